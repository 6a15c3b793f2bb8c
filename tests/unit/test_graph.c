/* Graphs of ComfyUI: each rule of routing, both formats, what does not run, and JSON that means harm. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "graph_route.h"
#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

static struct rv_error err;

static struct rv_graph *parse(const char *text)
{
    struct rv_graph *graph = NULL;

    if (rv_graph_parse(text, strlen(text), &graph, &err) < 0)
        fail_msg("refused: %s", err.message);
    return graph;
}

static void refused_bytes(const char *text, size_t length, int r, int code, const char *piece)
{
    struct rv_graph *graph = NULL;

    err = (struct rv_error){0};
    assert_int_equal(rv_graph_parse(text, length, &graph, &err), r);
    assert_int_equal(err.code, code);
    if (!strstr(err.message, piece))
        fail_msg("\"%s\" is not in: %s", piece, err.message);
}

static void refused(const char *text, const char *piece)
{
    refused_bytes(text, strlen(text), -EINVAL, CODE(BAD_REQUEST), piece);
}

/* Decides without types. */
static struct rv_route decide(const char *text)
{
    struct rv_graph *graph = parse(text);
    struct rv_route route;

    assert_int_equal(rv_graph_route(graph, NULL, NULL, 0, &route, &err), 0);
    assert_int_equal(route.type, RV_ROUTE_NO_TYPE);
    rv_graph_destroy(graph);
    return route;
}

static void is(const char *text, enum rv_route_rule rule, enum rv_medium medium)
{
    struct rv_route route = decide(text);

    if (route.rule != rule || route.medium != medium)
        fail_msg("%s by %s: %s", rv_medium_name(route.medium), rv_route_rule_name(route.rule), text);
}

/* A graph of unconnected nodes of the classes, ended by NULL. */
static void classes_are(enum rv_route_rule rule, enum rv_medium medium, ...)
{
    char text[2048] = "{";
    const char *name;
    va_list ap;
    int i = 0;

    va_start(ap, medium);
    for (; (name = va_arg(ap, const char *)); i++)
        (void)snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s\"%d\":{\"class_type\":\"%s\"}",
                       i ? "," : "", i, name);
    va_end(ap);
    (void)strncat(text, "}", 2);
    is(text, rule, medium);
}

/* ---- the rules --------------------------------------------------------------------------------------------------- */

static void test_the_strongest_output_decides(void **state)
{
    (void)state;
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_IMAGE, "SaveImage", NULL);
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_3D, "SaveImage", "SaveGLB", NULL);
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_AUDIO, "SaveAudioMP3", "SaveGLB", "SaveImage", NULL);
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_VIDEO, "SaveAudio", "VHS_VideoCombine", "SaveImage", NULL);
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_VIDEO, "SaveAnimatedWEBP", NULL);
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_TEXT, "SaveText", NULL);
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_IMAGE, "SaveText", "SaveImage", NULL);
}

static void test_a_preview_counts_only_where_nothing_is_saved(void **state)
{
    (void)state;
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_AUDIO, "PreviewAudio", "PreviewImage", NULL);
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_IMAGE, "PreviewAudio", "SaveImage", NULL);
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_AUDIO, "SaveAudio", "PreviewImage", NULL);
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_IMAGE, "PreviewImage", "VAEDecodeAudio", "Unknown", NULL);
}

static void test_without_output_nodes_those_that_make_something_decide(void **state)
{
    (void)state;
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_VIDEO, "CreateVideo", "VAEDecode", NULL);
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_AUDIO, "VAEDecodeAudio", "MyOwnSink", NULL);
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_3D, "TripoTextToModelNode", NULL);
    classes_are(RV_RULE_OUTPUT, RV_MEDIUM_IMAGE, "LoadVideo", "GetVideoComponents", "VAEDecode", NULL);
}

