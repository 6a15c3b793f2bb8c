/*
 * The configuration: one YAML file, read once by the supervisor and by `resvisor check`.
 *
 * Every key has one row in the table of config.c: place, type, range, default, unit, help. The table drives parsing,
 * errors (file:line, key, what is wrong, what is allowed, "did you mean"), environment variables, `check --show`, and
 * docs/configuration.md. Precedence: flag, environment, file, default. Bad configuration changes nothing.
 */
#ifndef RV_CONFIG_H
#define RV_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "log.h"
#include "memory.h"
#include "rv_limits.h"

struct rv_config_pair {
    char *key, *value;
};

struct rv_config_model { /* models.NAME */
    char *name;
    char *path;   /* absolute; a relative one in the file is relative to the first model folder that has it, else to the
                     first folder */
    bool preload; /* load at start */
    bool pin;     /* never evict, cannot be unloaded until unpinned */
    char *format; /* "auto" (by content and suffix), "safetensors", "blob" */
};

struct rv_config_device { /* devices.NAME; NAME is cuda:0, or GPU- and a uuid */
    char *name;
    char *backend;           /* "auto", "cuda-vmm", "cuda-ipc", "memfd" */
    uint64_t budget;         /* bytes; 0 = no limit */
    uint32_t budget_percent; /* of the device's memory, when it is known; 0 = budget says it in bytes */
};

struct rv_config_type { /* types.NAME */
    char *name;
    char *device;                 /* "auto", "host", "cuda:0", "GPU-uuid" */
    char *kind;                   /* worker kind: "native", "python", "comfyui" */
    char *executor;               /* a name (libexec of the installation) or an absolute path to a .so; kind native */
    char *python;                 /* absolute path of the interpreter; kinds python and comfyui */
    char *script;                 /* absolute; kind python */
    char *args[RV_TYPE_ARGS_MAX]; /* of the script, or of ComfyUI's main.py */
    uint32_t arg_count;
    char *directory;    /* absolute, holds main.py; kind comfyui, as the next two */
    char *state_folder; /* absolute; what each worker has of its own lies below; "" = the launcher's default */
    char *pooling;      /* "preferred", "required", "off" */
    bool primary;       /* kind comfyui: its first worker has the users' folder; of exactly one type, if there is any */
    char *warmup;       /* absolute; a prompt that a worker runs before it is ready; "" = none */
    char *warmup_failure;             /* "continue", "fail" */
    char *output_prefix;              /* before each saved file's name; "" = TYPE-NUMBER/ */
    uint64_t loop_timeout_us;         /* ComfyUI's event loop stands still for so long: restart; 0 = never */
    char *fast_start;                 /* "auto", "off" */
    char *models[RV_TYPE_MODELS_MAX]; /* configured names; attached by each worker in this order */
    uint32_t model_count;
    char *accepts[RV_ACCEPTS_MAX]; /* kinds of graphs, words of graph_route.h; none = the type's own name */
    uint32_t accept_count;
    uint32_t workers; /* 1 to RV_WORKERS_PER_TYPE_MAX */
    uint32_t queue;   /* jobs waiting */
    struct rv_config_pair env[RV_ENV_MAX];
    uint32_t env_count;
    uint64_t start_timeout_us;  /* start to ready, loading not counted */
    uint64_t stop_timeout_us;   /* drain or SIGTERM to SIGKILL */
    uint64_t ping_interval_us;  /* while it runs a job; an idle worker is not pinged */
    uint64_t ping_timeout_us;   /* unanswered: hung */
    uint64_t stall_timeout_us;  /* a job without a sign of life; 0 = never */
    uint64_t job_timeout_us;    /* a job in all; 0 = never */
    uint64_t cancel_timeout_us; /* a cancelled job that goes on: its worker is killed */
    uint32_t max_deaths;        /* within death_window: FAILED */
    uint64_t death_window_us;
    char *mapping; /* "private" (default), "shared" */
};

struct rv_config {
    char *file;        /* where it came from; NULL = defaults only */
    char *runtime_dir; /* absolute */
    enum rv_log_level log_level;

    char *clients_group; /* "" = nobody but the owner and root */
    int clients_gid;     /* -1 = none */
    uint32_t max_clients;
    uint32_t max_leases; /* all clients together */

    bool rpc_enabled;     /* ipc addresses in the runtime directory */
    char *rpc_tcp;        /* "host:port", "" = off */
    char *rpc_events_tcp; /* "" = off */
    char *rpc_token_file; /* required with rpc_tcp; mode must not be readable by others */
    char *rpc_group;
    int rpc_gid;
    uint64_t rpc_result_bytes; /* results kept for fetching */
    uint32_t rpc_result_count;
    uint64_t rpc_result_age_us;
    uint32_t rpc_jobs; /* job records kept */

