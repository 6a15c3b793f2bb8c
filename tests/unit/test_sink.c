/* The loader's sink and the mapping of what it wrote: bytes, seals, alignment, nothing left mapped. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "loader/sink.h"
#include "memory.h"

#define MIB (1024u * 1024)
#define ARENA (37 * MIB + 12 * 1024) /* whole blocks of 2 MiB, several calls' worth, and a rest */
#define LARGEST_PIECE (3 * MIB)
#define BLOCK (2u * MIB)

/* Mappings of this process, as numbers of lines in /proc/self/maps. */
static unsigned count_mappings(void)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    unsigned lines = 0;
    int c;

    assert_non_null(maps);
    while ((c = fgetc(maps)) != EOF)
        lines += c == '\n';
    (void)fclose(maps);
    return lines;
}

static int create(uint64_t size, struct rv_arena *ret_arena)
{
    struct rv_error err = {0};
    int fd = rv_backend_by_id(RV_BACKEND_MEMFD)->create("test-arena", size, RV_HUGE_OFF, ret_arena, &err);

    assert_true(fd >= 0);
    return fd;
}

/* Pieces of odd lengths with gaps between them; `expected` gets the same bytes. */
static void fill(struct rv_sink *sink, uint8_t *expected)
{
    struct rv_error err = {0};
    uint32_t random = 1;

    for (uint64_t at = 0; at < ARENA;) {
        uint64_t length;

        random = random * 1664525u + 1013904223u;
        length = 1 + random % LARGEST_PIECE;
        length = length < ARENA - at ? length : ARENA - at;
        for (uint64_t i = 0; i < length; i++)
            expected[at + i] = (uint8_t)((at + i) * 2654435761u >> 24);
        assert_int_equal(rv_sink_put(sink, at, expected + at, length, &err), 0);
        at += length + random % 777;
    }
    assert_int_equal(rv_sink_finish(sink, &err), 0);
}

static void fill_and_compare(void)
{
    const struct rv_backend *backend = rv_backend_by_id(RV_BACKEND_MEMFD);
    uint8_t *expected = calloc(1, ARENA);
    struct rv_error err = {0};
    struct rv_sink_wish wish = {.backend = backend, .huge_pages = RV_HUGE_OFF};
    struct rv_sink *sink;
    struct rv_arena arena;
    uint64_t planned;
    void *map = NULL;
    int fd;

    assert_non_null(expected);
    assert_int_equal(rv_sink_create(&wish, &sink, &err), 0);
    assert_int_equal(rv_sink_plan(sink, ARENA - 1, &planned, &err), 0);
    assert_int_equal(planned, ARENA);
    assert_int_equal(rv_sink_begin(sink, ARENA - 1, NULL, &err), 0);
    assert_null(rv_sink_memory(sink));
    fill(sink, expected);
    assert_int_equal(rv_sink_hand_over(sink, &arena, &fd, &err), 0); /* EBUSY if anything were still mapped */
    assert_int_equal(arena.size, ARENA);
    rv_sink_destroy(sink);
    assert_int_equal(backend->check(fd, &arena, &err), 0);
    assert_int_equal(backend->map(fd, &arena, RV_MAP_PRIVATE, &map, &err), 0);
    assert_memory_equal(map, expected, ARENA);
    ((uint8_t *)map)[5] ^= 0xff; /* a copy of this process: the arena keeps its byte */
    assert_int_equal(munmap(map, arena.size), 0);
    assert_int_equal(backend->map(fd, &arena, RV_MAP_SHARED, &map, &err), 0);
    assert_memory_equal(map, expected, ARENA);
    assert_int_equal(munmap(map, arena.size), 0);
    (void)close(fd);
    free(expected);
}

static void test_bytes_are_the_same_when_memory_is_gathered(void **state)
{
    (void)state;
    assert_int_equal(unsetenv("RESVISOR_LOADER_GATHER"), 0);
    fill_and_compare();
}

static void test_bytes_are_the_same_when_it_is_not(void **state)
{
    (void)state;
    assert_int_equal(setenv("RESVISOR_LOADER_GATHER", "never", 1), 0);
    fill_and_compare();
    assert_int_equal(unsetenv("RESVISOR_LOADER_GATHER"), 0);
}

static void test_mappings_are_aligned_and_leave_nothing_behind(void **state)
{
    static const uint64_t sizes[] = {4096, BLOCK, BLOCK + 4096, 5 * BLOCK, 5 * BLOCK + 8192};
    const struct rv_backend *backend = rv_backend_by_id(RV_BACKEND_MEMFD);
    struct rv_error err = {0};
    unsigned before;

    (void)state;
    (void)count_mappings(); /* the C library's first buffers */
    before = count_mappings();
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct rv_arena arena;
        int fd = create(sizes[i], &arena);

        for (int mode = RV_MAP_PRIVATE; mode <= RV_MAP_SHARED; mode++) {
            void *map = NULL;

            assert_int_equal(backend->map(fd, &arena, (enum rv_map_mode)mode, &map, &err), 0);
            if (sizes[i] >= BLOCK)
                assert_int_equal((uintptr_t)map % BLOCK, 0);
            assert_int_equal(munmap(map, arena.size), 0);
        }
        (void)close(fd);
    }
#ifdef __SANITIZE_THREAD__
    (void)before; /* its runtime maps memory of its own as it goes */
#else
    assert_int_equal(count_mappings(), before);
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes_are_the_same_when_memory_is_gathered),
        cmocka_unit_test(test_bytes_are_the_same_when_it_is_not),
        cmocka_unit_test(test_mappings_are_aligned_and_leave_nothing_behind),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
