/* The router's edges: events, tokens, hostile requests, the command line's socket; and its figures. */
#include <sched.h>

#include "test_router_stage.h"

static const struct submit_options plain = {0};

/* ---- events ----------------------------------------------------------------------------------------------------- */

static Resvisor__V1__Reply *events_since(int client, uint64_t sequence)
{
    Resvisor__V1__EventsSince body = RESVISOR__V1__EVENTS_SINCE__INIT;
    REQUEST(request);

    body.sequence = sequence;
    request.body_case = RESVISOR__V1__REQUEST__BODY_EVENTS_SINCE;
    request.events_since = &body;
    return rpc(client, &request);
}

static Resvisor__V1__Event *event_receive(int subscriber)
{
    uint8_t *bytes = NULL;
    int n = nn_recv(subscriber, &bytes, NN_MSG, 0);
    Resvisor__V1__Event *event;

    assert_true(n > 0);
    event = resvisor__v1__event__unpack(NULL, (size_t)n, bytes);
    (void)nn_freemsg(bytes);
    assert_non_null(event);
    return event;
}

static void every_change_is_an_event_and_gaps_can_be_asked_for(void **state)
{
    struct stage s;
    Resvisor__V1__Reply *reply;
    Resvisor__V1__Event *event;
    uint64_t last = 0, seen = 0;
    int subscriber = nn_socket(AF_SP, NN_SUB), timeout = WAIT_MS, n = 0;
    char id[32];

    (void)state;
    stage_init(&s);
    stage_start(&s);
    (void)nn_setsockopt(subscriber, NN_SUB, NN_SUB_SUBSCRIBE, "", 0);
    (void)nn_setsockopt(subscriber, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout, sizeof(timeout));
    assert_true(nn_connect(subscriber, s.events) >= 0);
    while (nn_get_statistic(subscriber, NN_STAT_CURRENT_CONNECTIONS) == 0) /* made by nanomsg's thread */
        (void)sched_yield();
    do { /* the other end may accept later: publish until one arrives */
        (void)snprintf(id, sizeof(id), "first-%d", n++);
        assert_int_equal(submit_code(s.client, id, plain), 0);
        reply_free(cancel(s.client, id));
        timeout = 50;
        (void)nn_setsockopt(subscriber, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout, sizeof(timeout));
        event = NULL;
        if (nn_recv(subscriber, id, sizeof(id), 0) > 0)
            event = event_receive(subscriber);
    } while (!event);
    assert_int_equal(event->epoch, 7);
    seen = event->sequence;
    resvisor__v1__event__free_unpacked(event, NULL);
    timeout = WAIT_MS;
    (void)nn_setsockopt(subscriber, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout, sizeof(timeout));
    assert_int_equal(submit_code(s.client, "e", plain), 0);
    event = event_receive(subscriber);
    assert_int_equal(event->sequence, seen + 1);
    assert_string_equal(event->job->job_id, "e");
    assert_int_equal(event->job->state, STATE(QUEUED));
    resvisor__v1__event__free_unpacked(event, NULL);
    reply_free(cancel(s.client, "e"));
    reply = events_since(s.client, seen);
    assert_int_equal(reply->events->oldest, 1);
    assert_int_equal(reply->events->n_events, 2);
    assert_int_equal(reply->events->events[1]->job->state, STATE(CANCELLED));
    reply_free(reply);
    for (unsigned i = 0; i < 600; i++) { /* more than the ring holds */
        (void)snprintf(id, sizeof(id), "job-%u", i);
        assert_int_equal(submit_code(s.client, id, plain), 0);
        reply_free(cancel(s.client, id));
    }
    seen += 2 + 1200;
    reply = events_since(s.client, 0);
    assert_int_equal(reply->events->oldest, seen - 1024 + 1);
    for (size_t i = 0; i < reply->events->n_events; i++) {
        last = reply->events->events[i]->sequence;
        assert_int_equal(last, reply->events->oldest + i);
    }
    reply_free(reply);
    assert_int_equal(last, seen);
    reply = events_since(s.client, UINT64_MAX);
    assert_int_equal(reply->events->n_events, 0);
    reply_free(reply);
    (void)nn_close(subscriber);
    stage_end(&s);
}

