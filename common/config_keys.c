#include "config_keys.h"

#include <stdio.h>
#include <string.h>

#include "config.h"

#define TOP(member) RV_SCOPE_TOP, offsetof(struct rv_config, member), 0
#define TOP_LIST(member, count) RV_SCOPE_TOP, offsetof(struct rv_config, member), offsetof(struct rv_config, count)
#define MODEL(member) RV_SCOPE_MODEL, offsetof(struct rv_config_model, member), 0
#define TYPE(member) RV_SCOPE_TYPE, offsetof(struct rv_config_type, member), 0
#define TYPE_LIST(member, count) \
    RV_SCOPE_TYPE, offsetof(struct rv_config_type, member), offsetof(struct rv_config_type, count)

#define DEVICE(member) RV_SCOPE_DEVICE, offsetof(struct rv_config_device, member), 0
#define DEVICE_SHARE(member, percent) \
    RV_SCOPE_DEVICE, offsetof(struct rv_config_device, member), offsetof(struct rv_config_device, percent)

#define KIB UINT64_C(1024)
#define MIB (1024 * KIB)
#define GIB (1024 * MIB)
#define TIB (1024 * GIB)
#define SECOND UINT64_C(1000000)
#define HOUR (3600 * SECOND)
#define DAY (24 * HOUR)
#define TEXT 0, RV_KEY_VALUE_MAX, false, NULL

