/* rv_message_unpack: what honest peers send passes, what hostile ones send does not, whatever the message type. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "frame.h"

static bool passes(const ProtobufCMessageDescriptor *descriptor, const uint8_t *bytes, size_t length, const char **why)
{
    void *arena = NULL;
    ProtobufCMessage *message = rv_message_unpack(descriptor, bytes, length, rv_message_cap(length), &arena, why);

    free(arena);
    return message != NULL;
}

static bool frame_passes(const Rv__Frame *frame)
{
    size_t length = rv__frame__get_packed_size(frame);
    uint8_t *bytes = malloc(length);
    const char *why = "";
    bool ok;

    assert_non_null(bytes);
    (void)rv__frame__pack(frame, bytes);
    ok = passes(&rv__frame__descriptor, bytes, length, &why);
    free(bytes);
    return ok;
}

/* Depth of nesting; the checker recurses, so a message that contains itself would be a way to exhaust the stack. */
static unsigned depth_of(const ProtobufCMessageDescriptor *d, unsigned depth)
{
    unsigned deepest = depth;

    assert_true(depth < 16);
    for (unsigned i = 0; i < d->n_fields; i++)
        if (d->fields[i].type == PROTOBUF_C_TYPE_MESSAGE) {
            unsigned n = depth_of(d->fields[i].descriptor, depth + 1);

            deepest = n > deepest ? n : deepest;
        }
    return deepest;
}

static void no_message_contains_itself(void **state)
{
    (void)state;
    assert_true(depth_of(&rv__frame__descriptor, 0) < 8);
}

static void a_ledger_of_short_job_ids_passes(void **state)
{
    enum { JOBS = RV_JOB_LEDGER_MAX };
    Rv__MarkedJob *jobs = calloc(JOBS, sizeof(*jobs)), **pointers = calloc(JOBS, sizeof(Rv__MarkedJob *));
    Rv__RouterSetup setup = RV__ROUTER_SETUP__INIT;
    Rv__Frame frame = RV__FRAME__INIT;

    (void)state;
    assert_true(jobs && pointers);
    for (unsigned i = 0; i < JOBS; i++) {
        rv__marked_job__init(&jobs[i]);
        jobs[i].job_id = (char *)"a";
        jobs[i].type = (char *)"b";
        jobs[i].content_digest.data = (uint8_t *)"0123456789abcdef";
        jobs[i].content_digest.len = 16;
        pointers[i] = &jobs[i];
    }
    setup.jobs = pointers;
    setup.n_jobs = JOBS;
    frame.body_case = RV__FRAME__BODY_ROUTER_SETUP;
    frame.router_setup = &setup;
    assert_true(frame_passes(&frame));
    free(pointers);
    free(jobs);
}

static void lists_of_small_records_pass(void **state)
{
    enum { JOBS = 1000, MODELS = RV_MODELS_MAX };
    static Resvisor__V1__Job jobs[JOBS], *job_pointers[JOBS];
    static Resvisor__V1__ModelStatus models[MODELS], *model_pointers[MODELS];
    Resvisor__V1__JobList list = RESVISOR__V1__JOB_LIST__INIT;
    Resvisor__V1__Reply reply = RESVISOR__V1__REPLY__INIT;
    Resvisor__V1__Status status = RESVISOR__V1__STATUS__INIT;
    Rv__Frame frame = RV__FRAME__INIT;

    (void)state;
    for (unsigned i = 0; i < JOBS; i++) {
        resvisor__v1__job__init(&jobs[i]);
        jobs[i].job_id = (char *)"7";
        jobs[i].type = (char *)"image";
        jobs[i].state = RESVISOR__V1__JOB_STATE__JOB_DONE;
        jobs[i].worker = (char *)"image/0";
        jobs[i].model = (char *)"m";
        jobs[i].submitted_ms = 1700000000000;
        job_pointers[i] = &jobs[i];
    }
    list.jobs = job_pointers;
    list.n_jobs = JOBS;
    reply.body_case = RESVISOR__V1__REPLY__BODY_JOBS;
    reply.jobs = &list;
    frame.body_case = RV__FRAME__BODY_RPC_REPLY;
    frame.rpc_reply = &reply;
    assert_true(frame_passes(&frame));

    for (unsigned i = 0; i < MODELS; i++) {
        resvisor__v1__model_status__init(&models[i]);
        models[i].name = (char *)"m";
        models[i].path = (char *)"/m";
        models[i].state = (char *)"ABSENT";
        model_pointers[i] = &models[i];
    }
    status.models = model_pointers;
    status.n_models = MODELS;
    frame.body_case = RV__FRAME__BODY_STATUS;
    frame.status = &status;
    assert_true(frame_passes(&frame));
}

