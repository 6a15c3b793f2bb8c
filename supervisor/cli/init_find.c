#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config_private.h"
#include "init.h"
#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

static const struct {
    const char *name, *text;
    const char *pattern; /* a file that is there if such a GPU and its driver are */
} gpus[] = {
    [RV_GPU_NONE] = {"none", "no GPU was found: it computes on the CPU", NULL},
    [RV_GPU_NVIDIA] = {"nvidia", "with an NVIDIA GPU", "/proc/driver/nvidia/gpus/*"},
    [RV_GPU_AMD] = {"amd", "with an AMD GPU", "/dev/kfd"},
    [RV_GPU_INTEL] = {"intel", "with an Intel GPU", "/sys/bus/pci/drivers/xe/0*"},
};
_Static_assert(sizeof(gpus) / sizeof(gpus[0]) == RV_GPUS, "a row per GPU");

const char *rv_comfyui_gpu_name(enum rv_gpu gpu)
{
    return gpus[gpu].name;
}

const char *rv_comfyui_gpu_text(enum rv_gpu gpu)
{
    return gpus[gpu].text;
}

static bool glob_matches(const char *pattern)
{
    glob_t found = {0};
    bool any = glob(pattern, GLOB_NOSORT, NULL, &found) == 0 && found.gl_pathc > 0;

    globfree(&found);
    return any;
}

static enum rv_gpu find_gpu(void)
{
    for (unsigned i = RV_GPU_NVIDIA; i < RV_GPUS; i++)
        if (glob_matches(gpus[i].pattern))
            return (enum rv_gpu)i;
    return RV_GPU_NONE;
}

static void add_note(struct rv_comfyui *found, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add_note(struct rv_comfyui *found, const char *format, ...)
{
    va_list ap;

    if (found->note_count == RV_COMFYUI_NOTES_MAX)
        return;
    va_start(ap, format);
    if (vasprintf(&found->notes[found->note_count], format, ap) >= 0)
        found->note_count++;
    va_end(ap);
}

/* ---- model folders ----------------------------------------------------------------------------------------------- */

static bool is_inside(const char *path, const char *folder)
{
    size_t n = strlen(folder);

    return strncmp(path, folder, n) == 0 && (path[n] == '/' || path[n] == '\0');
}

/* Adds a folder unless it lies in one that is there; takes out those that lie in it. */
static void add_folder(struct rv_comfyui *found, const char *path)
{
    char *real = realpath(path, NULL);
    uint32_t kept = 0;
    struct stat st;

    if (!real || stat(real, &st) < 0 || !S_ISDIR(st.st_mode) || strcmp(real, "/") == 0) {
        add_note(found, "%s: %s", path, real ? "it is no folder for models" : strerror(errno));
        free(real);
        return;
    }
    for (uint32_t i = 0; i < found->folder_count; i++) {
        if (is_inside(real, found->folders[i])) {
            free(real);
            return;
        }
    }
    for (uint32_t i = 0; i < found->folder_count; i++) {
        if (is_inside(found->folders[i], real))
            free(found->folders[i]);
        else
            found->folders[kept++] = found->folders[i];
    }
    found->folder_count = kept;
    if (found->folder_count < RV_FOLDERS_MAX) {
        found->folders[found->folder_count++] = real;
    } else {
        add_note(found, "%s: at most %u folders are allowed", real, RV_FOLDERS_MAX);
        free(real);
    }
}

/* ComfyUI's own rules: "~" is the home, a relative path is relative to `base`. Environment variables are not followed.
 */
static void add_path(struct rv_comfyui *found, const char *base, const char *path, char *buffer, size_t size)
{
    const char *home = getenv("HOME");
    int n;

    if (strchr(path, '$')) {
        add_note(found, "%s: it names an environment variable", path);
        buffer[0] = '\0';
        return;
    }
    if (path[0] == '~' && (path[1] == '/' || path[1] == '\0') && home)
        n = snprintf(buffer, size, "%s%s", home, path + 1);
    else
        n = snprintf(buffer, size, "%s%s%s", *path == '/' ? "" : base, *path == '/' ? "" : "/", path);
    if (n < 0 || (size_t)n >= size)
        buffer[0] = '\0';
}

/* The lines of one value: ComfyUI takes several folders, one per line. */
static void add_lines(struct rv_comfyui *found, const char *base, const char *lines)
{
    char line[PATH_MAX], path[PATH_MAX];

    while (*lines) {
        size_t n = strcspn(lines, "\n");

        if (n > 0 && n < sizeof(line)) {
            memcpy(line, lines, n);
            line[n] = '\0';
            add_path(found, base, line, path, sizeof(path));
            if (*path && access(path, F_OK) == 0) /* the example lists folders that few people have */
                add_folder(found, path);
        }
        lines += n + (lines[n] == '\n');
    }
}

static void read_section(struct rv_comfyui *found, const struct rv_node *section)
{
    char base[PATH_MAX];

    (void)snprintf(base, sizeof(base), "%s", found->directory);
    for (const struct rv_node *n = section->child; n; n = n->next)
        if (n->kind == RV_NODE_SCALAR && strcmp(n->key->text, "base_path") == 0)
            add_path(found, found->directory, n->text, base, sizeof(base));
    if (*base == '\0')
        return;
    for (const struct rv_node *n = section->child; n; n = n->next)
        if (n->kind == RV_NODE_SCALAR && strcmp(n->key->text, "base_path") != 0 &&
            strcmp(n->key->text, "is_default") != 0 && strcmp(n->key->text, "custom_nodes") != 0)
            add_lines(found, base, n->text);
}

static char *read_text(const char *path, size_t max, size_t *ret_length)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    char *text = fd >= 0 ? malloc(max + 1) : NULL;
    size_t length = 0;
    ssize_t n = 0;

    while (text && length < max && (n = read(fd, text + length, max - length)) > 0)
        length += (size_t)n;
    if (fd >= 0)
        (void)close(fd);
    if (text && n < 0) {
        free(text);
        return NULL;
    }
    if (text)
        text[length] = '\0';
    *ret_length = length;
    return text;
}

