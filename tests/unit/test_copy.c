/*
 * The loader's copies to a device, on a double of the copier that does nothing before it is waited for: bytes, zeros
 * between tensors and behind them, memory that is used again only when it may be, and copies that are not too small.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loader/copy.h"
#include "rpc.pb-c.h"

#define KIB 1024u
#define MIB (1024u * 1024)
#define ARENA (48u * MIB)
#define BASE 0x7000000000u /* not an address of this process */
#define BLOCKS 8u
#define BLOCK MIB
#define OPERATIONS_MAX 4096u
#define GARBAGE 0xee

/* ---- the double -------------------------------------------------------------------------------------------------- */

struct rv_cuda_copier {
    struct operation {
        uint64_t offset, length;
        const uint8_t *from; /* NULL = zeros */
    } operations[OPERATIONS_MAX];
    unsigned count, done;
    unsigned marks[OPERATIONS_MAX]; /* operations before each */
    uint64_t mark_count, reached;
};

static struct rv_cuda_copier copier;
static uint8_t *device_memory;
static bool no_pinned;
static unsigned fail_at; /* this operation fails; 0 = none */
static unsigned short_copies, writes, pinned_pieces;

static int refuse(struct rv_error *err)
{
    return rv_error_set(err, ENODEV, RESVISOR__V1__ERROR_CODE__ERROR_DEVICE_LOST, "lost");
}

static void run_to(unsigned count)
{
    for (; copier.done < count; copier.done++) {
        const struct operation *o = &copier.operations[copier.done];

        if (o->from)
            memcpy(device_memory + o->offset, o->from, o->length);
        else
            memset(device_memory + o->offset, 0, o->length);
    }
}

static int add(uint64_t address, const uint8_t *from, uint64_t length, struct rv_error *err)
{
    assert_true(copier.count < OPERATIONS_MAX);
    assert_true(length > 0 && address >= BASE && address - BASE + length <= ARENA);
    if (copier.count + 1 == fail_at)
        return refuse(err);
    copier.operations[copier.count++] = (struct operation){address - BASE, length, from};
    return 0;
}

int rv_cuda_copier_create(struct rv_cuda_device *device, struct rv_cuda_copier **ret_copier, struct rv_error *err)
{
    (void)device;
    (void)err;
    copier = (struct rv_cuda_copier){0};
    *ret_copier = &copier;
    return 0;
}

void rv_cuda_copier_destroy(struct rv_cuda_copier *c)
{
    run_to(c->count);
}

int rv_cuda_copier_put(struct rv_cuda_copier *c, uint64_t address, const void *host, uint64_t length,
                       struct rv_error *err)
{
    (void)c;
    assert_false(no_pinned);
    short_copies += length < RV_COPY_MIN;
    return add(address, host, length, err);
}

int rv_cuda_copier_zero(struct rv_cuda_copier *c, uint64_t address, uint64_t length, struct rv_error *err)
{
    (void)c;
    return add(address, NULL, length, err);
}

int rv_cuda_copier_mark(struct rv_cuda_copier *c, uint64_t *ret_mark, struct rv_error *err)
{
    (void)err;
    assert_true(c->mark_count + 1 < OPERATIONS_MAX);
    c->marks[++c->mark_count] = c->count;
    *ret_mark = c->mark_count;
    return 0;
}

int rv_cuda_copier_wait(struct rv_cuda_copier *c, uint64_t mark, struct rv_error *err)
{
    (void)err;
    assert_in_range(mark, 1, c->mark_count);
    run_to(c->marks[mark]);
    c->reached = mark > c->reached ? mark : c->reached;
    return 0;
}

uint64_t rv_cuda_copier_reached(struct rv_cuda_copier *c)
{
    return c->reached;
}

int rv_cuda_write(struct rv_cuda_device *device, uint64_t address, const void *host, uint64_t length,
                  struct rv_error *err)
{
    int r = add(address, host, length, err);

    (void)device;
    writes++;
    run_to(copier.count);
    return r;
}