/* Tag and length 0 of a repeated message, over and over: a few bytes on the wire, a struct each in memory. */
static void empty_repeated_messages_hit_the_cap(void **state)
{
    uint8_t *bytes = malloc(RV_FRAME_MAX);
    const char *why = "";

    (void)state;
    assert_non_null(bytes);
    for (unsigned i = 0; i + 1 < RV_FRAME_MAX; i += 2) {
        bytes[i] = (1u << 3) | 2; /* JobList.jobs */
        bytes[i + 1] = 0;
    }
    assert_false(passes(&resvisor__v1__job_list__descriptor, bytes, RV_FRAME_MAX, &why));
    assert_string_equal(why, "malformed protobuf, or too much of it");
    free(bytes);
}

struct text_case {
    const char *text;
    bool valid;
};

static const struct text_case texts[] = {
    {"", true},
    {"plain", true},
    {"tab\tand\nnewline", true},
    {"\xc3\xa9", true},
    {"\xe2\x82\xac", true},
    {"\xf0\x9f\x98\x80", true},
    {"\x80", false},             /* continuation without a start */
    {"\xc3", false},             /* cut */
    {"\xe2\x82", false},         /* cut */
    {"\xc0\xaf", false},         /* overlong */
    {"\xe0\x80\xaf", false},     /* overlong */
    {"\xed\xa0\x80", false},     /* surrogate */
    {"\xf4\x90\x80\x80", false}, /* beyond U+10FFFF */
    {"\xff", false},
    {"ok\xf0\x9f\x98", false},
};

static void texts_must_be_utf8(void **state)
{
    (void)state;
    for (unsigned i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        Rv__Frame frame = RV__FRAME__INIT;
        Rv__JobMark mark = RV__JOB_MARK__INIT;
        Rv__MarkedJob job = RV__MARKED_JOB__INIT; /* nested: the check goes all the way down */

        job.job_id = (char *)texts[i].text;
        mark.job = &job;
        frame.body_case = RV__FRAME__BODY_JOB_MARK;
        frame.job_mark = &mark;
        assert_int_equal(frame_passes(&frame), texts[i].valid);
        assert_int_equal(rv_text_is_valid(texts[i].text), texts[i].valid);
    }
}

static void unknown_enum_values_are_refused(void **state)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Hello hello = RV__HELLO__INIT;

    (void)state;
    frame.body_case = RV__FRAME__BODY_HELLO;
    frame.hello = &hello;
    hello.role = RV__ROLE__ROLE_LOADER;
    assert_true(frame_passes(&frame));
    hello.role = (Rv__Role)77;
    assert_false(frame_passes(&frame));
}

static void every_cut_of_a_message_is_survived(void **state)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobStart start = RV__JOB_START__INIT;
    Resvisor__V1__Submit submit = RESVISOR__V1__SUBMIT__INIT;
    Resvisor__V1__Param param = RESVISOR__V1__PARAM__INIT, *params[] = {&param};
    uint8_t bytes[256];
    size_t length;

    (void)state;
    param.key = (char *)"key";
    param.value = (char *)"value";
    submit.job_id = (char *)"job";
    submit.params = params;
    submit.n_params = 1;
    start.submit = &submit;
    frame.id = 300;
    frame.body_case = RV__FRAME__BODY_JOB_START;
    frame.job_start = &start;
    length = rv__frame__pack(&frame, bytes);
    for (size_t cut = 0; cut < length; cut++)
        (void)passes(&rv__frame__descriptor, bytes, cut, NULL);
    for (size_t at = 0; at < length; at++) {
        uint8_t before = bytes[at];

        for (unsigned value = 0; value < 256; value += 5) {
            bytes[at] = (uint8_t)value;
            (void)passes(&rv__frame__descriptor, bytes, length, NULL);
        }
        bytes[at] = before;
    }
}

