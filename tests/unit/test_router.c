/* The life of jobs in the router: queues, workers, deaths, limits. */
#include "test_router_stage.h"

static const struct submit_options plain = {0};

static void a_job_runs_and_its_result_is_fetched_in_pieces(void **state)
{
    struct stage s;
    struct rv_frame frame = RV_FRAME_INIT;
    struct marked mark;
    Resvisor__V1__Reply *reply;
    uint64_t offset = 0, total = 1300000;
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    reply = submit(s.client, "a", (struct submit_options){.payload = "cat"});
    assert_int_equal(code_of(reply), 0);
    assert_int_equal(reply->id, 4711);
    assert_string_equal(reply->job->model, "m");
    reply_free(reply);
    next_mark(&s, &mark);
    assert_string_equal(mark.id, "a");
    assert_false(mark.ended);
    worker_starts(worker, "a", 1);
    worker_progress(worker, "a", 3, 10);
    worker_ends(worker, "a", mark.digest, 0, total);
    reply = wait_for(s.client, "a");
    assert_int_equal(reply->job->state, STATE(DONE));
    assert_null(reply->job->error);
    assert_int_equal(reply->job->progress_done, 10); /* done is done, whatever was reported last */
    assert_int_equal(reply->job->n_outputs, 1);
    assert_int_equal(reply->job->outputs[0]->size, total);
    assert_int_equal(reply->job->run_us, 1234);
    assert_string_equal(reply->job->worker, "image/0");
    reply_free(reply);
    next_mark(&s, &mark);
    assert_true(mark.ended);
    while (offset < total) {
        reply = fetch(s.client, "a", 0, offset, 0);
        assert_int_equal(code_of(reply), 0);
        assert_int_equal(reply->piece->total, total);
        assert_int_equal(reply->piece->offset, offset);
        assert_true(reply->piece->data.len > 0 && reply->piece->data.len <= RV_PIECE_MAX);
        for (size_t i = 0; i < reply->piece->data.len; i++)
            if (reply->piece->data.data[i] != (uint8_t)((offset + i) * 31 / 7))
                fail_msg("byte %zu of the piece at %llu differs", i, (unsigned long long)offset);
        offset += reply->piece->data.len;
        reply_free(reply);
    }
    assert_int_equal(rv_frame_receive(worker, &frame, NULL),
                     -EAGAIN); /* kept by the worker too: it can still be fetched */
    reply = fetch(s.client, "a", 0, total + 1, 0);
    assert_int_equal(code_of(reply), CODE(BAD_REQUEST));
    reply_free(reply);
    reply = fetch(s.client, "a", 1, 0, 0);
    assert_int_equal(code_of(reply), CODE(NO_SUCH_RESULT));
    reply_free(reply);
    (void)close(worker);
    stage_end(&s);
}

static void the_same_id_is_the_same_job_or_an_error(void **state)
{
    struct stage s;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    assert_int_equal(submit_code(s.client, "a", (struct submit_options){.payload = "x"}), 0);
    assert_int_equal(submit_code(s.client, "a", (struct submit_options){.payload = "x"}), 0);
    assert_int_equal(submit_code(s.client, "a", (struct submit_options){.payload = "x", .priority = 5}), 0);
    assert_int_equal(submit_code(s.client, "a", (struct submit_options){.payload = "y"}), CODE(JOB_EXISTS));
    assert_int_equal(submit_code(s.client, "a", (struct submit_options){.payload = "x", .retry = true}),
                     CODE(JOB_EXISTS));
    assert_int_equal(state_of(s.client, "a"), STATE(QUEUED));
    assert_int_equal(state_of(s.client, "b"), STATE(UNKNOWN));
    stage_end(&s);
}

static void higher_priority_first_and_arrival_inside(void **state)
{
    static const struct {
        const char *id;
        int priority;
    } jobs[] = {{"n1", 0}, {"n2", 0}, {"low", -5}, {"h1", 9}, {"h2", 9}, {"n3", 0}};
    static const char *const order[] = {"h1", "h2", "n1", "n2", "n3", "low"};
    struct stage s;
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    for (unsigned i = 0; i < 6; i++)
        assert_int_equal(submit_code(s.client, jobs[i].id, (struct submit_options){.priority = jobs[i].priority}), 0);
    worker = worker_join(&s, "image/0", 1);
    for (unsigned i = 0; i < 6; i++) {
        worker_starts(worker, order[i], 1);
        worker_ends(worker, order[i], NULL, 0, 0);
    }
    assert_int_equal(ended_with(s.client, "low", STATE(DONE)), 0);
    (void)close(worker);
    stage_end(&s);
}

