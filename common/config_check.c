/* Checks of the configuration that need more than one value, or the machine: groups, folders, files. */
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <grp.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config_private.h"
#include "paths.h"

#define GROUP_BUFFER_MAX (1024u * 1024) /* a group with many members */
#define TOKEN_MAX 4096

/* The socket path that is longest under a runtime directory. */
#define LONGEST_SOCKET RV_SOCKET_CONTROL
_Static_assert(sizeof(LONGEST_SOCKET) >= sizeof(RV_SOCKET_ROUTER) && sizeof(LONGEST_SOCKET) >= sizeof(RV_SOCKET_RPC) &&
                   sizeof(LONGEST_SOCKET) >= sizeof(RV_SOCKET_EVENTS),
               "the longest one is checked");

static struct rv_origin origin_of(struct rv_loader *loader, const char *pattern, uint32_t number)
{
    return *rv_config_origin(loader->config, rv_key_find(pattern), number);
}

/* Replaces a text of the configuration. */
static void replace(struct rv_loader *loader, char **place, char *text)
{
    if (!text) {
        loader->no_memory = true;
        return;
    }
    free(*place);
    *place = text;
}

/* ---- runtime directory, groups ----------------------------------------------------------------------------------- */

int rv_runtime_dir_default(char *buffer, size_t size)
{
    const char *given = getenv("RESVISOR_RUNTIME_DIR"), *xdg = getenv("XDG_RUNTIME_DIR");
    struct stat st;
    int n;

    if (given && *given) {
        n = snprintf(buffer, size, "%s", given);
    } else if (geteuid() == 0) {
        n = snprintf(buffer, size, "/run/resvisor");
    } else if (xdg && *xdg == '/') {
        n = snprintf(buffer, size, "%s/resvisor", xdg);
    } else {
        /* Everybody can write to /tmp: a folder that somebody else made there is refused. */
        n = snprintf(buffer, size, "/tmp/resvisor-%u", (unsigned)geteuid());
        if (n > 0 && (size_t)n < size && lstat(buffer, &st) == 0 &&
            (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 022)))
            return -EACCES;
    }
    return n < 0 || (size_t)n >= size ? -ENAMETOOLONG : 0;
}

int rv_state_dir_default(char *buffer, size_t size)
{
    const char *given = getenv("STATE_DIRECTORY"), *xdg = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    int n;

    if (given && *given && *given != ':')
        n = snprintf(buffer, size, "%.*s", (int)strcspn(given, ":"), given);
    else if (geteuid() == 0)
        n = snprintf(buffer, size, "/var/lib/resvisor");
    else if (xdg && *xdg)
        n = snprintf(buffer, size, "%s/resvisor", xdg);
    else if (home && *home)
        n = snprintf(buffer, size, "%s/.local/state/resvisor", home);
    else
        return -ENOENT;
    return n < 0 || (size_t)n >= size ? -ENAMETOOLONG : 0;
}

static void check_runtime_dir(struct rv_loader *loader)
{
    struct rv_config *c = &loader->config->config;
    struct rv_origin origin = origin_of(loader, "runtime_dir", 0);
    size_t most = RV_SOCKET_PATH_MAX - sizeof(LONGEST_SOCKET);
    char folder[PATH_MAX];
    int r;

    if (*c->runtime_dir == '\0') {
        r = rv_runtime_dir_default(folder, sizeof(folder));
        if (r == -EACCES)
            rv_loader_problem(loader, origin, "runtime_dir",
                              "%s belongs to somebody else or is open to others; set "
                              "runtime_dir or XDG_RUNTIME_DIR",
                              folder);
        if (r == 0)
            replace(loader, &c->runtime_dir, strdup(folder));
    }
    if (strlen(c->runtime_dir) > most)
        rv_loader_problem(loader, origin, "runtime_dir", "is %zu bytes long; at most %zu, since socket paths are short",
                          strlen(c->runtime_dir), most);
}

