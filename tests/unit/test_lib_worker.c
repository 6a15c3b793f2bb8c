/* libresvisor as a worker: jobs, results that survive routers, pings, drains. The test plays supervisor and router. */
#include "supervisor_double.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "resvisor.h"

struct fixture {
    int control, router; /* the test's ends */
    struct rv_worker *worker;
    int before;
};

/* ---- what supervisor and router say ---- */

static void open_channel(struct fixture *f, uint64_t incarnation)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__RouterChannel channel = RV__ROUTER_CHANNEL__INIT;
    int pair[2];

    assert_int_equal(rv_frame_pair(pair), 0);
    channel.worker = (char *)"image/0";
    channel.type = (char *)"image";
    channel.incarnation = incarnation;
    frame.body_case = RV__FRAME__BODY_ROUTER_CHANNEL;
    frame.router_channel = &channel;
    double_send(f->control, 0, &frame, &pair[1], 1);
    (void)close(pair[1]);
    f->router = pair[0];
}

static void expect_report(struct fixture *f, const char *running, unsigned unacknowledged)
{
    struct rv_frame got = RV_FRAME_INIT;

    double_expect(f->router, RV__FRAME__BODY_WORKER_REPORT, &got);
    assert_string_equal(got.message->worker_report->worker, "image/0");
    assert_string_equal(got.message->worker_report->running_job, running);
    assert_int_equal(got.message->worker_report->unacknowledged, unacknowledged);
    if (*running)
        assert_memory_equal(got.message->worker_report->running_digest.data, "digest", 6);
    rv_frame_fini(&got);
}

static void start_job(int router, const char *id, const void *payload, size_t size)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobStart start = RV__JOB_START__INIT;
    Resvisor__V1__Submit submit = RESVISOR__V1__SUBMIT__INIT;
    Resvisor__V1__Param param = RESVISOR__V1__PARAM__INIT, *params[] = {&param};

    param.key = (char *)"seed";
    param.value = (char *)"42";
    submit.job_id = (char *)id;
    submit.type = (char *)"image";
    submit.model = (char *)"m";
    submit.params = params;
    submit.n_params = 1;
    submit.payload.data = (uint8_t *)payload;
    submit.payload.len = size;
    start.submit = &submit;
    start.content_digest.data = (uint8_t *)"digest";
    start.content_digest.len = 6;
    frame.body_case = RV__FRAME__BODY_JOB_START;
    frame.job_start = &start;
    double_send(router, 0, &frame, NULL, 0);
}

static void send_cancel(int router, const char *id)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobCancel cancel = RV__JOB_CANCEL__INIT;

    cancel.job_id = (char *)id;
    frame.body_case = RV__FRAME__BODY_JOB_CANCEL;
    frame.job_cancel = &cancel;
    double_send(router, 0, &frame, NULL, 0);
}

static void send_ack(int router, const char *id)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobAck ack = RV__JOB_ACK__INIT;

    ack.job_id = (char *)id;
    frame.body_case = RV__FRAME__BODY_JOB_ACK;
    frame.job_ack = &ack;
    double_send(router, 0, &frame, NULL, 0);
}

static void send_drain(int control)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Drain drain = RV__DRAIN__INIT;

    frame.body_case = RV__FRAME__BODY_DRAIN;
    frame.drain = &drain;
    double_send(control, 0, &frame, NULL, 0);
}

/* A ping's answer also shows that the service thread has handled all that was sent on this socket before. */
static void ping(struct fixture *f, const char *job_id)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Ping body = RV__PING__INIT;
    struct rv_frame got = RV_FRAME_INIT;

    body.sequence = 8;
    frame.body_case = RV__FRAME__BODY_PING;
    frame.ping = &body;
    double_send(f->control, 3, &frame, NULL, 0);
    double_expect(f->control, RV__FRAME__BODY_PONG, &got);
    assert_true(got.message->pong->sequence == 8);
    assert_string_equal(got.message->pong->job_id, job_id);
    assert_true(got.message->pong->quiet_ms < 20000);
    rv_frame_fini(&got);
}

