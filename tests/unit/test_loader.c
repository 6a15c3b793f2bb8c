/* Drives the real resvisor-loader over a socket pair, as the supervisor does, on good and bad files. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "clock.h"
#include "index.h"
#include "loader_drive.h"
#include "memory.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
static void send_start(const struct drive *l, int file, const char *format, uint32_t direct, uint32_t huge)
{
    Rv__LoadStart start = RV__LOAD_START__INIT;

    start.path = drive_path;
    start.format = (char *)format;
    start.direct = direct;
    start.huge_pages = huge;
    start.backend = RV_BACKEND_MEMFD;
    drive_send_start(l, file, &start);
}

static void send_admit(const struct drive *l)
{
    Rv__LoadAdmit admit = RV__LOAD_ADMIT__INIT;

    drive_send_admit(l, &admit);
}

/* ---- a load and what came of it -------------------------------------------------------------------------------- */

struct loaded {
    struct rv_index index;
    uint8_t *bytes; /* the arena */
    uint64_t size;
    char method[32];
    uint64_t read_bytes;
};

static void check_done(struct rv_frame *frame, struct loaded *ret)
{
    const Rv__LoadDone *done = frame->message->load_done;
    const struct rv_backend *backend = rv_backend_by_id(RV_BACKEND_MEMFD);
    struct rv_arena arena;
    struct rv_error err = {0};
    void *p;

    assert_int_equal(frame->message->body_case, RV__FRAME__BODY_LOAD_DONE);
    assert_int_equal(done->n_arenas, 1);
    assert_int_equal(frame->fd_count, 2);
    arena = (struct rv_arena){
        .size = done->arenas[0]->size, .page_size = done->arenas[0]->page_size, .backend = done->arenas[0]->backend};
    assert_int_equal(backend->check(frame->fds[1], &arena, &err), 0);
    assert_int_equal(rv_sealed_check(frame->fds[0], done->index_size), 0);
    assert_int_equal(rv_index_open(&ret->index, frame->fds[0], &arena.size, 1, &err), 0);
    assert_int_equal(rv_index_count(&ret->index), done->tensors);
    assert_int_equal(done->header_digest.len, 16);
    assert_memory_equal(done->header_digest.data, ret->index.header->header_digest, 16);
    assert_int_equal(backend->map(frame->fds[1], &arena, RV_MAP_SHARED, &p, &err), 0);
    ret->bytes = p;
    ret->size = arena.size;
    ret->read_bytes = done->read_bytes;
    (void)snprintf(ret->method, sizeof(ret->method), "%s", done->method);
}

/* Every tensor: alignment, digest, and (bytes from the drive_pattern at data_offset) content. */
static void check_tensors(const struct loaded *l)
{
    uint64_t at = 0;

    for (uint32_t i = 0; i < rv_index_count(&l->index); i++) {
        const char *name;
        const struct rv_index_entry *e = rv_index_at(&l->index, i, &name);
        XXH128_canonical_t digest;

        assert_non_null(e);
        assert_ptr_equal(rv_index_find(&l->index, name, strlen(name)), e);
        assert_int_equal(e->offset % RV_TENSOR_ALIGN, 0);
        for (uint64_t k = 0; k < e->length; k++)
            if (l->bytes[e->offset + k] != drive_pattern(at + k))
                fail_msg("tensor %u differs at byte %llu", i, (unsigned long long)k);
        XXH128_canonicalFromHash(&digest, XXH3_128bits(e->length ? l->bytes + e->offset : NULL, e->length));
        assert_memory_equal(digest.digest, e->digest, 16);
        at += e->length;
    }
}

static void loaded_fini(struct loaded *l)
{
    rv_index_close(&l->index);
    if (l->bytes)
        (void)munmap(l->bytes, l->size);
}