static void check_group(struct rv_loader *loader, const char *key, const char *name, int *ret_gid)
{
    size_t size = 4096;
    struct group group, *found = NULL;
    char *buffer = NULL;
    int r;

    *ret_gid = -1;
    if (*name == '\0')
        return;
    do {
        char *larger = realloc(buffer, size);

        if (!larger) {
            loader->no_memory = true;
            break;
        }
        buffer = larger;
        r = getgrnam_r(name, &group, buffer, size, &found);
        size *= 2;
    } while (r == ERANGE && size <= GROUP_BUFFER_MAX);
    if (found) {
        *ret_gid = (int)found->gr_gid;
    } else if (!loader->no_memory) {
        char shown[RV_KEY_PATH_MAX];

        rv_loader_problem(loader, origin_of(loader, key, 0), key,
                          "there is no group \"%s\"; allowed: a group of this machine, or empty",
                          rv_escape(shown, sizeof(shown), name, strlen(name)));
    }
    free(buffer);
}

/* ---- rpc --------------------------------------------------------------------------------------------------------- */

static bool is_host_port(const char *text)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-_*:[]%";
    const char *colon = strrchr(text, ':');
    unsigned long port = 0;
    size_t host = colon ? (size_t)(colon - text) : 0;

    if (host == 0 || host > 255 || strspn(text, letters) < host)
        return false;
    if (text[0] == '[' ? text[host - 1] != ']' : memchr(text, ':', host) != NULL)
        return false; /* an IPv6 address needs brackets */
    if (strlen(colon + 1) == 0 || strlen(colon + 1) > 5 || strspn(colon + 1, "0123456789") != strlen(colon + 1))
        return false;
    port = strtoul(colon + 1, NULL, 10);
    return port >= 1 && port <= 65535;
}

static void check_address(struct rv_loader *loader, const char *key, const char *text, bool needs_rpc)
{
    char shown[RV_KEY_PATH_MAX];

    if (*text == '\0')
        return;
    if (!is_host_port(text))
        rv_loader_problem(loader, origin_of(loader, key, 0), key,
                          "\"%s\" is not an address; allowed: HOST:PORT such as 127.0.0.1:5600 or [::1]:5600, or empty",
                          rv_escape(shown, sizeof(shown), text, strlen(text)));
    else if (needs_rpc && !loader->config->config.rpc_enabled)
        rv_loader_problem(loader, origin_of(loader, key, 0), key, "is set, but rpc.enabled is false");
}