    char *http_listen;     /* "host:port", "" = off */
    char *http_token_file; /* required unless http_listen is loopback */
    uint32_t http_connections;
    uint64_t http_worker_timeout_us; /* silence of a worker that a request was passed on to */
    uint64_t http_timeout_us;        /* a head must be there; three times as long for the rest */

    uint64_t pool_budget; /* bytes; 0 = no limit; a percentage in the file is of MemTotal */
    enum rv_huge_pages huge_pages;
    char *pool_backend; /* "memfd" */
    uint64_t load_timeout_us;
    uint64_t load_retry_us; /* a failed load is not tried again before, unless the file changed */
    uint32_t max_loads;     /* loaders at once */
    char *pool_direct;      /* "auto", "always", "never": O_DIRECT */

    char *cuda;                    /* "auto", "off": are there devices? */
    uint64_t cuda_reserve;         /* bytes of the machine's memory that models of a unified device leave alone */
    uint64_t cuda_test_timeout_us; /* silence of the self-test */
    uint64_t revoke_timeout_us;    /* from telling an importer that memory goes to ending it */
    struct rv_config_device *devices;
    uint32_t device_count;

    char *folders[RV_FOLDERS_MAX]; /* model_folders: real paths */
    uint32_t folder_count;
    struct rv_config_model *models;
    uint32_t model_count;
    struct rv_config_type *types;
    uint32_t type_count;
};

/* Command-line overrides, "key=value" with the key as in the file ("pool.budget"). */
struct rv_config_sources {
    const char *file;        /* -c; NULL = $RESVISOR_CONFIG, else /etc/resvisor/resvisor.yaml if it exists, else none */
    const char *const *sets; /* NULL-terminated; may be NULL */
};

/*
 * Reads and checks everything, also that executors, model folders and groups exist. On failure every problem found (at
 * most 50) was written to `problems` as one line each, "FILE:LINE: KEY: what is wrong; what is allowed", and -EINVAL is
 * returned; -ENOMEM. *ret_config is the caller's.
 */
int rv_config_load(const struct rv_config_sources *sources, FILE *problems, struct rv_config **ret_config);
void rv_config_destroy(struct rv_config *config);

/* Is this what a device is called in the configuration: cuda:0 to cuda:15, or GPU- and a uuid? False: reason says what
 * is wrong and what is allowed. */
bool rv_config_is_device(const char *name, char *reason, size_t size);

/* What `--flag VALUE` or `--flag=VALUE` of the type's args says, the last one; NULL = not given, "" = without a value.
 */
const char *rv_config_type_argument(const struct rv_config_type *type, const char *flag);

/* `resvisor check --show`: each effective value, its unit, and where it comes from (flag, environment, FILE:LINE,
 * default). */
void rv_config_show(const struct rv_config *config, FILE *out, bool json);

/* docs/configuration.md's table of keys, from the same rows: Markdown. */
void rv_config_write_reference(FILE *out);

/* Where the sockets are, given a runtime directory. Returned text is in the caller's buffer of RV_SOCKET_PATH_MAX + 32.
 */
#define RV_SOCKET_CONTROL "control/resvisor.sock"
#define RV_SOCKET_ROUTER "control/router.sock"
#define RV_SOCKET_RPC "rpc/rpc.ipc"
#define RV_SOCKET_EVENTS "rpc/events.ipc"

/* The default runtime directory of this user: $RESVISOR_RUNTIME_DIR, /run/resvisor as root, $XDG_RUNTIME_DIR/resvisor,
 * else /tmp/resvisor-UID (owned and 0700, or refused). Writes at most size bytes; -ENAMETOOLONG. */
int rv_runtime_dir_default(char *buffer, size_t size);

/* Where things are kept over starts: $STATE_DIRECTORY (its first folder), /var/lib/resvisor as root,
 * $XDG_STATE_HOME/resvisor, else ~/.local/state/resvisor. The same as the ComfyUI launcher's. -ENAMETOOLONG, -ENOENT.
 */
int rv_state_dir_default(char *buffer, size_t size);

/*
 * Where the supervisor of these sources listens, for commands that only talk to it: runtime_dir from flags,
 * environment, file, default. Nothing else in the file is looked at, so a half-edited file does not keep `resvisor
 * stop` from working. On failure `problem` has one line and a negative errno is returned.
 */
int rv_config_find_runtime_dir(const struct rv_config_sources *sources, char *buffer, size_t size, char *problem,
                               size_t problem_size);

#endif
