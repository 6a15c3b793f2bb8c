#include "fill.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "hash.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

/* Between the two threads. The filler owns sink, cursor, put, marks and err until it is joined. */
struct filler {
    const struct rv_plan *plan;
    struct rv_sink *sink;
    struct rv_cursor cursor;
    struct rv_error err;
    uint64_t put; /* blocks; filled <= put <= queued */
    uint64_t marks[RV_READER_SLOTS];
    pthread_mutex_t lock;
    pthread_cond_t work, progress;
    struct rv_block queue[RV_READER_SLOTS];
    uint64_t queued, filled; /* blocks; a filled one is not read any more */
    bool no_more;
    int result; /* negative errno: nothing is filled any more */
};

static int put_block(struct filler *f, const struct rv_block *block)
{
    uint64_t at = 0;
    struct rv_piece piece;
    int r = 0;

    while (r == 0 && rv_cursor_next(&f->cursor, f->plan, block->length - at, &piece)) {
        r = piece.length ? rv_sink_put(f->sink, piece.offset, block->data + at, piece.length, &f->err) : 0;
        at += piece.length;
    }
    if (r == 0)
        r = rv_sink_mark(f->sink, &f->marks[f->put % RV_READER_SLOTS], &f->err);
    f->put += r == 0;
    return r;
}

/* Waits for the oldest block that was put. Later ones go on meanwhile. */
static int wait_for_oldest(struct filler *f, uint64_t filled)
{
    return rv_sink_wait(f->sink, f->marks[filled % RV_READER_SLOTS], &f->err);
}

/* Puts what is there; when there is nothing to put, waits until blocks that were put can be given back. */
static void *filler_run(void *context)
{
    struct filler *f = context;
    int r = 0;

    (void)pthread_mutex_lock(&f->lock);
    while (r == 0) {
        struct rv_block block;
        uint64_t filled, reached;
        bool has_block;

        while (f->queued == f->filled && !f->no_more)
            (void)pthread_cond_wait(&f->work, &f->lock);
        if (f->queued == f->filled)
            break;
        filled = f->filled;
        has_block = f->queued > f->put;
        block = f->queue[f->put % RV_READER_SLOTS];
        (void)pthread_mutex_unlock(&f->lock);
        r = has_block ? put_block(f, &block) : wait_for_oldest(f, filled);
        filled += !has_block && r == 0;
        reached = rv_sink_reached(f->sink);
        while (r == 0 && filled < f->put && f->marks[filled % RV_READER_SLOTS] <= reached)
            filled++;
        (void)pthread_mutex_lock(&f->lock);
        f->filled = filled;
        f->result = r;
        (void)pthread_cond_signal(&f->progress);
    }
    (void)pthread_mutex_unlock(&f->lock);
    return NULL;
}

static void filler_give(struct filler *f, const struct rv_block *block)
{
    (void)pthread_mutex_lock(&f->lock);
    f->queue[f->queued++ % RV_READER_SLOTS] = *block;
    (void)pthread_cond_signal(&f->work);
    (void)pthread_mutex_unlock(&f->lock);
}

/* Blocks filled so far; waits until there are at least `least`, or filling has failed. */
static uint64_t filler_filled(struct filler *f, uint64_t least, int *ret_result)
{
    uint64_t filled;

    (void)pthread_mutex_lock(&f->lock);
    while (f->filled < least && f->result == 0)
        (void)pthread_cond_wait(&f->progress, &f->lock);
    filled = f->filled;
    *ret_result = f->result;
    (void)pthread_mutex_unlock(&f->lock);
    return filled;
}

struct hasher {
    const struct rv_hash_way *way;
    struct rv_hash *hash;
    struct rv_cursor cursor;
};

static void hash_block(struct hasher *h, const struct rv_plan *plan, const uint8_t *data, uint64_t length)
{
    struct rv_piece piece;

    while (rv_cursor_next(&h->cursor, plan, length, &piece)) {
        if (piece.first)
            h->way->reset(h->hash);
        if (piece.length) { /* data may be NULL where nothing is left but empty tensors */
            h->way->update(h->hash, data, piece.length);
            data += piece.length;
            length -= piece.length;
        }
        if (piece.last)
            h->way->digest(h->hash, piece.entry->digest);
    }
}

/* The caller's thread: takes blocks, gives them to the filler, hashes them, releases what is filled. */
static int pump(struct filler *f, struct rv_reader *reader, struct hasher *h,
                void (*progress)(void *context, uint64_t bytes_done), void *context, struct rv_error *err)
{
    uint64_t given = 0, released = 0, bytes = 0;
    struct rv_block block;
    int r, result = 0;

    while ((r = rv_reader_next(reader, &block, err)) == 1) {
        filler_give(f, &block);
        given++;
        bytes += block.length;
        hash_block(h, f->plan, block.data, block.length);
        for (uint64_t filled = filler_filled(f, rv_reader_taken(reader) == RV_READER_SLOTS ? released + 1 : 0, &result);
             released < filled; released++)
            rv_reader_release(reader);
        if (result < 0)
            return 0; /* the filler's error is the one to report */
        progress(context, bytes);
    }
    hash_block(h, f->plan, NULL, 0); /* empty tensors at the end, or all of an empty model */
    (void)filler_filled(f, given, &result);
    return r;
}

int rv_fill(const struct rv_plan *plan, struct rv_reader *reader, struct rv_sink *sink,
            void (*progress)(void *context, uint64_t bytes_done), void *context, struct rv_error *err)
{
    struct filler f = {.plan = plan, .sink = sink};
    struct hasher h = {.way = rv_hash_way()};
    pthread_t thread;
    int r;

    h.hash = h.way->create();
    if (!h.hash)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the hash");
    (void)pthread_mutex_init(&f.lock, NULL);
    (void)pthread_cond_init(&f.work, NULL);
    (void)pthread_cond_init(&f.progress, NULL);
    r = pthread_create(&thread, NULL, filler_run, &f);
    if (r != 0) {
        r = rv_error_set(err, r, ERROR(NO_MEMORY), "cannot start the filling thread: %s", strerror(r));
    } else {
        r = pump(&f, reader, &h, progress, context, err);
        (void)pthread_mutex_lock(&f.lock);
        f.no_more = true;
        (void)pthread_cond_signal(&f.work);
        (void)pthread_mutex_unlock(&f.lock);
        (void)pthread_join(thread, NULL);
        if (r == 0 && f.result < 0) {
            *err = f.err;
            r = f.result;
        }
        if (r == 0)
            r = rv_sink_finish(sink, err);
    }
    if (r < 0)
        rv_sink_stop(sink);
    (void)pthread_cond_destroy(&f.work);
    (void)pthread_cond_destroy(&f.progress);
    (void)pthread_mutex_destroy(&f.lock);
    h.way->destroy(h.hash);
    return r;
}