static void test_a_video_model_behind_an_image_decides(void **state)
{
    struct rv_route route;

    (void)state;
    is("{\"1\":{\"class_type\":\"UNETLoader\",\"inputs\":{\"unet_name\":\"Wan/wan2.2_t2v.safetensors\"}},"
       "\"2\":{\"class_type\":\"SaveImage\",\"inputs\":{\"images\":[\"1\",0]}}}",
       RV_RULE_MODEL, RV_MEDIUM_VIDEO);
    is("{\"1\":{\"class_type\":\"WanImageToVideo\"},\"2\":{\"class_type\":\"SaveImage\",\"inputs\":{\"i\":[\"1\",0]}}}",
       RV_RULE_MODEL, RV_MEDIUM_VIDEO);
    route = decide("{\"1\":{\"class_type\":\"CheckpointLoaderSimple\",\"inputs\":{\"ckpt_name\":\"ace_step_v1.ckpt\"}},"
                   "\"2\":{\"class_type\":\"PreviewAny\",\"inputs\":{\"x\":[\"1\",0]}}}");
    assert_int_equal(route.rule, RV_RULE_MODEL);
    assert_int_equal(route.medium, RV_MEDIUM_AUDIO);
    assert_int_equal(route.evidence[1].role, RV_ROLE_MODEL);
    assert_int_equal(route.votes[RV_MEDIUM_AUDIO][RV_ROLE_MODEL], 1);
    assert_int_equal(route.votes[RV_MEDIUM_TEXT][RV_ROLE_SHOW], 1);
    /* It is the outputs that say audio: the video model stays a witness. */
    is("{\"1\":{\"class_type\":\"WanImageToVideo\"},\"2\":{\"class_type\":\"SaveAudio\",\"inputs\":{\"i\":[\"1\",0]}}}",
       RV_RULE_OUTPUT, RV_MEDIUM_AUDIO);
}

static void test_encoders_and_names_that_only_look_alike_say_nothing(void **state)
{
    static const char *const loaders[] = {"VAELoader\",\"inputs\":{\"n\":\"wan_2.1_vae.safetensors\"}",
                                          "CLIPLoader\",\"inputs\":{\"n\":\"ltx_text.safetensors\"}",
                                          "LoraLoader\",\"inputs\":{\"n\":\"wan2.safetensors\"}",
                                          "UNETLoader\",\"inputs\":{\"n\":\"svdq-int4-flux.safetensors\"}",
                                          "UNETLoader\",\"inputs\":{\"n\":\"taiwan.safetensors\"}",
                                          "UNETLoader\",\"inputs\":{\"n\":\"a picture of wan2\"}"};
    char text[512];

    (void)state;
    for (unsigned i = 0; i < sizeof(loaders) / sizeof(loaders[0]); i++) {
        (void)snprintf(
            text, sizeof(text),
            "{\"1\":{\"class_type\":\"%s},\"2\":{\"class_type\":\"SaveImage\",\"inputs\":{\"i\":[\"1\",0]}}}",
            loaders[i]);
        is(text, RV_RULE_OUTPUT, RV_MEDIUM_IMAGE);
    }
}

static void test_what_no_output_needs_does_not_count(void **state)
{
    (void)state;
    is("{\"1\":{\"class_type\":\"WanImageToVideo\"},\"2\":{\"class_type\":\"VAEDecode\"},"
       "\"3\":{\"class_type\":\"SaveImage\",\"inputs\":{\"images\":[\"2\",0]}}}",
       RV_RULE_OUTPUT, RV_MEDIUM_IMAGE);
    /* only one of two outputs is wanted */
    is("{\"prompt\":{\"1\":{\"class_type\":\"SaveVideo\"},\"2\":{\"class_type\":\"SaveImage\"}},"
       "\"partial_execution_targets\":[\"2\"]}",
       RV_RULE_OUTPUT, RV_MEDIUM_IMAGE);
    is("{\"prompt\":{\"1\":{\"class_type\":\"SaveVideo\"},\"2\":{\"class_type\":\"SaveImage\"}},"
       "\"partial_execution_targets\":[]}",
       RV_RULE_OUTPUT, RV_MEDIUM_VIDEO);
}

static void test_cycles_and_links_to_nothing_are_no_fault(void **state)
{
    (void)state;
    is("{\"1\":{\"class_type\":\"A\",\"inputs\":{\"x\":[\"2\",0]}},\"2\":{\"class_type\":\"CreateVideo\",\"inputs\":"
       "{\"x\":[\"1\",0],\"y\":[\"2\",0],\"z\":[\"no\",0],\"w\":[7,0],\"v\":[\"1\"]}}}",
       RV_RULE_OUTPUT, RV_MEDIUM_VIDEO);
    is("{\"1\":{\"class_type\":\"SaveImage\",\"inputs\":[1,2]},\"2\":{\"class_type\":\"B\",\"inputs\":null}}",
       RV_RULE_OUTPUT, RV_MEDIUM_IMAGE);
    is("{\"prompt\":{\"class_type\":\"SaveAudio\"}}", RV_RULE_OUTPUT, RV_MEDIUM_AUDIO); /* a node called prompt */
}