static void a_full_queue_refuses_and_says_when_to_try_again(void **state)
{
    struct stage s;
    Resvisor__V1__Reply *reply;

    (void)state;
    stage_init(&s);
    s.type.queue_limit = 2;
    stage_start(&s);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    assert_int_equal(submit_code(s.client, "b", plain), 0);
    reply = submit(s.client, "c", plain);
    assert_int_equal(code_of(reply), CODE(QUEUE_FULL));
    assert_true(reply->error->retry_after_ms > 0);
    reply_free(reply);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    reply_free(cancel(s.client, "b"));
    assert_int_equal(submit_code(s.client, "c", plain), 0);
    stage_end(&s);
}

static void a_queued_job_is_cancelled_at_once(void **state)
{
    struct stage s;
    Resvisor__V1__Reply *reply;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    reply = cancel(s.client, "a");
    assert_int_equal(reply->job->state, STATE(CANCELLED));
    assert_int_equal(reply->job->error->code, CODE(CANCELLED));
    reply_free(reply);
    reply = cancel(s.client, "nobody");
    assert_int_equal(code_of(reply), CODE(NO_SUCH_JOB));
    reply_free(reply);
    stage_end(&s);
}

static void a_running_job_is_cancelled_by_its_worker(void **state)
{
    struct stage s;
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    worker_starts(worker, "a", 1);
    reply_free(cancel(s.client, "a"));
    expect_frame(worker, RV__FRAME__BODY_JOB_CANCEL);
    assert_int_equal(state_of(s.client, "a"), STATE(RUNNING));
    worker_ends(worker, "a", NULL, CODE(CANCELLED), 0);
    assert_int_equal(ended_with(s.client, "a", STATE(CANCELLED)), CODE(CANCELLED));
    worker_acked(worker, "a");
    (void)close(worker);
    stage_end(&s);
}

static void a_worker_that_does_not_cancel_is_ended(void **state)
{
    struct stage s;
    struct rv_frame frame = RV_FRAME_INIT;
    int worker;

    (void)state;
    stage_init(&s);
    s.type.cancel_timeout_ms = 20;
    stage_start(&s);
    worker = worker_join(&s, "image/0", 5);
    assert_int_equal(submit_code(s.client, "a", (struct submit_options){.retry = true}), 0);
    worker_starts(worker, "a", 1);
    reply_free(cancel(s.client, "a"));
    frame_of(s.supervisor, RV__FRAME__BODY_KILL_WORKER, &frame);
    assert_string_equal(frame.message->kill_worker->worker, "image/0");
    assert_int_equal(frame.message->kill_worker->incarnation, 5);
    rv_frame_fini(&frame);
    (void)close(worker);
    worker_gone(&s, "image/0", 5);
    assert_int_equal(ended_with(s.client, "a", STATE(CANCELLED)), CODE(CANCELLED));
    stage_end(&s);
}

static void a_job_over_its_time_limit_ends_with_deadline(void **state)
{
    struct stage s;
    int worker;

    (void)state;
    stage_init(&s);
    s.type.job_timeout_ms = 30;
    s.type.cancel_timeout_ms = 20;
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", (struct submit_options){.retry = true}), 0);
    assert_int_equal(submit_code(s.client, "b", plain), 0);
    worker_starts(worker, "a", 1);
    expect_frame(worker, RV__FRAME__BODY_JOB_CANCEL);
    worker_ends(worker, "a", NULL, CODE(CANCELLED), 0);
    assert_int_equal(ended_with(s.client, "a", STATE(FAILED)), CODE(DEADLINE));
    worker_starts(worker, "b", 1);
    expect_frame(worker, RV__FRAME__BODY_JOB_CANCEL);
    expect_frame(s.supervisor, RV__FRAME__BODY_KILL_WORKER);
    (void)close(worker);
    worker_gone(&s, "image/0", 1);
    assert_int_equal(ended_with(s.client, "b", STATE(FAILED)), CODE(DEADLINE));
    stage_end(&s);
}

static void a_dead_worker_fails_its_job_with_cause_and_what_is_next(void **state)
{
    struct stage s;
    Resvisor__V1__Reply *reply;
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    assert_int_equal(submit_code(s.client, "b", plain), 0);
    worker_starts(worker, "a", 1);
    (void)close(worker);
    worker_gone(&s, "image/0", 1);
    reply = wait_for(s.client, "a");
    assert_int_equal(reply->job->state, STATE(FAILED));
    assert_int_equal(reply->job->error->code, CODE(WORKER_DIED));
    assert_non_null(strstr(reply->job->error->message, "signal 9"));
    assert_non_null(strstr(reply->job->error->message, "restarts at once"));
    reply_free(reply);
    worker = worker_join(&s, "image/0", 2);
    worker_starts(worker, "b", 1);
    (void)close(worker);
    stage_end(&s);
}