static void progress_comes_at_most_ten_times_a_second_and_the_last_is_not_lost(void **state)
{
    struct stage s;
    Resvisor__V1__Reply *reply;
    int worker;
    bool told = false;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    worker_starts(worker, "a", 1);
    for (unsigned i = 1; i <= 200; i++)
        worker_progress(worker, "a", i, 200);
    while (!told) { /* the event of the last one comes without a further change */
        reply = events_since(s.client, 0);
        assert_true(reply->events->n_events < 50);
        told = reply->events->events[reply->events->n_events - 1]->job->progress_done == 200;
        reply_free(reply);
    }
    (void)close(worker);
    stage_end(&s);
}

/* ---- requests --------------------------------------------------------------------------------------------------- */

static void a_wrong_or_missing_token_is_refused_on_tcp_only(void **state)
{
    struct stage s;
    char address[40], port[32];
    int tcp, probe = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_storage any = {.ss_family = AF_INET};
    socklen_t size = sizeof(any);
    Resvisor__V1__List list = RESVISOR__V1__LIST__INIT;
    REQUEST(request);

    (void)state;
    assert_int_equal(bind(probe, (struct sockaddr *)&any, 16), 0); /* a free port */
    assert_int_equal(getsockname(probe, (struct sockaddr *)&any, &size), 0);
    (void)close(probe);
    (void)snprintf(port, sizeof(port), "127.0.0.1:%u", (unsigned)(((uint8_t *)&any)[2] << 8 | ((uint8_t *)&any)[3]));
    (void)snprintf(address, sizeof(address), "tcp://%s", port);
    stage_init(&s);
    s.setup.rpc_tcp = port;
    s.setup.token = "s3cret-token";
    stage_start(&s);
    tcp = client_open(address);
    request.body_case = RESVISOR__V1__REQUEST__BODY_LIST;
    request.list = &list;
    assert_int_equal(rpc_code(s.client, &request), 0);
    assert_int_equal(rpc_code(tcp, &request), CODE(UNAUTHENTICATED));
    request.token = "s3cret-tokem";
    assert_int_equal(rpc_code(tcp, &request), CODE(UNAUTHENTICATED));
    request.token = "s3cret-tokens3cret-token";
    assert_int_equal(rpc_code(tcp, &request), CODE(UNAUTHENTICATED));
    request.token = "s3cret-token";
    assert_int_equal(rpc_code(tcp, &request), 0);
    (void)nn_close(tcp);
    stage_end(&s);
}

static int submit_bad(int client, void (*spoil)(Resvisor__V1__Submit *submit))
{
    Resvisor__V1__Submit body;
    REQUEST(request);

    submit_fill(&body, "bad", plain);
    spoil(&body);
    request.body_case = RESVISOR__V1__REQUEST__BODY_SUBMIT;
    request.submit = &body;
    return rpc_code(client, &request);
}

static char long_text[5000];

static void spoil_id(Resvisor__V1__Submit *submit)
{
    submit->job_id = "a b";
}
static void spoil_empty_id(Resvisor__V1__Submit *submit)
{
    submit->job_id = "";
}
static void spoil_long_id(Resvisor__V1__Submit *submit)
{
    submit->job_id = long_text + sizeof(long_text) - 66;
}
static void spoil_type(Resvisor__V1__Submit *submit)
{
    submit->type = "nobody";
}
static void spoil_model(Resvisor__V1__Submit *submit)
{
    submit->model = long_text;
}
static void spoil_priority(Resvisor__V1__Submit *submit)
{
    submit->priority = 1001;
}
static void spoil_wait(Resvisor__V1__Submit *submit)
{
    submit->wait_ms = 3600001;
}
static void spoil_payload(Resvisor__V1__Submit *submit)
{
    static uint8_t payload[RV_PAYLOAD_MAX + 1];

    submit->payload = (ProtobufCBinaryData){sizeof(payload), payload};
}
static void spoil_params(Resvisor__V1__Submit *submit)
{
    static Resvisor__V1__Param param = RESVISOR__V1__PARAM__INIT;
    static Resvisor__V1__Param *params[65];

    param.key = "k";
    for (unsigned i = 0; i < 65; i++)
        params[i] = &param;
    submit->n_params = 65;
    submit->params = params;
}
static void spoil_value(Resvisor__V1__Submit *submit)
{
    static Resvisor__V1__Param param = RESVISOR__V1__PARAM__INIT;
    static Resvisor__V1__Param *params[1] = {&param};

    param.key = "k";
    param.value = long_text;
    submit->n_params = 1;
    submit->params = params;
}

