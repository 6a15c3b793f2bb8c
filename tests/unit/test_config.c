/* The configuration: every kind of problem, where values come from, limits, and that the documents match the table. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "config.h"
#include "config_keys.h"

static char folder[64]; /* the test's own; has models/a.safetensors, executor.so */

static char *path_of(const char *name)
{
    static char path[256];

    (void)snprintf(path, sizeof(path), "%s/%s", folder, name);
    return path;
}

static void write_bytes(const char *name, const void *bytes, size_t length)
{
    FILE *f = fopen(path_of(name), "w");

    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, length, f), length);
    assert_int_equal(fclose(f), 0);
}

static void write_text(const char *name, const char *text)
{
    write_bytes(name, text, strlen(text));
}

/* ---- loading ----------------------------------------------------------------------------------------------------- */

static char problems[65536];

/* Loads c.yaml of the folder with flags; what was complained about is in `problems`. */
static int load_with(const char *const *sets, struct rv_config **ret_config)
{
    struct rv_config_sources sources = {path_of("c.yaml"), sets};
    FILE *out = fmemopen(problems, sizeof(problems), "w");
    int r;

    problems[0] = '\0'; /* fmemopen leaves what is there until something is written */
    assert_non_null(out);
    r = rv_config_load(&sources, out, ret_config);
    assert_int_equal(fclose(out), 0);
    if (r == 0 && problems[0])
        fail_msg("no failure, but: %s", problems);
    return r;
}

static struct rv_config *load_good(const char *text, const char *const *sets)
{
    struct rv_config *config = NULL;

    write_text("c.yaml", text);
    if (load_with(sets, &config) < 0)
        fail_msg("refused: %s", problems);
    return config;
}

/* The text is refused, and the complaint has the piece. */
static void refused(const char *text, const char *piece)
{
    struct rv_config *config = NULL;

    write_text("c.yaml", text);
    assert_int_equal(load_with(NULL, &config), -22);
    if (!strstr(problems, piece))
        fail_msg("\"%s\" is not in: %s", piece, problems);
}