static void a_retried_job_goes_first_and_a_second_death_quarantines_it(void **state)
{
    struct stage s;
    Resvisor__V1__Reply *reply;
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", (struct submit_options){.retry = true}), 0);
    assert_int_equal(submit_code(s.client, "b", plain), 0);
    worker_starts(worker, "a", 1);
    (void)close(worker);
    worker_gone(&s, "image/0", 1);
    worker = worker_join(&s, "image/0", 2);
    worker_starts(worker, "a", 2);
    (void)close(worker);
    worker_gone(&s, "image/0", 2);
    reply = wait_for(s.client, "a");
    assert_int_equal(reply->job->error->code, CODE(QUARANTINED));
    assert_int_equal(reply->job->attempts, 2);
    reply_free(reply);
    worker = worker_join(&s, "image/0", 3);
    worker_starts(worker, "b", 1);
    (void)close(worker);
    stage_end(&s);
}

/* The worker has not read JobCancel when it ends: its last frame comes after a connection reset, and still counts. */
static void a_result_sent_before_death_counts(void **state)
{
    struct stage s;
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    worker_starts(worker, "a", 1);
    reply_free(cancel(s.client, "a"));
    assert_int_equal(kill(s.pid, SIGSTOP), 0); /* so that result, close and WorkerGone are there together */
    worker_ends(worker, "a", NULL, 0, 100);
    (void)close(worker);
    worker_gone(&s, "image/0", 1);
    assert_int_equal(kill(s.pid, SIGCONT), 0);
    assert_int_equal(ended_with(s.client, "a", STATE(DONE)), 0);
    stage_end(&s);
}

static void a_job_that_fails_has_the_executors_words(void **state)
{
    struct stage s;
    Resvisor__V1__Reply *reply;
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    worker_starts(worker, "a", 1);
    worker_ends(worker, "a", NULL, CODE(JOB_FAILED), 0);
    reply = wait_for(s.client, "a");
    assert_int_equal(reply->job->error->code, CODE(JOB_FAILED));
    assert_string_equal(reply->job->error->message, "it failed as told");
    reply_free(reply);
    (void)close(worker);
    stage_end(&s);
}

/* An unsealed file as output: nothing of it may be kept, and the worker cannot be trusted further. */
static void a_result_that_breaks_the_contract_ends_its_worker(void **state)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobResult result = RV__JOB_RESULT__INIT;
    Resvisor__V1__Output output = RESVISOR__V1__OUTPUT__INIT, *outputs[] = {&output};
    struct stage s;
    int worker, fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    worker_starts(worker, "a", 1);
    output.name = "x";
    output.content_type = "text/plain";
    result.job_id = "a";
    result.n_outputs = 1;
    result.outputs = outputs;
    frame.body_case = RV__FRAME__BODY_JOB_RESULT;
    frame.job_result = &result;
    send_frame(worker, &frame, &fd, 1);
    expect_frame(s.supervisor, RV__FRAME__BODY_KILL_WORKER);
    assert_int_equal(ended_with(s.client, "a", STATE(FAILED)), CODE(INTERNAL));
    (void)close(fd);
    (void)close(worker);
    stage_end(&s);
}

static void results_over_the_limit_go_oldest_first_and_are_acknowledged(void **state)
{
    static const char *const ids[] = {"a", "b", "c"};
    struct stage s;
    Resvisor__V1__Reply *reply;
    int worker;

    (void)state;
    stage_init(&s);
    s.setup.result_count = 2;
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(submit_code(s.client, ids[i], plain), 0);
        worker_starts(worker, ids[i], 1);
        worker_ends(worker, ids[i], NULL, 0, 10);
    }
    worker_acked(worker, "a"); /* nobody asked for it: dropped for space */
    reply = fetch(s.client, "a", 0, 0, 0);
    assert_int_equal(code_of(reply), CODE(NO_SUCH_RESULT));
    reply_free(reply);
    reply = fetch(s.client, "c", 0, 0, 0);
    assert_int_equal(reply->piece->data.len, 10);
    reply_free(reply);
    (void)close(worker);
    stage_end(&s);
}

static void results_expire_by_age(void **state)
{
    struct stage s;
    int worker;

    (void)state;
    stage_init(&s);
    s.setup.result_age_ms = 30;
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    worker_starts(worker, "a", 1);
    worker_ends(worker, "a", NULL, 0, 10);
    worker_acked(worker, "a");
    assert_int_equal(ended_with(s.client, "a", STATE(DONE)), 0); /* the record stays */
    (void)close(worker);
    stage_end(&s);
}