/* A load that must succeed. */
static void load_good(int file, const char *format, const char *way, uint32_t direct, uint32_t huge, struct loaded *ret)
{
    struct drive l = drive_start_loader(way);
    struct rv_frame frame;
    uint64_t planned, tensors;

    drive_greet(&l);
    send_start(&l, file, format, direct, huge);
    frame = drive_receive(&l);
    if (frame.message->body_case == RV__FRAME__BODY_ERROR)
        fail_msg("%s", frame.message->error->message);
    assert_int_equal(frame.message->body_case, RV__FRAME__BODY_LOAD_PLAN);
    planned = frame.message->load_plan->arena_bytes;
    tensors = frame.message->load_plan->tensors;
    rv_frame_fini(&frame);
    send_admit(&l);
    frame = drive_receive(&l);
    if (frame.message->body_case == RV__FRAME__BODY_ERROR)
        fail_msg("%s", frame.message->error->message);
    check_done(&frame, ret);
    assert_true(ret->size <= planned);
    assert_int_equal(rv_index_count(&ret->index), tensors);
    rv_frame_fini(&frame);
    drive_end_loader(&l, 0);
    (void)close(file);
}

/* A load that must fail before anything is allocated, with this code and these words. */
static void load_bad(int file, const char *format, int code, const char *words)
{
    struct drive l = drive_start_loader(NULL);
    struct rv_frame frame;

    assert_true(file >= 0);
    drive_greet(&l);
    send_start(&l, file, format, 0, RV_HUGE_OFF);
    frame = drive_receive(&l);
    assert_int_equal(frame.message->body_case, RV__FRAME__BODY_ERROR);
    if (frame.message->error->code != (Resvisor__V1__ErrorCode)code || !strstr(frame.message->error->message, words))
        fail_msg("code %d: %s", frame.message->error->code, frame.message->error->message);
    rv_frame_fini(&frame);
    drive_end_loader(&l, 1);
    (void)close(file);
}

/* ---- good files ------------------------------------------------------------------------------------------------ */

/* One tensor per dtype, each with an odd number of elements, so that the next one starts unaligned in the file. */
static void test_every_dtype(void **state)
{
    char header[4096], *p = header;
    struct loaded l = {0};
    uint64_t at = 0;

    (void)state;
    p += sprintf(p, "{\"__metadata__\":{\"format\": \"pt\"}");
    for (uint32_t d = 1; d < RV_INDEX_BLOB; d++) {
        uint64_t end = at + 15ull * rv_dtype_size(d);

        p += sprintf(p, ",\"t.%s\":{\"dtype\":\"%s\",\"shape\":[3,5],\"data_offsets\":[%llu,%llu]}", rv_dtype_name(d),
                     rv_dtype_name(d), (unsigned long long)at, (unsigned long long)end);
        at = end;
    }
    (void)sprintf(p, "}");
    load_good(drive_make_file("dtypes.safetensors", 0, header, at), "auto", NULL, 0, RV_HUGE_OFF, &l);
    assert_int_equal(rv_index_count(&l.index), RV_INDEX_BLOB - 1);
    assert_string_equal(rv_index_metadata(&l.index, NULL), "{\"format\":\"pt\"}");
    for (uint32_t d = 1; d < RV_INDEX_BLOB; d++) {
        char name[32];
        const struct rv_index_entry *e;

        (void)snprintf(name, sizeof(name), "t.%s", rv_dtype_name(d));
        e = rv_index_find(&l.index, name, strlen(name));
        assert_non_null(e);
        assert_int_equal(e->dtype, d);
        assert_int_equal(e->rank, 2);
        assert_int_equal(e->shape[1], 5);
    }
    assert_int_equal(l.read_bytes, 8 + strlen(header) + at);
    check_tensors(&l);
    loaded_fini(&l);
}

static const struct {
    const char *way, *method;
    uint32_t direct;
    bool drop; /* from the page cache first */
} ways[] = {
    {"io_uring", "io_uring", 0, true}, {"threads", "threads", 0, true}, {"cache", "page cache", 0, false},
    {NULL, "page cache", 0, false},    {NULL, "io_uring", 0, true},     {NULL, "page cache", 2, true},
    {NULL, "io_uring", 1, false},
};