static void refused_flag(const char *flag, const char *piece)
{
    const char *sets[] = {flag, NULL};
    struct rv_config *config = NULL;

    write_text("c.yaml", "");
    assert_int_equal(load_with(sets, &config), -22);
    if (!strstr(problems, piece))
        fail_msg("\"%s\" is not in: %s", piece, problems);
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

static void test_every_default_is_valid_and_every_row_has_a_text(void **state)
{
    struct rv_config *config = load_good("", NULL);

    (void)state;
    for (unsigned i = 0; rv_key_at(i); i++) {
        const struct rv_key *key = rv_key_at(i);

        assert_true(strlen(key->help) > 10);
        assert_ptr_equal(rv_key_find(key->pattern), key);
        assert_true(rv_key_number(key) < RV_KEYS_PER_SCOPE);
        for (unsigned k = 0; k < i; k++)
            assert_string_not_equal(rv_key_at(k)->pattern, key->pattern);
    }
    assert_true(config->rpc_enabled);
    assert_int_equal(config->log_level, RV_LOG_INFO);
    assert_int_equal(config->clients_gid, -1);
    assert_true(config->pool_budget > 0 && config->pool_budget < rv_machine_memory());
    assert_string_equal(config->pool_backend, "memfd");
    rv_config_destroy(config);
}

static void test_a_full_file_is_read(void **state)
{
    char text[2048];
    struct rv_config *c;
    const struct rv_config_type *t;

    (void)state;
    (void)snprintf(
        text, sizeof(text),
        "runtime_dir: /tmp/rv-x\n"
        "log_level: debug\n"
        "clients: {max: 7, max_leases: 9}\n"
        "rpc: {enabled: yes, result_bytes: 2MiB, result_count: 3, result_age: 90s, jobs: 100}\n"
        "pool:\n  budget: 1.5GiB\n  huge_pages: auto\n  load_timeout: 2m\n  load_retry: 0\n  max_loads: 4\n"
        "  direct: never\n"
        "model_folders: [models]\n"
        "models:\n  a: a.safetensors\n  b.c: {path: later.safetensors, pin: on, preload: true, format: blob}\n"
        "types:\n"
        "  image:\n    executor: %s/executor.so\n    models: [b.c, a]\n    workers: 2\n    queue: 5\n"
        "    accepts: [image, any]\n"
        "    env: {HOME: /x, A_1: \"\"}\n    job_timeout: 1h\n    mapping: shared\n",
        folder);
    c = load_good(text, NULL);
    t = &c->types[0];
    assert_string_equal(c->runtime_dir, "/tmp/rv-x");
    assert_int_equal(c->log_level, RV_LOG_DEBUG);
    assert_int_equal(c->max_clients, 7);
    assert_int_equal(c->rpc_result_bytes, 2 << 20);
    assert_int_equal(c->rpc_result_age_us, 90000000);
    assert_int_equal(c->pool_budget, 3ull << 29);
    assert_int_equal(c->huge_pages, RV_HUGE_AUTO);
    assert_int_equal(c->load_timeout_us, 120000000);
    assert_int_equal(c->load_retry_us, 0);
    assert_string_equal(c->pool_direct, "never");
    assert_int_equal(c->folder_count, 1);
    assert_int_equal(c->model_count, 2);
    assert_string_equal(c->models[0].path, path_of("models/a.safetensors"));
    assert_string_equal(c->models[1].name, "b.c");
    assert_string_equal(c->models[1].path, path_of("models/later.safetensors"));
    assert_true(c->models[1].pin && c->models[1].preload && !c->models[0].pin);
    assert_int_equal(c->type_count, 1);
    assert_string_equal(t->executor, path_of("executor.so"));
    assert_string_equal(t->models[0], "b.c");
    assert_int_equal(t->model_count, 2);
    assert_int_equal(t->accept_count, 2);
    assert_string_equal(t->accepts[1], "any");
    assert_int_equal(t->env_count, 2);
    assert_string_equal(t->env[1].value, "");
    assert_int_equal(t->job_timeout_us, 3600000000);
    assert_string_equal(t->mapping, "shared");
    rv_config_destroy(c);
}

static void test_precedence_is_flag_environment_file_default(void **state)
{
    static const char text[] = "pool:\n  budget: 1GiB\n";
    const char *sets[] = {"pool.budget=3GiB", NULL};
    char *shown = NULL;
    size_t length;
    FILE *out;
    struct rv_config *c;

    (void)state;
    c = load_good(text, NULL);
    assert_int_equal(c->pool_budget, 1ull << 30);
    rv_config_destroy(c);
    assert_int_equal(setenv("RESVISOR_POOL_BUDGET", "2GiB", 1), 0);
    c = load_good(text, NULL);
    assert_int_equal(c->pool_budget, 2ull << 30);
    rv_config_destroy(c);
    c = load_good(text, sets);
    assert_int_equal(c->pool_budget, 3ull << 30);
    rv_config_destroy(c);
    assert_int_equal(unsetenv("RESVISOR_POOL_BUDGET"), 0);

    assert_int_equal(setenv("RESVISOR_LOG_LEVEL", "error", 1), 0);
    c = load_good("clients:\n\n  max: 7\n", sets);
    assert_int_equal(unsetenv("RESVISOR_LOG_LEVEL"), 0);
    out = open_memstream(&shown, &length);
    rv_config_show(c, out, false);
    assert_int_equal(fclose(out), 0);
    assert_non_null(strstr(shown, "c.yaml:3"));
    assert_non_null(strstr(shown, "# environment RESVISOR_LOG_LEVEL"));
    assert_non_null(strstr(shown, "# command line"));
    assert_non_null(strstr(shown, "# default"));
    free(shown);
    rv_config_destroy(c);
}

static void test_flags_reach_types_models_and_lists(void **state)
{
    char executor[128];
    const char *sets[] = {"types.my.type.queue=5",     executor,
                          "types.my.type.env.HOME=/y", "types.my.type.env.B=2",
                          "model_folders=models",      "models.a.path=a.safetensors",
                          "types.my.type.models=a",    NULL};
    struct rv_config *c;

    (void)state;
    (void)snprintf(executor, sizeof(executor), "types.my.type.executor=%s/executor.so", folder);
    assert_int_equal(chdir(folder), 0);
    c = load_good("", sets);
    assert_int_equal(c->type_count, 1);
    assert_string_equal(c->types[0].name, "my.type");
    assert_int_equal(c->types[0].queue, 5);
    assert_int_equal(c->types[0].env_count, 2);
    assert_string_equal(c->types[0].env[0].value, "/y");
    assert_string_equal(c->types[0].models[0], "a");
    assert_string_equal(c->models[0].path, path_of("models/a.safetensors"));
    rv_config_destroy(c);
    refused_flag("pool.budget", "pool.budget: has no value");
    refused_flag("pool.bugdet=1", "pool.bugdet: unknown key, did you mean \"budget\"?");
    refused_flag("types.x.queu=1", "did you mean \"queue\"?");
    refused_flag("types.x=1", "unknown key");
    refused_flag("=1", "unknown key");
    refused_flag("types..queue=1", "is not a name");
    refused_flag("types.x.env.1A=1", "is not the name of an environment variable");
    refused_flag("types.*.queue=1", "is not a name");
}

static void test_wrong_values_name_line_key_and_what_is_allowed(void **state)
{
    (void)state;
    refused("\n\npool:\n  budget: 10GB\n", "c.yaml:4: pool.budget: \"10GB\" has an unknown unit; allowed: a size");
    refused("pool:\n  budget: 101%\n", "is more than 100%");
    refused("pool:\n  budget: 99999999TiB\n", "is too large");
    refused("pool:\n  budget: 99999999999999999999999999999\n", "is not a number with a unit");
    refused("pool:\n  budget: 1.\n", "is not a number with a unit");
    refused("pool:\n  budget:\n", "the value is missing");
    refused("pool:\n  budget: [1]\n", "is a list; allowed: a size");
    refused("pool:\n  load_timeout: 10\n", "has no unit; allowed: a duration");
    refused("pool:\n  load_timeout: 1ms\n", "is too small");
    refused("pool:\n  max_loads: -1\n", "is not a whole number; allowed: a whole number from 1 to 64");
    refused("pool:\n  max_loads: 0\n", "is too small");
    refused("pool:\n  max_loads: 4294967296\n", "is too large");
    refused("pool:\n  huge_pages: atuo\n", "did you mean \"auto\"?; allowed: one of off, auto, only");
    refused("pool: 3\n", "c.yaml:1: pool: is a single value; allowed: a map");
    refused("rpc: {enabled: maybe}\n", "is neither true nor false");
    refused("rpc: {result_bytes: 50%}\n", "has an unknown unit");
    refused("model_folders: models\n", "model_folders: is a single value; allowed: a list of paths");
    refused("model_folders: [[a]]\n", "an element is a list, not a text");
    refused("model_folders: [\"\"]\n", "an element is empty");
    refused("types: {a: {accepts: [imgae]}}\n",
            "types.a.accepts: \"imgae\" is not known, did you mean \"image\"?; allowed: a list of these: image, video");
    refused("types: {a: {env: [x]}}\n", "types.a.env: is a list");
    refused("types: {a: {env: {\"A B\": x}}}\n", "is not the name of an environment variable");
    refused("log_level: \"\\e[31m\"\n", "\"\\x1b[31m\" is not known"); /* nothing from the file reaches the terminal */
}

static void test_wrong_keys_get_a_suggestion(void **state)
{
    (void)state;
    refused("pools: {}\n", "c.yaml:1: pools: unknown key, did you mean \"pool\"?");
    refused("pool: {bugdet: 1}\n", "pool.bugdet: unknown key, did you mean \"budget\"?");
    refused("pool: {huge: auto}\n", "did you mean \"huge_pages\"?");
    refused("xyzzy: 1\n", "xyzzy: unknown key; `resvisor check --reference` lists all keys");
    refused("types: {a: {worker: 1}}\n", "types.a.worker: unknown key, did you mean \"workers\"?");
    refused("\"pool.budget\": 1\n", "pool.budget: unknown key");
    refused("\"types.*.queue\": 1\n", "types.*.queue: unknown key");
    refused("types: {a: {\"env.HOME\": 1}}\n", "types.a.env.HOME: unknown key");
    refused("\"*\": 1\n", "unknown key");
    refused("\"\": 1\n", "unknown key");
    refused("log_level: info\npool: {}\nlog_level: debug\n", "c.yaml:3: log_level: is here twice, first in line 1");
    refused("models: {a: x, a: y}\n", "models.a: is here twice");
    refused("models: {\"a b\": x}\n", "\"a b\" is not a name");
    refused("types: {router: {executor: image}}\n", "is the name of a log of resvisor itself");
    refused("types: {a: {env: {RESVISOR_INCARNATION: \"1\"}}}\n", "is set by resvisor itself");
    refused("models: {a: [x]}\n", "models.a: is a list; allowed: a map or the path of a file");
    refused("? [a]\n: b\n", "a key must be a word");
}

static void test_yaml_faults_have_a_place(void **state)
{
    char deep[64], *huge = malloc(1100000);

    (void)state;
    refused("pool:\n  budget: [1\n", "c.yaml:3: YAML syntax, column ");
    refused("pool:\n\tbudget: 1\n", "c.yaml:2: YAML syntax");
    refused("log_level: \"info", "YAML syntax");
    refused("a: &x 1\nb: *x\n", "c.yaml:2: aliases (*name) are not supported");
    refused("log_level: info\n---\nlog_level: info\n", "c.yaml:2: a second document");
    refused("- a\n", "the file holds a list; allowed: a map of keys");
    refused("log_level: \"a\\0b\"\n", "a text with a NUL byte");
    refused("log_level: \xff\xfe\n", "not readable as text");
    memset(deep, '[', sizeof(deep));
    deep[sizeof(deep) - 1] = '\0';
    refused(deep, "nested too deep; at most 8 levels");
    assert_non_null(huge);
    memset(huge, '#', 1100000);
    write_bytes("c.yaml", huge, 1100000);
    free(huge);
    {
        struct rv_config *config = NULL;

        assert_int_equal(load_with(NULL, &config), -22);
        assert_non_null(strstr(problems, "c.yaml: is larger than 1 MiB"));
    }
    rv_config_destroy(load_good("# only a comment\n", NULL));
    rv_config_destroy(load_good("pool:\n  # nothing\ntypes:\n", NULL));
    rv_config_destroy(load_good("log_level: &anchor info\n", NULL));
}

static void test_files_that_are_no_files_are_refused(void **state)
{
    struct rv_config *config = NULL;

    (void)state;
    assert_int_equal(unlink(path_of("c.yaml")), 0);
    assert_int_equal(load_with(NULL, &config), -22);
    assert_non_null(strstr(problems, "cannot be read: No such file"));
    assert_int_equal(mkdir(path_of("c.yaml"), 0700), 0);
    assert_int_equal(load_with(NULL, &config), -22);
    assert_non_null(strstr(problems, "is not a regular file"));
    assert_int_equal(rmdir(path_of("c.yaml")), 0);
    assert_int_equal(mkfifo(path_of("c.yaml"), 0600), 0); /* does not block */
    assert_int_equal(load_with(NULL, &config), -22);
    assert_non_null(strstr(problems, "is not a regular file"));
    assert_int_equal(unlink(path_of("c.yaml")), 0);
}

static void test_what_refers_to_something_is_checked(void **state)
{
    char text[1024];

    (void)state;
    refused("clients: {group: no-such-group-9}\n", "clients.group: there is no group \"no-such-group-9\"");
    refused("model_folders: [nowhere]\n", "No such file or directory; allowed: folders that exist");
    refused("model_folders: [c.yaml]\n", "is not a folder");
    refused("model_folders: [models]\nmodels: {a: /etc/passwd}\n",
            "models.a.path: /etc/passwd lies outside model_folders");
    refused("model_folders: [models]\nmodels: {a: ../x}\n", "lies outside model_folders");
    refused("models: {a: x}\n", "there are no model_folders");
    refused("model_folders: [models]\nmodels: {a: {pin: true}}\n", "models.a.path: is missing");
    refused("types: {a: {}}\n", "c.yaml:1: types.a.executor: is missing");
    refused("types: {a: {executor: no-such-executor}}\n", "no-such-executor.so: No such file");
    refused("types: {a: {executor: ./x.so}}\n", "is a relative path");
    refused("types: {a: {kind: python}}\n", "c.yaml:1: types.a.script: is missing");
    refused("types: {a: {kind: python, script: no-such.py}}\n", "no-such.py: No such file");
    refused("types: {a: {kind: python, script: c.yaml, python: no-such-python}}\n",
            "no program \"no-such-python\" is in PATH");
    refused("types: {a: {kind: python, script: c.yaml, executor: image}}\n", "allowed with kind: native");
    refused("types: {a: {executor: image, args: [x]}}\n", "allowed with kind: python|comfyui");
    refused("types: {a: {kind: comfyui}}\n", "c.yaml:1: types.a.directory: is missing");
    refused("types: {a: {kind: comfyui, directory: models}}\n", "main.py: No such file");
    refused("types: {a: {kind: comfyui, directory: ., executor: image}}\n", "allowed with kind: native");
    refused("types: {a: {kind: comfyui, directory: ., script: c.yaml}}\n", "allowed with kind: python");
    refused("types: {a: {kind: comfyui, directory: ., models: []}}\n", "allowed with kind: native|python");
    refused("types: {a: {kind: comfyui, directory: ., pooling: never}}\n", "preferred, required");
    refused("types: {a: {kind: python, script: c.yaml, directory: .}}\n", "allowed with kind: comfyui");
    refused("types: {a: {executor: /tmp}}\n", "/tmp is not a readable file");
    (void)snprintf(text, sizeof(text),
                   "model_folders: [models]\nmodels: {first: a.safetensors}\n"
                   "types:\n  a:\n    executor: %s/executor.so\n    models: [frist]\n",
                   folder);
    refused(text, "c.yaml:6: types.a.models: there is no model \"frist\", did you mean \"first\"?");
    (void)snprintf(text, sizeof(text), "types: {a: {executor: %s/executor.so, ping_interval: 30s, ping_timeout: 1s}}\n",
                   folder);
    refused(text, "ping_timeout: is shorter than ping_interval");
    refused("runtime_dir: /aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n",
            "since socket paths are short");
}

static void test_tcp_needs_a_good_address_and_a_secret_token(void **state)
{
    static const char text[] = "rpc: {tcp: \"127.0.0.1:5600\", token_file: token}\n";
    struct rv_config *c;

    (void)state;
    refused("rpc: {tcp: \"127.0.0.1\"}\n", "rpc.tcp: \"127.0.0.1\" is not an address");
    refused("rpc: {tcp: \"h:0\", token_file: token}\n", "is not an address");
    refused("rpc: {tcp: \"h:65536\", token_file: token}\n", "is not an address");
    refused("rpc: {tcp: \"::1:80\", token_file: token}\n", "is not an address");
    refused("rpc: {tcp: \"h;x:80\", token_file: token}\n", "is not an address");
    refused("rpc: {tcp: \"127.0.0.1:5600\"}\n", "rpc.tcp: needs rpc.token_file");
    refused("rpc: {events_tcp: \"127.0.0.1:5600\", enabled: false}\n", "is set, but rpc.enabled is false");
    refused(text, "token: No such file");
    write_text("token", "");
    assert_int_equal(chmod(path_of("token"), 0600), 0);
    refused(text, "holds 0 bytes");
    write_text("token", "secret\n");
    assert_int_equal(chmod(path_of("token"), 0640), 0);
    refused(text, "has mode 0640; allowed: nothing for group and others");
    assert_int_equal(chmod(path_of("token"), 0600), 0);
    c = load_good(text, NULL);
    assert_string_equal(c->rpc_token_file, path_of("token"));
    rv_config_destroy(c);
    rv_config_destroy(load_good("http: {listen: \"0.0.0.0:80\", token_file: token}\n", NULL));
    rv_config_destroy(load_good("http: {listen: \"localhost:80\"}\n", NULL));
    rv_config_destroy(load_good("http: {listen: \"[::1]:80\", connections: 4, timeout: 1s}\n", NULL));
    refused("http: {listen: \"0.0.0.0:80\"}\n", "is not a loopback address, so it needs http.token_file");
    refused("http: {listen: \"[::]:80\"}\n", "is not a loopback address, so it needs http.token_file");
    refused("http: {listen: \"128.0.0.1:80\"}\n", "is not a loopback address, so it needs http.token_file");
    refused("http: {listen: \"example.org:80\", token_file: token}\n", "neither a number nor localhost");
    refused("http: {listen: \"127.0.0.1\"}\n", "http.listen: \"127.0.0.1\" is not an address");
    refused("http: {listen: \"[1.2.3.4]:80\"}\n", "neither a number nor localhost");
    rv_config_destroy(load_good("rpc: {tcp: \"[::1]:5600\", token_file: token}\n", NULL));
}

static void test_all_problems_are_told_and_many_are_counted(void **state)
{
    char text[4096] = "";
    unsigned lines = 0;

    (void)state;
    refused("log_level: x\npool: {budget: x}\nfoo: 1\n", "c.yaml:1:");
    assert_non_null(strstr(problems, "c.yaml:2:"));
    assert_non_null(strstr(problems, "c.yaml:3:"));
    for (unsigned i = 0; i < 60; i++)
        (void)snprintf(text + strlen(text), sizeof(text) - strlen(text), "k%u: 1\n", i);
    refused(text, "and 10 problems more");
    for (const char *p = problems; *p; p++)
        lines += *p == '\n';
    assert_int_equal(lines, 51);
}

static void test_limits_of_lists_and_names(void **state)
{
    char text[8192] = "types:\n";

    (void)state;
    for (unsigned i = 0; i < 33; i++)
        (void)snprintf(text + strlen(text), sizeof(text) - strlen(text), "  t%u: {executor: %s/executor.so}\n", i,
                       folder);
    refused(text, "types: too many; at most 32 are allowed");
    (void)snprintf(text, sizeof(text), "types: {a: {models: [");
    for (unsigned i = 0; i < 17; i++)
        (void)snprintf(text + strlen(text), sizeof(text) - strlen(text), "m%u, ", i);
    (void)snprintf(text + strlen(text), sizeof(text) - strlen(text), "]}}\n");
    refused(text, "more than 16 elements");
    (void)snprintf(text, sizeof(text), "models: {%065d: x}\n", 1);
    refused(text, "is not a name");
}

static void test_the_runtime_directory_is_found_without_the_rest(void **state)
{
    const char *sets[] = {"runtime_dir=/tmp/flag", NULL};
    struct rv_config_sources sources = {path_of("c.yaml"), NULL};
    char found[256], problem[256];

    (void)state;
    write_text("c.yaml", "runtime_dir: run\nnonsense: [1, {}]\n");
    assert_int_equal(rv_config_find_runtime_dir(&sources, found, sizeof(found), problem, sizeof(problem)), 0);
    assert_string_equal(found, path_of("run"));
    sources.file = path_of("c.yaml");
    sources.sets = sets;
    assert_int_equal(rv_config_find_runtime_dir(&sources, found, sizeof(found), problem, sizeof(problem)), 0);
    assert_string_equal(found, "/tmp/flag");
    sources.sets = NULL;
    write_text("c.yaml", "runtime_dir: [\n");
    sources.file = path_of("c.yaml");
    assert_true(rv_config_find_runtime_dir(&sources, found, sizeof(found), problem, sizeof(problem)) < 0);
    assert_non_null(strstr(problem, "YAML syntax"));
    assert_true(rv_config_find_runtime_dir(&sources, found, 3, problem, sizeof(problem)) < 0);
}

static void test_sizes_and_durations_for_people(void **state)
{
    static const struct {
        uint64_t value;
        const char *size, *duration;
    } rows[] = {{0, "0 B", "0 s"},
                {1023, "1023 B", "1 ms"},
                {1536, "1.5 KiB", "1.5 ms"},
                {1ull << 30, "1 GiB", "17.8 m"},
                {UINT64_MAX, "16777215.9 TiB", "213503982.3 d"}};
    char text[64];

    (void)state;
    for (unsigned i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        rv_format_size(rows[i].value, text, sizeof(text));
        assert_string_equal(text, rows[i].size);
        rv_format_duration(rows[i].value, text, sizeof(text));
        assert_string_equal(text, rows[i].duration);
    }
}

static void test_the_json_of_show_is_whole(void **state)
{
    struct rv_config *c = load_good("model_folders: [models]\nmodels: {a: a.safetensors}\n", NULL);
    char *text = NULL;
    size_t length;
    FILE *out = open_memstream(&text, &length);

    (void)state;
    rv_config_show(c, out, true);
    assert_int_equal(fclose(out), 0);
    assert_non_null(strstr(text, "\"key\": \"models.a.path\""));
    assert_non_null(strstr(text, "\"unit\": \"bytes\""));
    free(text);
    rv_config_destroy(c);
}

/* docs/configuration.md is what the table says: `resvisor check --reference > docs/configuration.md` mends it. */
static void test_the_document_matches_the_table(void **state)
{
    static char document[262144];
    char *text = NULL;
    size_t length, n;
    FILE *out = open_memstream(&text, &length), *f = fopen(RV_SOURCE_DIR "/docs/configuration.md", "r");

    (void)state;
    assert_non_null(f);
    rv_config_write_reference(out);
    assert_int_equal(fclose(out), 0);
    n = fread(document, 1, sizeof(document) - 1, f);
    document[n] = '\0';
    assert_int_equal(fclose(f), 0);
    assert_true(n == length && memcmp(document, text, n) == 0);
    free(text);
}

static void test_devices_have_names_shares_and_a_place_in_types(void **state)
{
    static const char uuid[] = "GPU-0123abcd-0123-4567-89ab-0123456789ab";
    char text[1024], executor[128], *shown = NULL;
    const char *sets[] = {"devices.cuda:1.budget=3GiB", "cuda.reserve=1GiB", NULL};
    struct rv_config *c;
    size_t length;
    FILE *out;

    (void)state;
    (void)snprintf(text, sizeof(text),
                   "cuda:\n  revoke_timeout: 3s\n"
                   "devices:\n  cuda:0:\n    backend: cuda-ipc\n    budget: 50%%\n"
                   "  cuda:1: {budget: 1GiB}\n  %s: {backend: memfd}\n"
                   "types:\n  a: {executor: %s/executor.so, device: cuda:1}\n"
                   "  b: {executor: %s/executor.so, device: %s}\n  c: {executor: %s/executor.so}\n",
                   uuid, folder, folder, uuid, folder);
    c = load_good(text, sets);
    assert_string_equal(c->cuda, "auto");
    assert_int_equal(c->revoke_timeout_us, 3000000);
    assert_int_equal(c->cuda_reserve, 1 << 30);
    assert_int_equal(c->device_count, 3);
    assert_string_equal(c->devices[0].name, "cuda:0");
    assert_string_equal(c->devices[0].backend, "cuda-ipc");
    assert_true(c->devices[0].budget == 0 && c->devices[0].budget_percent == 50);
    assert_true(c->devices[1].budget == 3ull << 30 && c->devices[1].budget_percent == 0);
    assert_true(c->devices[2].budget == 0 && c->devices[2].budget_percent == 90);
    assert_string_equal(c->devices[2].name, uuid);
    assert_string_equal(c->types[0].device, "cuda:1");
    assert_string_equal(c->types[1].device, uuid);
    assert_string_equal(c->types[2].device, "auto");
    for (int json = 0; json < 2; json++) {
        out = open_memstream(&shown, &length);
        rv_config_show(c, out, json);
        assert_int_equal(fclose(out), 0);
        assert_non_null(strstr(shown, "devices.cuda:0.budget"));
        assert_non_null(strstr(shown, "50%"));
        assert_non_null(strstr(shown, json ? "3221225472" : "3 GiB"));
        free(shown);
    }
    rv_config_destroy(c);

    assert_int_equal(setenv("RESVISOR_CUDA_ENABLED", "off", 1), 0);
    (void)snprintf(executor, sizeof(executor), "types: {a: {executor: %s/executor.so, device: cuda:0}}\n", folder);
    refused(executor, "c.yaml:1: types.a.device: is cuda:0, but cuda.enabled is off; allowed: host");
    assert_int_equal(unsetenv("RESVISOR_CUDA_ENABLED"), 0);
}

static void test_wrong_devices_are_refused_with_a_suggestion(void **state)
{
    static const struct {
        const char *text, *piece;
    } rows[] = {
        {"devices:\n  gpu0: {}\n", "c.yaml:2: devices: \"gpu0\" is not a device, did you mean \"cuda:0\"?"},
        {"devices: {CUDA:3: {}}\n", "did you mean \"cuda:3\"?"},
        {"devices: {cuda: {}}\n", "did you mean \"cuda:0\"?"},
        {"devices: {\"1\": {}}\n", "did you mean \"cuda:1\"?"},
        {"devices: {\"\": {}}\n", "\"\" is not a device; allowed: cuda:0 to cuda:15"},
        {"devices: {cuda:16: {}}\n", "\"cuda:16\" is not a device; allowed: cuda:0 to cuda:15"},
        {"devices: {cuda:01: {}}\n", "\"cuda:01\" is not a device; allowed"},
        {"devices: {cuda:1x: {}}\n", "\"cuda:1x\" is not a device; allowed"},
        {"devices: {GPU-12: {}}\n", "\"GPU-12\" is not a device; allowed"},
        {"devices: {GPU-0123ABCD-0123-4567-89AB-0123456789AB: {}}\n",
         "did you mean \"GPU-0123abcd-0123-4567-89ab-0123456789ab\"?"},
        {"devices: {MIG-0123abcd-0123-4567-89ab-0123456789ab: {}}\n", "is not a device; allowed"},
        {"devices: {cuda:0: 5}\n", "devices.cuda:0: is a single value; allowed: a map"},
        {"devices: {cuda:0: {budget: 120%}}\n", "devices.cuda:0.budget: \"120%\" is more than 100%; allowed: a size"},
        {"devices: {cuda:0: {budget: 0%}}\n", "is not a whole percentage"},
        {"devices: {cuda:0: {budget: 1.5%}}\n", "is not a whole percentage"},
        {"devices: {cuda:0: {budget: x%}}\n", "is not a percentage"},
        {"devices: {cuda:0: {budgte: 1}}\n", "devices.cuda:0.budgte: unknown key, did you mean \"budget\"?"},
        {"devices: {cuda:0: {backend: cuda-vm}}\n", "did you mean \"cuda-vmm\"?"},
        {"devices: {cuda:0: {}, cuda:0: {}}\n", "is here twice"},
        {"pool: {backend: cuda-vmm}\n", "allowed: memfd"},
        {"cuda: {enabled: on}\n", "auto, off"},
        {"types: {a: {executor: image, device: hots}}\n", "types.a.device: is not known, did you mean \"host\"?"},
        {"types: {a: {executor: image, device: gpu}}\n", "types.a.device: \"gpu\" is not a device, did you mean"},
        {"types: {a: {executor: image, device: tpu:0}}\n", "auto and host are allowed too"},
    };

    (void)state;
    for (unsigned i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        refused(rows[i].text, rows[i].piece);
    refused_flag("devices.cuda:0.budgte=1", "devices.cuda:0.budgte: unknown key, did you mean \"budget\"?");
    refused_flag("devices.gpu0.budget=1", "did you mean \"cuda:0\"?");
}

static int setup(void **state)
{
    (void)state;
    (void)unsetenv("RESVISOR_RUNTIME_DIR");
    (void)strcpy(folder, "/tmp/rv-config-XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    (void)mkdir(path_of("models"), 0700);
    write_text("models/a.safetensors", "x");
    write_text("executor.so", "x");
    write_text("c.yaml", "");
    return 0;
}

static int teardown(void **state)
{
    static const char *const files[] = {"models/a.safetensors", "executor.so", "c.yaml", "token"};

    (void)state;
    for (unsigned i = 0; i < sizeof(files) / sizeof(files[0]); i++)
        (void)unlink(path_of(files[i]));
    (void)rmdir(path_of("models"));
    return chdir("/") < 0 ? -1 : rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_every_default_is_valid_and_every_row_has_a_text, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_full_file_is_read, setup, teardown),
        cmocka_unit_test_setup_teardown(test_precedence_is_flag_environment_file_default, setup, teardown),
        cmocka_unit_test_setup_teardown(test_flags_reach_types_models_and_lists, setup, teardown),
        cmocka_unit_test_setup_teardown(test_wrong_values_name_line_key_and_what_is_allowed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_wrong_keys_get_a_suggestion, setup, teardown),
        cmocka_unit_test_setup_teardown(test_yaml_faults_have_a_place, setup, teardown),
        cmocka_unit_test_setup_teardown(test_files_that_are_no_files_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_refers_to_something_is_checked, setup, teardown),
        cmocka_unit_test_setup_teardown(test_tcp_needs_a_good_address_and_a_secret_token, setup, teardown),
        cmocka_unit_test_setup_teardown(test_all_problems_are_told_and_many_are_counted, setup, teardown),
        cmocka_unit_test_setup_teardown(test_limits_of_lists_and_names, setup, teardown),
        cmocka_unit_test_setup_teardown(test_the_runtime_directory_is_found_without_the_rest, setup, teardown),
        cmocka_unit_test_setup_teardown(test_sizes_and_durations_for_people, setup, teardown),
        cmocka_unit_test_setup_teardown(test_the_json_of_show_is_whole, setup, teardown),
        cmocka_unit_test_setup_teardown(test_devices_have_names_shares_and_a_place_in_types, setup, teardown),
        cmocka_unit_test_setup_teardown(test_wrong_devices_are_refused_with_a_suggestion, setup, teardown),
        cmocka_unit_test(test_the_document_matches_the_table),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
