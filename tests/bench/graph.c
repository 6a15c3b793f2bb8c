/*
 * What it takes to decide where a prompt goes, one core, nothing else:
 *
 *   bench_graph FILE ROUNDS   reads FILE (API format, or the body of POST /prompt) again and again
 *
 * Printed as one JSON object: `json` is the reading alone, `jansson` the same by jansson, `parse` is rv_graph_parse and
 * its end, `route` is rv_graph_route with three types, `all` is what a request pays.
 */
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common.h"
#include "graph_route.h"

static const struct rv_route_type types[] = {
    {"image", 0, NULL, 0}, {"video", 0, NULL, 0}, {"audio", RV_ROUTE_ANY, NULL, 0}};

static char *read_file(const char *path, size_t *ret_length)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    char *text;

    if (fd < 0 || fstat(fd, &st) < 0)
        bench_fail("%s cannot be read", path);
    text = malloc((size_t)st.st_size + 1);
    if (!text || read(fd, text, (size_t)st.st_size) != st.st_size)
        bench_fail("%s cannot be read", path);
    (void)close(fd);
    *ret_length = (size_t)st.st_size;
    return text;
}

static void read_once(const char *text, size_t length, struct bench_samples *samples)
{
    static const struct rv_json_limits limits = {RV_GRAPH_DEPTH_MAX, RV_GRAPH_VALUES_MAX, "the graph"};
    uint64_t start = bench_now_ns();
    struct rv_error err = {0};
    struct rv_json json;

    if (rv_json_parse(&json, text, length, &limits, &err) < 0)
        bench_fail("%s", err.message);
    rv_json_fini(&json);
    bench_sample(samples, start);
}

static void read_by_jansson(const char *text, size_t length, struct bench_samples *samples)
{
    uint64_t start = bench_now_ns();
    json_t *root = json_loadb(text, length, JSON_DECODE_INT_AS_REAL | JSON_ALLOW_NUL, NULL);

    if (!root)
        bench_fail("jansson does not read it");
    json_decref(root);
    bench_sample(samples, start);
}

static void decide(const char *text, size_t length, struct bench_samples *parse, struct bench_samples *route,
                   struct bench_samples *all)
{
    uint64_t start = bench_now_ns(), middle;
    struct rv_error err = {0};
    struct rv_graph *graph;
    struct rv_route found;

    if (rv_graph_parse(text, length, &graph, &err) < 0)
        bench_fail("%s", err.message);
    bench_sample(parse, start);
    middle = bench_now_ns();
    if (rv_graph_route(graph, NULL, types, 3, &found, &err) < 0)
        bench_fail("%s", err.message);
    bench_sample(route, middle);
    rv_graph_destroy(graph);
    bench_sample(all, start);
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"json", "jansson", "parse", "route", "all"};
    struct bench_samples samples[5];
    size_t length, rounds;
    char *text;

    if (argc != 3)
        bench_fail("usage: bench_graph FILE ROUNDS");
    text = read_file(argv[1], &length);
    rounds = bench_number(argv[2]);
    for (unsigned i = 0; i < 5; i++)
        samples[i] = bench_samples_make(rounds);
    /* One after another: jansson leaves malloc's lists in another state. */
    for (size_t i = 0; i < rounds; i++)
        read_once(text, length, &samples[0]);
    for (size_t i = 0; i < rounds; i++)
        decide(text, length, &samples[2], &samples[3], &samples[4]);
    for (size_t i = 0; i < rounds; i++)
        read_by_jansson(text, length, &samples[1]);
    printf("{\"bytes\": %zu", length);
    for (unsigned i = 0; i < 5; i++) {
        printf(", ");
        bench_samples_print(names[i], &samples[i]);
        bench_samples_free(&samples[i]);
    }
    printf("}\n");
    free(text);
    return 0;
}
