#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "reader_way.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define ALIGN_DEFAULT 4096u
#define BUFFER_ALIGN (2u * 1024 * 1024) /* a huge page per half block: O_DIRECT pins fewer pages */
#define WAYS_MAX 4u
#define SAMPLES 64u
#define SAMPLES_CACHED 56u /* so many of them present: reading the rest from the disk is cheaper than all of it */

static int open_again(int file, int flags)
{
    char path[64];

    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", file);
    return open(path, O_RDONLY | O_CLOEXEC | flags);
}

/*
 * Is the range in the page cache? Looked at in a few places. On a descriptor of our own: FADV_RANDOM keeps a look at a
 * page that is not there from reading its neighbours.
 */
static bool is_cached(int file, uint64_t begin, uint64_t end)
{
    int fd = open_again(file, 0);
    unsigned present = 0;

    if (fd < 0)
        return true; /* then it cannot be opened with O_DIRECT either */
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    for (unsigned i = 0; i < SAMPLES; i++) {
        uint64_t at = begin + (end - begin - 1) / (SAMPLES - 1) * i;
        uint8_t byte;
        struct iovec iov = {&byte, 1};

        ssize_t n = preadv2(fd, &iov, 1, (off_t)at, RWF_NOWAIT);

        if (n == 1)
            present++;
        else if (n < 0 && errno == EOPNOTSUPP) { /* a filesystem without RWF_NOWAIT: memory or network */
            present = SAMPLES;
            break;
        }
    }
    (void)close(fd);
    return present >= SAMPLES_CACHED;
}

/* Opens with O_DIRECT and finds the alignment: descriptor or negative errno. */
static int open_direct(int file, uint32_t *ret_align)
{
    struct statx x = {0};
    uint32_t align = ALIGN_DEFAULT;
    int fd = open_again(file, O_DIRECT);

    if (fd < 0)
        return -errno;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &x) == 0 && (x.stx_mask & STATX_DIOALIGN)) {
        uint32_t wanted = x.stx_dio_mem_align > x.stx_dio_offset_align ? x.stx_dio_mem_align : x.stx_dio_offset_align;

        if (x.stx_dio_offset_align == 0 || wanted > READER_DIRECT_BLOCK || (wanted & (wanted - 1)) != 0) {
            (void)close(fd);
            return -EOPNOTSUPP;
        }
        align = wanted > align ? wanted : align;
    }
    *ret_align = align;
    return fd;
}

/* As many blocks as there are slots, or as the range has. */
static int allocate(struct rv_reader *reader)
{
    uint64_t blocks = (reader->end - reader->next_offset + reader->block - 1) / reader->block, size;
    uint8_t *memory;

    blocks = blocks < RV_READER_SLOTS ? blocks : RV_READER_SLOTS;
    size = blocks * reader->block + BUFFER_ALIGN;
    memory = reader->source ? reader->source->allocate(reader->source->context, size) : NULL;
    if (!memory) {
        memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            return -ENOMEM;
        (void)madvise(memory, size, MADV_HUGEPAGE);
        reader->memory_size = size;
    }
    reader->memory = memory;
    memory += (BUFFER_ALIGN - (uintptr_t)memory % BUFFER_ALIGN) % BUFFER_ALIGN;
    for (unsigned i = 0; i < blocks; i++)
        reader->slots[i].buffer = memory + (uint64_t)i * reader->block;
    return 0;
}

static void start_reads(struct rv_reader *reader)
{
    while (reader->started - reader->released < RV_READER_SLOTS && reader->next_offset < reader->end) {
        struct reader_slot *slot = &reader->slots[reader->started % RV_READER_SLOTS];
        uint64_t left = reader->end - reader->next_offset;

        slot->offset = reader->next_offset;
        slot->need = left < reader->block ? (uint32_t)left : reader->block;
        slot->request = (slot->need + reader->align - 1) / reader->align * reader->align;
        slot->done = false;
        reader->next_offset += slot->need;
        reader->started++;
        reader->way->start(reader, slot);
    }
}

/* Which ways to try, best first. */
static unsigned choose(const struct rv_reader *reader, enum rv_direct_mode direct, const char *force,
                       const struct reader_way **ways)
{
    static const struct {
        const char *name;
        const struct reader_way *way;
    } forced[] = {{"io_uring", &rv_reader_uring}, {"threads", &rv_reader_threads}, {"cache", &rv_reader_cache}};
    unsigned count = 0;

    for (unsigned i = 0; force && i < sizeof(forced) / sizeof(forced[0]); i++)
        if (strcmp(forced[i].name, force) == 0) {
            ways[count++] = forced[i].way;
            if (forced[i].way->direct)
                ways[count++] = &rv_reader_cache;
            return count;
        }
    if (direct == RV_DIRECT_ALWAYS ||
        (direct == RV_DIRECT_AUTO && !is_cached(reader->file, reader->begin, reader->end))) {
        ways[count++] = &rv_reader_uring;
        ways[count++] = &rv_reader_threads;
    }
    if (reader->source) /* a device takes the blocks by itself: the copy out of the cache is all the work there is */
        ways[count++] = &rv_reader_cache_threads;
    ways[count++] = &rv_reader_cache;
    return count;
}