static void test_the_default_is_image(void **state)
{
    (void)state;
    classes_are(RV_RULE_DEFAULT, RV_MEDIUM_IMAGE, "Foo", "Bar", NULL);
}

/* ---- types ------------------------------------------------------------------------------------------------------- */

static const char *const flux[] = {"/m/unet/flux.safetensors", "/m/vae.safetensors"};
static const char *const sdxl[] = {"/m/sdxl.safetensors"};
static const char *const other[] = {"/m/other.gguf"};
static const struct rv_route_type types[] = {
    {"image", 0, flux, 2},
    {"fast", 1u << RV_MEDIUM_IMAGE, sdxl, 1},
    {"movies", 1u << RV_MEDIUM_VIDEO | 1u << RV_MEDIUM_AUDIO, NULL, 0},
    {"rest", RV_ROUTE_ANY, other, 1},
};
#define TYPES (sizeof(types) / sizeof(types[0]))

static struct rv_route route_of(const char *text, const char *header, uint32_t type_count, int r)
{
    struct rv_graph *graph = parse(text);
    struct rv_route route = {.type = 99};

    err = (struct rv_error){0};
    assert_int_equal(rv_graph_route(graph, header, types, type_count, &route, &err), r);
    rv_graph_destroy(graph);
    return route;
}

static void goes_to(const char *text, const char *header, const char *type, enum rv_route_rule rule)
{
    struct rv_route route = route_of(text, header, TYPES, 0);

    assert_string_equal(types[route.type].name, type);
    assert_int_equal(route.rule, rule);
}

#define UNET(name) "{\"1\":{\"class_type\":\"UNETLoader\",\"inputs\":{\"n\":\"" name "\"}},"
#define SAVE_2 "\"2\":{\"class_type\":\"SaveImage\",\"inputs\":{\"i\":[\"1\",0]}}}"

static void test_a_kind_goes_to_the_type_that_accepts_it(void **state)
{
    (void)state;
    goes_to("{\"1\":{\"class_type\":\"SaveImage\"}}", NULL, "image", RV_RULE_OUTPUT);
    goes_to("{\"1\":{\"class_type\":\"SaveVideo\"}}", NULL, "movies", RV_RULE_OUTPUT);
    goes_to("{\"1\":{\"class_type\":\"SaveGLB\"}}", NULL, "rest", RV_RULE_OUTPUT);
    goes_to("{\"1\":{\"class_type\":\"Foo\"}}", NULL, "image", RV_RULE_DEFAULT);
    assert_int_equal(route_of("{\"1\":{\"class_type\":\"SaveGLB\"}}", NULL, 3, -ENOENT).type, RV_ROUTE_NO_TYPE);
    assert_int_equal(err.code, CODE(NO_SUCH_TYPE));
}

static void test_among_several_types_the_one_with_the_models_is_chosen(void **state)
{
    (void)state;
    goes_to(UNET("sdxl.safetensors") SAVE_2, NULL, "fast", RV_RULE_OUTPUT);
    goes_to(UNET("sub\\\\sdxl.safetensors") SAVE_2, NULL, "fast", RV_RULE_OUTPUT);
    goes_to(UNET("flux.safetensors") SAVE_2, NULL, "image", RV_RULE_OUTPUT);
    goes_to(UNET("other.gguf") SAVE_2, NULL, "image", RV_RULE_OUTPUT); /* affinity does not outdo the kind */
}

static void test_unknown_nodes_go_where_their_models_are(void **state)
{
    (void)state;
    goes_to("{\"1\":{\"class_type\":\"Foo\",\"inputs\":{\"n\":\"x/other.gguf\"}}}", NULL, "rest", RV_RULE_AFFINITY);
    goes_to("{\"1\":{\"class_type\":\"Foo\",\"inputs\":{\"n\":\"sdxl.safetensors\"}}}", NULL, "fast", RV_RULE_AFFINITY);
}

