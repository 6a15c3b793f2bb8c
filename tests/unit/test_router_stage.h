/*
 * A stage for the router's tests: the real program, with the test as its supervisor, its workers and its clients.
 * Everything waits on frames and replies; WAIT_US only ends a test that hangs.
 */
#ifndef TEST_ROUTER_STAGE_H
#define TEST_ROUTER_STAGE_H

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <nanomsg/nn.h>
#include <nanomsg/pubsub.h>
#include <nanomsg/reqrep.h>

#include "clock.h"
#include "frame.h"
#include "memory.h"
#include "paths.h"

/* A message that is under way inside nanomsg when a client of the test closes is nanomsg's own leak. Only of this
 * process: the router that is tested answers for itself. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:nn_chunk_alloc\n";
}

#define WAIT_US (20 * RV_SEC)
#define WAIT_MS 20000
#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define STATE(name) RESVISOR__V1__JOB_STATE__JOB_##name
#define LEDGER_MAX 16

struct stage {
    char dir[64], control[90], rpc[100], events[100];
    pid_t pid;
    int supervisor; /* our end of descriptor 3 */
    int client;     /* nanomsg REQ */
    Rv__RouterSetup setup;
    Rv__TypeSetup type;
    Rv__TypeSetup *types[1];
    char *models[1];
};

struct marked {
    char id[65];
    uint8_t digest[16];
    bool ended;
};

static inline void stage_init(struct stage *s)
{
    memset(s, 0, sizeof(*s));
    strcpy(s->dir, "/tmp/rv-router-XXXXXX");
    assert_non_null(mkdtemp(s->dir));
    (void)snprintf(s->control, sizeof(s->control), "%s/router.sock", s->dir);
    (void)snprintf(s->rpc, sizeof(s->rpc), "ipc://%s/rpc.ipc", s->dir);
    (void)snprintf(s->events, sizeof(s->events), "ipc://%s/events.ipc", s->dir);
    rv__router_setup__init(&s->setup);
    rv__type_setup__init(&s->type);
    s->models[0] = "m";
    s->type.name = "image";
    s->type.queue_limit = 8;
    s->type.cancel_timeout_ms = 60000;
    s->type.n_models = 1;
    s->type.models = s->models;
    s->type.state = "READY";
    s->types[0] = &s->type;
    s->setup.control_path = s->control;
    s->setup.control_gid = -1;
    s->setup.rpc_gid = -1;
    s->setup.rpc_address = s->rpc;
    s->setup.events_address = s->events;
    s->setup.n_types = 1;
    s->setup.types = s->types;
    s->setup.result_bytes = 64 << 20;
    s->setup.result_count = 64;
    s->setup.jobs_limit = 1000;
    s->setup.epoch = 7;
    s->supervisor = s->client = -1;
}

/* The next frame; fails the test if none comes. */
static inline void next_frame(int socket, struct rv_frame *frame)
{
    int r = rv_frame_wait(socket, frame, WAIT_US);

    if (r != 1)
        fail_msg("no frame came: %d", r);
}

/* Reads on to a frame of that body. */
static inline void frame_of(int socket, Rv__Frame__BodyCase body, struct rv_frame *frame)
{
    for (;;) {
        next_frame(socket, frame);
        if (frame->message->body_case == body)
            return;
        rv_frame_fini(frame);
    }
}

static inline void expect_frame(int socket, Rv__Frame__BodyCase body)
{
    struct rv_frame frame = RV_FRAME_INIT;

    frame_of(socket, body, &frame);
    rv_frame_fini(&frame);
}

static inline void send_frame(int socket, const Rv__Frame *frame, const int *fds, unsigned count)
{
    assert_int_equal(rv_frame_send(socket, frame, fds, count, WAIT_US), 0);
}

