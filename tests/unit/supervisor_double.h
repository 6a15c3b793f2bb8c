/*
 * The other side of libresvisor for tests: a thread that speaks frames and can be told to say anything, the wrong
 * things in particular. Only for injecting protocol errors: that the real supervisor works with libresvisor is shown
 * end to end.
 */
#ifndef RV_TEST_SUPERVISOR_DOUBLE_H
#define RV_TEST_SUPERVISOR_DOUBLE_H

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "clock.h"
#include "frame.h"
#include "index.h"
#include "memory.h"

#define DOUBLE_WAIT_US (20 * RV_SEC) /* longer than any sanitizer needs; reached only when a test fails */

static inline int open_descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int count = 0;

    assert_non_null(dir);
    while (readdir(dir))
        count++;
    (void)closedir(dir);
    return count;
}

/* ---- a model: two tensors, "a" F32 {2,3} and "b" U8 {300}, byte k of the arena = k * 7 ---- */

struct double_model {
    int arena_fd, index_fd;
    struct rv_arena arena;
    uint64_t index_size;
};

static inline void add_tensor(struct rv_index_builder *builder, const char *name, uint16_t dtype, uint64_t offset,
                              const uint8_t *bytes, uint64_t length, uint8_t rank, uint64_t d0, uint64_t d1)
{
    struct rv_index_entry entry = {.dtype = dtype, .rank = rank, .offset = offset, .length = length, .shape = {d0, d1}};
    XXH128_canonical_t digest;

    XXH128_canonicalFromHash(&digest, XXH3_128bits(bytes + offset, length));
    memcpy(entry.digest, digest.digest, sizeof(entry.digest));
    assert_int_equal(rv_index_builder_add(builder, name, (uint32_t)strlen(name), &entry), 0);
}

static inline void double_model_make(struct double_model *ret_model, bool seal)
{
    const struct rv_backend *backend = rv_backend_by_id(RV_BACKEND_MEMFD);
    struct rv_index_builder *builder = rv_index_builder_create(2, 16);
    struct rv_index_arena in_index;
    uint8_t bytes[8192], nothing[16] = {0};

    assert_non_null(builder);
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (uint8_t)(i * 7);
    ret_model->arena_fd = backend->create("test", sizeof(bytes), RV_HUGE_OFF, &ret_model->arena, NULL);
    assert_true(ret_model->arena_fd >= 0);
    assert_int_equal(pwrite(ret_model->arena_fd, bytes, sizeof(bytes), 0), sizeof(bytes));
    if (seal)
        assert_int_equal(backend->seal(ret_model->arena_fd, NULL), 0);
    add_tensor(builder, "a", RV_INDEX_F32, 0, bytes, 24, 2, 2, 3);
    add_tensor(builder, "b", RV_INDEX_U8, 4096, bytes, 300, 1, 300, 0);
    in_index = (struct rv_index_arena){ret_model->arena.size, ret_model->arena.backend, ret_model->arena.page_size};
    ret_model->index_fd =
        rv_index_builder_write(builder, &in_index, 1, "{\"k\":\"v\"}", 9, nothing, &ret_model->index_size);
    assert_true(ret_model->index_fd >= 0);
    rv_index_builder_destroy(builder);
}

static inline void double_model_close(struct double_model *model)
{
    (void)close(model->arena_fd);
    (void)close(model->index_fd);
}

/* ---- frames ---- */

static inline void double_expect(int socket, Rv__Frame__BodyCase body, struct rv_frame *ret_frame)
{
    assert_int_equal(rv_frame_wait(socket, ret_frame, DOUBLE_WAIT_US), 1);
    assert_int_equal(ret_frame->message->body_case, body);
}

static inline void double_send(int socket, uint64_t id, Rv__Frame *frame, const int *fds, unsigned fd_count)
{
    frame->id = id;
    assert_int_equal(rv_frame_send(socket, frame, fds, fd_count, DOUBLE_WAIT_US), 0);
}

static inline void double_hello(int socket, uint32_t version)
{
    struct rv_frame got = RV_FRAME_INIT;
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__HelloReply reply = RV__HELLO_REPLY__INIT;

    double_expect(socket, RV__FRAME__BODY_HELLO, &got);
    reply.version = version;
    reply.pid = (int32_t)getpid();
    frame.body_case = RV__FRAME__BODY_HELLO_REPLY;
    frame.hello_reply = &reply;
    double_send(socket, got.message->id, &frame, NULL, 0);
    rv_frame_fini(&got);
}

static inline void double_send_error(int socket, uint64_t id, int code, const char *text)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__Error error = RESVISOR__V1__ERROR__INIT;

    error.code = (Resvisor__V1__ErrorCode)code;
    error.message = (char *)text;
    frame.body_case = RV__FRAME__BODY_ERROR;
    frame.error = &error;
    double_send(socket, id, &frame, NULL, 0);
}

