/* The loader's reader with a ring in memory of somebody else, as a driver's pinned memory is. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "loader/reader.h"

#define FILE_BYTES (37u * 1024 * 1024 + 12345)
#define BEGIN 1003u /* the data section of a model starts anywhere */

static char file_path[] = "/var/tmp/test_reader_XXXXXX"; /* not /tmp: that may be a tmpfs, which knows no O_DIRECT */
static int file;

static uint8_t pattern(uint64_t i)
{
    return (uint8_t)(i * 2654435761u >> 11 ^ i >> 9);
}

struct source {
    enum { SOURCE_PAGES, SOURCE_SECRET, SOURCE_NOTHING } kind;
    uint64_t size;
    bool missing; /* the kernel has no such memory */
    unsigned alive;
};

/* Secret memory is what a driver's can be: the process reads and writes it, the kernel may not hand it to a disk. */
static void *source_allocate(void *context, uint64_t size)
{
    struct source *s = context;
    int fd = -1, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    void *memory;

    if (s->kind == SOURCE_NOTHING)
        return NULL;
    if (s->kind == SOURCE_SECRET) {
        fd = (int)syscall(SYS_memfd_secret, 0);
        flags = MAP_SHARED;
        if (fd < 0 || ftruncate(fd, (off_t)size) < 0) {
            s->missing = true;
            return NULL;
        }
    }
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (fd >= 0)
        (void)close(fd);
    if (memory == MAP_FAILED) {
        s->missing = true;
        return NULL;
    }
    s->size = size;
    s->alive++;
    return memory;
}

static void source_release(void *context, void *memory)
{
    struct source *s = context;

    s->alive--;
    assert_int_equal(munmap(memory, s->size), 0);
}

/* Reads [BEGIN, end) in order. held: so many blocks are released late. Returns the method. */
static const char *read_all(struct source *s, const char *way, uint64_t end, unsigned held)
{
    const struct rv_reader_memory memory = {source_allocate, source_release, s};
    struct rv_reader *reader;
    struct rv_error err = {0};
    struct rv_block block;
    uint64_t at = BEGIN;
    const char *method;
    int r;

    if (rv_reader_open(file, BEGIN, end, RV_DIRECT_ALWAYS, way, &memory, &reader, &err) < 0)
        fail_msg("%s", err.message);
    while ((r = rv_reader_next(reader, &block, &err)) == 1) {
        assert_int_equal(block.offset, at);
        for (uint64_t i = 0; i < block.length; i++)
            if (block.data[i] != pattern(at + i))
                fail_msg("%s: byte %llu differs", way, (unsigned long long)(at + i));
        at += block.length;
        if (rv_reader_taken(reader) > held)
            rv_reader_release(reader);
    }
    if (r < 0)
        fail_msg("%s: %s", way, err.message);
    assert_int_equal(at, end);
    method = rv_reader_method(reader);
    rv_reader_close(reader);
    assert_int_equal(s->alive, 0);
    return method;
}

static const char *const ways[] = {"io_uring", "threads", "cache", NULL};

static void test_any_length_in_memory_of_a_source(void **state)
{
    static const uint64_t ends[] = {BEGIN, BEGIN + 1, 4096, 4u << 20, (4u << 20) + 1, FILE_BYTES - 1, FILE_BYTES};

    (void)state;
    for (unsigned i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
        for (unsigned k = 0; k < sizeof(ends) / sizeof(ends[0]); k++) {
            struct source s = {.kind = SOURCE_PAGES};

            (void)read_all(&s, ways[i], ends[k], k % RV_READER_SLOTS);
        }
}

static void test_a_source_without_memory(void **state)
{
    struct source s = {.kind = SOURCE_NOTHING};

    (void)state;
    for (unsigned i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
        (void)read_all(&s, ways[i], FILE_BYTES, 3);
}

/* O_DIRECT into it is EFAULT: the bytes come all the same. One block, since a user may lock little memory; then many.
 */
static void test_memory_that_a_disk_may_not_write(void **state)
{
    static const uint64_t ends[] = {3u << 20, FILE_BYTES};

    (void)state;
    for (unsigned k = 0; k < 2; k++)
        for (unsigned i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
            struct source s = {.kind = SOURCE_SECRET};
            const char *method = read_all(&s, ways[i], ends[k], 3 * k);

            if (s.missing && k == 0) {
                print_message("no secret memory here\n");
                skip();
            }
            if (!s.missing)
                assert_string_equal(method, "page cache");
        }
}

static int make_file(void **state)
{
    uint8_t *bytes = malloc(FILE_BYTES);

    (void)state;
    file = mkstemp(file_path);
    if (!bytes || file < 0)
        return -1;
    for (uint64_t i = 0; i < FILE_BYTES; i++)
        bytes[i] = pattern(i);
    if (write(file, bytes, FILE_BYTES) != FILE_BYTES || fdatasync(file) < 0)
        return -1;
    free(bytes);
    return 0;
}

static int remove_file(void **state)
{
    (void)state;
    (void)close(file);
    return unlink(file_path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_length_in_memory_of_a_source),
        cmocka_unit_test(test_a_source_without_memory),
        cmocka_unit_test(test_memory_that_a_disk_may_not_write),
    };

    return cmocka_run_group_tests(tests, make_file, remove_file);
}