static inline void stage_launch(struct stage *s)
{
    char path[4096];
    int pair[2];

    assert_int_equal(rv_installed_path(RV_LIBEXEC, "resvisor-router", path, sizeof(path)), 0);
    assert_int_equal(rv_frame_pair(pair), 0);
    s->pid = fork();
    assert_true(s->pid >= 0);
    if (s->pid == 0) {
        int fd = fcntl(pair[1], F_DUPFD, 10); /* so that dup2 clears O_CLOEXEC also when it is 3 already */

        (void)dup2(fd, 3);
        (void)close(fd);
        (void)setenv("RESVISOR_CONTROL_FD", "3", 1);
        (void)execl(path, "resvisor-router", (char *)NULL);
        _exit(127);
    }
    (void)close(pair[1]);
    s->supervisor = pair[0];
}

static inline void stage_greet(struct stage *s)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__HelloReply reply = RV__HELLO_REPLY__INIT;
    struct rv_frame hello = RV_FRAME_INIT;

    next_frame(s->supervisor, &hello);
    assert_int_equal(hello.message->body_case, RV__FRAME__BODY_HELLO);
    assert_int_equal(hello.message->hello->role, RV__ROLE__ROLE_ROUTER);
    reply.version = RV_PROTOCOL_VERSION;
    frame.id = hello.message->id;
    rv_frame_fini(&hello);
    frame.body_case = RV__FRAME__BODY_HELLO_REPLY;
    frame.hello_reply = &reply;
    send_frame(s->supervisor, &frame, NULL, 0);
    rv__frame__init(&frame);
    frame.body_case = RV__FRAME__BODY_ROUTER_SETUP;
    frame.router_setup = &s->setup;
    send_frame(s->supervisor, &frame, NULL, 0);
}

static inline int client_open(const char *address)
{
    int s = nn_socket(AF_SP, NN_REQ), timeout = WAIT_MS, size = 1 << 20;

    assert_true(s >= 0);
    (void)nn_setsockopt(s, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout, sizeof(timeout));
    (void)nn_setsockopt(s, NN_SOL_SOCKET, NN_RCVMAXSIZE, &size, sizeof(size));
    assert_true(nn_connect(s, address) >= 0);
    return s;
}

static inline void stage_start(struct stage *s)
{
    stage_launch(s);
    stage_greet(s);
    if (s->setup.n_workers == 0) /* else it comes when these have reported */
        expect_frame(s->supervisor, RV__FRAME__BODY_ROUTER_READY);
    s->client = client_open(s->rpc);
}

/* Waits for the program's end; returns the wait status. */
static inline int stage_reap(struct stage *s)
{
    int status = -1;

    assert_int_equal(waitpid(s->pid, &status, 0), s->pid);
    s->pid = 0;
    if (s->client >= 0)
        (void)nn_close(s->client);
    s->client = -1;
    if (s->supervisor >= 0)
        (void)close(s->supervisor);
    s->supervisor = -1;
    return status;
}

static inline void stage_kill(struct stage *s)
{
    assert_int_equal(kill(s->pid, SIGKILL), 0);
    (void)stage_reap(s);
}

/* The supervisor closes; the router must go, cleanly, and take its sockets with it. */
static inline void stage_end(struct stage *s)
{
    int status;

    (void)close(s->supervisor);
    s->supervisor = -1;
    status = stage_reap(s);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(access(s->control, F_OK), -1);
    assert_int_equal(access(s->rpc + 6, F_OK), -1);
    assert_int_equal(access(s->events + 6, F_OK), -1);
    assert_int_equal(rmdir(s->dir), 0);
}

/* ---- clients ---------------------------------------------------------------------------------------------------- */

#define REQUEST(name)                                         \
    Resvisor__V1__Request name = RESVISOR__V1__REQUEST__INIT; \
    name.version = 1;                                         \
    name.id = 4711

static inline void rpc_send(int client, const Resvisor__V1__Request *request)
{
    size_t size = resvisor__v1__request__get_packed_size(request);
    uint8_t *bytes = malloc(size + 1);

    (void)resvisor__v1__request__pack(request, bytes);
    assert_int_equal(nn_send(client, bytes, size, 0), size);
    free(bytes);
}