static void read_extra_paths(struct rv_comfyui *found)
{
    struct rv_node *root = NULL;
    char path[PATH_MAX + 32], reason[RV_KEY_REASON_MAX], *text;
    unsigned line = 0;
    size_t length;

    (void)snprintf(path, sizeof(path), "%s/extra_model_paths.yaml", found->directory);
    if (access(path, F_OK) < 0)
        return;
    text = read_text(path, RV_COMFYUI_YAML_MAX, &length);
    if (!text) {
        add_note(found, "%s: it cannot be read: %s", path, strerror(errno));
        return;
    }
    if (rv_tree_parse(text, length, &root, &line, reason, sizeof(reason)) < 0)
        add_note(found, "%s:%u: %s", path, line, reason);
    else if (!root || root->kind != RV_NODE_MAP)
        add_note(found, "%s: it is empty, or no map; ComfyUI does not start with it", path);
    for (const struct rv_node *n = root ? root->child : NULL; n && root->kind == RV_NODE_MAP; n = n->next)
        if (n->kind == RV_NODE_MAP)
            read_section(found, n);
    rv_tree_destroy(root);
    free(text);
}

/* ---- the interpreter --------------------------------------------------------------------------------------------- */

static bool has_torch(const char *python)
{
    char pattern[PATH_MAX + 64];
    const char *slash = strrchr(python, '/');

    if (!slash)
        return false;
    (void)snprintf(pattern, sizeof(pattern), "%.*s/../lib/python3*/site-packages/torch", (int)(slash - python), python);
    return glob_matches(pattern);
}

/* The places of virtual environments; the first one with torch wins, then the first one. */
static void find_python(struct rv_comfyui *found)
{
    static const char *const places[] = {"venv", ".venv", "env", "../venv", "../.venv", "../env"};
    const char *variables[] = {getenv("VIRTUAL_ENV"), getenv("CONDA_PREFIX")};
    char path[PATH_MAX + 32], first[PATH_MAX] = "";

    for (unsigned i = 0; i < 8; i++) {
        if (i < 6)
            (void)snprintf(path, sizeof(path), "%s/%s/bin/python", found->directory, places[i]);
        else
            (void)snprintf(path, sizeof(path), "%s/bin/python", variables[i - 6] ? variables[i - 6] : "/nonexistent");
        if (strlen(path) >= PATH_MAX || access(path, X_OK) < 0)
            continue;
        if (has_torch(path)) {
            (void)snprintf(found->python, sizeof(found->python), "%.*s", PATH_MAX - 1, path);
            found->python_reason = i < 6 ? "that of the virtual environment beside ComfyUI, which has torch"
                                         : "that of the active environment, which has torch";
            return;
        }
        if (!*first)
            (void)snprintf(first, sizeof(first), "%.*s", PATH_MAX - 1, path);
    }
    (void)snprintf(found->python, sizeof(found->python), "%s", *first ? first : "python3");
    found->python_reason =
        *first ? "that of the first environment that was found; no torch was seen in it"
               : "the one in PATH, since no virtual environment was found; name yours with --python if it is "
                 "another";
}