static void long_error_texts_are_cut_between_characters(void **state)
{
    struct rv_error err = {0}, copy = {0};
    Resvisor__V1__Error message;
    char text[RV_ERROR_TEXT_MAX * 2];

    (void)state;
    for (unsigned shift = 0; shift < 4; shift++) {
        memset(text, 'x', sizeof(text));
        for (size_t i = shift; i + 4 < sizeof(text); i += 4)
            memcpy(text + i, "\xf0\x9f\x98\x80", 4);
        text[sizeof(text) - 5] = '\0';
        (void)rv_error_set(&err, EIO, RESVISOR__V1__ERROR_CODE__ERROR_FILE, "%s", text);
        assert_true(rv_text_is_valid(err.message));
        assert_true(strlen(err.message) > RV_ERROR_TEXT_MAX - 6);
        rv_error_remedy(&err, "%s", text);
        assert_true(rv_text_is_valid(err.remedy));
        rv_error_to_message(&err, &message);
        message.message = text; /* longer than what fits */
        assert_int_equal(rv_error_from_message(&copy, &message), -ENOENT);
        assert_true(rv_text_is_valid(copy.message));
        assert_int_equal(copy.code, RESVISOR__V1__ERROR_CODE__ERROR_FILE);
    }
    assert_int_equal(rv_error_from_message(&copy, NULL), 0);
    assert_int_equal(copy.code, 0);
}

static void texts_that_a_format_cut_are_mended(void **state)
{
    struct rv_error err = {0};
    char whole[] = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z", torn[] = "\xe2\x82, \xc3\xa9\xff\xf0\x9f\x98";

    (void)state;
    assert_string_equal(rv_text_mend(whole), "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z");
    assert_string_equal(rv_text_mend(torn), "??, \xc3\xa9????");
    assert_string_equal(rv_text_mend(torn + strlen(torn)), "");
    (void)rv_error_set(&err, EIO, RESVISOR__V1__ERROR_CODE__ERROR_DEVICE, "%.4s; and more", "abc\xc3\xa9");
    assert_string_equal(err.message, "abc?; and more");
}

/* Found by fuzz_message: an unknown field with a tag in two bytes packed to one that protobuf-c refuses. */
static void unknown_fields_are_not_passed_on(void **state)
{
    const uint8_t odd[] = {0x80, 0x00, 0x5b}, later[] = {0x0a, 0x01, 'j', 0xf8, 0x07, 0x01};
    uint8_t packed[16];
    void *arena = NULL;
    ProtobufCMessage *message;

    (void)state;
    message = rv_message_unpack(&rv__job_ack__descriptor, odd, sizeof(odd), 4096, &arena, NULL);
    if (message)
        assert_int_equal(protobuf_c_message_get_packed_size(message), 0);
    free(message ? arena : NULL);
    message = rv_message_unpack(&rv__job_ack__descriptor, later, sizeof(later), 4096, &arena, NULL);
    assert_non_null(message); /* a newer peer's message is understood */
    assert_int_equal(protobuf_c_message_pack(message, packed), 3);
    free(arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_message_contains_itself),
        cmocka_unit_test(a_ledger_of_short_job_ids_passes),
        cmocka_unit_test(lists_of_small_records_pass),
        cmocka_unit_test(empty_repeated_messages_hit_the_cap),
        cmocka_unit_test(texts_must_be_utf8),
        cmocka_unit_test(unknown_enum_values_are_refused),
        cmocka_unit_test(unknown_fields_are_not_passed_on),
        cmocka_unit_test(every_cut_of_a_message_is_survived),
        cmocka_unit_test(long_error_texts_are_cut_between_characters),
        cmocka_unit_test(texts_that_a_format_cut_are_mended),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
