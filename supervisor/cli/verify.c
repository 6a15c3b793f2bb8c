/* `verify`: does a workflow stay warm when another one runs in between? Runs them as jobs, compares, and judges. */
#include "verify.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "cli.h"
#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define FACTOR 1.25
#define FACTOR_MAX 1e6
#define OFFSET_BITS 20 /* of the first seed's offset; see choose_seeds */

static const struct rv_option options[] = {
    {"order", 0, "A,B,...", "The runs, by the files' letters (default: A,A,B,A, and so on for each further file)."},
    {"type", 't', "A=TYPE", "Run file A as a job of this type; may be repeated."},
    {"factor", 0, "N", "After a switch a run may take N times as long as a warm one (default 1.25)."},
    {"same-seed", 0, NULL, "Leave the seeds as they are: ComfyUI then answers repeats from its cache."},
    {"baseline", 'b', NULL, "Run the same on one plain ComfyUI process, without the pool, and show both."},
    {0},
};
enum { OPT_ORDER, OPT_TYPE, OPT_FACTOR, OPT_SAME_SEED, OPT_BASELINE };

static volatile sig_atomic_t interrupted;

static void on_interrupt(int number)
{
    (void)number;
    interrupted = 1;
}

bool rv_verify_interrupted(void)
{
    return interrupted != 0;
}

static void verify_fini(struct rv_verify *verify)
{
    for (unsigned i = 0; i < verify->file_count; i++)
        free(verify->files[i].text);
    for (unsigned i = 0; i < verify->run_count; i++) {
        json_decref(verify->runs[i].report);
        json_decref(verify->runs[i].plain);
    }
    rv_cli_types_fini(&verify->types);
    rv_args_fini(&verify->args);
}

/* ---- the command line -------------------------------------------------------------------------------------------- */

static bool read_factor(struct rv_verify *verify, const char *text)
{
    char *end;

    verify->factor = strtod(text, &end);
    if (end == text || *end || !(verify->factor >= 1 && verify->factor <= FACTOR_MAX))
        return (void)rv_args_wrong(&verify->args, "--factor takes a number from 1 to %.0f", FACTOR_MAX), false;
    return true;
}

/* The number of a file by its letter; RV_VERIFY_FILES_MAX = there is none. */
static unsigned file_of(const struct rv_verify *verify, char letter)
{
    unsigned number = letter >= 'A' && letter <= 'Z'   ? (unsigned)(letter - 'A')
                      : letter >= 'a' && letter <= 'z' ? (unsigned)(letter - 'a')
                                                       : RV_VERIFY_FILES_MAX;

    return number < verify->file_count ? number : RV_VERIFY_FILES_MAX;
}

static bool add_run(struct rv_verify *verify, unsigned file)
{
    if (verify->run_count == RV_VERIFY_RUNS_MAX)
        return (void)rv_args_wrong(&verify->args, "--order has more than %u runs", RV_VERIFY_RUNS_MAX), false;
    verify->runs[verify->run_count++].file = file;
    return true;
}

/* A run after a switch: an earlier run of the same file, with another one between. */
static bool has_switch(const struct rv_verify *verify)
{
    for (unsigned i = 2; i < verify->run_count; i++)
        if (verify->runs[i].file != verify->runs[i - 1].file)
            for (unsigned k = 0; k + 1 < i; k++)
                if (verify->runs[k].file == verify->runs[i].file)
                    return true;
    return false;
}

static bool read_order(struct rv_verify *verify, const char *text)
{
    if (!text) {
        (void)add_run(verify, 0);
        (void)add_run(verify, 0);
        for (unsigned i = 1; i < verify->file_count; i++) {
            (void)add_run(verify, i);
            (void)add_run(verify, 0);
        }
        return true;
    }
    for (;; text += 2) {
        unsigned file = *text ? file_of(verify, *text) : RV_VERIFY_FILES_MAX;

        if (file == RV_VERIFY_FILES_MAX || (text[1] != ',' && text[1] != '\0'))
            return (void)rv_args_wrong(&verify->args, "--order takes letters from A to %c with commas between",
                                       'A' + (int)verify->file_count - 1),
                   false;
        if (!add_run(verify, file))
            return false;
        if (text[1] == '\0')
            break;
    }
    if (!has_switch(verify))
        return (void)rv_args_wrong(&verify->args, "--order has no run after a switch, such as the last one of A,B,A"),
               false;
    return true;
}