static void a_failed_type_refuses_new_jobs_and_keeps_its_queue(void **state)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__TypeState type_state = RV__TYPE_STATE__INIT;
    struct stage s;
    Resvisor__V1__Reply *reply;
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    type_state.type = "image";
    type_state.state = "FAILED";
    type_state.detail = "5 deaths in 60 s";
    frame.body_case = RV__FRAME__BODY_TYPE_STATE;
    frame.type_state = &type_state;
    send_frame(s.supervisor, &frame, NULL, 0);
    barrier(&s);
    reply = submit(s.client, "b", plain);
    assert_int_equal(code_of(reply), CODE(TYPE_FAILED));
    assert_non_null(strstr(reply->error->message, "5 deaths"));
    reply_free(reply);
    assert_int_equal(state_of(s.client, "a"), STATE(QUEUED));
    type_state.state = "READY";
    send_frame(s.supervisor, &frame, NULL, 0);
    worker = worker_join(&s, "image/0", 1);
    worker_starts(worker, "a", 1);
    assert_int_equal(submit_code(s.client, "b", plain), 0);
    (void)close(worker);
    stage_end(&s);
}

static void a_draining_worker_gets_no_more_jobs(void **state)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__WorkerDrain drain = RV__WORKER_DRAIN__INIT;
    struct stage s;
    int worker, other;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    worker_starts(worker, "a", 1);
    drain.worker = "image/0";
    drain.incarnation = 1;
    frame.body_case = RV__FRAME__BODY_WORKER_DRAIN;
    frame.worker_drain = &drain;
    send_frame(s.supervisor, &frame, NULL, 0);
    barrier(&s);
    other = worker_join(&s, "image/1", 1);
    worker_ends(worker, "a", NULL, 0, 0);
    assert_int_equal(submit_code(s.client, "b", plain), 0);
    worker_starts(other, "b", 1);
    (void)close(worker);
    (void)close(other);
    stage_end(&s);
}

static void a_job_refused_by_a_leaving_worker_goes_to_another(void **state)
{
    struct stage s;
    Resvisor__V1__Reply *reply;
    int worker, other;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    worker_starts(worker, "a", 1);
    worker_ends(worker, "a", NULL, CODE(SHUTTING_DOWN), 0);
    worker_acked(worker, "a");
    other = worker_join(&s, "image/1", 1);
    worker_starts(other, "a", 1);
    worker_ends(other, "a", NULL, 0, 0);
    reply = wait_for(s.client, "a");
    assert_int_equal(reply->job->state, STATE(DONE));
    assert_int_equal(reply->job->attempts, 1);
    reply_free(reply);
    (void)close(worker);
    (void)close(other);
    stage_end(&s);
}

/* Submits and ends jobs until the marks fill the socket of a supervisor that does not read: the start of job `id` is
 * held back. */
static void hold_back(struct stage *s, int worker, char id[32])
{
    enum { SOON_US = 100000, MANY = 2000 };
    struct rv_frame frame = RV_FRAME_INIT;
    unsigned i;
    int r = 1;

    for (i = 0; i < MANY && r == 1; i++) {
        (void)snprintf(id, 32, "job-%u", i);
        assert_int_equal(submit_code(s->client, id, plain), 0);
        while ((r = rv_frame_wait(worker, &frame, SOON_US)) == 1) {
            bool started = frame.message->body_case == RV__FRAME__BODY_JOB_START;

            rv_frame_fini(&frame);
            if (started)
                break;
        }
        if (r == 1)
            worker_ends(worker, id, NULL, 0, 0);
    }
    assert_int_equal(r, -ETIMEDOUT);
    assert_true(i > 20);
    assert_int_equal(state_of(s->client, id), STATE(RUNNING));
}

/* A supervisor that is slow to read: no worker may have a job that the ledger does not know. */
static void a_job_is_not_started_before_its_mark_has_left_the_router(void **state)
{
    struct stage s;
    struct marked mark;
    char id[32];
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    hold_back(&s, worker, id);
    do
        next_mark(&s, &mark);
    while (strcmp(mark.id, id) != 0);
    worker_starts(worker, id, 1);
    (void)close(worker);
    stage_end(&s);
}