static void check_token_file(struct rv_loader *loader, const char *key, const char *file)
{
    struct rv_origin origin = origin_of(loader, key, 0);
    struct stat st;

    if (*file == '\0')
        return;
    if (stat(file, &st) < 0)
        rv_loader_problem(loader, origin, key, "%s: %s; allowed: a file with the token", file, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        rv_loader_problem(loader, origin, key, "%s is not a regular file", file);
    else if (st.st_mode & 077)
        rv_loader_problem(loader, origin, key, "%s has mode %04o; allowed: nothing for group and others (chmod 600)",
                          file, (unsigned)st.st_mode & 07777);
    else if (st.st_size == 0 || st.st_size > TOKEN_MAX)
        rv_loader_problem(loader, origin, key, "%s holds %lld bytes; allowed: 1 to %d", file, (long long)st.st_size,
                          TOKEN_MAX);
    else if (access(file, R_OK) < 0)
        rv_loader_problem(loader, origin, key, "%s: %s", file, strerror(errno));
}

/* Numbers only: a name would be looked up by the router, and could mean another machine tomorrow. */
static bool read_http_address(const char *text, bool *ret_loopback)
{
    char host[256];
    const char *colon = strrchr(text, ':');
    struct in_addr four;
    struct in6_addr six;
    bool brackets = text[0] == '[';

    (void)snprintf(host, sizeof(host), "%.*s", (int)(colon - text) - 2 * brackets, text + brackets);
    if (brackets) {
        if (inet_pton(AF_INET6, host, &six) != 1)
            return false;
        *ret_loopback = IN6_IS_ADDR_LOOPBACK(&six);
    } else if (inet_pton(AF_INET, host, &four) == 1) {
        *ret_loopback = ntohl(four.s_addr) >> 24 == IN_LOOPBACKNET;
    } else {
        *ret_loopback = strcmp(host, "localhost") == 0;
        return *ret_loopback;
    }
    return true;
}

static void check_http(struct rv_loader *loader)
{
    const struct rv_config *c = &loader->config->config;
    static const char key[] = "http.listen";
    bool loopback = false;

    check_address(loader, key, c->http_listen, false);
    check_token_file(loader, "http.token_file", c->http_token_file);
    if (!*c->http_listen || !is_host_port(c->http_listen))
        return;
    if (!read_http_address(c->http_listen, &loopback))
        rv_loader_problem(loader, origin_of(loader, key, 0), key,
                          "the host is neither a number nor localhost; allowed: such as 127.0.0.1:8188 or [::1]:8188");
    else if (!loopback && !*c->http_token_file)
        rv_loader_problem(
            loader, origin_of(loader, key, 0), key,
            "is not a loopback address, so it needs http.token_file; without a token, 127.0.0.1 is allowed");
}

/* ---- models ------------------------------------------------------------------------------------------------------ */

static void check_folders(struct rv_loader *loader)
{
    struct rv_config *c = &loader->config->config;

    for (uint32_t i = 0; i < c->folder_count; i++) {
        char *real = realpath(c->folders[i], NULL);
        struct stat st;

        if (!real || stat(real, &st) < 0 || !S_ISDIR(st.st_mode)) {
            rv_loader_problem(loader, origin_of(loader, "model_folders", 0), "model_folders",
                              "%s: %s; allowed: folders "
                              "that exist",
                              c->folders[i], real ? "is not a folder" : strerror(errno));
            free(real);
            continue;
        }
        replace(loader, &c->folders[i], real);
    }
}

static bool is_inside(const struct rv_config *c, const char *path)
{
    for (uint32_t i = 0; i < c->folder_count; i++) {
        size_t n = strlen(c->folders[i]);

        if (strcmp(c->folders[i], "/") == 0 || (strncmp(path, c->folders[i], n) == 0 && path[n] == '/'))
            return true;
    }
    return false;
}

/* "a/../b" would lie outside although its text begins with the folder's. */
static bool has_dot_dot(const char *path)
{
    for (const char *p = path; (p = strstr(p, "..")); p += 2)
        if ((p == path || p[-1] == '/') && (p[2] == '\0' || p[2] == '/'))
            return true;
    return false;
}

/* The first folder that has it, else the first folder. */
static char *find_model(const struct rv_config *c, const char *path)
{
    char *text = NULL;

    for (uint32_t i = 0; i < c->folder_count; i++) {
        if (asprintf(&text, "%s/%s", c->folders[i], path) < 0)
            return NULL;
        if (access(text, F_OK) == 0)
            return text;
        free(text);
    }
    return asprintf(&text, "%s/%s", c->folders[0], path) < 0 ? NULL : text;
}

static void check_model(struct rv_loader *loader, uint32_t number)
{
    struct rv_config *c = &loader->config->config;
    struct rv_config_model *model = &c->models[number];
    struct rv_origin origin = origin_of(loader, "models.*.path", number);
    char key[RV_KEY_PATH_MAX];
    char *real;

    (void)snprintf(key, sizeof(key), "models.%s.path", model->name);
    if (*model->path == '\0') {
        rv_loader_problem(loader, loader->config->entities[RV_SCOPE_MODEL][number].origin, key,
                          "is missing; allowed: the path of a file");
        return;
    }
    if (c->folder_count == 0) {
        rv_loader_problem(loader, origin, key, "there are no model_folders; add the folder of this file to them");
        return;
    }
    if (*model->path != '/')
        replace(loader, &model->path, find_model(c, model->path));
    /* A file that is not there yet is no fault of the configuration: the load says so, and it may come later. */
    real = realpath(model->path, NULL);
    if (real ? !is_inside(c, real) : (!is_inside(c, model->path) || has_dot_dot(model->path)))
        rv_loader_problem(loader, origin, key, "%s lies outside model_folders; move it, or add its folder to them",
                          real ? real : model->path);
    free(real);
}

/* ---- types ------------------------------------------------------------------------------------------------------- */

static void check_executor(struct rv_loader *loader, uint32_t number)
{
    struct rv_config_type *type = &loader->config->config.types[number];
    struct rv_origin origin = origin_of(loader, "types.*.executor", number);
    char key[RV_KEY_PATH_MAX], file[NAME_MAX + 1], path[PATH_MAX];
    struct stat st;

    (void)snprintf(key, sizeof(key), "types.%s.executor", type->name);
    if (*type->executor == '\0') {
        rv_loader_problem(loader, loader->config->entities[RV_SCOPE_TYPE][number].origin, key,
                          "is missing; allowed: a name such as image, or the absolute path of a .so file");
        return;
    }
    if (*type->executor != '/') {
        if (strchr(type->executor, '/') || strlen(type->executor) > RV_NAME_MAX) {
            rv_loader_problem(loader, origin, key,
                              "is a relative path; allowed: a name such as image, or the absolute "
                              "path of a .so file");
            return;
        }
        (void)snprintf(file, sizeof(file), "%s.so", type->executor);
        if (rv_installed_path(RV_EXECUTORS, file, path, sizeof(path)) < 0) {
            rv_loader_problem(loader, origin, key, "the installation of this program cannot be found");
            return;
        }
        replace(loader, &type->executor, strdup(path));
    }
    if (stat(type->executor, &st) < 0)
        rv_loader_problem(loader, origin, key,
                          "%s: %s; allowed: an installed executor, or the absolute path of a .so "
                          "file",
                          type->executor, strerror(errno));
    else if (!S_ISREG(st.st_mode) || access(type->executor, R_OK) < 0)
        rv_loader_problem(loader, origin, key, "%s is not a readable file", type->executor);
}

/* The first executable of that name in PATH, absolute; NULL = none. */
static char *find_in_path(const char *name)
{
    const char *folder = getenv("PATH");

    for (size_t n; folder && *folder; folder += n + (folder[n] == ':')) {
        char *text = NULL;

        n = strcspn(folder, ":");
        if (*folder != '/') /* the working folder is no place for programs */
            continue;
        if (asprintf(&text, "%.*s/%s", (int)n, folder, name) < 0)
            return NULL;
        if (access(text, X_OK) == 0)
            return text;
        free(text);
    }
    return NULL;
}

static bool is_file(const char *path, int mode)
{
    struct stat st;

    if (stat(path, &st) < 0)
        return false;
    if (!S_ISREG(st.st_mode)) {
        errno = S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
        return false;
    }
    return access(path, mode) == 0;
}

static void check_interpreter(struct rv_loader *loader, uint32_t number)
{
    struct rv_config_type *type = &loader->config->config.types[number];
    struct rv_origin origin = origin_of(loader, "types.*.python", number);
    char key[RV_KEY_PATH_MAX], *found = NULL;

    (void)snprintf(key, sizeof(key), "types.%s.python", type->name);
    if (*type->python != '\0' && !strchr(type->python, '/')) {
        found = find_in_path(type->python);
        if (!found) {
            rv_loader_problem(loader, origin, key,
                              "no program \"%s\" is in PATH; allowed: a name that is there, or the path of an "
                              "interpreter",
                              type->python);
            return;
        }
    } else if (*type->python != '/' && asprintf(&found, "%s/%s", loader->file_folder, type->python) < 0) {
        found = NULL;
        loader->no_memory = true;
        return;
    }
    if (found)
        replace(loader, &type->python, found);
    if (!is_file(type->python, X_OK))
        rv_loader_problem(loader, origin, key, "%s: %s; allowed: a name that is in PATH, or the path of an interpreter",
                          type->python, strerror(errno));
}

static void check_python(struct rv_loader *loader, uint32_t number)
{
    struct rv_config_type *type = &loader->config->config.types[number];
    char key[RV_KEY_PATH_MAX];

    (void)snprintf(key, sizeof(key), "types.%s.script", type->name);
    if (*type->script == '\0')
        rv_loader_problem(loader, loader->config->entities[RV_SCOPE_TYPE][number].origin, key,
                          "is missing; allowed: the path of a Python script");
    else if (!is_file(type->script, R_OK))
        rv_loader_problem(loader, origin_of(loader, "types.*.script", number), key,
                          "%s: %s; allowed: the path of a Python script", type->script, strerror(errno));
    check_interpreter(loader, number);
}

static void check_comfyui(struct rv_loader *loader, uint32_t number)
{
    struct rv_config_type *type = &loader->config->config.types[number];
    char key[RV_KEY_PATH_MAX], path[PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s/main.py", type->directory);

    (void)snprintf(key, sizeof(key), "types.%s.directory", type->name);
    if (*type->directory == '\0')
        rv_loader_problem(loader, loader->config->entities[RV_SCOPE_TYPE][number].origin, key,
                          "is missing; allowed: the folder of ComfyUI, with its main.py");
    else if (n < 0 || (size_t)n >= sizeof(path) || !is_file(path, R_OK))
        rv_loader_problem(loader, origin_of(loader, "types.*.directory", number), key,
                          "%s: %s; allowed: the folder of ComfyUI, with its main.py", path, strerror(errno));
    check_interpreter(loader, number);
    rv_config_check_comfyui(loader, number);
}

/* ---- worker kinds ------------------------------------------------------------------------------------------------ */

static const struct {
    const char *kind;
    void (*check)(struct rv_loader *loader, uint32_t number);
} kind_checks[] = {
    {"native", check_executor},
    {"python", check_python},
    {"comfyui", check_comfyui},
};

static void check_kind(struct rv_loader *loader, uint32_t number)
{
    const struct rv_config_type *type = &loader->config->config.types[number];

    const struct rv_key *row;

    for (unsigned i = 0; (row = rv_key_at(i)); i++) {
        struct rv_origin origin;
        char key[RV_KEY_PATH_MAX];

        if (row->scope != RV_SCOPE_TYPE || rv_key_is_of_kind(row, type->kind))
            continue;
        origin = origin_of(loader, row->pattern, number);
        if (origin.source == RV_SOURCE_DEFAULT)
            continue;
        rv_key_shown(row, type->name, key, sizeof(key));
        rv_loader_problem(loader, origin, key, "is not a key of workers of kind %s; allowed with kind: %s", type->kind,
                          rv_key_kinds(row));
    }
    for (unsigned i = 0; i < sizeof(kind_checks) / sizeof(kind_checks[0]); i++)
        if (strcmp(kind_checks[i].kind, type->kind) == 0)
            kind_checks[i].check(loader, number);
}

static bool model_is_known(const struct rv_config *c, const char *name)
{
    for (uint32_t i = 0; i < c->model_count; i++)
        if (strcmp(c->models[i].name, name) == 0)
            return true;
    return false;
}

static void report_unknown_model(struct rv_loader *loader, uint32_t number, const char *key, const char *name)
{
    const struct rv_config *c = &loader->config->config;
    struct rv_origin origin = origin_of(loader, "types.*.models", number);
    char shown[RV_KEY_PATH_MAX], guess[RV_KEY_PATH_MAX];

    rv_escape(shown, sizeof(shown), name, strlen(name));
    for (uint32_t i = 0; i < c->model_count; i++) {
        if (rv_word_suggest(c->models[i].name, name, guess, sizeof(guess))) {
            rv_loader_problem(loader, origin, key, "there is no model \"%s\", did you mean \"%s\"?", shown, guess);
            return;
        }
    }
    rv_loader_problem(loader, origin, key, "there is no model \"%s\"; allowed: names under models", shown);
}

/* ---- devices ----------------------------------------------------------------------------------------------------- */

/* "GPU-" and a uuid's digits in groups; `hexadecimal` are the digits that are allowed. */
static bool is_gpu_uuid(const char *text, const char *hexadecimal)
{
    static const unsigned groups[] = {8, 4, 4, 4, 12};

    if (strncmp(text, "GPU", 3) != 0)
        return false;
    text += 3;
    for (unsigned i = 0; i < sizeof(groups) / sizeof(groups[0]); i++, text += groups[i - 1])
        if (*text++ != '-' || strspn(text, hexadecimal) != groups[i])
            return false;
    return *text == '\0';
}

/* cuda:0 to cuda:15, without leading zeros. */
static bool is_cuda_number(const char *text)
{
    size_t digits;

    if (strncmp(text, "cuda:", 5) != 0)
        return false;
    text += 5;
    digits = strspn(text, "0123456789");
    return digits > 0 && digits <= 2 && text[digits] == '\0' && (digits == 1 || *text != '0') &&
           strtoul(text, NULL, 10) < RV_DEVICES_MAX;
}

/* "gpu1", "cuda", "CUDA:1", "1": all mean one thing. False = nothing is near. */
static bool guess_device(const char *name, char *buffer, size_t size)
{
    static const char *const words[] = {"cuda", "gpu", "device", "nvidia", ""};
    char lower[RV_NAME_MAX];
    size_t n = strlen(name);

    if (n >= sizeof(lower))
        return false;
    for (size_t i = 0; i <= n; i++)
        lower[i] = (char)tolower((unsigned char)name[i]);
    if (strncmp(lower, "gpu-", 4) == 0) {
        memcpy(lower, "GPU", 3);
        (void)snprintf(buffer, size, "%s", lower);
        return is_gpu_uuid(buffer, "0123456789abcdef");
    }
    for (unsigned i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        const char *rest = lower + strlen(words[i]);

        if (strncmp(lower, words[i], strlen(words[i])) != 0)
            continue;
        rest += strspn(rest, ":_- ");
        (void)snprintf(buffer, size, "cuda:%s", *rest ? rest : "0");
        return n > 0 && is_cuda_number(buffer);
    }
    return false;
}

bool rv_config_is_device(const char *name, char *reason, size_t size)
{
    char shown[RV_NAME_MAX], guess[RV_NAME_MAX];

    if (is_cuda_number(name) || is_gpu_uuid(name, "0123456789abcdef"))
        return true;
    (void)rv_escape(shown, sizeof(shown), name, strlen(name));
    if (guess_device(name, guess, sizeof(guess)))
        (void)snprintf(reason, size, "\"%s\" is not a device, did you mean \"%s\"?", shown, guess);
    else
        (void)snprintf(reason, size,
                       "\"%s\" is not a device; allowed: cuda:0 to cuda:%u, or GPU- and a uuid in small letters, as "
                       "`nvidia-smi -L` shows it",
                       shown, RV_DEVICES_MAX - 1);
    return false;
}

static void check_type_device(struct rv_loader *loader, uint32_t number)
{
    const struct rv_config *c = &loader->config->config;
    const char *device = c->types[number].device;
    struct rv_origin origin = origin_of(loader, "types.*.device", number);
    char key[RV_KEY_PATH_MAX], reason[RV_KEY_REASON_MAX], guess[RV_NAME_MAX];

    if (strcmp(device, "auto") == 0 || strcmp(device, "host") == 0)
        return;
    (void)snprintf(key, sizeof(key), "types.%s.device", c->types[number].name);
    if (!rv_config_is_device(device, reason, sizeof(reason))) {
        if (!strstr(reason, "did you mean") && rv_word_suggest("auto|host", device, guess, sizeof(guess)))
            rv_loader_problem(loader, origin, key, "is not known, did you mean \"%s\"?", guess);
        else
            rv_loader_problem(loader, origin, key, "%s; auto and host are allowed too", reason);
    } else if (strcmp(c->cuda, "off") == 0) {
        rv_loader_problem(loader, origin, key, "is %s, but cuda.enabled is off; allowed: host", device);
    }
}

static void check_type(struct rv_loader *loader, uint32_t number)
{
    struct rv_config *c = &loader->config->config;
    struct rv_config_type *type = &c->types[number];
    char key[RV_KEY_PATH_MAX];

    check_kind(loader, number);
    check_type_device(loader, number);
    (void)snprintf(key, sizeof(key), "types.%s.models", type->name);
    for (uint32_t i = 0; i < type->model_count; i++) {
        if (!model_is_known(c, type->models[i]))
            report_unknown_model(loader, number, key, type->models[i]);
        for (uint32_t k = 0; k < i; k++)
            if (strcmp(type->models[i], type->models[k]) == 0)
                rv_loader_problem(loader, origin_of(loader, "types.*.models", number), key,
                                  "\"%s\" is in the list twice; once is allowed", type->models[i]);
    }
    if (type->ping_timeout_us < type->ping_interval_us) {
        (void)snprintf(key, sizeof(key), "types.%s.ping_timeout", type->name);
        rv_loader_problem(loader, origin_of(loader, "types.*.ping_timeout", number), key,
                          "is shorter than ping_interval; allowed: the same or longer");
    }
}

void rv_config_check(struct rv_loader *loader)
{
    struct rv_config *c = &loader->config->config;

    check_runtime_dir(loader);
    check_group(loader, "clients.group", c->clients_group, &c->clients_gid);
    check_group(loader, "rpc.group", c->rpc_group, &c->rpc_gid);
    check_address(loader, "rpc.tcp", c->rpc_tcp, true);
    check_address(loader, "rpc.events_tcp", c->rpc_events_tcp, true);
    check_token_file(loader, "rpc.token_file", c->rpc_token_file);
    if (*c->rpc_tcp && !*c->rpc_token_file)
        rv_loader_problem(loader, origin_of(loader, "rpc.tcp", 0), "rpc.tcp", "needs rpc.token_file");
    check_http(loader);
    check_folders(loader);
    for (uint32_t i = 0; i < c->model_count; i++)
        check_model(loader, i);
    for (uint32_t i = 0; i < c->type_count; i++)
        check_type(loader, i);
    rv_config_check_all_comfyui(loader);
}
