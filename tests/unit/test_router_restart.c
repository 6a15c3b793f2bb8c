/* The router's start: after another one's death, and at sockets that are somebody's already. */
#include "test_router_stage.h"

static const struct submit_options plain = {0};

/* ---- restart ---------------------------------------------------------------------------------------------------- */

/* Sends a Get until the answer is not NOT_READY; the first one must be. */
static void expect_not_ready(struct stage *s, const char *id)
{
    Resvisor__V1__Reply *reply = get(s->client, id);

    assert_int_equal(code_of(reply), CODE(NOT_READY));
    assert_true(reply->error->retry_after_ms > 0);
    reply_free(reply);
}

static void ledger_entry(struct stage *s, const struct marked *mark, Rv__MarkedJob *job, Rv__MarkedJob **list)
{
    rv__marked_job__init(job);
    job->job_id = (char *)mark->id;
    job->type = "image";
    job->ended = mark->ended;
    job->content_digest = (ProtobufCBinaryData){16, (uint8_t *)mark->digest};
    job->attempts = 1;
    list[s->setup.n_jobs++] = job;
}

/*
 * Four jobs were dispatched by a router that is killed: one still runs, one waits in its worker for JobAck, one is
 * known to nobody, one had ended and its result is gone.
 */
static void a_new_router_learns_from_workers_and_runs_nothing_twice(void **state)
{
    static const char *const ids[] = {"runs", "done", "lost", "over"};
    struct stage s;
    struct marked marks[4];
    Rv__MarkedJob jobs[4], *list[4];
    char *workers[] = {"image/0", "image/1"};
    Resvisor__V1__Reply *reply;
    struct rv_frame frame = RV_FRAME_INIT;
    int old[4], worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    for (unsigned i = 0; i < 4; i++) {
        char name[16];

        (void)snprintf(name, sizeof(name), "image/%u", i);
        old[i] = worker_join(&s, name, 1);
        assert_int_equal(submit_code(s.client, ids[i], (struct submit_options){.payload = ids[i]}), 0);
        next_mark(&s, &marks[i]);
        assert_string_equal(marks[i].id, ids[i]);
        expect_frame(old[i], RV__FRAME__BODY_JOB_START);
    }
    stage_kill(&s);
    marks[3].ended = true;
    for (unsigned i = 0; i < 4; i++) {
        (void)close(old[i]);
        ledger_entry(&s, &marks[i], &jobs[i], list);
    }
    s.setup.jobs = list;
    s.setup.n_workers = 2;
    s.setup.workers = workers;
    s.setup.epoch = 8;
    stage_start(&s); /* over the dead router's socket files */
    expect_not_ready(&s, "runs");
    worker = worker_channel(&s, "image/0", 1);
    worker_report(worker, "image/0", 1, &marks[0], 1);
    worker_ends(worker, "done", marks[1].digest, 0, 50);
    expect_not_ready(&s, "done");
    worker_gone(&s, "image/1", 1);
    barrier(&s);
    while ((reply = get(s.client, "runs")) && code_of(reply) == CODE(NOT_READY)) /* the report is on its way */
        reply_free(reply);
    assert_int_equal(reply->job->state, STATE(RUNNING));
    reply_free(reply);
    assert_int_equal(submit_code(s.client, "runs", (struct submit_options){.payload = "runs"}), 0);
    assert_int_equal(ended_with(s.client, "done", STATE(DONE)), 0);
    reply = fetch(s.client, "done", 0, 0, 0);
    assert_int_equal(reply->piece->data.len, 50);
    reply_free(reply);
    assert_int_equal(ended_with(s.client, ids[2], STATE(FAILED)), CODE(JOB_LOST));
    assert_int_equal(ended_with(s.client, ids[3], STATE(DONE)), 0); /* it had ended: only its result is lost */
    for (unsigned i = 2; i < 4; i++) {
        reply = submit(s.client, ids[i], (struct submit_options){.payload = ids[i]});
        assert_int_equal(code_of(reply), 0);
        assert_int_equal(reply->job->state, i == 2 ? STATE(FAILED) : STATE(DONE));
        assert_int_equal(reply->job->n_outputs, 0);
        reply_free(reply);
        assert_int_equal(submit_code(s.client, ids[i], (struct submit_options){.payload = "other"}), CODE(JOB_EXISTS));
    }
    worker_ends(worker, "runs", marks[0].digest, 0, 0);
    assert_int_equal(ended_with(s.client, "runs", STATE(DONE)), 0);
    worker_acked(worker, "runs");
    assert_int_equal(rv_frame_receive(worker, &frame, NULL), -EAGAIN); /* nothing was started again */
    (void)close(worker);
    stage_end(&s);
}

