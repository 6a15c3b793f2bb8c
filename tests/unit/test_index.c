/* The index: what the builder writes the reader finds; what a hostile one says costs a failed lookup at most. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "clock.h"
#include "index.h"
#include "index_hash.h"
#include "memory.h"

static const uint8_t digest[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
#define ARENA_SIZE (UINT64_C(1) << 40)

static uint32_t test_name(char *buffer, uint32_t i)
{
    return (uint32_t)sprintf(buffer, "model.layers.%u.weight", i);
}

/* An index of `count` tensors of 256 x i bytes. hint: what the builder is told at first. */
static int make_index(uint32_t count, uint32_t hint, const char *metadata, uint64_t *ret_size)
{
    struct rv_index_builder *builder = rv_index_builder_create(hint, 0);
    const struct rv_index_arena arena = {ARENA_SIZE, RV_BACKEND_MEMFD, 4096};
    uint64_t metadata_length = metadata ? strlen(metadata) : 0, planned;
    char name[64];
    int fd;

    assert_non_null(builder);
    for (uint32_t i = 0; i < count; i++) {
        struct rv_index_entry entry = {.dtype = RV_INDEX_F32, .rank = 2, .offset = 256ull * i, .shape = {i, 64}};

        entry.length = entry.shape[0] * 256;
        assert_int_equal(rv_index_builder_add(builder, name, test_name(name, i), &entry), 0);
    }
    planned = rv_index_builder_size(builder, 1, metadata_length);
    fd = rv_index_builder_write(builder, &arena, 1, metadata, metadata_length, digest, ret_size);
    assert_true(fd >= 0);
    assert_int_equal(planned, *ret_size);
    rv_index_builder_destroy(builder);
    return fd;
}

static void check_index(uint32_t count, uint32_t hint, const char *metadata)
{
    const uint64_t arena_size = ARENA_SIZE;
    struct rv_index index;
    struct rv_error err = {0};
    uint64_t size;
    char name[64];
    int fd = make_index(count, hint, metadata, &size);

    assert_int_equal(rv_sealed_check(fd, size), 0);
    assert_int_equal(rv_index_open(&index, fd, &arena_size, 1, &err), 0);
    (void)close(fd);
    assert_int_equal(rv_index_count(&index), count);
    assert_memory_equal(index.header->header_digest, digest, 16);
    for (uint32_t i = 0; i < count; i++) {
        const char *found_name;
        const struct rv_index_entry *e = rv_index_at(&index, i, &found_name);
        uint32_t length = test_name(name, i);

        assert_non_null(e);
        assert_string_equal(found_name, name);
        assert_int_equal(e->shape[0], i);
        assert_ptr_equal(rv_index_find(&index, name, length), e);
        assert_null(rv_index_find(&index, name, length - 1));
    }
    assert_null(rv_index_at(&index, count, NULL));
    assert_null(rv_index_find(&index, "", 0));
    if (metadata)
        assert_string_equal(rv_index_metadata(&index, &size), metadata);
    else
        assert_null(rv_index_metadata(&index, NULL));
    rv_index_close(&index);
}

static void test_written_is_found(void **state)
{
    (void)state;
    check_index(0, 0, NULL);
    check_index(0, 0, "{\"a\":\"b\"}");
    check_index(1, 1, NULL);
    check_index(1, 0, "{}");
    check_index(1000, 1000, "{\"format\":\"pt\"}");
    check_index(1000, 0, NULL); /* the tables grow on the way */
}

static void test_lookup_in_a_million(void **state)
{
    const uint64_t arena_size = ARENA_SIZE;
    struct rv_index index;
    uint64_t size, start;
    char name[64];
    int fd;

    (void)state;
    start = rv_now_us();
    fd = make_index(1000000, 1000000, NULL, &size);
    print_message("1,000,000 tensors: built in %llu ms, %llu MiB", (unsigned long long)(rv_now_us() - start) / 1000,
                  (unsigned long long)size >> 20);
    start = rv_now_us();
    assert_int_equal(rv_index_open(&index, fd, &arena_size, 1, NULL), 0);
    print_message(", opened in %llu us", (unsigned long long)(rv_now_us() - start));
    start = rv_now_us();
    for (uint32_t i = 0; i < 1000000; i++)
        assert_non_null(rv_index_find(&index, name, test_name(name, i)));
    print_message(", each found in %llu ns\n", (unsigned long long)(rv_now_us() - start) / 1000);
    rv_index_close(&index);
    (void)close(fd);
}