/* Waits for the result of a job; progress on the way is skipped. */
static void expect_result(int router, const char *id, int code, unsigned outputs)
{
    struct rv_frame got = RV_FRAME_INIT;
    const Rv__JobResult *result;

    do {
        rv_frame_fini(&got);
        assert_int_equal(rv_frame_wait(router, &got, DOUBLE_WAIT_US), 1);
    } while (got.message->body_case == RV__FRAME__BODY_JOB_PROGRESS);
    assert_int_equal(got.message->body_case, RV__FRAME__BODY_JOB_RESULT);
    result = got.message->job_result;
    assert_string_equal(result->job_id, id);
    assert_string_equal(result->type, "image");
    assert_string_equal(result->model, "m");
    assert_memory_equal(result->content_digest.data, "digest", 6);
    assert_int_equal(result->error ? (int)result->error->code : 0, code);
    assert_int_equal(result->n_outputs, outputs);
    assert_int_equal(got.fd_count, outputs);
    for (unsigned i = 0; i < outputs; i++)
        assert_int_equal(rv_sealed_check(got.fds[i], result->outputs[i]->size), 0);
    rv_frame_fini(&got);
}

/* ---- start and end ---- */

static int open_worker(struct fixture *f)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__HelloReply reply = RV__HELLO_REPLY__INIT;
    struct rv_failure err = {0};
    struct rv_frame got = RV_FRAME_INIT;
    char number[16];
    int pair[2];

    if (rv_frame_pair(pair) < 0)
        return -1;
    f->control = pair[0];
    (void)snprintf(number, sizeof(number), "%d", pair[1]);
    (void)setenv("RESVISOR_CONTROL_FD", number, 1);
    (void)setenv("RESVISOR_WORKER", "image/0", 1);
    (void)setenv("RESVISOR_TYPE", "image", 1);
    reply.version = RV_PROTOCOL_VERSION;
    frame.body_case = RV__FRAME__BODY_HELLO_REPLY;
    frame.hello_reply = &reply;
    double_send(f->control, 1, &frame, NULL, 0); /* the first question of a connection has id 1 */
    assert_int_equal(rv_worker_open(&f->worker, &err), 0);
    double_expect(f->control, RV__FRAME__BODY_HELLO, &got);
    assert_int_equal(got.message->hello->role, RV__ROLE__ROLE_WORKER);
    assert_string_equal(got.message->hello->instance, "image/0");
    rv_frame_fini(&got);
    assert_true(fcntl(pair[1], F_GETFD) & FD_CLOEXEC);
    assert_string_equal(rv_worker_id(f->worker), "image/0");
    assert_string_equal(rv_worker_type(f->worker), "image");
    return 0;
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    struct rv_frame got = RV_FRAME_INIT;

    if (!f)
        return -1;
    f->before = open_descriptors();
    f->router = -1;
    if (open_worker(f) < 0)
        return -1;
    assert_int_equal(rv_worker_ready(f->worker, "1 model", NULL), 0);
    double_expect(f->control, RV__FRAME__BODY_WORKER_READY, &got);
    assert_string_equal(got.message->worker_ready->detail, "1 model");
    rv_frame_fini(&got);
    open_channel(f, 1);
    expect_report(f, "", 0);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    int now;

    if (f->router >= 0)
        (void)close(f->router);
    rv_worker_close(f->worker);
    if (f->control >= 0)
        (void)close(f->control);
    now = open_descriptors();
    if (now != f->before)
        (void)fprintf(stderr, "%d descriptors leaked\n", now - f->before);
    now -= f->before;
    free(f);
    return now == 0 ? 0 : -1;
}

static struct rv_job *next_job(struct fixture *f, const char *id)
{
    struct rv_job *job = NULL;

    assert_int_equal(rv_worker_next(f->worker, &job), 1);
    assert_string_equal(rv_job_id(job), id);
    return job;
}

/* ---- tests ---- */