static inline void double_send_progress(int socket, uint64_t id, uint64_t done, uint64_t total)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__LoadProgress progress = RV__LOAD_PROGRESS__INIT;

    progress.bytes_done = done;
    progress.bytes_total = total;
    frame.body_case = RV__FRAME__BODY_LOAD_PROGRESS;
    frame.load_progress = &progress;
    double_send(socket, id, &frame, NULL, 0);
}

/* An AttachReply as it should be; `spoil` (may be NULL) changes it. */
struct double_reply {
    Rv__AttachReply body;
    Rv__Arena arenas[16], *pointers[16];
    int fds[RV_FRAME_FDS_MAX];
    unsigned fd_count;
};

static inline void double_send_lease(int socket, uint64_t id, uint64_t lease_id, const struct double_model *model,
                                     void (*spoil)(struct double_reply *reply))
{
    struct double_reply reply = {.fds = {model->index_fd, model->arena_fd}, .fd_count = 2};
    Rv__Frame frame = RV__FRAME__INIT;

    rv__attach_reply__init(&reply.body);
    for (unsigned i = 0; i < 16; i++) {
        rv__arena__init(&reply.arenas[i]);
        reply.arenas[i].size = model->arena.size;
        reply.arenas[i].backend = model->arena.backend;
        reply.arenas[i].page_size = model->arena.page_size;
        reply.pointers[i] = &reply.arenas[i];
    }
    reply.body.lease_id = lease_id;
    reply.body.generation = 3;
    reply.body.model = (char *)"m";
    reply.body.arenas = reply.pointers;
    reply.body.n_arenas = 1;
    reply.body.index_size = model->index_size;
    reply.body.waited = true;
    reply.body.load_us = 5;
    reply.body.read_bytes = 1000;
    if (spoil)
        spoil(&reply);
    frame.body_case = RV__FRAME__BODY_ATTACH_REPLY;
    frame.attach_reply = &reply.body;
    double_send(socket, id, &frame, reply.fds, reply.fd_count);
}

static inline void double_expect_detach(int socket, uint64_t lease_id)
{
    struct rv_frame got = RV_FRAME_INIT;

    double_expect(socket, RV__FRAME__BODY_DETACH, &got);
    assert_true(got.message->detach->lease_id == lease_id);
    rv_frame_fini(&got);
}

/* Waits for an Attach and returns its id. */
static inline uint64_t double_expect_attach(int socket)
{
    struct rv_frame got = RV_FRAME_INIT;
    uint64_t id;

    double_expect(socket, RV__FRAME__BODY_ATTACH, &got);
    id = got.message->id;
    rv_frame_fini(&got);
    return id;
}

static inline void double_expect_end(int socket)
{
    struct rv_frame got = RV_FRAME_INIT;

    assert_int_equal(rv_frame_wait(socket, &got, DOUBLE_WAIT_US), 0);
}

/* A script that stands still, in no allocation, while its test forks: sanitizers' allocators do not live through a fork
 * that catches another thread inside. */
static sem_t double_stands, double_goes;

static inline void double_pauses_init(void)
{
    assert_int_equal(sem_init(&double_stands, 0, 0), 0);
    assert_int_equal(sem_init(&double_goes, 0, 0), 0);
}

/* The script. */
static inline void double_pause(void)
{
    (void)sem_post(&double_stands);
    while (sem_wait(&double_goes) != 0)
        ;
}

/* The test, before it forks; double_go_on afterwards. */
static inline void double_await_pause(void)
{
    while (sem_wait(&double_stands) != 0)
        ;
}

static inline void double_go_on(void)
{
    (void)sem_post(&double_goes);
}

/* ---- the thread: accepts one client and runs a script on its socket ---- */

struct double_server {
    char folder[64], path[96];
    int listener;
    pthread_t thread;
    void (*script)(int socket);
};

/* A failed assertion on this thread has no test to jump to: it aborts the program, which fails the test as well. */
static inline void *double_serve(void *context)
{
    struct double_server *d = context;
    int socket = accept(d->listener, NULL, NULL);

    if (socket >= 0) {
        d->script(socket);
        (void)close(socket);
    }
    return NULL;
}

static inline void double_start(struct double_server *d, void (*script)(int socket))
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    (void)snprintf(d->folder, sizeof(d->folder), "/tmp/rv-test-XXXXXX");
    assert_non_null(mkdtemp(d->folder));
    (void)snprintf(d->path, sizeof(d->path), "%s/s", d->folder);
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", d->path);
    d->script = script;
    d->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(d->listener, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(d->listener, 8), 0);
    assert_int_equal(pthread_create(&d->thread, NULL, double_serve, d), 0);
}

static inline void double_stop(struct double_server *d)
{
    (void)shutdown(d->listener, SHUT_RDWR);
    assert_int_equal(pthread_join(d->thread, NULL), 0);
    (void)close(d->listener);
    (void)unlink(d->path);
    (void)rmdir(d->folder);
}

#endif