static const struct rv_key keys[] = {
    {"runtime_dir", RV_KEY_PATH, TOP(runtime_dir), TEXT, "",
     "Folder of the sockets and the lock. Made with mode 0700. Empty means `/run/resvisor` for root, else "
     "`$XDG_RUNTIME_DIR/resvisor`, else `/tmp/resvisor-UID`. At most 68 bytes long, since socket paths are short."},
    {"log_level", RV_KEY_CHOICE, TOP(log_level), 0, 0, false, "error|warning|info|debug", "info",
     "Least important kind of line that is still logged."},

    {"clients.group", RV_KEY_STRING, TOP(clients_group), TEXT, "",
     "Group whose members may attach models, read the status and use jobs. Empty admits the owner and root only."},
    {"clients.max", RV_KEY_UINT, TOP(max_clients), 1, 100000, false, NULL, "512",
     "Connections to the supervisor at one time; further ones are refused. One place in eight is kept for the "
     "owner and root."},
    {"clients.max_leases", RV_KEY_UINT, TOP(max_leases), 1, 1000000, false, NULL, "4096",
     "Leases of all clients together."},

    {"rpc.enabled", RV_KEY_BOOL, TOP(rpc_enabled), 0, 0, false, NULL, "true",
     "Whether gateways are served at `ipc://RUNTIME_DIR/rpc/rpc.ipc`, with events at `events.ipc` beside it."},
    {"rpc.tcp", RV_KEY_STRING, TOP(rpc_tcp), TEXT, "",
     "Serve requests at this `HOST:PORT` too. Needs rpc.token_file. There is no encryption: use a trusted network."},
    {"rpc.events_tcp", RV_KEY_STRING, TOP(rpc_events_tcp), TEXT, "",
     "Publish events at this `HOST:PORT` too. Whoever reaches it can read them, since a subscriber sends no token."},
    {"rpc.token_file", RV_KEY_PATH, TOP(rpc_token_file), TEXT, "",
     "File with the token that requests over TCP must carry. Its mode must give nothing to group and others (0600)."},
    {"rpc.group", RV_KEY_STRING, TOP(rpc_group), TEXT, "",
     "Group whose members may use the ipc addresses. Empty admits the owner and root only."},
    {"rpc.result_bytes", RV_KEY_SIZE, TOP(rpc_result_bytes), MIB, 16 * TIB, false, NULL, "1GiB",
     "Memory for results that wait to be fetched. The oldest ones go first when it is full."},
    {"rpc.result_count", RV_KEY_UINT, TOP(rpc_result_count), 1, 100000, false, NULL, "256",
     "Number of results that are kept for fetching."},
    {"rpc.result_age", RV_KEY_DURATION, TOP(rpc_result_age_us), SECOND, 30 * DAY, false, NULL, "1h",
     "How long a result is kept for fetching."},
    {"rpc.jobs", RV_KEY_UINT, TOP(rpc_jobs), 16, 1000000, false, NULL, "4096",
     "Job records that are kept. The oldest ended ones go first when it is full."},

    {"http.listen", RV_KEY_STRING, TOP(http_listen), TEXT, "",
     "Serve HTTP at this `HOST:PORT`, such as `127.0.0.1:8188`, and with a type of kind `comfyui` ComfyUI's own "
     "interface too. The host is a number or `localhost`. An address that is not loopback needs http.token_file. There "
     "is no encryption: use a trusted network or a proxy with TLS."},
    {"http.token_file", RV_KEY_PATH, TOP(http_token_file), TEXT, "",
     "File with the token that HTTP requests must carry as `Authorization: Bearer TOKEN`. Its mode must give nothing "
     "to "
     "group and others (0600). Requests that only operators may make need it, also on loopback."},
    {"http.connections", RV_KEY_UINT, TOP(http_connections), 4, 10000, false, NULL, "256",
     "HTTP connections at one time; further ones are refused with status 503."},
    {"http.timeout", RV_KEY_DURATION, TOP(http_timeout_us), SECOND, HOUR, false, NULL, "20s",
     "A client that has not sent the head of its request after this time is cut off; so is one that needs three times "
     "as "
     "long for the rest of it, that takes nothing of its answer for so long, or that is idle between two requests."},
    {"http.worker_timeout", RV_KEY_DURATION, TOP(http_worker_timeout_us), SECOND, HOUR, false, NULL, "5m",
     "A request that was passed on to a ComfyUI worker ends with status 504 when the worker is silent for so long. "
     "While "
     "a node holds Python's lock, ComfyUI's server is silent too."},

    {"pool.budget", RV_KEY_SIZE, TOP(pool_budget), 0, 1024 * TIB, true, NULL, "75%",
     "Memory of the machine that all models together may take. A percentage is a share of it. 0 means no limit. Memory "
     "of devices has budgets of its own: devices.NAME.budget."},
    {"pool.huge_pages", RV_KEY_CHOICE, TOP(huge_pages), 0, 0, false, "off|auto|only", "off",
     "Whether models lie in huge pages: `auto` uses them when enough are free, `only` refuses a load otherwise."},
    {"pool.backend", RV_KEY_WORD, TOP(pool_backend), 0, 0, false, "memfd", "memfd",
     "What kind of memory models on the host lie in. Devices: devices.NAME.backend."},
    {"pool.load_timeout", RV_KEY_DURATION, TOP(load_timeout_us), SECOND, DAY, false, NULL, "10m",
     "A load that takes longer is ended and fails."},
    {"pool.load_retry", RV_KEY_DURATION, TOP(load_retry_us), 0, DAY, false, NULL, "30s",
     "A failed load is not tried again before this time, unless the file has changed."},
    {"pool.max_loads", RV_KEY_UINT, TOP(max_loads), 1, 64, false, NULL, "2", "Loads at one time; further ones wait."},
    {"pool.direct", RV_KEY_WORD, TOP(pool_direct), 0, 0, false, "auto|always|never", "auto",
     "Whether files are read past the page cache: `auto` does so when the file is not cached."},

    {"cuda.enabled", RV_KEY_WORD, TOP(cuda), 0, 0, false, "auto|off", "auto",
     "Whether GPUs are looked for. `auto` uses those that the driver has; without a driver there are none. `off` never "
     "starts anything that loads the driver."},
    {"cuda.reserve", RV_KEY_SIZE, TOP(cuda_reserve), 0, 1024 * TIB, true, NULL, "4GiB",
     "When a device shares the machine's memory: what models leave alone of the memory that is available. A percentage "
     "is a share of the machine's memory."},
    {"cuda.test_timeout", RV_KEY_DURATION, TOP(cuda_test_timeout_us), SECOND, HOUR, false, NULL, "60s",
     "Silence of the self-test of devices after which it is ended. What it has not reported until then counts as "
     "failed."},
    {"cuda.revoke_timeout", RV_KEY_DURATION, TOP(revoke_timeout_us), 100000, HOUR, false, NULL, "10s",
     "When a device's memory goes, its clients are told. Those that still hold it after this time are cut off."},

    {"model_folders", RV_KEY_PATHS, TOP_LIST(folders, folder_count), 0, RV_FOLDERS_MAX, false, NULL, "",
     "Folders that models lie in. A path that a client gives must lie in one of them, also behind links; a configured "
     "model may be a link that leads out. A relative one is relative to the configuration file."},

    {"models.*.path", RV_KEY_STRING, MODEL(path), TEXT, "",
     "The model's file. A relative one is looked up in model_folders, in their order. Required. Short form: "
     "`NAME: path`."},
    {"models.*.preload", RV_KEY_BOOL, MODEL(preload), 0, 0, false, NULL, "false", "Load it at start."},
    {"models.*.pin", RV_KEY_BOOL, MODEL(pin), 0, 0, false, NULL, "false",
     "Keep it in memory: it cannot be unloaded until `resvisor unpin`."},
    {"models.*.format", RV_KEY_WORD, MODEL(format), 0, 0, false, "auto|safetensors|blob", "auto",
     "How the file is read: `auto` decides by suffix and content, `blob` holds it as one piece."},

    {"types.*.kind", RV_KEY_WORD, TYPE(kind), 0, 0, false, "native|python|comfyui", "native",
     "Kind of worker: `native` runs an executor, `python` a script that uses `resvisor.worker`, `comfyui` a ComfyUI of "
     "your own (see comfyui.md)."},
    {"types.*.executor", RV_KEY_STRING, TYPE(executor), TEXT, "",
     "Kind `native` only, and required there. The executor: a name such as `image`, looked up among the installed "
     "ones, or the absolute path of a `.so` file."},
    {"types.*.script", RV_KEY_PATH, TYPE(script), TEXT, "",
     "Kind `python` only, and required there. The worker's Python script. A relative one is relative to the "
     "configuration file."},
    {"types.*.python", RV_KEY_STRING, TYPE(python), TEXT, "python3",
     "Kinds `python` and `comfyui` only. The interpreter: a name that is looked up in `PATH`, or a path such as that "
     "of a virtual "
     "environment's `bin/python`; a relative one is relative to the configuration file."},
    {"types.*.args", RV_KEY_LIST, TYPE_LIST(args, arg_count), 0, RV_TYPE_ARGS_MAX, false, NULL, "",
     "Kinds `python` and `comfyui` only. Arguments of the script, or of ComfyUI's `main.py`; one element each."},
    {"types.*.directory", RV_KEY_PATH, TYPE(directory), TEXT, "",
     "Kind `comfyui` only, and required there. The folder of ComfyUI, with its `main.py`."},
    {"types.*.state_folder", RV_KEY_PATH, TYPE(state_folder), TEXT, "",
     "Kind `comfyui` only. Where each worker has its own temporary, user and database folders. Empty means "
     "`$STATE_DIRECTORY`, else `/var/lib/resvisor` for root, else `$XDG_STATE_HOME/resvisor`, else "
     "`~/.local/state/resvisor`."},
    {"types.*.pooling", RV_KEY_WORD, TYPE(pooling), 0, 0, false, "preferred|required|off", "preferred",
     "Kind `comfyui` only. What happens when ComfyUI's loader cannot be connected with the pool: `preferred` leaves it "
     "to ComfyUI's own loader and shows `unpooled` with the reason, `required` makes the worker FAILED. `off` never "
     "connects it, for comparison."},
    {"types.*.primary", RV_KEY_BOOL, TYPE(primary), 0, 0, false, NULL, "false",
     "Kind `comfyui` only. Settings and saved workflows of people are those of this type's first worker. One type can "
     "have it; without any it is the first type of that kind."},
    {"types.*.warmup", RV_KEY_PATH, TYPE(warmup), TEXT, "",
     "Kind `comfyui` only. A workflow in API format that a worker runs before it is ready, so that the first job is a "
     "warm one. Workers warm up one after another, in the order of the configuration, when preloading is done. "
     "start_timeout counts from the worker's turn."},
    {"types.*.warmup_failure", RV_KEY_WORD, TYPE(warmup_failure), 0, 0, false, "continue|fail", "continue",
     "Kind `comfyui` only. What happens when the warm-up fails: `continue` makes the worker ready and shows the "
     "reason, "
     "`fail` ends it, which counts as a death."},
    {"types.*.output_prefix", RV_KEY_STRING, TYPE(output_prefix), TEXT, "",
     "Kind `comfyui` only. Stands before the name of each file that is saved; a `/` at its end makes it a folder. "
     "Empty "
     "means `TYPE-NUMBER/`. `%worker%` is the worker's number, and must be in it when the type has several workers."},
    {"types.*.loop_timeout", RV_KEY_DURATION, TYPE(loop_timeout_us), 0, DAY, false, NULL, "5m",
     "Kind `comfyui` only. A worker whose server stands still for this long, which a custom node's code can cause, is "
     "restarted. 0 means never."},
    {"types.*.fast_start", RV_KEY_WORD, TYPE(fast_start), 0, 0, false, "auto|off", "auto",
     "Kind `comfyui` only. `auto` forks workers from a template process, which has imported torch, other packages and, "
     "with `--cpu`, ComfyUI's own modules; types that have the same ComfyUI, Python, arguments and environment share "
     "one. `off` starts each worker from nothing."},
    {"types.*.models", RV_KEY_LIST, TYPE_LIST(models, model_count), 0, RV_TYPE_MODELS_MAX, false, NULL, "",
     "Names of models that each worker attaches at start, in this order. Jobs use the first unless they name another."},
    {"types.*.device", RV_KEY_STRING, TYPE(device), TEXT, "auto",
     "Where the models of this type lie: `host`, `cuda:0` and the like, or `GPU-` and the uuid. `auto` is `host`, and "
     "with kind `comfyui` and `--gpu-only` among its args the device that these choose. A device that shares the "
     "machine's memory may use models that lie on the host."},
    {"types.*.accepts", RV_KEY_LIST, TYPE_LIST(accepts, accept_count), 0, RV_ACCEPTS_MAX, false,
     "image|video|audio|3d|text|any", "",
     "Kinds of ComfyUI graphs that it runs: image, video, audio, 3d, text, or any for what no other type accepts. "
     "Empty "
     "means the kind that is called like the type, if there is one. `resvisor route FILE` explains a graph."},
    {"types.*.workers", RV_KEY_UINT, TYPE(workers), 1, RV_WORKERS_PER_TYPE_MAX, false, NULL, "1",
     "Worker processes. Each runs one job at a time."},
    {"types.*.queue", RV_KEY_UINT, TYPE(queue), 1, 100000, false, NULL, "64",
     "Jobs that may wait; further ones are refused."},
    {"types.*.env", RV_KEY_MAP, TYPE_LIST(env, env_count), 0, RV_ENV_MAX, false, NULL, "",
     "Environment variables of the workers, as a map of texts."},
    {"types.*.start_timeout", RV_KEY_DURATION, TYPE(start_timeout_us), 100000, HOUR, false, NULL, "30s",
     "From start to ready, time for loading models not counted. A worker that needs longer is killed."},
    {"types.*.stop_timeout", RV_KEY_DURATION, TYPE(stop_timeout_us), 100000, HOUR, false, NULL, "10s",
     "From the request to stop to the kill."},
    {"types.*.ping_interval", RV_KEY_DURATION, TYPE(ping_interval_us), 100000, HOUR, false, NULL, "5s",
     "Time between two signs of life that a worker is asked for while it runs a job. An idle one is not asked."},
    {"types.*.ping_timeout", RV_KEY_DURATION, TYPE(ping_timeout_us), 100000, HOUR, false, NULL, "20s",
     "A worker that does not answer for this long hangs, and is killed."},
    {"types.*.stall_timeout", RV_KEY_DURATION, TYPE(stall_timeout_us), 0, DAY, false, NULL, "0",
     "A job whose executor shows no progress for this long hangs, and its worker is killed. 0 means never."},
    {"types.*.job_timeout", RV_KEY_DURATION, TYPE(job_timeout_us), 0, 7 * DAY, false, NULL, "0",
     "Longest run time of a job. 0 means no limit."},
    {"types.*.cancel_timeout", RV_KEY_DURATION, TYPE(cancel_timeout_us), 100000, HOUR, false, NULL, "10s",
     "A worker whose cancelled job goes on for longer is killed."},
    {"types.*.max_deaths", RV_KEY_UINT, TYPE(max_deaths), 1, RV_DEATHS_MAX, false, NULL, "5",
     "Deaths of a worker within death_window after which it is not started again until `resvisor restart TYPE`."},
    {"types.*.death_window", RV_KEY_DURATION, TYPE(death_window_us), SECOND, DAY, false, NULL, "5m",
     "The time that max_deaths counts in."},
    {"types.*.mapping", RV_KEY_WORD, TYPE(mapping), 0, 0, false, "private|shared", "private",
     "How workers map models: `private` makes own copies of pages that they write to, `shared` is read-only."},

    {"devices.*.backend", RV_KEY_WORD, DEVICE(backend), 0, 0, false, "auto|cuda-vmm|cuda-ipc|memfd", "auto",
     "How memory of this device is shared. `auto` takes what its self-test says is best; `resvisor devices` shows "
     "which "
     "and why. `memfd` leaves models in the machine's memory, which only a device that shares it can read."},
    {"devices.*.budget", RV_KEY_SHARE, DEVICE_SHARE(budget, budget_percent), 0, 1024 * TIB, true, NULL, "90%",
     "Memory of this device that all models together may take. A percentage is a share of the device's memory. 0 means "
     "no limit but what is free."},
};