static inline Resvisor__V1__Reply *rpc_receive(int client)
{
    void *bytes = NULL;
    int n = nn_recv(client, &bytes, NN_MSG, 0);
    Resvisor__V1__Reply *reply;

    if (n < 0)
        fail_msg("no reply came: %s", nn_strerror(nn_errno()));
    reply = resvisor__v1__reply__unpack(NULL, (size_t)n, bytes);
    (void)nn_freemsg(bytes);
    assert_non_null(reply);
    assert_int_equal(reply->version, 1);
    return reply;
}

static inline Resvisor__V1__Reply *rpc(int client, const Resvisor__V1__Request *request)
{
    rpc_send(client, request);
    return rpc_receive(client);
}

static inline void reply_free(Resvisor__V1__Reply *reply)
{
    resvisor__v1__reply__free_unpacked(reply, NULL);
}

static inline int code_of(const Resvisor__V1__Reply *reply)
{
    return reply->error ? (int)reply->error->code : 0;
}

/* Sends a request and returns only the error code of its reply. */
static inline int rpc_code(int client, const Resvisor__V1__Request *request)
{
    Resvisor__V1__Reply *reply = rpc(client, request);
    int code = code_of(reply);

    reply_free(reply);
    return code;
}

struct submit_options {
    const char *payload;
    int priority;
    bool retry;
    uint64_t wait_ms;
};

static inline void submit_fill(Resvisor__V1__Submit *submit, const char *id, struct submit_options options)
{
    resvisor__v1__submit__init(submit);
    submit->job_id = (char *)id;
    submit->type = "image";
    submit->priority = options.priority;
    submit->retry_on_worker_death = options.retry;
    submit->wait_ms = options.wait_ms;
    if (options.payload)
        submit->payload = (ProtobufCBinaryData){strlen(options.payload), (uint8_t *)options.payload};
}

static inline Resvisor__V1__Reply *submit(int client, const char *id, struct submit_options options)
{
    Resvisor__V1__Submit body;
    REQUEST(request);

    submit_fill(&body, id, options);
    request.body_case = RESVISOR__V1__REQUEST__BODY_SUBMIT;
    request.submit = &body;
    return rpc(client, &request);
}

static inline int submit_code(int client, const char *id, struct submit_options options)
{
    Resvisor__V1__Reply *reply = submit(client, id, options);
    int code = code_of(reply);

    reply_free(reply);
    return code;
}

static inline Resvisor__V1__Reply *get(int client, const char *id)
{
    Resvisor__V1__Get body = RESVISOR__V1__GET__INIT;
    REQUEST(request);

    body.job_id = (char *)id;
    request.body_case = RESVISOR__V1__REQUEST__BODY_GET;
    request.get = &body;
    return rpc(client, &request);
}

static inline void wait_send(int client, const char *id, uint64_t timeout_ms)
{
    Resvisor__V1__Wait body = RESVISOR__V1__WAIT__INIT;
    REQUEST(request);

    body.job_id = (char *)id;
    body.timeout_ms = timeout_ms;
    request.body_case = RESVISOR__V1__REQUEST__BODY_WAIT;
    request.wait = &body;
    rpc_send(client, &request);
}

static inline Resvisor__V1__Reply *wait_for(int client, const char *id)
{
    wait_send(client, id, WAIT_MS);
    return rpc_receive(client);
}

/* Waits for the job's end and returns the code of its error; it must be in that state. */
static inline int ended_with(int client, const char *id, Resvisor__V1__JobState state)
{
    Resvisor__V1__Reply *reply = wait_for(client, id);
    int code;

    assert_int_equal(code_of(reply), 0);
    assert_int_equal(reply->job->state, state);
    code = reply->job->error ? (int)reply->job->error->code : 0;
    reply_free(reply);
    return code;
}

static inline Resvisor__V1__JobState state_of(int client, const char *id)
{
    Resvisor__V1__Reply *reply = get(client, id);
    Resvisor__V1__JobState state = reply->job ? reply->job->state : STATE(UNKNOWN);

    reply_free(reply);
    return state;
}