static void every_field_is_checked(void **state)
{
    static const struct {
        void (*spoil)(Resvisor__V1__Submit *submit);
        int code;
    } cases[] = {
        {spoil_id, CODE(BAD_REQUEST)},    {spoil_empty_id, CODE(BAD_REQUEST)}, {spoil_long_id, CODE(BAD_REQUEST)},
        {spoil_type, CODE(NO_SUCH_TYPE)}, {spoil_model, CODE(BAD_REQUEST)},    {spoil_priority, CODE(BAD_REQUEST)},
        {spoil_wait, CODE(BAD_REQUEST)},  {spoil_payload, CODE(TOO_LARGE)},    {spoil_params, CODE(BAD_REQUEST)},
        {spoil_value, CODE(BAD_REQUEST)},
    };
    struct stage s;
    REQUEST(request);

    (void)state;
    memset(long_text, 'x', sizeof(long_text) - 1);
    stage_init(&s);
    stage_start(&s);
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (submit_bad(s.client, cases[i].spoil) != cases[i].code)
            fail_msg("case %u", i);
    assert_int_equal(rpc_code(s.client, &request), CODE(BAD_REQUEST)); /* no body */
    request.version = 2;
    assert_int_equal(rpc_code(s.client, &request), CODE(BAD_VERSION));
    stage_end(&s);
}

static int raw_code(int client, const void *bytes, size_t size)
{
    Resvisor__V1__Reply *reply;
    int code;

    assert_int_equal(nn_send(client, bytes, size, 0), size);
    reply = rpc_receive(client);
    code = code_of(reply);
    reply_free(reply);
    return code;
}

static void hostile_protobuf_gets_an_error_and_hurts_nobody(void **state)
{
    static uint8_t bytes[RV_RPC_FRAME_MAX + 4096];
    struct stage s;
    unsigned seed = 12345;
    size_t n = 0;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    for (unsigned round = 0; round < 300; round++) {
        size_t size = 1 + seed % 200;

        for (size_t i = 0; i < size; i++)
            bytes[i] = (uint8_t)((seed = seed * 1103515245 + 12345) >> 16);
        assert_int_not_equal(raw_code(s.client, bytes, size), 0);
    }
    memset(bytes, 0, sizeof(bytes));
    assert_int_equal(raw_code(s.client, bytes, sizeof(bytes)), CODE(TOO_LARGE));
    /* A Submit of a hundred thousand empty params: 2 bytes each, 40 when unpacked. */
    bytes[n++] = 0x08;
    bytes[n++] = 0x01;
    bytes[n++] = 0x52;
    bytes[n++] = 0x80 | (200000 & 0x7f);
    bytes[n++] = 0x80 | (200000 >> 7 & 0x7f);
    bytes[n++] = 200000 >> 14;
    for (unsigned i = 0; i < 100000; i++) {
        bytes[n++] = 0x22;
        bytes[n++] = 0x00;
    }
    assert_int_equal(raw_code(s.client, bytes, n), CODE(BAD_REQUEST));
    assert_int_equal(raw_code(s.client, "\x08\x01\x62\x04\x0a\x02\xff\xfe", 8), CODE(BAD_REQUEST)); /* not UTF-8 */
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    stage_end(&s);
}