#define KEY_COUNT (sizeof(keys) / sizeof(keys[0]))

const struct rv_key *rv_key_at(unsigned i)
{
    return i < KEY_COUNT ? &keys[i] : NULL;
}

const struct rv_key *rv_key_find(const char *pattern)
{
    for (unsigned i = 0; i < KEY_COUNT; i++)
        if (strcmp(keys[i].pattern, pattern) == 0)
            return &keys[i];
    return NULL;
}

unsigned rv_key_number(const struct rv_key *key)
{
    unsigned number = 0;

    for (const struct rv_key *k = keys; k < key; k++)
        if (k->scope == key->scope)
            number++;
    return number;
}

/* ---- kinds of worker -------------------------------------------------------------------------------------------- */

/* Keys that only some kinds of worker have; the others are for all. */
static const struct {
    const char *pattern;
    const char *kinds; /* "a|b" */
} kind_keys[] = {
    {"types.*.executor", "native"},       {"types.*.script", "python"},        {"types.*.python", "python|comfyui"},
    {"types.*.args", "python|comfyui"},   {"types.*.models", "native|python"}, {"types.*.mapping", "native|python"},
    {"types.*.directory", "comfyui"},     {"types.*.state_folder", "comfyui"}, {"types.*.pooling", "comfyui"},
    {"types.*.primary", "comfyui"},       {"types.*.warmup", "comfyui"},       {"types.*.warmup_failure", "comfyui"},
    {"types.*.output_prefix", "comfyui"}, {"types.*.loop_timeout", "comfyui"}, {"types.*.fast_start", "comfyui"},
};