/* One way: 0 or negative errno, then nothing is left of it. */
static int try_way(struct rv_reader *reader, const struct reader_way *way)
{
    int r;

    reader->way = way;
    reader->block = way->block;
    reader->align = 1;
    reader->fd = reader->file;
    if (way->direct) {
        reader->fd = open_direct(reader->file, &reader->align);
        if (reader->fd < 0)
            return reader->fd;
    }
    reader->next_offset = reader->begin / reader->align * reader->align;
    r = way->open(reader);
    if (r == 0) {
        r = allocate(reader);
        if (r == 0)
            return 0;
        way->close(reader);
    }
    if (reader->fd != reader->file)
        (void)close(reader->fd);
    return r;
}

int rv_reader_open(int file, uint64_t begin, uint64_t end, enum rv_direct_mode direct, const char *force,
                   const struct rv_reader_memory *memory, struct rv_reader **ret_reader, struct rv_error *err)
{
    const struct reader_way *ways[WAYS_MAX];
    struct rv_reader *reader = calloc(1, sizeof(*reader));
    unsigned count;
    int r = -ENOMEM;

    if (!reader)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the reader");
    reader->file = file;
    reader->source = memory;
    reader->begin = begin;
    reader->end = end;
    if (begin == end) {
        reader->way = &rv_reader_cache;
        reader->fd = file;
        reader->next_offset = end;
        *ret_reader = reader;
        return 0;
    }
    count = choose(reader, direct, force, ways);
    for (unsigned i = 0; i < count; i++) {
        r = try_way(reader, ways[i]);
        if (r == 0) {
            start_reads(reader);
            *ret_reader = reader;
            return 0;
        }
    }
    free(reader);
    return rv_error_set(err, -r, ERROR(NO_MEMORY), "cannot set up reading: %s", strerror(-r));
}

/* The rest of a block that the way could not bring (a refused or short read), through the page cache. */
static int read_rest(struct rv_reader *reader, const struct reader_slot *slot, uint32_t have, struct rv_error *err)
{
    reader->fell_back |= reader->way->direct;
    while (have < slot->need) {
        uint64_t at = slot->offset + have;
        ssize_t n = pread(reader->file, slot->buffer + have, slot->need - have, (off_t)at);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return rv_error_set(err, errno, ERROR(FILE), "cannot read the file at byte %llu: %s",
                                (unsigned long long)at, strerror(errno));
        if (n == 0)
            return rv_error_set(err, ESTALE, ERROR(MODEL_CHANGED),
                                "the file became shorter while it was read: it ends at byte %llu",
                                (unsigned long long)at);
        have += (uint32_t)n;
    }
    return 0;
}

/* Failures that say nothing of the file: the page cache may still bring it. EFAULT: memory of a driver, whose pages the
 * kernel cannot hand to a disk; a copy into it works. */
static bool can_read_again(int result)
{
    return result == -EINVAL || result == -EAGAIN || result == -EINTR || result == -EFAULT;
}

int rv_reader_next(struct rv_reader *reader, struct rv_block *ret_block, struct rv_error *err)
{
    struct reader_slot *slot;
    uint64_t skip;

    if (reader->taken == reader->started)
        return 0;
    slot = &reader->slots[reader->taken % RV_READER_SLOTS];
    reader->way->wait(reader, slot);
    if (slot->result < 0 && !can_read_again((int)slot->result))
        return rv_error_set(err, (int)-slot->result, ERROR(FILE), "cannot read the file at byte %llu: %s",
                            (unsigned long long)slot->offset, strerror((int)-slot->result));
    if (slot->result < (int64_t)slot->need) {
        int r = read_rest(reader, slot, slot->result > 0 ? (uint32_t)slot->result : 0, err);

        if (r < 0)
            return r;
    }
    reader->taken++;
    skip = slot->offset < reader->begin ? reader->begin - slot->offset : 0;
    *ret_block = (struct rv_block){slot->buffer + skip, slot->offset + skip, slot->need - skip};
    return 1;
}

void rv_reader_release(struct rv_reader *reader)
{
    if (reader->released < reader->taken)
        reader->released++;
    start_reads(reader);
}

unsigned rv_reader_taken(const struct rv_reader *reader)
{
    return (unsigned)(reader->taken - reader->released);
}

const char *rv_reader_method(const struct rv_reader *reader)
{
    return reader->fell_back ? rv_reader_cache.name : reader->way->name;
}

void rv_reader_close(struct rv_reader *reader)
{
    if (!reader)
        return;
    reader->way->close(reader);
    if (reader->memory_size)
        (void)munmap(reader->memory, reader->memory_size);
    else if (reader->memory)
        reader->source->release(reader->source->context, reader->memory);
    if (reader->fd != reader->file)
        (void)close(reader->fd);
    free(reader);
}