static void too_many_waiting_requests_get_a_limit_error(void **state)
{
    Resvisor__V1__Reply *reply = NULL;
    struct stage s;
    struct rv_frame frame = RV_FRAME_INIT;
    Resvisor__V1__Wait body = RESVISOR__V1__WAIT__INIT;
    int local;
    REQUEST(request);

    (void)state;
    stage_init(&s);
    stage_start(&s);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    local = local_open(&s);
    body.job_id = "a";
    body.timeout_ms = 100000;
    request.body_case = RESVISOR__V1__REQUEST__BODY_WAIT;
    request.wait = &body;
    for (unsigned i = 0; i < 65; i++)
        local_request(local, &request, NULL);
    frame_of(local, RV__FRAME__BODY_RPC_REPLY, &frame);
    assert_int_equal(frame.message->rpc_reply->error->code, CODE(LIMIT));
    rv_frame_fini(&frame);
    (void)close(local); /* its 64 waits go with it */
    reply = cancel(s.client, "a");
    assert_int_equal(reply->job->state, STATE(CANCELLED));
    reply_free(reply);
    stage_end(&s);
}

static void a_wait_ends_at_its_time_with_the_job_as_it_stands(void **state)
{
    struct stage s;
    Resvisor__V1__Reply *reply;
    int other;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    reply = submit(s.client, "a", (struct submit_options){.wait_ms = 30});
    assert_int_equal(reply->job->state, STATE(QUEUED));
    reply_free(reply);
    other = client_open(s.rpc);
    wait_send(other, "a", WAIT_MS); /* parked; others are served meanwhile */
    assert_int_equal(state_of(s.client, "a"), STATE(QUEUED));
    reply_free(cancel(s.client, "a"));
    reply = rpc_receive(other);
    assert_int_equal(reply->job->state, STATE(CANCELLED));
    reply_free(reply);
    (void)nn_close(other);
    stage_end(&s);
}

/* REQ repeats what is not answered: one waiting client must not take all places. */
static void a_repeated_wait_takes_no_place_and_no_more_time(void **state)
{
    struct stage s;
    Resvisor__V1__Reply *reply;
    int other, interval = 1;

    (void)state;
    stage_init(&s);
    stage_start(&s);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    other = client_open(s.rpc);
    assert_int_equal(nn_setsockopt(other, NN_REQ, NN_REQ_RESEND_IVL, &interval, sizeof(interval)), 0);
    wait_send(other, "a", 2000); /* up to 2,000 repeats; 1,024 may wait */
    reply = rpc_receive(other);
    assert_int_equal(code_of(reply), 0);
    assert_int_equal(reply->job->state, STATE(QUEUED));
    reply_free(reply);
    (void)nn_close(other);
    stage_end(&s);
}

/* Answers the status that the router asks the supervisor for next. */
static void answer_status(struct stage *s, int pid)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__Status status = RESVISOR__V1__STATUS__INIT;
    struct rv_frame got = RV_FRAME_INIT;

    frame_of(s->supervisor, RV__FRAME__BODY_STATUS_REQUEST, &got);
    frame.id = got.message->id;
    rv_frame_fini(&got);
    status.supervisor_pid = pid;
    frame.body_case = RV__FRAME__BODY_STATUS;
    frame.status = &status;
    send_frame(s->supervisor, &frame, NULL, 0);
}

static void many_who_ask_for_the_status_share_the_next_one(void **state)
{
    enum { MANY = 60 };
    Resvisor__V1__StatusRequest ask = RESVISOR__V1__STATUS_REQUEST__INIT;
    struct rv_frame got = RV_FRAME_INIT;
    struct stage s;
    int local;
    REQUEST(request);

    (void)state;
    stage_init(&s);
    stage_start(&s);
    local = local_open(&s);
    request.body_case = RESVISOR__V1__REQUEST__BODY_STATUS;
    request.status = &ask;
    for (unsigned i = 0; i < MANY; i++)
        local_request(local, &request, NULL);
    barrier(&s);
    answer_status(&s, 1);
    answer_status(&s, 2);
    for (unsigned i = 0; i < MANY; i++) {
        next_frame(local, &got);
        assert_int_equal(got.message->rpc_reply->status->supervisor_pid, i == 0 ? 1 : 2);
        rv_frame_fini(&got);
    }
    local_request(local, &request, NULL); /* and nobody else has asked */
    answer_status(&s, 3);
    next_frame(local, &got);
    assert_int_equal(got.message->rpc_reply->status->supervisor_pid, 3);
    rv_frame_fini(&got);
    (void)close(local);
    stage_end(&s);
}