static bool read_type(struct rv_verify *verify, const char *text)
{
    unsigned file = *text && text[1] == '=' ? file_of(verify, *text) : RV_VERIFY_FILES_MAX;

    if (file == RV_VERIFY_FILES_MAX || text[2] == '\0')
        return (void)rv_args_wrong(&verify->args, "--type takes A=TYPE, with a letter from A to %c",
                                   'A' + (int)verify->file_count - 1),
               false;
    verify->files[file].wanted = text + 2;
    return true;
}

/* RV_ARGS_END, or what rv_args_exit takes. Letters mean something when all files are known: so options are read later.
 */
static int read_arguments(struct rv_verify *verify, int argc, char **argv)
{
    const char *value, *order = NULL, *types[RV_VERIFY_FILES_MAX];
    unsigned type_count = 0;
    int i;

    rv_args_init(&verify->args, &rv_command_verify, argc, argv);
    verify->factor = FACTOR;
    while ((i = rv_args_next(&verify->args, &value)) >= 0) {
        if (i == OPT_ORDER)
            order = value;
        else if (i == OPT_TYPE && type_count == RV_VERIFY_FILES_MAX)
            return rv_args_wrong(&verify->args, "--type is given more than %u times", RV_VERIFY_FILES_MAX),
                   RV_ARGS_ERROR;
        else if (i == OPT_TYPE)
            types[type_count++] = value;
        else if (i == OPT_FACTOR && !read_factor(verify, value))
            return RV_ARGS_ERROR;
        verify->same_seed |= i == OPT_SAME_SEED;
        verify->baseline |= i == OPT_BASELINE;
    }
    if (i != RV_ARGS_END)
        return i;
    verify->file_count = verify->args.count;
    for (unsigned k = 0; k < verify->file_count; k++)
        verify->files[k].path = verify->args.arguments[k];
    if (!read_order(verify, order))
        return RV_ARGS_ERROR;
    for (unsigned k = 0; k < type_count; k++)
        if (!read_type(verify, types[k]))
            return RV_ARGS_ERROR;
    return RV_ARGS_END;
}

/* ---- before the first run ---------------------------------------------------------------------------------------- */

static int check_type(const struct rv_verify *verify, const struct rv_verify_file *file, struct rv_error *err)
{
    const struct rv_config_type *type = &verify->types.config->types[file->type];

    if (strcmp(type->kind, "comfyui") == 0)
        return 0;
    (void)rv_error_set(err, ENOTSUP, CODE(UNSUPPORTED), "%s belongs to type %s, whose workers are of kind %s",
                       file->path, type->name, type->kind);
    rv_error_remedy(err, "only types of kind comfyui run graphs; --type A=TYPE chooses another one");
    return -ENOTSUP;
}

static int read_file(struct rv_verify *verify, struct rv_verify_file *file, struct rv_error *err)
{
    struct rv_graph *graph = NULL;
    struct rv_route route = {.type = RV_ROUTE_NO_TYPE};
    struct rv_error inner = {0};
    int r = rv_cli_read_file(file->path, &file->text, &file->length, err);

    if (r < 0)
        return r;
    if (file->length > RV_PAYLOAD_MAX)
        return rv_error_set(err, EFBIG, CODE(TOO_LARGE), "%s is larger than %u KiB", file->path, RV_PAYLOAD_MAX / 1024);
    r = rv_cli_parse_graph(file->path, file->text, file->length, &graph, err);
    if (r < 0)
        return r;
    if (graph->format != RV_GRAPH_PROMPT) {
        r = rv_error_set(err, EINVAL, CODE(BAD_REQUEST), "%s is a workflow of the editor", file->path);
        rv_error_remedy(err, "save it in API format (Workflow > Export (API)) and use that");
    } else {
        r = rv_graph_route(graph, file->wanted, verify->types.list, verify->types.count, &route, &inner);
        if (r < 0) {
            (void)rv_error_set(err, -r, inner.code, "%s: %s", file->path, inner.message);
            rv_error_remedy(err, "%s", inner.remedy);
        }
    }
    file->type = route.type;
    rv_graph_destroy(graph);
    return r < 0 ? r : check_type(verify, file, err);
}