/* Several tensors over several blocks, data at an odd place of the file, with every way to read. */
static void test_every_way_to_read(void **state)
{
    static const uint64_t ends[] = {1, 4096, 4096, 70000, 4194304, 4194305, 13000001, 21000000, 21000000};
    char header[2048], *p = header;
    uint64_t at = 0;

    (void)state;
    p += sprintf(p, "{");
    for (unsigned i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        p += sprintf(p, "%s\"%u\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}", i ? "," : "", i,
                     (unsigned long long)(ends[i] - at), (unsigned long long)at, (unsigned long long)ends[i]);
        at = ends[i];
    }
    (void)sprintf(p, "} ");
    for (unsigned i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        struct loaded l = {0};
        int file = drive_make_file("ways.safetensors", 0, header, at);

        if (ways[i].drop)
            assert_int_equal(posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED), 0);
        load_good(file, "auto", ways[i].way, ways[i].direct, RV_HUGE_OFF, &l);
        if (strcmp(l.method, ways[i].method) != 0) /* a container may forbid io_uring, a filesystem O_DIRECT */
            print_message("way %u: %s instead of %s\n", i, l.method, ways[i].method);
        check_tensors(&l);
        loaded_fini(&l);
    }
}

/* Where huge pages are free they are used, else `auto` takes small ones. */
static void test_huge_pages_auto(void **state)
{
    struct loaded l = {0};

    (void)state;
    load_good(drive_make_file("huge.safetensors", 0,
                              "{\"a\":{\"dtype\":\"U8\",\"shape\":[3000001],\"data_offsets\":[0,3000001]}}", 3000001),
              "auto", NULL, 0, RV_HUGE_AUTO, &l);
    check_tensors(&l);
    loaded_fini(&l);
}

static void test_no_tensors(void **state)
{
    struct loaded l = {0};

    (void)state;
    load_good(drive_make_file("none.safetensors", 0, "{}", 0), "auto", NULL, 0, RV_HUGE_OFF, &l);
    assert_int_equal(rv_index_count(&l.index), 0);
    assert_int_equal(l.size, 0);
    loaded_fini(&l);
    load_good(drive_make_file("only-empty.safetensors", 0,
                              "{\"e\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[0,0]}}", 0),
              "auto", NULL, 0, RV_HUGE_OFF, &l);
    check_tensors(&l);
    loaded_fini(&l);
}

static void test_blob(void **state)
{
    static const uint64_t sizes[] = {0, 1, 8, 9, 100000};

    (void)state;
    for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct loaded l = {0};
        const struct rv_index_entry *e;

        load_good(drive_make_blob("some.gguf", sizes[i]), "auto", NULL, 0, RV_HUGE_OFF, &l);
        e = rv_index_find(&l.index, "blob", 4);
        assert_non_null(e);
        assert_int_equal(e->dtype, RV_INDEX_BLOB);
        assert_int_equal(e->length, sizes[i]);
        check_tensors(&l);
        loaded_fini(&l);
    }
}

/* Content decides where the name does not, and the configuration decides over both. */
static void test_format(void **state)
{
    static const char one[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}";
    struct loaded l = {0};

    (void)state;
    load_good(drive_make_file("weights.bin", 0, one, 2), "auto", NULL, 0, RV_HUGE_OFF, &l);
    assert_non_null(rv_index_find(&l.index, "a", 1));
    loaded_fini(&l);
    load_good(drive_make_file("weights.safetensors", 0, one, 2), "blob", NULL, 0, RV_HUGE_OFF, &l);
    assert_non_null(rv_index_find(&l.index, "blob", 4));
    loaded_fini(&l);
    load_bad(drive_make_blob("x.bin", 100), "safetensors", ERROR(MODEL_INVALID), "header of");
}

/* ---- bad files ------------------------------------------------------------------------------------------------- */

#define U8(name, begin, end, shape) \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":[" shape "],\"data_offsets\":[" begin "," end "]}"