static void a_job_held_back_for_a_worker_whose_channel_ended_goes_to_another(void **state)
{
    struct stage s;
    struct marked mark;
    char id[32];
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    hold_back(&s, worker, id);
    (void)close(worker);
    /* The router must have seen the channel's end before its marks get out, or it starts the job on a dead channel and
     * puts it back at once. One question may be answered in the very turn that the end came in, and the next one before
     * the end in the turn after it; the third comes later. */
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(state_of(s.client, id), STATE(RUNNING));
    do
        next_mark(&s, &mark);
    while (strcmp(mark.id, id) != 0);
    expect_frame(s.supervisor, RV__FRAME__BODY_KILL_WORKER); /* the marks are out, and the worker has no channel */
    assert_int_equal(state_of(s.client, id), STATE(RUNNING));
    worker_gone(&s, "image/0", 1);
    worker = worker_join(&s, "image/0", 2);
    worker_starts(worker, id, 1);
    (void)close(worker);
    stage_end(&s);
}

static void a_stop_ends_queued_jobs_and_lets_running_ones_end(void **state)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Drain drain = RV__DRAIN__INIT;
    struct stage s;
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "runs", plain), 0);
    worker_starts(worker, "runs", 1);
    assert_int_equal(submit_code(s.client, "waits", plain), 0);
    wait_send(s.client, "waits", WAIT_MS);
    frame.body_case = RV__FRAME__BODY_DRAIN;
    frame.drain = &drain;
    send_frame(s.supervisor, &frame, NULL, 0);
    reply_free(rpc_receive(s.client));
    assert_int_equal(ended_with(s.client, "waits", STATE(FAILED)), CODE(SHUTTING_DOWN));
    assert_int_equal(submit_code(s.client, "late", plain), CODE(SHUTTING_DOWN));
    worker_ends(worker, "runs", NULL, 0, 0);
    assert_int_equal(ended_with(s.client, "runs", STATE(DONE)), 0);
    (void)close(worker);
    stage_end(&s);
}

static void a_stranger_on_a_worker_channel_is_dropped(void **state)
{
    struct stage s;
    struct rv_frame frame = RV_FRAME_INIT;
    int worker;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_channel(&s, "image/0", 1);
    worker_report(worker, "image/9", 1, NULL, 0);
    assert_true(rv_frame_wait(worker, &frame, WAIT_US) <= 0);
    (void)close(worker);
    worker = worker_channel(&s, "image/1", 1);
    assert_int_equal(send(worker, "\xff\xff\xff", 3, 0), 3);
    assert_true(rv_frame_wait(worker, &frame, WAIT_US) <= 0);
    (void)close(worker);
    expect_frame(s.supervisor, RV__FRAME__BODY_KILL_WORKER); /* no WorkerGone came */
    worker_gone(&s, "image/1", 1);
    worker = worker_join(&s, "image/1", 2);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    worker_starts(worker, "a", 1);
    (void)close(worker);
    stage_end(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_job_runs_and_its_result_is_fetched_in_pieces),
        cmocka_unit_test(the_same_id_is_the_same_job_or_an_error),
        cmocka_unit_test(higher_priority_first_and_arrival_inside),
        cmocka_unit_test(a_full_queue_refuses_and_says_when_to_try_again),
        cmocka_unit_test(a_queued_job_is_cancelled_at_once),
        cmocka_unit_test(a_running_job_is_cancelled_by_its_worker),
        cmocka_unit_test(a_worker_that_does_not_cancel_is_ended),
        cmocka_unit_test(a_job_over_its_time_limit_ends_with_deadline),
        cmocka_unit_test(a_dead_worker_fails_its_job_with_cause_and_what_is_next),
        cmocka_unit_test(a_retried_job_goes_first_and_a_second_death_quarantines_it),
        cmocka_unit_test(a_result_sent_before_death_counts),
        cmocka_unit_test(a_job_that_fails_has_the_executors_words),
        cmocka_unit_test(a_result_that_breaks_the_contract_ends_its_worker),
        cmocka_unit_test(results_over_the_limit_go_oldest_first_and_are_acknowledged),
        cmocka_unit_test(results_expire_by_age),
        cmocka_unit_test(a_failed_type_refuses_new_jobs_and_keeps_its_queue),
        cmocka_unit_test(a_draining_worker_gets_no_more_jobs),
        cmocka_unit_test(a_job_refused_by_a_leaving_worker_goes_to_another),
        cmocka_unit_test(a_job_is_not_started_before_its_mark_has_left_the_router),
        cmocka_unit_test(a_job_held_back_for_a_worker_whose_channel_ended_goes_to_another),
        cmocka_unit_test(a_stop_ends_queued_jobs_and_lets_running_ones_end),
        cmocka_unit_test(a_stranger_on_a_worker_channel_is_dropped),
    };

    (void)signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests_name("router", tests, NULL, NULL);
}