static void test_an_explicit_type_comes_first(void **state)
{
    static const char marked[] = "{\"prompt\":{\"1\":{\"class_type\":\"SaveVideo\"}},"
                                 "\"extra_data\":{\"resvisor\":{\"type\":\"fast\"}}}";

    (void)state;
    goes_to(marked, NULL, "fast", RV_RULE_EXPLICIT);
    goes_to(marked, "rest", "rest", RV_RULE_EXPLICIT);
    assert_int_equal(route_of(marked, "movies", TYPES, 0).medium, RV_MEDIA); /* a type of two kinds */
    (void)route_of(marked, "nothing\x1b", TYPES, -ENOENT);
    assert_int_equal(err.code, CODE(NO_SUCH_TYPE));
    assert_non_null(strstr(err.message, "nothing\\x1b"));
    (void)route_of(marked, NULL, 0, -ENOENT); /* without types only kinds have names */
    assert_int_equal(route_of(marked, "3d", 0, 0).medium, RV_MEDIUM_3D);
    refused("{\"prompt\":{\"1\":{\"class_type\":\"A\"}},\"extra_data\":{\"resvisor\":{\"type\":7}}}", "resvisor.type");
}

/* ---- saved workflows --------------------------------------------------------------------------------------------- */

static void test_muted_and_bypassed_nodes_do_not_run(void **state)
{
    (void)state;
    is("{\"nodes\":[{\"id\":1,\"type\":\"SaveVideo\",\"mode\":4},{\"id\":2,\"type\":\"SaveAudio\",\"mode\":2},"
       "{\"id\":3,\"type\":\"SaveImage\",\"mode\":0}]}",
       RV_RULE_OUTPUT, RV_MEDIUM_IMAGE);
    refused("{\"nodes\":[{\"id\":1,\"type\":\"SaveVideo\",\"mode\":4}]}", "no node that would run");
}

static void test_subgraphs_are_read_once_and_only_where_used(void **state)
{
    static const char text[] =
        "{\"nodes\":[{\"id\":1,\"type\":\"a\"},{\"id\":2,\"type\":\"a\"},{\"id\":3,\"type\":\"c\",\"mode\":4}],"
        "\"definitions\":{\"subgraphs\":["
        "{\"id\":\"a\",\"nodes\":[{\"id\":5,\"type\":\"b\"},{\"id\":\"x\",\"type\":\"SaveAudio\"}]},"
        "{\"id\":\"b\",\"nodes\":[{\"id\":6,\"type\":\"a\"},{\"id\":7,\"type\":\"UNETLoader\","
        "\"widgets_values\":[\"wan2.safetensors\",3]}]},"
        "{\"id\":\"c\",\"nodes\":[{\"id\":8,\"type\":\"SaveVideo\"}]}]}}";
    struct rv_graph *graph = parse(text);
    struct rv_route route;

    (void)state;
    assert_int_equal(graph->format, RV_GRAPH_WORKFLOW);
    assert_int_equal(graph->node_count, 2); /* each subgraph's nodes once, and none for the places where it is used */
    assert_string_equal(graph->nodes[0].id, "a:x");
    assert_int_equal(graph->file_count, 1);
    assert_int_equal(rv_graph_route(graph, NULL, NULL, 0, &route, &err), 0);
    assert_int_equal(route.medium, RV_MEDIUM_AUDIO);
    assert_int_equal(route.votes[RV_MEDIUM_VIDEO][RV_ROLE_MODEL], 1);
    assert_int_equal(route.votes[RV_MEDIUM_VIDEO][RV_ROLE_SAVE], 0);
    rv_graph_destroy(graph);
}

static void test_group_nodes_of_older_workflows_are_read(void **state)
{
    struct rv_graph *graph =
        parse("{\"nodes\":[{\"id\":1,\"type\":\"workflow/both\"},{\"id\":2,\"type\":\"workflow>both\"}],"
              "\"extra\":{\"groupNodes\":{\"both\":{\"nodes\":[{\"index\":3,\"type\":\"SaveAudio\"}]},"
              "\"other\":{\"nodes\":[{\"index\":0,\"type\":\"SaveVideo\"}]}}}}");
    struct rv_route route;

    (void)state;
    assert_int_equal(graph->node_count, 2);
    assert_string_equal(graph->nodes[0].id, "workflow/both:3");
    assert_int_equal(rv_graph_route(graph, NULL, NULL, 0, &route, &err), 0);
    assert_int_equal(route.medium, RV_MEDIUM_AUDIO);
    rv_graph_destroy(graph);
}

/* ---- harm -------------------------------------------------------------------------------------------------------- */