static inline Resvisor__V1__Reply *cancel(int client, const char *id)
{
    Resvisor__V1__Cancel body = RESVISOR__V1__CANCEL__INIT;
    REQUEST(request);

    body.job_id = (char *)id;
    request.body_case = RESVISOR__V1__REQUEST__BODY_CANCEL;
    request.cancel = &body;
    return rpc(client, &request);
}

static inline Resvisor__V1__Reply *fetch(int client, const char *id, uint32_t output, uint64_t offset, uint32_t length)
{
    Resvisor__V1__Fetch body = RESVISOR__V1__FETCH__INIT;
    REQUEST(request);

    body.job_id = (char *)id;
    body.output = output;
    body.offset = offset;
    body.length = length;
    request.body_case = RESVISOR__V1__REQUEST__BODY_FETCH;
    request.fetch = &body;
    return rpc(client, &request);
}

/* ---- the command line -------------------------------------------------------------------------------------------- */

static inline int local_connect(const struct stage *s)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int local = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", s->control);
    assert_int_equal(connect(local, (struct sockaddr *)&address, sizeof(address)), 0);
    return local;
}

static inline int local_open(const struct stage *s)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Hello hello = RV__HELLO__INIT;
    int local = local_connect(s);

    hello.version = RV_PROTOCOL_VERSION;
    hello.role = RV__ROLE__ROLE_CLIENT;
    frame.id = 1;
    frame.body_case = RV__FRAME__BODY_HELLO;
    frame.hello = &hello;
    send_frame(local, &frame, NULL, 0);
    expect_frame(local, RV__FRAME__BODY_HELLO_REPLY);
    return local;
}

static inline void local_request(int local, Resvisor__V1__Request *request, struct rv_frame *reply)
{
    Rv__Frame frame = RV__FRAME__INIT;

    frame.id = 9;
    frame.body_case = RV__FRAME__BODY_RPC_REQUEST;
    frame.rpc_request = request;
    send_frame(local, &frame, NULL, 0);
    if (!reply)
        return;
    next_frame(local, reply);
    assert_int_equal(reply->message->id, 9);
    assert_int_equal(reply->message->body_case, RV__FRAME__BODY_RPC_REPLY);
}

/* ---- workers ---------------------------------------------------------------------------------------------------- */

static inline int worker_channel(struct stage *s, const char *name, uint64_t incarnation)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__RouterChannel channel = RV__ROUTER_CHANNEL__INIT;
    int pair[2];

    assert_int_equal(rv_frame_pair(pair), 0);
    channel.worker = (char *)name;
    channel.type = "image";
    channel.incarnation = incarnation;
    frame.body_case = RV__FRAME__BODY_ROUTER_CHANNEL;
    frame.router_channel = &channel;
    send_frame(s->supervisor, &frame, &pair[1], 1);
    (void)close(pair[1]);
    return pair[0];
}

static inline void worker_report(int worker, const char *name, uint64_t incarnation, const struct marked *running,
                                 unsigned unacknowledged)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__WorkerReport report = RV__WORKER_REPORT__INIT;

    report.worker = (char *)name;
    report.incarnation = incarnation;
    if (running) {
        report.running_job = (char *)running->id;
        report.running_digest = (ProtobufCBinaryData){16, (uint8_t *)running->digest};
    }
    report.unacknowledged = unacknowledged;
    frame.body_case = RV__FRAME__BODY_WORKER_REPORT;
    frame.worker_report = &report;
    send_frame(worker, &frame, NULL, 0);
}

static inline int worker_join(struct stage *s, const char *name, uint64_t incarnation)
{
    int worker = worker_channel(s, name, incarnation);

    worker_report(worker, name, incarnation, NULL, 0);
    return worker;
}

static inline void worker_gone(struct stage *s, const char *name, uint64_t incarnation)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__WorkerGone gone = RV__WORKER_GONE__INIT;

    gone.worker = (char *)name;
    gone.incarnation = incarnation;
    gone.cause = "killed by signal 9 (SIGKILL) after 12 s";
    gone.next = "restarts at once";
    frame.body_case = RV__FRAME__BODY_WORKER_GONE;
    frame.worker_gone = &gone;
    send_frame(s->supervisor, &frame, NULL, 0);
}