static void a_job_runs_and_its_result_is_kept_until_acknowledged(void **state)
{
    struct fixture *f = *state;
    struct rv_frame got = RV_FRAME_INIT;
    struct rv_job *job, *second = NULL;
    const char *key, *value;
    char *payload = malloc(RV_PAYLOAD_MAX);
    size_t size;

    assert_non_null(payload);
    memset(payload, 'p', RV_PAYLOAD_MAX);
    start_job(f->router, "j1", payload, RV_PAYLOAD_MAX); /* larger than a frame */
    job = next_job(f, "j1");
    assert_int_equal(rv_worker_next(f->worker, &second), -EBUSY);
    assert_string_equal(rv_job_model(job), "m");
    assert_string_equal(rv_job_param(job, "seed", "0"), "42");
    assert_string_equal(rv_job_param(job, "steps", "20"), "20");
    assert_int_equal(rv_job_param_count(job), 1);
    rv_job_param_at(job, 0, &key, &value);
    assert_string_equal(key, "seed");
    rv_job_param_at(job, 1, &key, &value);
    assert_string_equal(key, "");
    assert_memory_equal(rv_job_payload(job, &size), payload, RV_PAYLOAD_MAX);
    assert_int_equal(size, RV_PAYLOAD_MAX);
    free(payload);

    assert_true(rv_job_progress(job, 1, 4, "step \xff one"));
    double_expect(f->router, RV__FRAME__BODY_JOB_PROGRESS, &got);
    assert_string_equal(got.message->job_progress->text, "step \\xff one");
    assert_true(got.message->job_progress->done == 1 && got.message->job_progress->total == 4);
    rv_frame_fini(&got);
    ping(f, "j1");
    rv_job_count_load(job, 1500, 4096);
    assert_int_equal(rv_job_add_output(job, "a.png", "image/png", "abcdef", 6, NULL), 0);
    assert_int_equal(rv_job_add_output(job, "empty", "text/plain", NULL, 0, NULL), 0);
    assert_int_equal(rv_job_finish(job), 0);
    double_expect(f->router, RV__FRAME__BODY_JOB_RESULT, &got);
    assert_true(got.message->job_result->load_us == 1500 && got.message->job_result->read_bytes == 4096);
    assert_string_equal(got.message->job_result->outputs[0]->name, "a.png");
    assert_string_equal(got.message->job_result->outputs[0]->content_type, "image/png");
    assert_int_equal(got.fd_count, 2);
    {
        char text[8] = "";

        assert_int_equal(pread(got.fds[0], text, sizeof(text), 0), 6);
        assert_string_equal(text, "abcdef");
    }
    rv_frame_fini(&got);
    ping(f, "");

    start_job(f->router, "j1", "", 0); /* asked again: said again, not run again */
    expect_result(f->router, "j1", 0, 2);
    send_ack(f->router, "j1");
    start_job(f->router, "j2", "", 0);
    job = next_job(f, "j2");
    assert_int_equal(rv_job_fail(job, RESVISOR__V1__ERROR_CODE__ERROR_FILE, "no such picture"), 0);
    expect_result(f->router, "j2", RESVISOR__V1__ERROR_CODE__ERROR_FILE, 0);
    (void)close(f->router);
    open_channel(f, 1);
    expect_report(f, "", 1); /* j1 was acknowledged */
    expect_result(f->router, "j2", RESVISOR__V1__ERROR_CODE__ERROR_FILE, 0);
}

