#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config_keys.h"
#include "error.h"
#include "verify.h"

#define REASONS_MAX 16u
#define REASON_LENGTH 256u
#define LOADERS_SHOWN 40u /* characters in the table */

enum verify_state {
    COLD,   /* the first time in this worker */
    WARM,   /* the same workflow ran just before */
    SWITCH, /* another one ran in between */
    STATES,
};

static const char *const state_names[] = {[COLD] = "cold", [WARM] = "warm", [SWITCH] = "switch"};
_Static_assert(sizeof(state_names) / sizeof(state_names[0]) == STATES, "a name per state");

/* Why the verdict is not good. */
struct verdict {
    char reasons[REASONS_MAX][REASON_LENGTH];
    unsigned count;
};

uint64_t rv_verify_number(const json_t *object, const char *name)
{
    json_int_t value = json_integer_value(json_object_get(object, name));

    return value > 0 ? (uint64_t)value : 0;
}

/* ---- comparing --------------------------------------------------------------------------------------------------- */

/* A run on a worker is compared with what that worker has done; on the plain process, with all runs. */
static enum verify_state state_of(const struct rv_verify *verify, unsigned number, bool plain)
{
    const struct rv_verify_run *run = &verify->runs[number];
    bool between = false;

    for (unsigned i = number; i-- > 0;) {
        const struct rv_verify_run *other = &verify->runs[i];

        if (other->file == run->file && (plain || strcmp(other->worker, run->worker) == 0))
            return between ? SWITCH : WARM;
        between |= other->file != run->file;
    }
    return COLD;
}

static uint64_t time_of(const struct rv_verify_run *run, bool plain)
{
    return plain ? rv_verify_number(run->plain, "run_us") : run->run_us;
}