/* ---- the rest ---------------------------------------------------------------------------------------------------- */

static int is_pack(const struct dirent *entry)
{
    size_t n = strlen(entry->d_name);

    return entry->d_name[0] != '.' && strcmp(entry->d_name, "__pycache__") != 0 &&
           !(n > 9 && strcmp(entry->d_name + n - 9, ".disabled") == 0);
}

static void find_packs(struct rv_comfyui *found)
{
    char path[PATH_MAX + 32];
    struct dirent **list = NULL;
    struct stat st;
    int n;

    (void)snprintf(path, sizeof(path), "%s/custom_nodes", found->directory);
    n = scandir(path, &list, is_pack, alphasort);
    for (int i = 0; i < n; i++) {
        char entry[PATH_MAX + NAME_MAX + 40];
        bool is_folder;

        (void)snprintf(entry, sizeof(entry), "%s/%s", path, list[i]->d_name);
        is_folder = stat(entry, &st) == 0 && S_ISDIR(st.st_mode);
        if (is_folder && found->pack_count < RV_COMFYUI_PACKS_MAX) {
            found->packs[found->pack_count] = strdup(list[i]->d_name);
            found->pack_count += found->packs[found->pack_count] != NULL;
        }
        free(list[i]);
    }
    free(list);
}

/* comfyui_version.py holds `__version__ = "0.33.0"`. */
static void find_version(struct rv_comfyui *found)
{
    char path[PATH_MAX + 32], *text, *begin;
    size_t length;

    (void)snprintf(found->version, sizeof(found->version), "of unknown version");
    (void)snprintf(path, sizeof(path), "%s/comfyui_version.py", found->directory);
    text = read_text(path, 4096, &length);
    begin = text ? strstr(text, "__version__") : NULL;
    begin = begin ? strchr(begin, '"') : NULL;
    if (begin) {
        size_t n = strspn(begin + 1, "0123456789.abcdefghijklmnopqrstuvwxyz+-");

        if (n > 0 && n < sizeof(found->version) && begin[n + 1] == '"')
            (void)snprintf(found->version, sizeof(found->version), "%.*s", (int)n, begin + 1);
    }
    free(text);
}

/* A path that could end a comment or a text of the file that is written is not for us. */
static bool is_plain(const char *path)
{
    char safe[4 * PATH_MAX];

    return strcmp(rv_escape(safe, sizeof(safe), path, strlen(path)), path) == 0;
}

int rv_comfyui_find(const char *directory, const char *python, struct rv_comfyui *ret_found, struct rv_error *err)
{
    char path[PATH_MAX + 32], *real = realpath(directory, NULL);
    struct rv_comfyui *found = ret_found;

    *found = (struct rv_comfyui){0};
    if (!real)
        return rv_error_set(err, errno, CODE(FILE), "%s: %s", directory, strerror(errno));
    (void)snprintf(found->directory, sizeof(found->directory), "%s", real);
    free(real);
    if (!is_plain(found->directory))
        return rv_error_set(err, EINVAL, CODE(FILE), "the path of ComfyUI has bytes that are no text");
    (void)snprintf(path, sizeof(path), "%s/main.py", found->directory);
    if (access(path, R_OK) < 0) {
        (void)rv_error_set(err, ENOENT, CODE(FILE), "%s: %s", path, strerror(errno));
        rv_error_remedy(err, "name the folder of ComfyUI, the one with main.py");
        return -ENOENT;
    }
    if (python && strlen(python) >= sizeof(found->python))
        return rv_error_set(err, ENAMETOOLONG, CODE(USAGE), "the path of python is too long");
    find_version(found);
    found->gpu = find_gpu();
    find_python(found);
    if (python) {
        real = strchr(python, '/') && *python != '/' ? getcwd(NULL, 0) : NULL; /* links of an environment must stay */
        (void)snprintf(found->python, sizeof(found->python), "%s%s%s", real ? real : "", real ? "/" : "", python);
        free(real);
        found->python_reason = "the one that was named";
    }
    (void)snprintf(path, sizeof(path), "%s/models", found->directory);
    add_folder(found, path);
    read_extra_paths(found);
    find_packs(found);
    return 0;
}

void rv_comfyui_fini(struct rv_comfyui *found)
{
    for (uint32_t i = 0; i < found->folder_count; i++)
        free(found->folders[i]);
    for (uint32_t i = 0; i < found->pack_count; i++)
        free(found->packs[i]);
    for (uint32_t i = 0; i < found->note_count; i++)
        free(found->notes[i]);
    found->folder_count = found->pack_count = found->note_count = 0;
}