static void an_adopted_job_whose_worker_dies_is_not_retried(void **state)
{
    struct stage s;
    struct marked mark;
    Rv__MarkedJob job, *list[1];
    char *workers[] = {"image/0"};
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", (struct submit_options){.retry = true}), 0);
    next_mark(&s, &mark);
    stage_kill(&s);
    (void)close(worker);
    ledger_entry(&s, &mark, &job, list);
    s.setup.jobs = list;
    s.setup.n_workers = 1;
    s.setup.workers = workers;
    stage_start(&s);
    worker = worker_channel(&s, "image/0", 1);
    worker_report(worker, "image/0", 1, &mark, 0);
    (void)close(worker);
    worker_gone(&s, "image/0", 1);
    barrier(&s);
    assert_int_equal(ended_with(s.client, "a", STATE(FAILED)), CODE(WORKER_DIED));
    stage_end(&s);
}

/* A mark without digest would end the router's connection: one worker's report must not do that. */
static void a_job_without_its_digest_is_not_adopted(void **state)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__WorkerReport report = RV__WORKER_REPORT__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    struct stage s;
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_channel(&s, "image/0", 1);
    report.worker = "image/0";
    report.incarnation = 1;
    report.running_job = "ghost";
    frame.body_case = RV__FRAME__BODY_WORKER_REPORT;
    frame.worker_report = &report;
    send_frame(worker, &frame, NULL, 0);
    frame_of(worker, RV__FRAME__BODY_JOB_CANCEL, &answer);
    assert_string_equal(answer.message->job_cancel->job_id, "ghost");
    rv_frame_fini(&answer);
    worker_ends(worker, "ghost", NULL, 0, 0);
    worker_acked(worker, "ghost");
    assert_int_equal(rv_frame_receive(s.supervisor, &answer, NULL), -EAGAIN); /* nothing was marked */
    (void)close(worker);
    worker_gone(&s, "image/0", 1);
    stage_end(&s);
}

/* One of two workers never speaks: after 5 s the router goes on, and what nobody knows is lost. */
static void a_silent_worker_delays_a_new_router_by_five_seconds_only(void **state)
{
    static const struct marked mark = {.id = "a"};
    Rv__MarkedJob job, *list[1];
    char *workers[] = {"image/0", "image/1"};
    struct stage s;
    uint8_t *event = NULL;
    int subscriber = nn_socket(AF_SP, NN_SUB), timeout = WAIT_MS, worker, silent;

    (void)state;
    stage_init(&s);
    ledger_entry(&s, &mark, &job, list);
    s.setup.jobs = list;
    s.setup.n_workers = 2;
    s.setup.workers = workers;
    stage_start(&s);
    (void)nn_setsockopt(subscriber, NN_SUB, NN_SUB_SUBSCRIBE, "", 0);
    (void)nn_setsockopt(subscriber, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout, sizeof(timeout));
    assert_true(nn_connect(subscriber, s.events) >= 0);
    silent = worker_channel(&s, "image/1", 1);
    worker = worker_join(&s, "image/0", 1);
    expect_not_ready(&s, "a");
    assert_true(nn_recv(subscriber, &event, NN_MSG, 0) > 0); /* "a" has ended */
    (void)nn_freemsg(event);
    expect_frame(s.supervisor, RV__FRAME__BODY_ROUTER_READY);
    assert_int_equal(ended_with(s.client, "a", STATE(FAILED)), CODE(JOB_LOST));
    assert_int_equal(submit_code(s.client, "b", plain), 0);
    worker_starts(worker, "b", 1);
    (void)nn_close(subscriber);
    (void)close(silent);
    (void)close(worker);
    stage_end(&s);
}

/* ---- socket files ----------------------------------------------------------------------------------------------- */

static void a_foreign_file_at_a_socket_path_stays(void **state)
{
    struct stage s;
    struct stat st;
    int fd, status;

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        const char *path;

        stage_init(&s);
        path = i == 0 ? s.rpc + 6 : s.control;
        fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
        assert_int_equal(write(fd, "precious", 8), 8);
        (void)close(fd);
        stage_launch(&s);
        stage_greet(&s);
        status = stage_reap(&s);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_size, 8);
        assert_int_equal(unlink(path), 0);
        assert_int_equal(rmdir(s.dir), 0);
    }
}