static int compare_times(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

/* The median of a file's runs in one state; 0 = there is none. */
static uint64_t median(const struct rv_verify *verify, unsigned file, enum verify_state state, bool plain)
{
    uint64_t times[RV_VERIFY_RUNS_MAX];
    unsigned n = 0;

    for (unsigned i = 0; i < verify->run_count; i++)
        if (verify->runs[i].file == file && state_of(verify, i, plain) == state)
            times[n++] = time_of(&verify->runs[i], plain);
    if (n == 0)
        return 0;
    qsort(times, n, sizeof(times[0]), compare_times);
    return n % 2 ? times[n / 2] : (times[n / 2 - 1] + times[n / 2]) / 2;
}

/* ---- judging ----------------------------------------------------------------------------------------------------- */

static void add_reason(struct verdict *verdict, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add_reason(struct verdict *verdict, const char *format, ...)
{
    va_list ap;

    if (verdict->count == REASONS_MAX)
        return;
    va_start(ap, format);
    (void)vsnprintf(verdict->reasons[verdict->count++], REASON_LENGTH, format, ap);
    va_end(ap);
}

static void judge_run(const struct rv_verify *verify, unsigned number, struct verdict *verdict)
{
    const struct rv_verify_run *run = &verify->runs[number];
    uint64_t warm = median(verify, run->file, WARM, false);
    char bytes[32], time[32], reference[32];
    int letter = 'A' + (int)run->file;

    rv_format_size(run->read_bytes, bytes, sizeof(bytes));
    rv_format_duration(run->run_us, time, sizeof(time));
    rv_format_duration(warm, reference, sizeof(reference));
    if (run->read_bytes > 0)
        add_reason(verdict, "run %u (%c, after a switch) read %s", number + 1, letter, bytes);
    if (!json_is_true(json_object_get(run->report, "pooled")))
        add_reason(verdict, "run %u (%c): worker %s is unpooled, so what ComfyUI reads is not known", number + 1,
                   letter, run->worker);
    if (!verify->same_seed && json_array_size(json_object_get(run->report, "executed")) == 0)
        add_reason(verdict,
                   "run %u (%c, after a switch) computed nothing, so it shows nothing: give a workflow with a seed",
                   number + 1, letter);
    if (warm > 0 && (double)run->run_us > verify->factor * (double)warm)
        add_reason(verdict, "run %u (%c, after a switch) took %s, %.2f times the warm %s", number + 1, letter, time,
                   (double)run->run_us / (double)warm, reference);
}

static void judge(const struct rv_verify *verify, struct verdict *verdict)
{
    bool any = false;

    for (unsigned i = 0; i < verify->run_count; i++) {
        if (state_of(verify, i, false) == SWITCH) {
            judge_run(verify, i, verdict);
            any = true;
        }
    }
    if (!any)
        add_reason(verdict, "no run came after a switch in the same worker: each worker of a type has a first run; "
                            "give more runs by --order");
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static json_t *run_json(const struct rv_verify *verify, unsigned number)
{
    static const char *const counts[] = {"nodes",     "seeds",         "pool_files",   "own_files",
                                         "own_bytes", "aliased_bytes", "private_bytes"};
    const struct rv_verify_run *run = &verify->runs[number];
    const struct rv_verify_file *file = &verify->files[run->file];
    const char letter[2] = {(char)('A' + (int)run->file), '\0'};
    json_t *root = json_object(), *plain;

    rv_json_set_integer(root, "run", number + 1);
    rv_json_set_text(root, "workflow", letter);
    rv_json_set_text(root, "file", file->path);
    rv_json_set_text(root, "type", verify->types.config->types[file->type].name);
    rv_json_set_text(root, "worker", run->worker);
    rv_json_set_text(root, "state", state_names[state_of(verify, number, false)]);
    rv_json_set_integer(root, "wait_us", run->wait_us);
    rv_json_set_integer(root, "load_us", run->load_us);
    rv_json_set_integer(root, "run_us", run->run_us);
    rv_json_set_integer(root, "read_bytes", run->read_bytes);
    rv_json_set_integer(root, "seed_offset", run->seed_offset);
    for (unsigned i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
        rv_json_set_integer(root, counts[i], rv_verify_number(run->report, counts[i]));
    (void)json_object_set_new(root, "pooled", json_boolean(json_is_true(json_object_get(run->report, "pooled"))));
    (void)json_object_set(root, "executed", json_object_get(run->report, "executed"));
    (void)json_object_set(root, "loaders", json_object_get(run->report, "loaders"));
    if (run->plain) {
        plain = json_copy(run->plain);
        rv_json_set_text(plain, "state", state_names[state_of(verify, number, true)]);
        (void)json_object_set_new(root, "baseline", plain);
    }
    return root;
}

static json_t *file_json(const struct rv_verify *verify, unsigned number)
{
    static const char *const keys[2][STATES] = {{"cold_us", "warm_us", "switch_us"},
                                                {"plain_cold_us", "plain_warm_us", "plain_switch_us"}};
    const char letter[2] = {(char)('A' + (int)number), '\0'};
    json_t *root = json_object();

    rv_json_set_text(root, "workflow", letter);
    rv_json_set_text(root, "file", verify->files[number].path);
    rv_json_set_text(root, "type", verify->types.config->types[verify->files[number].type].name);
    for (unsigned plain = 0; plain <= verify->baseline; plain++) {
        for (unsigned i = 0; i < STATES; i++) {
            uint64_t time = median(verify, number, (enum verify_state)i, plain);

            (void)json_object_set_new(root, keys[plain][i], time ? json_integer((json_int_t)time) : json_null());
        }
    }
    return root;
}

static void print_json(const struct rv_verify *verify, const struct verdict *verdict)
{
    json_t *root = json_object(), *runs = json_array(), *files = json_array(), *reasons = json_array();

    for (unsigned i = 0; i < verify->run_count; i++)
        (void)json_array_append_new(runs, run_json(verify, i));
    for (unsigned i = 0; i < verify->file_count; i++)
        (void)json_array_append_new(files, file_json(verify, i));
    for (unsigned i = 0; i < verdict->count; i++)
        (void)json_array_append_new(reasons, rv_json_text(verdict->reasons[i]));
    (void)json_object_set_new(root, "good", json_boolean(verdict->count == 0));
    (void)json_object_set_new(root, "reasons", reasons);
    (void)json_object_set_new(root, "factor", json_real(verify->factor));
    (void)json_object_set_new(root, "workflows", files);
    (void)json_object_set_new(root, "runs", runs);
    if (verify->baseline)
        rv_json_set_integer(root, "baseline_ready_us", verify->plain_ready_us);
    rv_json_print(root);
}

/* ---- text -------------------------------------------------------------------------------------------------------- */

/* "-", or the classes that ran, each once. */
static void loader_text(const json_t *report, char *buffer, size_t size)
{
    const json_t *list = json_object_get(report, "loaders"), *value, *other;
    size_t i, k, n = 0;

    (void)snprintf(buffer, size, "-");
    json_array_foreach (list, i, value) {
        const char *name = json_string_value(value);
        bool seen = !name;

        json_array_foreach (list, k, other)
            seen |= k < i && json_equal(other, value);
        if (seen)
            continue;
        if (n + strlen(name) + 5 > size) {
            (void)snprintf(buffer + n, size - n, " ...");
            return;
        }
        n += (size_t)snprintf(buffer + n, size - n, "%s%s", n ? " " : "", name);
    }
}

static void add_size(struct rv_table *table, uint64_t bytes)
{
    char text[32];

    rv_format_size(bytes, text, sizeof(text));
    rv_table_add(table, "%s", text);
}

static void add_time(struct rv_table *table, uint64_t us)
{
    char text[32];

    rv_format_duration(us, text, sizeof(text));
    rv_table_add(table, "%s", text);
}

static void print_runs(const struct rv_verify *verify)
{
    static const char *const titles[] = {"RUN",   "STATE",   "WORKER",   ">WAIT",  ">LOAD",       ">TIME",
                                         ">READ", "LOADERS", ">IN POOL", ">PLAIN", ">PLAIN READ", NULL};
    const char *shown[sizeof(titles) / sizeof(titles[0])];
    char loaders[LOADERS_SHOWN + 8];
    struct rv_table table;

    memcpy(shown, titles, sizeof(shown));
    if (!verify->baseline)
        shown[9] = NULL;
    rv_table_init(&table, shown);
    for (unsigned i = 0; i < verify->run_count; i++) {
        const struct rv_verify_run *run = &verify->runs[i];

        loader_text(run->report, loaders, sizeof(loaders));
        rv_table_add(&table, "%u %c", i + 1, 'A' + (int)run->file);
        rv_table_add(&table, "%s", state_names[state_of(verify, i, false)]);
        rv_table_add(&table, "%s", run->worker);
        add_time(&table, run->wait_us);
        add_time(&table, run->load_us);
        add_time(&table, run->run_us);
        add_size(&table, run->read_bytes);
        rv_table_add(&table, "%s", loaders);
        add_size(&table, rv_verify_number(run->report, "aliased_bytes"));
        if (!verify->baseline)
            continue;
        add_time(&table, rv_verify_number(run->plain, "run_us"));
        add_size(&table, rv_verify_number(run->plain, "disk_bytes"));
    }
    rv_table_print(&table);
}

/* "A: cold 1.2 s, warm 300 ms, after a switch 310 ms (1.03 x warm)" */
static void print_times(const struct rv_verify *verify, unsigned file, bool plain)
{
    static const char *const words[] = {"cold", "warm", "after a switch"};
    uint64_t warm = median(verify, file, WARM, plain);
    const char *comma = "";
    char text[32];

    printf("%c%s: ", 'A' + (int)file, plain ? " plain" : "");
    for (unsigned i = 0; i < STATES; i++) {
        uint64_t time = median(verify, file, (enum verify_state)i, plain);

        if (time == 0)
            continue;
        rv_format_duration(time, text, sizeof(text));
        printf("%s%s %s", comma, words[i], text);
        if (i == SWITCH && warm > 0)
            printf(" (%.2f x warm)", (double)time / (double)warm);
        comma = ", ";
    }
    printf("\n");
}

/* What makes the times say less than they seem to. */
static void print_notes(const struct rv_verify *verify)
{
    char text[32];

    for (unsigned i = 0; i < verify->run_count; i++) {
        const struct rv_verify_run *run = &verify->runs[i];

        if (json_array_size(json_object_get(run->report, "executed")) == 0)
            printf("note: run %u (%c) computed nothing: ComfyUI answered it from its cache%s\n", i + 1,
                   'A' + (int)run->file,
                   rv_verify_number(run->report, "seeds") == 0 ? ", since the graph has no seed" : "");
        if (state_of(verify, i, false) == SWITCH && median(verify, run->file, WARM, false) == 0)
            printf("note: %c has no warm run; only what was read is judged\n", 'A' + (int)run->file);
    }
    if (verify->baseline) {
        rv_format_duration(verify->plain_ready_us, text, sizeof(text));
        printf("note: the plain ComfyUI was ready after %s; PLAIN READ is from disks, the page cache not counted\n",
               text);
    }
}

static void print_text(const struct rv_verify *verify, const struct verdict *verdict)
{
    char safe[512];

    for (unsigned i = 0; i < verify->file_count; i++)
        printf("%c = %s, type %s\n", 'A' + (int)i,
               rv_escape(safe, sizeof(safe), verify->files[i].path, strlen(verify->files[i].path)),
               verify->types.config->types[verify->files[i].type].name);
    printf("\n");
    print_runs(verify);
    printf("\n");
    for (unsigned i = 0; i < verify->file_count; i++)
        for (unsigned plain = 0; plain <= verify->baseline; plain++)
            print_times(verify, i, plain);
    print_notes(verify);
    for (unsigned i = 0; i < verdict->count; i++)
        printf("not good: %s\n", rv_escape(safe, sizeof(safe), verdict->reasons[i], strlen(verdict->reasons[i])));
    if (verdict->count == 0)
        printf("verdict: good. After a switch nothing was read, and no run took more than %.2f times a warm one\n",
               verify->factor);
    else
        printf("verdict: not good\n");
}

int rv_verify_show(const struct rv_verify *verify)
{
    static struct verdict verdict;

    judge(verify, &verdict);
    if (verify->args.json)
        print_json(verify, &verdict);
    else
        print_text(verify, &verdict);
    return verdict.count == 0 ? RV_EXIT_DONE : 1;
}