static void a_new_router_learns_everything(void **state)
{
    struct fixture *f = *state;
    struct rv_job *job;
    char id[8];

    for (unsigned i = 0; i < 5; i++) {
        (void)snprintf(id, sizeof(id), "r%u", i);
        start_job(f->router, id, "", 0);
        job = next_job(f, id);
        assert_int_equal(rv_job_add_output(job, "o", "", id, strlen(id), NULL), 0);
        if (i == 4) { /* the router dies while it runs, and its end finds no router */
            (void)close(f->router);
            f->router = -1;
        }
        assert_int_equal(rv_job_finish(job), 0);
        if (i < 4)
            expect_result(f->router, id, 0, 1);
    }
    open_channel(f, 2);
    expect_report(f, "", 5);
    for (unsigned i = 0; i < 5; i++) {
        (void)snprintf(id, sizeof(id), "r%u", i);
        expect_result(f->router, id, 0, 1);
    }
    start_job(f->router, "run", "", 0);
    job = next_job(f, "run");
    (void)close(f->router);
    open_channel(f, 3);
    expect_report(f, "run", 5);
    for (unsigned i = 0; i < 5; i++) {
        (void)snprintf(id, sizeof(id), "r%u", i);
        expect_result(f->router, id, 0, 1);
        send_ack(f->router, id);
    }
    start_job(f->router, "run", "", 0); /* it runs already */
    assert_int_equal(rv_job_finish(job), 0);
    expect_result(f->router, "run", 0, 0);
    send_ack(f->router, "run");
}

/* JobStart of a router that died before the worker read it: the job was promised, so it counts as running. */
static void a_job_that_the_dead_router_started_is_not_lost(void **state)
{
    struct fixture *f = *state;
    struct rv_job *job;
    int old = f->router;

    start_job(old, "late", "", 0);
    (void)close(old);
    open_channel(f, 2);
    expect_report(f, "late", 0);
    job = next_job(f, "late");
    assert_int_equal(rv_job_finish(job), 0);
    expect_result(f->router, "late", 0, 0);
}

static void a_second_job_is_refused_while_one_runs(void **state)
{
    struct fixture *f = *state;
    struct rv_job *job;

    start_job(f->router, "one", "", 0);
    job = next_job(f, "one");
    start_job(f->router, "two", "", 0);
    expect_result(f->router, "two", RESVISOR__V1__ERROR_CODE__ERROR_LIMIT, 0);
    assert_int_equal(rv_job_finish(job), 0);
    expect_result(f->router, "one", 0, 0);
}

static void a_cancel_reaches_the_job(void **state)
{
    struct fixture *f = *state;
    struct rv_job *job;

    start_job(f->router, "c", "", 0);
    job = next_job(f, "c");
    send_cancel(f->router, "another");
    assert_true(rv_job_progress(job, 0, 0, NULL));
    send_cancel(f->router, "c");
    while (rv_job_progress(job, 0, 0, NULL))
        ; /* as an executor's loop would */
    assert_true(rv_job_cancelled(job));
    assert_int_equal(rv_job_fail(job, 0, NULL), 0);
    expect_result(f->router, "c", RESVISOR__V1__ERROR_CODE__ERROR_CANCELLED, 0);
}

static void nonsense_from_the_router_is_survived(void **state)
{
    struct fixture *f = *state;
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobStart empty = RV__JOB_START__INIT;
    struct rv_job *job;
    char id[RV_NAME_MAX + 2];

    frame.body_case = RV__FRAME__BODY_JOB_START;
    frame.job_start = &empty; /* without a submit */
    double_send(f->router, 0, &frame, NULL, 0);
    memset(id, 'x', sizeof(id) - 1);
    id[sizeof(id) - 1] = '\0';
    start_job(f->router, id, "", 0);
    start_job(f->router, "", "", 0);
    start_job(f->router, "a/b", "", 0);
    send_ack(f->router, "unknown");
    send_cancel(f->router, "unknown");
    start_job(f->router, "good", "", 0);
    job = next_job(f, "good");
    assert_int_equal(send(f->router, "\xff\xff", 2, 0), 2); /* malformed: the channel ends, the worker does not */
    double_expect_end(f->router);
    (void)close(f->router);
    open_channel(f, 2);
    expect_report(f, "good", 0);
    assert_int_equal(rv_job_finish(job), 0);
    expect_result(f->router, "good", 0, 0);
}