static int read_files(struct rv_verify *verify, struct rv_error *err)
{
    int r = rv_cli_types_read(&verify->args, &verify->types, err);

    if (r == 0 && verify->types.count == 0) {
        r = rv_error_set(err, ENOENT, CODE(NO_SUCH_TYPE), "the configuration has no workflow types");
        rv_error_remedy(err, "name the configuration that resvisor was started with: --config FILE");
    }
    for (unsigned i = 0; r == 0 && i < verify->file_count; i++)
        r = read_file(verify, &verify->files[i], err);
    return r;
}

/*
 * A prompt that was run before is answered from ComfyUI's cache: its time says nothing. So each run gets other seeds,
 * also other ones than the last `verify` had.
 */
static int choose_seeds(struct rv_verify *verify, struct rv_error *err)
{
    uint32_t first = 0;

    if (verify->same_seed)
        return 0;
    if (getrandom(&first, sizeof(first), 0) != (ssize_t)sizeof(first))
        return rv_error_set(err, EIO, CODE(INTERNAL), "no random bytes for the seeds: %s", strerror(errno));
    for (unsigned i = 0; i < verify->run_count; i++)
        verify->runs[i].seed_offset = 1 + (first >> (32 - OFFSET_BITS)) + i;
    return 0;
}

/* ---- all together ------------------------------------------------------------------------------------------------ */

static int run_all(struct rv_verify *verify, struct rv_error *err)
{
    struct sigaction action = {.sa_handler = on_interrupt}; /* no SA_RESTART: waits end */
    struct rv_router router;
    int r = rv_router_init(&router, &verify->args, err);

    if (r < 0)
        return r;
    (void)sigaction(SIGINT, &action, NULL);
    (void)sigaction(SIGTERM, &action, NULL);
    for (unsigned i = 0; r == 0 && i < verify->run_count; i++)
        r = rv_verify_job(verify, &router, i, err);
    rv_router_fini(&router);
    if (r == 0 && verify->baseline)
        r = rv_verify_plain(verify, err);
    return r;
}

static int run_verify(int argc, char **argv)
{
    static struct rv_verify verify; /* large */
    struct rv_error err = {0};
    int r = read_arguments(&verify, argc, argv), exit_code;

    if (r != RV_ARGS_END)
        return rv_args_exit(&verify.args, r);
    r = read_files(&verify, &err);
    if (r == 0)
        r = choose_seeds(&verify, &err);
    if (r == 0)
        r = run_all(&verify, &err);
    if (r == 0)
        exit_code = rv_verify_show(&verify);
    else
        exit_code = rv_say_error(&err, verify.args.json);
    if (r < 0 && verify.job_failed)
        exit_code = RV_EXIT_JOB_FAILED; /* as `submit`: whatever the job's error */
    verify_fini(&verify);
    return exit_code;
}

const struct rv_command rv_command_verify = {
    .name = "verify",
    .arguments = "A.json B.json... [--order A,A,B,A] [--baseline] [OPTION]...",
    .summary = "Prove that ComfyUI workflows stay warm when they take turns.",
    .text =
        "Runs workflows in ComfyUI's API format as jobs, one after another, and prints for each run how long it took, "
        "what was\nread from files, which loader nodes ran, and how much of the models lies in the pool. Exit code 0 "
        "if "
        "after each switch\nnothing was read and the run took at most N times as long as a warm one, else 1.\n\n"
        "Only types of kind comfyui can be verified. Seeds are changed from run to run, since ComfyUI would answer a "
        "repeat\nfrom its cache. Ctrl-C ends everything, the running job too.",
    .common = RV_COMMON_CONFIG | RV_COMMON_JSON,
    .min_arguments = 2,
    .max_arguments = RV_VERIFY_FILES_MAX,
    .options = options,
    .run = run_verify,
};
