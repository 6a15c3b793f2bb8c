/*
 * Reading by a few threads. With O_DIRECT: where io_uring is not allowed (containers often forbid it). From the page
 * cache: where one thread's copying would be slower than a device takes the blocks.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "reader_way.h"

#define THREADS 4u
#define CACHE_BLOCK (1024u * 1024)
#define STACK_BYTES (128u * 1024)

struct pool {
    struct rv_reader *reader;
    pthread_mutex_t lock;
    pthread_cond_t work, finished;
    struct reader_slot *queue[RV_READER_SLOTS]; /* a ring: never more than the slots */
    uint64_t head, tail;
    bool stop;
    pthread_t threads[THREADS];
    unsigned thread_count;
};

static void *run(void *context)
{
    struct pool *pool = context;

    (void)pthread_mutex_lock(&pool->lock);
    for (;;) {
        struct reader_slot *slot;
        ssize_t n;

        while (pool->head == pool->tail && !pool->stop)
            (void)pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->stop)
            break;
        slot = pool->queue[pool->head++ % RV_READER_SLOTS];
        (void)pthread_mutex_unlock(&pool->lock);
        n = pread(pool->reader->fd, slot->buffer, slot->request, (off_t)slot->offset);
        if (n < 0)
            n = -errno;
        (void)pthread_mutex_lock(&pool->lock);
        slot->result = n;
        slot->done = true;
        (void)pthread_cond_signal(&pool->finished);
    }
    (void)pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void threads_close(struct rv_reader *reader)
{
    struct pool *pool = reader->state;

    if (!pool)
        return;
    (void)pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    (void)pthread_cond_broadcast(&pool->work);
    (void)pthread_mutex_unlock(&pool->lock);
    for (unsigned i = 0; i < pool->thread_count; i++)
        (void)pthread_join(pool->threads[i], NULL);
    (void)pthread_cond_destroy(&pool->work);
    (void)pthread_cond_destroy(&pool->finished);
    (void)pthread_mutex_destroy(&pool->lock);
    free(pool);
    reader->state = NULL;
}

static int threads_open(struct rv_reader *reader)
{
    struct pool *pool = calloc(1, sizeof(*pool));
    pthread_attr_t attributes;
    int r = 0;

    if (!pool)
        return -ENOMEM;
    pool->reader = reader;
    (void)pthread_mutex_init(&pool->lock, NULL);
    (void)pthread_cond_init(&pool->work, NULL);
    (void)pthread_cond_init(&pool->finished, NULL);
    reader->state = pool;
    (void)pthread_attr_init(&attributes);
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    while (pool->thread_count < THREADS && r == 0) {
        r = pthread_create(&pool->threads[pool->thread_count], &attributes, run, pool);
        pool->thread_count += r == 0;
    }
    (void)pthread_attr_destroy(&attributes);
    if (pool->thread_count > 0) /* fewer than wanted still read */
        return 0;
    threads_close(reader);
    return -r;
}

static void threads_start(struct rv_reader *reader, struct reader_slot *slot)
{
    struct pool *pool = reader->state;

    (void)pthread_mutex_lock(&pool->lock);
    pool->queue[pool->tail++ % RV_READER_SLOTS] = slot;
    (void)pthread_cond_signal(&pool->work);
    (void)pthread_mutex_unlock(&pool->lock);
}

static void threads_wait(struct rv_reader *reader, struct reader_slot *slot)
{
    struct pool *pool = reader->state;

    (void)pthread_mutex_lock(&pool->lock);
    while (!slot->done)
        (void)pthread_cond_wait(&pool->finished, &pool->lock);
    (void)pthread_mutex_unlock(&pool->lock);
}

const struct reader_way rv_reader_threads = {
    .name = "threads",
    .direct = true,
    .block = READER_DIRECT_BLOCK,
    .open = threads_open,
    .start = threads_start,
    .wait = threads_wait,
    .close = threads_close,
};

const struct reader_way rv_reader_cache_threads = {
    .name = "page cache",
    .block = CACHE_BLOCK,
    .open = threads_open,
    .start = threads_start,
    .wait = threads_wait,
    .close = threads_close,
};