static void status_and_models_are_answered_by_the_supervisor(void **state)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__Status status = RESVISOR__V1__STATUS__INIT;
    Resvisor__V1__TypeStatus type = RESVISOR__V1__TYPE_STATUS__INIT, *types[] = {&type};
    Resvisor__V1__WorkerStatus row = RESVISOR__V1__WORKER_STATUS__INIT, *rows[] = {&row};
    Resvisor__V1__StatusRequest ask = RESVISOR__V1__STATUS_REQUEST__INIT;
    Resvisor__V1__ModelRequest model = RESVISOR__V1__MODEL_REQUEST__INIT;
    Resvisor__V1__Error error = RESVISOR__V1__ERROR__INIT;
    struct rv_frame got = RV_FRAME_INIT;
    struct stage s;
    Resvisor__V1__Reply *reply;
    int worker;
    REQUEST(request);

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    assert_int_equal(submit_code(s.client, "b", plain), 0);
    worker_starts(worker, "a", 1);
    request.body_case = RESVISOR__V1__REQUEST__BODY_STATUS;
    request.status = &ask;
    rpc_send(s.client, &request);
    frame_of(s.supervisor, RV__FRAME__BODY_STATUS_REQUEST, &got);
    type.name = "image";
    type.n_workers = 1;
    type.workers = rows;
    row.id = "image/0";
    status.supervisor_pid = 99;
    status.n_types = 1;
    status.types = types;
    frame.id = got.message->id;
    rv_frame_fini(&got);
    frame.body_case = RV__FRAME__BODY_STATUS;
    frame.status = &status;
    send_frame(s.supervisor, &frame, NULL, 0);
    reply = rpc_receive(s.client);
    assert_int_equal(reply->status->supervisor_pid, 99);
    assert_int_equal(reply->status->types[0]->queued, 1);
    assert_int_equal(reply->status->types[0]->running, 1);
    assert_string_equal(reply->status->types[0]->workers[0]->job, "a");
    assert_string_equal(reply->status->router_state, "READY");
    reply_free(reply);
    model.action = RESVISOR__V1__MODEL_ACTION__MODEL_UNLOAD;
    model.model = "m";
    request.body_case = RESVISOR__V1__REQUEST__BODY_MODEL;
    request.model = &model;
    rpc_send(s.client, &request);
    frame_of(s.supervisor, RV__FRAME__BODY_MODEL_REQUEST, &got);
    assert_string_equal(got.message->model_request->model, "m");
    frame.id = got.message->id;
    rv_frame_fini(&got);
    error.code = CODE(MODEL_IN_USE);
    error.message = "m has 3 leases";
    frame.body_case = RV__FRAME__BODY_ERROR;
    frame.error = &error;
    send_frame(s.supervisor, &frame, NULL, 0);
    reply = rpc_receive(s.client);
    assert_int_equal(code_of(reply), CODE(MODEL_IN_USE));
    assert_string_equal(reply->error->message, "m has 3 leases");
    reply_free(reply);
    (void)close(worker);
    stage_end(&s);
}

/* ---- the command line's socket ---------------------------------------------------------------------------------- */