static void test_builder_refuses(void **state)
{
    struct rv_index_builder *builder = rv_index_builder_create(4, 64);
    struct rv_index_entry entry = {.dtype = RV_INDEX_U8};
    char *long_name = calloc(1, RV_TENSOR_NAME_MAX + 1);

    (void)state;
    assert_int_equal(rv_index_builder_add(builder, "a", 1, &entry), 0);
    assert_int_equal(rv_index_builder_add(builder, "a", 1, &entry), -EEXIST);
    assert_int_equal(rv_index_builder_add(builder, "", 0, &entry), 0);
    assert_int_equal(rv_index_builder_add(builder, "", 0, &entry), -EEXIST);
    assert_int_equal(rv_index_builder_add(builder, long_name, RV_TENSOR_NAME_MAX + 1, &entry), -E2BIG);
    assert_non_null(rv_index_builder_entry(builder, 1));
    assert_null(rv_index_builder_entry(builder, 2));
    assert_null(rv_index_builder_create(RV_TENSORS_MAX + 1, 0));
    free(long_name);
    rv_index_builder_destroy(builder);
}

/* Names chosen to share one slot are refused instead of making every lookup a scan. */
static void test_names_of_one_slot_are_refused(void **state)
{
    struct rv_index_builder *builder = rv_index_builder_create(4096, 0);
    struct rv_index_entry entry = {.dtype = RV_INDEX_U8};
    uint32_t added = 0;
    int r = 0;

    (void)state;
    for (uint32_t i = 0; r == 0 && i < 100000000; i++) {
        char name[16];
        uint32_t length = (uint32_t)sprintf(name, "%u", i);

        if ((rv_index_hash(name, length) & 8191) != 77)
            continue;
        r = rv_index_builder_add(builder, name, length, &entry);
        added += r == 0;
    }
    assert_int_equal(r, -ELOOP);
    assert_int_equal(added, RV_INDEX_PROBES_MAX);
    rv_index_builder_destroy(builder);
}

static void test_shapes(void **state)
{
    const uint64_t zero_hides[] = {UINT64_C(1) << 40, UINT64_C(1) << 40, 0}, max[] = {UINT64_MAX}, two[] = {2, 3};
    uint64_t bytes = 77;

    (void)state;
    assert_true(rv_shape_bytes(RV_INDEX_F64, NULL, 0, &bytes));
    assert_int_equal(bytes, 8);
    assert_true(rv_shape_bytes(RV_INDEX_BF16, two, 2, &bytes));
    assert_int_equal(bytes, 12);
    assert_true(rv_shape_bytes(RV_INDEX_U8, max, 1, &bytes));
    assert_false(rv_shape_bytes(RV_INDEX_U16, max, 1, &bytes));
    assert_false(rv_shape_bytes(RV_INDEX_U8, zero_hides, 3, &bytes));
    assert_false(rv_shape_bytes(RV_INDEX_DTYPE_NONE, two, 2, &bytes));
    assert_false(rv_shape_bytes(RV_INDEX_DTYPE_COUNT, two, 2, &bytes));
    assert_false(rv_shape_bytes(RV_INDEX_U8, two, RV_RANK_MAX + 1, &bytes));
    for (uint32_t d = 1; d < RV_INDEX_DTYPE_COUNT; d++)
        assert_int_equal(rv_dtype_by_name(rv_dtype_name(d), strlen(rv_dtype_name(d))), d);
    assert_int_equal(rv_dtype_by_name("F3", 2), 0);
    assert_null(rv_dtype_name(RV_INDEX_DTYPE_COUNT));
}

/* ---- hostile ---------------------------------------------------------------------------------------------------- */

/* The bytes of a good index, to be damaged. */
static uint8_t *index_bytes(uint64_t *ret_size)
{
    int fd = make_index(3, 3, "{\"a\":\"b\"}", ret_size);
    uint8_t *bytes = malloc(*ret_size);

    assert_int_equal(pread(fd, bytes, *ret_size, 0), (ssize_t)*ret_size);
    (void)close(fd);
    return bytes;
}