static void a_router_that_does_not_read_gets_results_but_not_all_progress(void **state)
{
    struct fixture *f = *state;
    struct rv_job *job;
    char id[8];

    for (unsigned i = 0; i < 8; i++) { /* descriptors: one frame of them at a time */
        (void)snprintf(id, sizeof(id), "s%u", i);
        start_job(f->router, id, "", 0);
        job = next_job(f, id);
        for (unsigned k = 0; k < 5000; k++)
            assert_true(rv_job_progress(job, k, 5000, "x"));
        assert_int_equal(rv_job_add_output(job, "o", "", "x", 1, NULL), 0);
        assert_int_equal(rv_job_finish(job), 0);
    }
    for (unsigned i = 0; i < 8; i++) {
        (void)snprintf(id, sizeof(id), "s%u", i);
        expect_result(f->router, id, 0, 1);
    }
}

static void unacknowledged_results_are_bounded(void **state)
{
    enum { JOBS = 70, KEPT = 64 };
    struct fixture *f = *state;
    struct rv_job *job;
    char id[8];
    int before = open_descriptors();
    uint64_t started;

    for (unsigned i = 0; i < JOBS; i++) {
        (void)snprintf(id, sizeof(id), "k%u", i);
        start_job(f->router, id, "", 0);
        job = next_job(f, id);
        assert_int_equal(rv_job_add_output(job, "o", "", "x", 1, NULL), 0);
        assert_int_equal(rv_job_finish(job), 0);
        expect_result(f->router, id, 0, 1);
    }
    assert_int_equal(open_descriptors() - before, KEPT);
    (void)close(f->router);
    started = rv_now_us();
    open_channel(f, 2);
    expect_report(f, "", KEPT);
    for (unsigned i = JOBS - KEPT; i < JOBS; i++) {
        (void)snprintf(id, sizeof(id), "k%u", i);
        expect_result(f->router, id, 0, 1);
    }
    assert_true(rv_now_us() - started < 4 * RV_SEC); /* a new router waits 5 s for all of them */
}