static void the_command_line_gets_a_whole_output_as_a_descriptor(void **state)
{
    struct stage s;
    struct rv_frame reply = RV_FRAME_INIT;
    Resvisor__V1__Fetch body = RESVISOR__V1__FETCH__INIT;
    int worker, local, fd;
    REQUEST(request);

    (void)state;
    stage_init(&s);
    stage_start(&s);
    worker = worker_join(&s, "image/0", 1);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    worker_starts(worker, "a", 1);
    worker_ends(worker, "a", NULL, 0, 3000000);
    assert_int_equal(ended_with(s.client, "a", STATE(DONE)), 0);
    local = local_open(&s);
    body.job_id = "a";
    request.body_case = RESVISOR__V1__REQUEST__BODY_FETCH;
    request.fetch = &body;
    local_request(local, &request, &reply);
    assert_int_equal(reply.message->rpc_reply->piece->total, 3000000);
    assert_int_equal(reply.message->rpc_reply->piece->data.len, 0);
    fd = rv_frame_take_fd(&reply, 0);
    assert_int_equal(rv_sealed_check(fd, 3000000), 0);
    (void)close(fd);
    rv_frame_fini(&reply);
    body.length = 100;
    local_request(local, &request, &reply);
    assert_int_equal(reply.message->rpc_reply->piece->data.len, 100);
    assert_int_equal(reply.fd_count, 0);
    rv_frame_fini(&reply);
    body.length = 400000; /* larger than a frame */
    local_request(local, &request, &reply);
    assert_int_equal(reply.message->rpc_reply->piece->data.len, 400000);
    rv_frame_fini(&reply);
    (void)close(local);
    (void)close(worker);
    stage_end(&s);
}

/* Reads until the router hangs up. */
static void expect_end(int local)
{
    struct rv_frame frame = RV_FRAME_INIT;
    int r;

    while ((r = rv_frame_wait(local, &frame, WAIT_US)) == 1)
        rv_frame_fini(&frame);
    assert_true(r == 0 || r == -ECONNRESET);
    (void)close(local);
}

static void garbage_on_the_local_socket_ends_only_that_peer(void **state)
{
    static const char big[RV_FRAME_MAX + 100];
    struct stage s;
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Hello hello = RV__HELLO__INIT;
    Rv__Stop stop = RV__STOP__INIT;
    int good, bad;
    struct rv_frame reply = RV_FRAME_INIT;
    Resvisor__V1__List list = RESVISOR__V1__LIST__INIT;
    REQUEST(request);

    (void)state;
    stage_init(&s);
    stage_start(&s);
    good = local_open(&s);
    bad = local_connect(&s);
    assert_int_equal(send(bad, "\xde\xad\xbe\xef", 4, 0), 4);
    expect_end(bad);
    bad = local_open(&s);
    (void)send(bad, big, sizeof(big), 0);
    expect_end(bad);
    bad = local_connect(&s); /* not Hello */
    frame.body_case = RV__FRAME__BODY_STOP;
    frame.stop = &stop;
    send_frame(bad, &frame, NULL, 0);
    expect_end(bad);
    bad = local_open(&s); /* not for the router */
    send_frame(bad, &frame, NULL, 0);
    expect_end(bad);
    bad = local_connect(&s);
    hello.version = 99;
    frame.body_case = RV__FRAME__BODY_HELLO;
    frame.hello = &hello;
    send_frame(bad, &frame, NULL, 0);
    next_frame(bad, &reply);
    assert_int_equal(reply.message->error->code, CODE(BAD_VERSION));
    rv_frame_fini(&reply);
    expect_end(bad);
    request.body_case = RESVISOR__V1__REQUEST__BODY_LIST;
    request.list = &list;
    local_request(good, &request, &reply);
    assert_int_equal(code_of(reply.message->rpc_reply), 0);
    rv_frame_fini(&reply);
    (void)close(good);
    stage_end(&s);
}

static void a_peer_that_never_reads_is_dropped_and_others_are_served(void **state)
{
    struct stage s;
    int deaf;
    Resvisor__V1__List list = RESVISOR__V1__LIST__INIT;
    Rv__Frame frame = RV__FRAME__INIT;
    int r = 0;
    REQUEST(request);

    (void)state;
    stage_init(&s);
    stage_start(&s);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    deaf = local_open(&s);
    request.body_case = RESVISOR__V1__REQUEST__BODY_LIST;
    request.list = &list;
    frame.body_case = RV__FRAME__BODY_RPC_REQUEST;
    frame.rpc_request = &request;
    for (unsigned i = 0; i < 100000 && r == 0; i++)
        r = rv_frame_send(deaf, &frame, NULL, 0, WAIT_US);
    assert_true(r == -EPIPE || r == -ECONNRESET);
    assert_int_equal(state_of(s.client, "a"), STATE(QUEUED));
    (void)close(deaf);
    stage_end(&s);
}