static void test_what_is_no_graph_is_refused_with_its_place(void **state)
{
    (void)state;
    refused("", "line 1");
    refused("{\n  \"1\": nonsense\n}", "line 2");
    refused("[]", "a JSON object is expected");
    refused("{}", "no node");
    refused("{\"prompt\":[]}", "`prompt` is no graph");
    refused("{\"1\":{}}", "node 1: its class is missing");
    refused("{\"1\":\"text\"}", "node 1");
    refused("{\"1\":{\"class_type\":7}}", "node 1");
    refused("{\"a\\u001b\":{\"class_type\":\"\"}}", "node a\\x1b");
    refused("{\"nodes\":[7]}", "no object");
    refused("{\"nodes\":[{\"id\":4}]}", "node 4");
    refused("{\"1\":{\"class_type\":\"A\"}} x", "line 1");
    refused("{\"1\":{\"class_type\":\"\xff\"}}", "line 1");
}

/* The router needs more of the body than the graph, and shall not read it twice. */
static void test_what_stands_beside_the_graph_is_found(void **state)
{
    const char *text = "{\"number\": -2.5, \"client_id\": \"c\\u00e9\", \"prompt\": {\"1\":{\"class_type\":\"A\"}},"
                       "\"front\": true, \"other\": {}, \"client_id\": \"last\"}";
    struct rv_graph *graph = NULL;
    const char *alone = "{\"prompt\":{\"class_type\":\"A\"}}"; /* a node called so */
    const struct rv_json_value *prompt;

    (void)state;
    assert_int_equal(rv_graph_parse(text, strlen(text), &graph, &err), 0);
    assert_true(graph->is_body);
    prompt = &graph->json.values[graph->members[RV_GRAPH_MEMBER_PROMPT]];
    assert_int_equal(prompt->end - prompt->begin, strlen("{\"1\":{\"class_type\":\"A\"}}"));
    assert_memory_equal(text + prompt->begin, "{\"1\":", 5);
    assert_string_equal(rv_json_string(&graph->json, graph->members[RV_GRAPH_MEMBER_CLIENT_ID], NULL), "last");
    assert_true(rv_json_number(&graph->json, graph->members[RV_GRAPH_MEMBER_NUMBER]) == -2.5);
    assert_true(rv_json_is(&graph->json, graph->members[RV_GRAPH_MEMBER_FRONT], RV_JSON_TRUE));
    assert_int_equal(graph->members[RV_GRAPH_MEMBER_PROMPT_ID], RV_JSON_NONE);
    rv_graph_destroy(graph);
    graph = NULL;
    assert_int_equal(rv_graph_parse(alone, strlen(alone), &graph, &err), 0);
    assert_false(graph->is_body);
    assert_int_equal(graph->members[RV_GRAPH_MEMBER_PROMPT], RV_JSON_NONE);
    rv_graph_destroy(graph);
}

/* `times` times the piece, between a begin and an end. */
static char *repeat(const char *begin, const char *piece, size_t times, const char *end, size_t *ret_length)
{
    size_t n = strlen(piece), length = strlen(begin) + n * times + strlen(end);
    char *text = malloc(length + 1), *p;

    assert_non_null(text);
    p = stpcpy(text, begin);
    for (size_t i = 0; i < times; i++, p += n)
        memcpy(p, piece, n);
    memcpy(p, end, strlen(end) + 1);
    *ret_length = length;
    return text;
}

static void over_limit(const char *begin, const char *piece, size_t times, const char *end, const char *message)
{
    size_t length;
    char *text = repeat(begin, piece, times, end, &length);

    refused_bytes(text, length, -E2BIG, CODE(TOO_LARGE), message);
    free(text);
}

static void test_limits_hold_before_anything_is_built(void **state)
{
    (void)state;
    over_limit("", "[", 10000000, "", "nested deeper than 64 levels");
    over_limit("", "{\"a\":", 65, "", "nested deeper than 64 levels");
    over_limit("{\"a\":[", "[],", RV_GRAPH_VALUES_MAX, "0]}", "more than 262144 values");
    over_limit("{\"a\":\"", "x", RV_GRAPH_SIZE_MAX, "\"}", "larger than 16 MiB");
    over_limit("{\"nodes\":[", "{\"type\":\"A\"},", RV_GRAPH_NODES_MAX + 1, "{\"type\":\"A\"}]}",
               "more than 16384 nodes");
}