void *rv_cuda_host_alloc(struct rv_cuda_device *device, uint64_t size, struct rv_error *err)
{
    (void)device;
    if (no_pinned) {
        rv_error_set(err, ENOMEM, RESVISOR__V1__ERROR_CODE__ERROR_NO_MEMORY, "none");
        return NULL;
    }
    pinned_pieces++;
    return malloc(size);
}

void rv_cuda_host_free(struct rv_cuda_device *device, void *memory)
{
    (void)device;
    pinned_pieces--;
    free(memory);
}

/* ---- a model that is filled in ------------------------------------------------------------------------------------
 */

/* As the loader does it: the data is cut into blocks, each tensor starts at the next multiple of 256. */
struct model {
    const uint64_t *lengths;
    unsigned count;
    uint8_t *expected;
    uint64_t used;
};

static uint8_t *blocks;
static uint64_t block_marks[BLOCKS];

static uint8_t pattern(uint64_t i)
{
    return (uint8_t)((i * 2654435761u >> 15 ^ i) | 1); /* never 0: zeros are what a gap is checked for */
}

/* Puts the whole model: 0, or the error of the first call that failed. */
static int put_model(struct rv_copy *copy, struct model *m, struct rv_error *err)
{
    uint64_t at = 0, block = 0, in_block = 0, seen = 0;
    int r = 0;

    for (unsigned t = 0; t < m->count; t++) {
        at = (at + 255) / 256 * 256;
        for (uint64_t done = 0; done < m->lengths[t];) {
            uint8_t *data = blocks + block % BLOCKS * BLOCK + in_block;
            uint64_t left = m->lengths[t] - done, n = left < BLOCK - in_block ? left : BLOCK - in_block;

            if (in_block == 0 && block >= BLOCKS) { /* the ring is full: this memory is used again */
                r = rv_copy_wait(copy, block_marks[block % BLOCKS], err);
                memset(blocks + block % BLOCKS * BLOCK, GARBAGE, BLOCK);
            }
            for (uint64_t i = 0; i < n; i++)
                data[i] = m->expected[at + done + i] = pattern(seen++);
            if (r == 0)
                r = rv_copy_put(copy, at + done, data, n, err);
            done += n;
            in_block += n;
            if (r == 0 && in_block == BLOCK) {
                r = rv_copy_mark(copy, &block_marks[block % BLOCKS], err);
                block++;
                in_block = 0;
            }
            if (r < 0)
                return r;
        }
        at += m->lengths[t];
    }
    m->used = at;
    return 0;
}

static int fill(const uint64_t *lengths, unsigned count, struct rv_error *err)
{
    struct model m = {.lengths = lengths, .count = count, .expected = calloc(1, ARENA)};
    struct rv_copy copy;
    int r;

    assert_non_null(m.expected);
    memset(device_memory, GARBAGE, ARENA);
    short_copies = writes = 0;
    assert_int_equal(rv_copy_init(&copy, NULL, BASE, ARENA, err), 0);
    r = put_model(&copy, &m, err);
    if (r == 0)
        r = rv_copy_finish(&copy, err);
    if (r == 0)
        assert_memory_equal(device_memory, m.expected, ARENA);
    rv_copy_fini(&copy);
    rv_copy_fini(&copy); /* twice is once */
    assert_int_equal(pinned_pieces, 0);
    free(m.expected);
    return r;
}

/* ---- tests --------------------------------------------------------------------------------------------------------
 */

static const struct {
    const char *name;
    uint64_t lengths[40];
    unsigned count, repeat; /* repeat: the list so many times */
} models[] = {
    {"nothing", {0}, 0, 1},
    {"one byte", {1}, 1, 1},
    {"one block", {BLOCK}, 1, 1},
    {"one huge tensor", {40 * MIB + 24}, 1, 1},
    {"tensors of 8 bytes", {8}, 1, 20000},
    {"multiples of 256, one after the other in file and arena", {768, 100 * KIB, 256, 30 * KIB}, 4, 90},
    {"just below and above what goes by itself",
     {RV_COPY_MIN - 1, RV_COPY_MIN, RV_COPY_MIN + 1, 2 * RV_COPY_MIN - 1, 2 * RV_COPY_MIN, 1, 3},
     7,
     6},
    {"large ones with a small one before each", {8, 3 * MIB + 8, 16, 5 * MIB - 8, 4096, 2 * MIB + 1}, 6, 4},
    {"large ones, never a multiple of 256", {900 * KIB + 8}, 1, 40},
};