static void sockets_are_for_the_owner_only(void **state)
{
    struct stage s;
    struct stat st;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    assert_int_equal(stat(s.rpc + 6, &st), 0);
    assert_int_equal(st.st_mode & 077, 0);
    assert_int_equal(stat(s.events + 6, &st), 0);
    assert_int_equal(st.st_mode & 077, 0);
    assert_int_equal(stat(s.control, &st), 0);
    assert_int_equal(st.st_mode & 077, 0);
    stage_end(&s);
}

static void a_group_gets_what_the_configuration_gives_it(void **state)
{
    struct stage s;
    struct stat st;

    (void)state;
    stage_init(&s);
    s.setup.rpc_gid = (int)getegid();
    s.setup.control_gid = (int)getegid();
    stage_start(&s);
    assert_int_equal(stat(s.rpc + 6, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0660);
    assert_int_equal(stat(s.control, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0660);
    stage_end(&s);
}

/* In a child of another user: 0 = a client that may not unload, 1 = refused, other = not as it should be. */
static int as_nobody(struct stage *s)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Hello hello = RV__HELLO__INIT;
    Resvisor__V1__ModelRequest model = RESVISOR__V1__MODEL_REQUEST__INIT;
    struct rv_frame reply = RV_FRAME_INIT;
    int local;
    REQUEST(request);

    if (setgid(65534) < 0 || setuid(65534) < 0)
        return 2;
    local = local_connect(s);
    hello.version = RV_PROTOCOL_VERSION;
    frame.body_case = RV__FRAME__BODY_HELLO;
    frame.hello = &hello;
    (void)rv_frame_send(local, &frame, NULL, 0, WAIT_US);
    if (rv_frame_wait(local, &reply, WAIT_US) != 1)
        return 3;
    if (reply.message->body_case == RV__FRAME__BODY_ERROR)
        return reply.message->error->code == CODE(NOT_PERMITTED) ? 1 : 4;
    if (reply.message->hello_reply->operator_)
        return 5;
    rv_frame_fini(&reply);
    model.action = RESVISOR__V1__MODEL_ACTION__MODEL_UNLOAD;
    model.model = "m";
    request.body_case = RESVISOR__V1__REQUEST__BODY_MODEL;
    request.model = &model;
    local_request(local, &request, &reply);
    return code_of(reply.message->rpc_reply) == CODE(NOT_PERMITTED) ? 0 : 6;
}

static void other_users_are_clients_at_most(void **state)
{
    struct stage s;

    (void)state;
    if (geteuid() != 0)
        skip();
    for (int refused = 0; refused < 2; refused++) {
        int status;
        pid_t pid;

        stage_init(&s);
        s.setup.control_gid = refused ? -1 : 65534;
        stage_start(&s);
        assert_int_equal(chmod(s.dir, 0711), 0);
        assert_int_equal(chmod(s.control, 0666), 0);
        pid = fork();
        if (pid == 0)
            _exit(as_nobody(&s));
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(WEXITSTATUS(status), refused);
        stage_end(&s);
    }
}

static void a_second_router_at_the_same_sockets_gives_up(void **state)
{
    struct stage s, second;
    int status;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    second = s;
    second.client = -1;
    second.setup.types = second.types;
    stage_launch(&second);
    stage_greet(&second);
    status = stage_reap(&second);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    stage_end(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_new_router_learns_from_workers_and_runs_nothing_twice),
        cmocka_unit_test(an_adopted_job_whose_worker_dies_is_not_retried),
        cmocka_unit_test(a_job_without_its_digest_is_not_adopted),
        cmocka_unit_test(a_silent_worker_delays_a_new_router_by_five_seconds_only),
        cmocka_unit_test(a_foreign_file_at_a_socket_path_stays),
        cmocka_unit_test(sockets_are_for_the_owner_only),
        cmocka_unit_test(a_group_gets_what_the_configuration_gives_it),
        cmocka_unit_test(other_users_are_clients_at_most),
        cmocka_unit_test(a_second_router_at_the_same_sockets_gives_up),
    };

    (void)signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests_name("router_restart", tests, NULL, NULL);
}