const char *rv_key_kinds(const struct rv_key *key)
{
    for (unsigned i = 0; i < sizeof(kind_keys) / sizeof(kind_keys[0]); i++)
        if (strcmp(kind_keys[i].pattern, key->pattern) == 0)
            return kind_keys[i].kinds;
    return NULL;
}

bool rv_key_is_of_kind(const struct rv_key *key, const char *kind)
{
    const char *words = rv_key_kinds(key);
    size_t n = strlen(kind);

    if (!words)
        return true;
    for (; *words; words += strcspn(words, "|"), words += *words == '|')
        if (strncmp(words, kind, n) == 0 && (words[n] == '|' || words[n] == '\0'))
            return true;
    return false;
}

bool rv_key_is_section(const char *pattern)
{
    size_t n = strlen(pattern);

    for (unsigned i = 0; i < KEY_COUNT; i++)
        if (strncmp(keys[i].pattern, pattern, n) == 0 && keys[i].pattern[n] == '.')
            return true;
    return false;
}

/* ---- "did you mean" -------------------------------------------------------------------------------------------- */

#define WORD_MAX_BYTES 32u /* longer words get no suggestion */

/* Edit distance with swaps of neighbours counted as one step; both texts at most WORD_MAX_BYTES long. */
static unsigned edit_distance(const char *a, size_t a_length, const char *b, size_t b_length)
{
    unsigned rows[3][WORD_MAX_BYTES + 1];
    unsigned *before = rows[0], *above = rows[1], *row = rows[2];

    for (unsigned j = 0; j <= b_length; j++)
        above[j] = before[j] = j;
    for (unsigned i = 1; i <= a_length; i++) {
        unsigned *old = before;

        row[0] = i;
        for (unsigned j = 1; j <= b_length; j++) {
            unsigned best = above[j - 1] + (a[i - 1] != b[j - 1]);

            best = above[j] + 1 < best ? above[j] + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < best)
                best = before[j - 2] + 1;
            row[j] = best;
        }
        before = above;
        above = row;
        row = old;
    }
    return above[b_length];
}