/* Returns when the router has handled all that the supervisor sent before: it drops a channel with a false report. */
static inline void barrier(struct stage *s)
{
    struct rv_frame frame = RV_FRAME_INIT;
    int worker = worker_channel(s, "image/barrier", 1);

    worker_report(worker, "image/other", 1, NULL, 0);
    assert_true(rv_frame_wait(worker, &frame, WAIT_US) <= 0);
    (void)close(worker);
    worker_gone(s, "image/barrier", 1);
}

/* The next job must be that one. */
static inline void worker_starts(int worker, const char *id, unsigned attempt)
{
    struct rv_frame frame = RV_FRAME_INIT;

    frame_of(worker, RV__FRAME__BODY_JOB_START, &frame);
    assert_string_equal(frame.message->job_start->submit->job_id, id);
    assert_int_equal(frame.message->job_start->attempt, attempt);
    assert_int_equal(frame.message->job_start->content_digest.len, 16);
    rv_frame_fini(&frame);
}

/* Ends a job: code 0 with one output of `size` bytes (none if 0), or a failure. */
static inline void worker_ends(int worker, const char *id, const uint8_t *digest, int code, size_t size)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobResult result = RV__JOB_RESULT__INIT;
    Resvisor__V1__Error error = RESVISOR__V1__ERROR__INIT;
    Resvisor__V1__Output output = RESVISOR__V1__OUTPUT__INIT, *outputs[] = {&output};
    uint8_t *bytes = malloc(size + 1);
    int fd = -1;

    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(i * 31 / 7);
    result.job_id = (char *)id;
    result.run_us = 1234;
    result.type = "image";
    if (digest)
        result.content_digest = (ProtobufCBinaryData){16, (uint8_t *)digest};
    error.code = (Resvisor__V1__ErrorCode)code;
    error.message = code ? "it failed as told" : "";
    result.error = &error;
    if (size) {
        fd = rv_sealed_create("out", bytes, size);
        assert_true(fd >= 0);
        output.name = "image.png";
        output.content_type = "image/png";
        output.size = size;
        result.n_outputs = 1;
        result.outputs = outputs;
    }
    frame.body_case = RV__FRAME__BODY_JOB_RESULT;
    frame.job_result = &result;
    send_frame(worker, &frame, &fd, size > 0);
    if (fd >= 0)
        (void)close(fd);
    free(bytes);
}

static inline void worker_progress(int worker, const char *id, uint64_t done, uint64_t total)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobProgress progress = RV__JOB_PROGRESS__INIT;

    progress.job_id = (char *)id;
    progress.done = done;
    progress.total = total;
    progress.text = "step";
    frame.body_case = RV__FRAME__BODY_JOB_PROGRESS;
    frame.job_progress = &progress;
    send_frame(worker, &frame, NULL, 0);
}

static inline void worker_acked(int worker, const char *id)
{
    struct rv_frame frame = RV_FRAME_INIT;

    frame_of(worker, RV__FRAME__BODY_JOB_ACK, &frame);
    assert_string_equal(frame.message->job_ack->job_id, id);
    rv_frame_fini(&frame);
}

/* Reads the supervisor's frames to the next mark. */
static inline void next_mark(struct stage *s, struct marked *mark)
{
    struct rv_frame frame = RV_FRAME_INIT;
    const Rv__MarkedJob *job;

    frame_of(s->supervisor, RV__FRAME__BODY_JOB_MARK, &frame);
    job = frame.message->job_mark->job;
    (void)snprintf(mark->id, sizeof(mark->id), "%s", job->job_id);
    assert_int_equal(job->content_digest.len, 16);
    memcpy(mark->digest, job->content_digest.data, 16);
    mark->ended = job->ended;
    rv_frame_fini(&frame);
}

#endif