/* Opens damaged bytes, asks everything, and says whether opening worked. */
static bool use(const uint8_t *bytes, uint64_t size)
{
    const uint64_t arena_size = ARENA_SIZE;
    int fd = rv_sealed_create("hostile", bytes, size), r;
    struct rv_index index;
    struct rv_error err = {0};
    char name[64];

    assert_true(fd >= 0);
    r = rv_index_open(&index, fd, &arena_size, 1, &err);
    (void)close(fd);
    if (r < 0) {
        assert_int_equal(r, -EBADMSG);
        assert_true(err.message[0] != '\0');
        return false;
    }
    for (uint32_t i = 0; i < 8; i++) {
        const char *found;
        const struct rv_index_entry *e = rv_index_at(&index, i, &found);

        if (e) {
            assert_true(e->offset <= ARENA_SIZE && e->length <= ARENA_SIZE - e->offset);
            assert_int_equal(strlen(found), e->name_length);
        }
        (void)rv_index_find(&index, name, test_name(name, i));
    }
    (void)rv_index_metadata(&index, NULL);
    rv_index_close(&index);
    return true;
}

static void test_header_damage_is_refused(void **state)
{
    static const struct {
        size_t offset, width;
        uint64_t value;
    } damages[] = {
        {0, 1, 'X'},
        {offsetof(struct rv_index_header, version), 4, 2},
        {offsetof(struct rv_index_header, byte_order), 4, 0x04030201},
        {offsetof(struct rv_index_header, total_size), 8, 7},
        {offsetof(struct rv_index_header, tensor_count), 4, UINT32_MAX},
        {offsetof(struct rv_index_header, tensor_count), 4, 5},
        {offsetof(struct rv_index_header, slot_count), 4, 0},
        {offsetof(struct rv_index_header, slot_count), 4, 7},
        {offsetof(struct rv_index_header, slot_count), 4, 0x80000000},
        {offsetof(struct rv_index_header, arena_count), 4, 2},
        {offsetof(struct rv_index_header, arena_count), 4, 0},
        {offsetof(struct rv_index_header, flags), 4, 1},
        {offsetof(struct rv_index_header, arenas_offset), 8, UINT64_MAX - 7},
        {offsetof(struct rv_index_header, slots_offset), 8, 193},
        {offsetof(struct rv_index_header, entries_offset), 8, UINT64_MAX - 7},
        {offsetof(struct rv_index_header, names_offset), 8, 1 << 30},
        {offsetof(struct rv_index_header, names_length), 8, UINT64_MAX},
        {offsetof(struct rv_index_header, metadata_length), 8, UINT64_MAX},
        {offsetof(struct rv_index_header, metadata_length), 8, 3},
    };
    uint64_t size;
    uint8_t *good = index_bytes(&size), *bytes = malloc(size);

    (void)state;
    assert_true(use(good, size));
    for (unsigned i = 0; i < sizeof(damages) / sizeof(damages[0]); i++) {
        memcpy(bytes, good, size);
        memcpy(bytes + damages[i].offset, &damages[i].value, damages[i].width);
        if (use(bytes, size))
            fail_msg("damage %u was accepted", i);
    }
    for (uint64_t cut = 0; cut < size; cut += 8)
        assert_false(use(good, cut));
    free(bytes);
    free(good);
}

/* Every byte set to every extreme: nothing outside is read (the sanitizer build proves it), nothing outside is named.
 */
static void test_any_byte_damaged(void **state)
{
    static const uint8_t values[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
    uint64_t size;
    uint8_t *bytes = index_bytes(&size);

    (void)state;
    for (uint64_t i = 0; i < size; i++) {
        uint8_t old = bytes[i];

        for (unsigned v = 0; v < sizeof(values); v++) {
            bytes[i] = values[v];
            (void)use(bytes, size);
        }
        bytes[i] = old;
    }
    free(bytes);
}

static void test_unsealed_or_foreign_memory_is_refused(void **state)
{
    const uint64_t arena_size = ARENA_SIZE, other = 4096;
    struct rv_index index;
    uint64_t size;
    int fd = rv_memfd_create("unsealed", 0);

    (void)state;
    assert_int_equal(ftruncate(fd, 4096), 0);
    assert_int_equal(rv_index_open(&index, fd, &arena_size, 1, NULL), -EBADMSG);
    (void)close(fd);
    fd = make_index(1, 1, NULL, &size);
    assert_int_equal(rv_index_open(&index, fd, &other, 1, NULL), -EBADMSG); /* an arena of another size */
    assert_int_equal(rv_index_open(&index, fd, &arena_size, 0, NULL), -EBADMSG);
    (void)close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_written_is_found), cmocka_unit_test(test_lookup_in_a_million),
        cmocka_unit_test(test_builder_refuses),  cmocka_unit_test(test_names_of_one_slot_are_refused),
        cmocka_unit_test(test_shapes),           cmocka_unit_test(test_header_damage_is_refused),
        cmocka_unit_test(test_any_byte_damaged), cmocka_unit_test(test_unsealed_or_foreign_memory_is_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
