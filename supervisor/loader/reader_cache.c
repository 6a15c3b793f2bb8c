/* Through the page cache: the file is there already, or O_DIRECT is refused. */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "reader_way.h"

#define BLOCK (256u * 1024) /* stays in the processor's cache between the copy in and the copy out */

static int cache_open(struct rv_reader *reader)
{
    (void)posix_fadvise(reader->fd, (off_t)reader->begin, (off_t)(reader->end - reader->begin), POSIX_FADV_SEQUENTIAL);
    return 0;
}

static void cache_start(struct rv_reader *reader, struct reader_slot *slot)
{
    (void)reader;
    (void)slot; /* it is read when it is wanted: then it is still in the processor's cache when it is used */
}

static void cache_wait(struct rv_reader *reader, struct reader_slot *slot)
{
    ssize_t n = pread(reader->fd, slot->buffer, slot->request, (off_t)slot->offset);

    slot->result = n < 0 ? -errno : n;
    slot->done = true;
}

static void cache_close(struct rv_reader *reader)
{
    (void)reader;
}

const struct reader_way rv_reader_cache = {
    .name = "page cache",
    .block = BLOCK,
    .open = cache_open,
    .start = cache_start,
    .wait = cache_wait,
    .close = cache_close,
};