/* ---- figures ---------------------------------------------------------------------------------------------------- */

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

/* Prints, and asserts nothing of the clock: the machine may be busy. */
static void round_trips(void **state)
{
    enum { ROUNDS = 2000, CLIENTS = 8 };
    static uint64_t us[ROUNDS];
    struct stage s;
    uint64_t start, all;
    struct rv_frame reply = RV_FRAME_INIT;
    Resvisor__V1__Get body = RESVISOR__V1__GET__INIT;
    int local, clients[CLIENTS];
    REQUEST(request);

    (void)state;
    stage_init(&s);
    stage_start(&s);
    assert_int_equal(submit_code(s.client, "a", plain), 0);
    all = rv_now_us();
    for (unsigned i = 0; i < ROUNDS; i++) {
        start = rv_now_us();
        reply_free(get(s.client, "a"));
        us[i] = rv_now_us() - start;
    }
    all = rv_now_us() - all;
    qsort(us, ROUNDS, sizeof(us[0]), compare);
    print_message("Get by nanomsg: p50 %llu us, p99 %llu us, %.0f requests per second\n",
                  (unsigned long long)us[ROUNDS / 2], (unsigned long long)us[ROUNDS * 99 / 100],
                  ROUNDS * 1e6 / (double)all);
    body.job_id = "a";
    request.body_case = RESVISOR__V1__REQUEST__BODY_GET;
    request.get = &body;
    for (unsigned i = 0; i < CLIENTS; i++)
        clients[i] = client_open(s.rpc);
    all = rv_now_us();
    for (unsigned i = 0; i < ROUNDS; i += CLIENTS) {
        for (unsigned k = 0; k < CLIENTS; k++)
            rpc_send(clients[k], &request);
        for (unsigned k = 0; k < CLIENTS; k++)
            reply_free(rpc_receive(clients[k]));
    }
    all = rv_now_us() - all;
    print_message("Get by nanomsg, %d clients: %.0f requests per second\n", CLIENTS, ROUNDS * 1e6 / (double)all);
    for (unsigned i = 0; i < CLIENTS; i++)
        (void)nn_close(clients[i]);
    local = local_open(&s);
    all = rv_now_us();
    for (unsigned i = 0; i < ROUNDS; i++) {
        start = rv_now_us();
        local_request(local, &request, &reply);
        rv_frame_fini(&reply);
        us[i] = rv_now_us() - start;
    }
    all = rv_now_us() - all;
    qsort(us, ROUNDS, sizeof(us[0]), compare);
    print_message("Get by the local socket: p50 %llu us, p99 %llu us, %.0f requests per second\n",
                  (unsigned long long)us[ROUNDS / 2], (unsigned long long)us[ROUNDS * 99 / 100],
                  ROUNDS * 1e6 / (double)all);
    (void)close(local);
    stage_end(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_change_is_an_event_and_gaps_can_be_asked_for),
        cmocka_unit_test(progress_comes_at_most_ten_times_a_second_and_the_last_is_not_lost),
        cmocka_unit_test(a_wrong_or_missing_token_is_refused_on_tcp_only),
        cmocka_unit_test(every_field_is_checked),
        cmocka_unit_test(hostile_protobuf_gets_an_error_and_hurts_nobody),
        cmocka_unit_test(too_many_waiting_requests_get_a_limit_error),
        cmocka_unit_test(a_wait_ends_at_its_time_with_the_job_as_it_stands),
        cmocka_unit_test(a_repeated_wait_takes_no_place_and_no_more_time),
        cmocka_unit_test(many_who_ask_for_the_status_share_the_next_one),
        cmocka_unit_test(status_and_models_are_answered_by_the_supervisor),
        cmocka_unit_test(the_command_line_gets_a_whole_output_as_a_descriptor),
        cmocka_unit_test(garbage_on_the_local_socket_ends_only_that_peer),
        cmocka_unit_test(a_peer_that_never_reads_is_dropped_and_others_are_served),
        cmocka_unit_test(round_trips),
    };

    (void)signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests_name("router_rpc", tests, NULL, NULL);
}