/* Takes candidate over as the best if it is closer than *best. */
static void consider(const char *word, const char *candidate, size_t length, unsigned *best, char *buffer, size_t size)
{
    size_t n = strlen(word);
    unsigned distance;

    if (n == 0 || n > WORD_MAX_BYTES || length == 0 || length > WORD_MAX_BYTES || length >= size)
        return;
    distance = edit_distance(word, n, candidate, length);
    /* "huge" for "huge_pages" is a good guess although five letters are missing */
    if (n >= 3 && n < length && strncmp(word, candidate, n) == 0)
        distance = 1;
    if (distance < *best) {
        *best = distance;
        memcpy(buffer, candidate, length);
        buffer[length] = '\0';
    }
}

static unsigned too_far(const char *word)
{
    size_t n = strlen(word);

    return n < 3 ? 1 : n < 5 ? 2 : n < 8 ? 3 : 4; /* too short a word is close to everything */
}

bool rv_key_suggest(const char *prefix, const char *word, char *buffer, size_t size)
{
    unsigned limit = too_far(word), best = limit;
    size_t n = strlen(prefix);

    for (unsigned i = 0; i < KEY_COUNT; i++)
        if (strncmp(keys[i].pattern, prefix, n) == 0)
            consider(word, keys[i].pattern + n, strcspn(keys[i].pattern + n, "."), &best, buffer, size);
    return best < limit;
}

bool rv_word_suggest(const char *words, const char *word, char *buffer, size_t size)
{
    unsigned limit = too_far(word), best = limit;

    while (*words) {
        size_t length = strcspn(words, "|");

        consider(word, words, length, &best, buffer, size);
        words += length + (words[length] == '|');
    }
    return best < limit;
}