static unsigned lay_out(unsigned i, uint64_t *lengths)
{
    unsigned n = 0;

    for (unsigned k = 0; k < models[i].repeat; k++)
        for (unsigned t = 0; t < models[i].count; t++)
            lengths[n++] = models[i].lengths[t];
    return n;
}

static uint64_t lengths[20000];

static void test_bytes_and_zeros_with_late_copies(void **state)
{
    struct rv_error err = {0};

    (void)state;
    for (unsigned i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        unsigned n = lay_out(i, lengths);

        assert_int_equal(fill(lengths, n, &err), 0);
        if (short_copies > 1) /* the last one cannot help it */
            fail_msg("%s: %u copies under %u bytes", models[i].name, short_copies, RV_COPY_MIN);
        assert_int_equal(writes, 0);
    }
}

static void test_random_models(void **state)
{
    static const uint64_t classes[] = {64, 5 * KIB, 300 * KIB, 2 * MIB};
    struct rv_error err = {0};
    uint32_t random = 7;

    (void)state;
    for (unsigned round = 0; round < 8; round++) {
        uint64_t total = 0;
        unsigned n = 0;

        for (;;) {
            random = random * 1664525u + 1013904223u;
            lengths[n] = 1 + (random >> 8) % classes[random >> 30];
            if (n == 3000 || total + lengths[n] + 256 > ARENA)
                break;
            total += lengths[n++] + 256;
        }
        assert_int_equal(fill(lengths, n, &err), 0);
        assert_true(short_copies <= 1);
    }
}

/* Without pinned memory each copy is waited for, since the driver would read it at a time of its own. */
static void test_without_pinned_memory(void **state)
{
    struct rv_error err = {0};
    unsigned n = lay_out(7, lengths);

    (void)state;
    no_pinned = true;
    assert_int_equal(fill(lengths, n, &err), 0);
    assert_true(writes > 0);
    no_pinned = false;
}

static void test_any_failing_copy_is_an_error(void **state)
{
    unsigned n = lay_out(7, lengths), operations;
    struct rv_error err = {0};

    (void)state;
    assert_int_equal(fill(lengths, n, &err), 0);
    operations = copier.count;
    assert_true(operations > 10);
    for (fail_at = 1; fail_at <= operations; fail_at += 3) {
        err = (struct rv_error){0};
        assert_int_equal(fill(lengths, n, &err), -ENODEV);
        assert_string_equal(err.message, "lost");
    }
    fail_at = 0;
}

static void test_writes_out_of_order_or_place_are_refused(void **state)
{
    static const uint8_t data[512];
    struct rv_error err = {0};
    struct rv_copy copy;

    (void)state;
    assert_int_equal(rv_copy_init(&copy, NULL, BASE, ARENA, &err), 0);
    assert_int_equal(rv_copy_put(&copy, 512, data, 256, &err), 0);
    assert_int_equal(rv_copy_put(&copy, 512, data, 256, &err), -EINVAL);
    assert_int_equal(rv_copy_put(&copy, ARENA, data, 1, &err), -EINVAL);
    assert_int_equal(rv_copy_put(&copy, ARENA + 1, data, 1, &err), -EINVAL);
    assert_int_equal(rv_copy_put(&copy, ARENA - 256, data, 256, &err), 0);
    assert_int_equal(rv_copy_finish(&copy, &err), 0);
    rv_copy_fini(&copy);
}

static int set_up(void **state)
{
    (void)state;
    device_memory = malloc(ARENA);
    blocks = malloc((size_t)BLOCKS * BLOCK);
    return device_memory && blocks ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    free(device_memory);
    free(blocks);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes_and_zeros_with_late_copies),
        cmocka_unit_test(test_random_models),
        cmocka_unit_test(test_without_pinned_memory),
        cmocka_unit_test(test_any_failing_copy_is_an_error),
        cmocka_unit_test(test_writes_out_of_order_or_place_are_refused),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