static const struct {
    const char *what;
    uint64_t prefix;
    const char *header;
    uint64_t data;
    int code;
    const char *words;
} bad[] = {
    {"truncated", 0, "{" U8("a", "0", "10", "10") "}", 9, ERROR(MODEL_INVALID), "truncated"},
    {"trailing bytes", 0, "{" U8("a", "0", "10", "10") "}", 11, ERROR(MODEL_INVALID), "1 bytes follow"},
    {"overlap", 0, "{" U8("a", "0", "10", "10") "," U8("b", "5", "15", "10") "}", 15, ERROR(MODEL_INVALID),
     "inside the tensor before it"},
    {"gap", 0, "{" U8("a", "0", "10", "10") "," U8("b", "11", "15", "4") "}", 15, ERROR(MODEL_INVALID), "gap"},
    {"overflowing shape", 0, "{" U8("a", "0", "0", "4294967296,4294967296") "}", 0, ERROR(MODEL_INVALID), "2^64"},
    {"duplicate", 0, "{" U8("a", "0", "1", "1") "," U8("\\u0061", "1", "2", "1") "}", 2, ERROR(MODEL_INVALID), "twice"},
    {"not JSON", 0, "{this is not JSON}", 0, ERROR(MODEL_INVALID), "byte 9"},
    {"header length 2^63", UINT64_C(1) << 63, "{}", 0, ERROR(MODEL_INVALID), "9223372036854775808"},
    {"header past the end", 3, "{}", 0, ERROR(MODEL_INVALID), "truncated"},
    {"sub-byte", 0, "{\"a\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,1]}}", 1, ERROR(UNSUPPORTED), "F4"},
    {"unknown dtype", 0, "{\"a\":{\"dtype\":\"BLOB\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2, ERROR(MODEL_INVALID),
     "unknown dtype"},
};