static void bad_outputs_are_refused(void **state)
{
    struct fixture *f = *state;
    struct rv_job *job;
    struct rv_failure err;
    char name[300];

    memset(name, 'n', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    start_job(f->router, "o", "", 0);
    job = next_job(f, "o");
    assert_int_equal(rv_job_add_output(job, NULL, "", "x", 1, &err), -EINVAL);
    assert_int_equal(rv_job_add_output(job, "", "", "x", 1, &err), -EINVAL);
    assert_int_equal(rv_job_add_output(job, "../x", "", "x", 1, &err), -EINVAL);
    assert_int_equal(rv_job_add_output(job, "..", "", "x", 1, &err), -EINVAL);
    assert_int_equal(rv_job_add_output(job, "\xff", "", "x", 1, &err), -EINVAL);
    assert_int_equal(rv_job_add_output(job, name, "", "x", 1, &err), -EINVAL);
    assert_int_equal(rv_job_add_output(job, "x", name, "x", 1, &err), -EINVAL);
    assert_int_equal(rv_job_add_output(job, "x", "", NULL, 1, &err), -EINVAL);
    assert_int_equal(rv_job_add_output(job, "x", "", "x", RV_OUTPUT_MAX + 1, &err), -EMSGSIZE);
    assert_int_equal(err.code, RESVISOR__V1__ERROR_CODE__ERROR_TOO_LARGE);
    for (unsigned i = 0; i < RV_OUTPUTS_MAX; i++)
        assert_int_equal(rv_job_add_output(job, "x", "", "x", 1, &err), 0);
    assert_int_equal(rv_job_add_output(job, "x", "", "x", 1, &err), -E2BIG);
    assert_int_equal(rv_job_fail(job, 0, "a failed job keeps what it made until then"), 0);
    expect_result(f->router, "o", RESVISOR__V1__ERROR_CODE__ERROR_JOB_FAILED, RV_OUTPUTS_MAX);
}

static void a_drain_ends_the_loop_after_the_job(void **state)
{
    struct fixture *f = *state;
    struct rv_job *job;

    start_job(f->router, "last", "", 0);
    job = next_job(f, "last");
    send_drain(f->control);
    ping(f, "last");
    assert_false(rv_job_cancelled(job));
    assert_int_equal(rv_job_finish(job), 0);
    assert_int_equal(rv_worker_next(f->worker, &job), 0);
    expect_result(f->router, "last", 0, 0);
    start_job(f->router, "too-late", "", 0);
    expect_result(f->router, "too-late", RESVISOR__V1__ERROR_CODE__ERROR_SHUTTING_DOWN, 0);
}

static void without_a_supervisor_the_loop_ends(void **state)
{
    struct fixture *f = *state;
    struct rv_job *job;

    start_job(f->router, "orphan", "", 0);
    job = next_job(f, "orphan");
    (void)close(f->control);
    f->control = -1;
    while (!rv_job_cancelled(job))
        (void)sched_yield();
    assert_int_equal(rv_job_fail(job, 0, NULL), 0);
    assert_int_equal(rv_worker_next(f->worker, &job), 0);
}

static void *attach_in_a_job(void *context)
{
    struct fixture *f = context;
    struct rv_lease *lease = NULL;

    return rv_attach(rv_worker_connection(f->worker), "m", NULL, &lease, NULL) == 0 ? lease : NULL;
}

static void an_attach_in_a_job_counts_as_its_load(void **state)
{
    struct fixture *f = *state;
    struct double_model model;
    struct rv_frame got = RV_FRAME_INIT;
    struct rv_job *job;
    pthread_t thread;
    uint64_t id;
    void *lease = NULL;

    double_model_make(&model, true);
    start_job(f->router, "load", "", 0);
    job = next_job(f, "load");
    assert_int_equal(pthread_create(&thread, NULL, attach_in_a_job, f), 0);
    id = double_expect_attach(f->control);
    double_send_progress(f->control, id, 1, 2);
    ping(f, "load"); /* answered while another thread waits for a load */
    double_send_lease(f->control, id, 9, &model, NULL);
    assert_int_equal(pthread_join(thread, &lease), 0);
    assert_non_null(lease);
    rv_disconnect(rv_worker_connection(f->worker)); /* not allowed, and harmless */
    assert_int_equal(rv_job_finish(job), 0);
    double_expect(f->router, RV__FRAME__BODY_JOB_RESULT, &got);
    assert_true(got.message->job_result->load_us == 5 && got.message->job_result->read_bytes == 1000);
    rv_frame_fini(&got);
    rv_detach(lease);
    double_expect_detach(f->control, 9);
    double_model_close(&model);
}

static void without_its_environment_it_says_so(void **state)
{
    struct rv_worker *worker = NULL;
    struct rv_failure err;
    int pipes[2];
    char number[16];

    (void)state;
    (void)unsetenv("RESVISOR_CONTROL_FD");
    assert_int_equal(rv_worker_open(&worker, &err), -ENOTCONN);
    assert_non_null(strstr(err.message, "RESVISOR_CONTROL_FD"));
    (void)setenv("RESVISOR_CONTROL_FD", "three", 1);
    assert_int_equal(rv_worker_open(&worker, &err), -EINVAL);
    assert_int_equal(pipe(pipes), 0);
    (void)snprintf(number, sizeof(number), "%d", pipes[0]);
    (void)setenv("RESVISOR_CONTROL_FD", number, 1);
    assert_int_equal(rv_worker_open(&worker, &err), -EINVAL);
    (void)close(pipes[0]);
    (void)close(pipes[1]);
    assert_null(worker);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_job_runs_and_its_result_is_kept_until_acknowledged),
        TEST(a_new_router_learns_everything),
        TEST(a_job_that_the_dead_router_started_is_not_lost),
        TEST(a_second_job_is_refused_while_one_runs),
        TEST(a_cancel_reaches_the_job),
        TEST(nonsense_from_the_router_is_survived),
        TEST(a_router_that_does_not_read_gets_results_but_not_all_progress),
        TEST(unacknowledged_results_are_bounded),
        TEST(bad_outputs_are_refused),
        TEST(a_drain_ends_the_loop_after_the_job),
        TEST(without_a_supervisor_the_loop_ends),
        TEST(an_attach_in_a_job_counts_as_its_load),
        cmocka_unit_test(without_its_environment_it_says_so),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