static void test_the_largest_graph_is_decided(void **state)
{
    size_t length, room = (size_t)RV_GRAPH_NODES_MAX * 96;
    char *text = malloc(room), *p = text;
    struct rv_graph *graph = NULL;
    struct rv_route route;

    (void)state;
    assert_non_null(text);
    *p++ = '{';
    for (unsigned i = 0; i < RV_GRAPH_NODES_MAX; i++)
        p += snprintf(p, room - (size_t)(p - text), "%s\"%u\":{\"class_type\":\"%s\",\"inputs\":{\"x\":[\"%u\",0]}}",
                      i ? "," : "", i, i ? "VAEDecode" : "SaveImage", (i + 1) % RV_GRAPH_NODES_MAX);
    *p++ = '}';
    length = (size_t)(p - text);
    assert_int_equal(rv_graph_parse(text, length, &graph, &err), 0);
    assert_int_equal(graph->node_count, RV_GRAPH_NODES_MAX);
    assert_int_equal(rv_graph_route(graph, NULL, NULL, 0, &route, &err), 0);
    assert_true(graph->nodes[RV_GRAPH_NODES_MAX - 1].reached);
    assert_int_equal(route.evidence_count, RV_ROUTE_EVIDENCE_MAX);
    assert_int_equal(route.votes[RV_MEDIUM_IMAGE][RV_ROLE_MAKE], RV_GRAPH_NODES_MAX - 1);
    rv_graph_destroy(graph);
    free(text);
}

static void test_odd_but_legal_json_is_read(void **state)
{
    char long_class[900];
    size_t length;
    char *text;

    (void)state;
    /* the largest seed, NUL in a text, brackets in a text */
    is("{\"1\":{\"class_type\":\"SaveVideo\",\"inputs\":{\"seed\":18446744073709551615,\"t\":\"a\\u0000b\\\"[[[{\"}}}",
       RV_RULE_OUTPUT, RV_MEDIUM_VIDEO);
    (void)memset(long_class, 'V', sizeof(long_class));
    long_class[300] = '\0';
    classes_are(RV_RULE_DEFAULT, RV_MEDIUM_IMAGE, long_class, NULL); /* a class of 300 bytes is merely unknown */
    text = repeat("{\"1\":{\"class_type\":\"", "Video", 103, "\"}}", &length);
    refused_bytes(text, length, -EINVAL, CODE(BAD_REQUEST), "node 1");
    free(text);
}

static void test_every_word_for_a_kind_is_known(void **state)
{
    static const char *const words[] = {"text", "image", "3d", "audio", "video", "any"};

    (void)state;
    for (unsigned i = 0; i <= RV_MEDIA; i++) {
        assert_string_equal(rv_medium_name((enum rv_medium)i), words[i]);
        assert_int_equal(rv_route_accepts(words[i]), 1u << i);
    }
    assert_int_equal(rv_route_accepts("picture"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_strongest_output_decides),
        cmocka_unit_test(test_a_preview_counts_only_where_nothing_is_saved),
        cmocka_unit_test(test_without_output_nodes_those_that_make_something_decide),
        cmocka_unit_test(test_a_video_model_behind_an_image_decides),
        cmocka_unit_test(test_encoders_and_names_that_only_look_alike_say_nothing),
        cmocka_unit_test(test_what_no_output_needs_does_not_count),
        cmocka_unit_test(test_cycles_and_links_to_nothing_are_no_fault),
        cmocka_unit_test(test_the_default_is_image),
        cmocka_unit_test(test_a_kind_goes_to_the_type_that_accepts_it),
        cmocka_unit_test(test_among_several_types_the_one_with_the_models_is_chosen),
        cmocka_unit_test(test_unknown_nodes_go_where_their_models_are),
        cmocka_unit_test(test_an_explicit_type_comes_first),
        cmocka_unit_test(test_muted_and_bypassed_nodes_do_not_run),
        cmocka_unit_test(test_subgraphs_are_read_once_and_only_where_used),
        cmocka_unit_test(test_group_nodes_of_older_workflows_are_read),
        cmocka_unit_test(test_what_is_no_graph_is_refused_with_its_place),
        cmocka_unit_test(test_limits_hold_before_anything_is_built),
        cmocka_unit_test(test_the_largest_graph_is_decided),
        cmocka_unit_test(test_odd_but_legal_json_is_read),
        cmocka_unit_test(test_what_stands_beside_the_graph_is_found),
        cmocka_unit_test(test_every_word_for_a_kind_is_known),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