static void test_bad_files(void **state)
{
    (void)state;
    for (unsigned i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        load_bad(drive_make_file("bad.safetensors", bad[i].prefix, bad[i].header, bad[i].data), "auto", bad[i].code,
                 bad[i].words);
    load_bad(drive_make_blob("empty.safetensors", 0), "auto", ERROR(MODEL_INVALID), "too short");
    load_bad(open(drive_directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC), "auto", ERROR(FILE), "not a regular file");
}

/* The file changes between plan and admission: found, whatever way it is read. */
static void change_while_loading(const char *way, bool truncate_it)
{
    int file = drive_make_file("changing.safetensors", 0, "{" U8("a", "0", "100000", "100000") "}", 100000);
    struct drive l = drive_start_loader(way);
    struct rv_frame frame;
    int writer = open(drive_path, O_WRONLY | O_CLOEXEC);

    drive_greet(&l);
    send_start(&l, file, "auto", 0, RV_HUGE_OFF);
    frame = drive_receive(&l);
    assert_int_equal(frame.message->body_case, RV__FRAME__BODY_LOAD_PLAN);
    rv_frame_fini(&frame);
    if (truncate_it)
        assert_int_equal(ftruncate(writer, 5000), 0);
    else
        assert_int_equal(pwrite(writer, "new", 3, 90000), 3);
    send_admit(&l);
    frame = drive_receive(&l);
    assert_int_equal(frame.message->body_case, RV__FRAME__BODY_ERROR);
    assert_int_equal(frame.message->error->code, ERROR(MODEL_CHANGED));
    rv_frame_fini(&frame);
    drive_end_loader(&l, 1);
    (void)close(writer);
    (void)close(file);
}

static void test_file_changed_while_loading(void **state)
{
    static const char *const readers[] = {"cache", "io_uring", "threads"};

    (void)state;
    for (unsigned i = 0; i < 3; i++) {
        change_while_loading(readers[i], false);
        change_while_loading(readers[i], true);
    }
}

/* ---- the channel ----------------------------------------------------------------------------------------------- */

static void test_refusal_and_closed_channel_end_it(void **state)
{
    Rv__Frame message = RV__FRAME__INIT;
    Resvisor__V1__Error error = RESVISOR__V1__ERROR__INIT;
    struct drive l;
    struct rv_frame frame;
    int file = drive_make_file("one.safetensors", 0, "{" U8("a", "0", "1", "1") "}", 1);

    (void)state;
    l = drive_start_loader(NULL); /* closed before anything */
    drive_end_loader(&l, 1);
    l = drive_start_loader(NULL); /* closed while it waits for work */
    drive_greet(&l);
    drive_end_loader(&l, 1);
    l = drive_start_loader(NULL); /* refused */
    drive_greet(&l);
    send_start(&l, file, "auto", 0, RV_HUGE_OFF);
    frame = drive_receive(&l);
    rv_frame_fini(&frame);
    error.code = ERROR(OVER_BUDGET);
    message.body_case = RV__FRAME__BODY_ERROR;
    message.error = &error;
    assert_int_equal(rv_frame_send(l.socket, &message, NULL, 0, DRIVE_WAIT_US), 0);
    assert_int_equal(rv_frame_wait(l.socket, &frame, DRIVE_WAIT_US), 0); /* quietly: nothing but the end */
    drive_end_loader(&l, 0);
    l = drive_start_loader(NULL); /* closed while it waits for admission */
    drive_greet(&l);
    send_start(&l, file, "auto", 0, RV_HUGE_OFF);
    frame = drive_receive(&l);
    rv_frame_fini(&frame);
    drive_end_loader(&l, 1);
    (void)close(file);
}

/* A load that lasts: it tells how far it is, and ends at once when the channel closes. */
static void test_progress_and_closed_channel_during_a_load(void **state)
{
    const uint64_t size = UINT64_C(16) << 30; /* a hole: seconds to load, nothing on the disk */
    struct rv_frame frame;
    struct drive l;
    uint64_t start;
    int file;

    (void)state;
    (void)snprintf(drive_path, sizeof(drive_path), "%s/hole.bin", drive_directory);
    file = open(drive_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_int_equal(ftruncate(file, (off_t)size), 0);
    l = drive_start_loader(NULL);
    drive_greet(&l);
    send_start(&l, file, "blob", 1, RV_HUGE_OFF);
    frame = drive_receive(&l);
    assert_int_equal(frame.message->load_plan->arena_bytes, size);
    rv_frame_fini(&frame);
    send_admit(&l);
    assert_int_equal(rv_frame_wait(l.socket, &frame, DRIVE_WAIT_US), 1);
    assert_int_equal(frame.message->body_case, RV__FRAME__BODY_LOAD_PROGRESS);
    assert_int_equal(frame.message->load_progress->bytes_total, size);
    assert_true(frame.message->load_progress->bytes_done > 0);
    rv_frame_fini(&frame);
    start = rv_now_us();
    drive_end_loader(&l, 1);
    assert_true(rv_now_us() - start < 2 * RV_SEC);
    (void)close(file);
}

/* No memory for the arena is an error with words, not a death. */
static void test_no_room_for_the_arena(void **state)
{
    const struct rlimit small = {8 << 20, RLIM_INFINITY};
    struct rlimit old;
    struct rv_frame frame;
    struct drive l;
    int file = drive_make_file("big.safetensors", 0, "{" U8("a", "0", "10000000", "10000000") "}", 10000000);

    (void)state;
    (void)getrlimit(RLIMIT_FSIZE, &old);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    l = drive_start_loader(NULL);
    (void)setrlimit(RLIMIT_FSIZE, &old);
    drive_greet(&l);
    send_start(&l, file, "auto", 0, RV_HUGE_OFF);
    frame = drive_receive(&l);
    rv_frame_fini(&frame);
    send_admit(&l);
    frame = drive_receive(&l);
    assert_int_equal(frame.message->body_case, RV__FRAME__BODY_ERROR);
    assert_int_equal(frame.message->error->code, ERROR(NO_MEMORY));
    rv_frame_fini(&frame);
    drive_end_loader(&l, 1);
    (void)close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_dtype),
        cmocka_unit_test(test_every_way_to_read),
        cmocka_unit_test(test_huge_pages_auto),
        cmocka_unit_test(test_no_tensors),
        cmocka_unit_test(test_blob),
        cmocka_unit_test(test_format),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_file_changed_while_loading),
        cmocka_unit_test(test_refusal_and_closed_channel_end_it),
        cmocka_unit_test(test_progress_and_closed_channel_during_a_load),
        cmocka_unit_test(test_no_room_for_the_arena),
    };

    return cmocka_run_group_tests(tests, drive_set_up, drive_tear_down);
}
