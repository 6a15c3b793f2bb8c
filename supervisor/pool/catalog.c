/* From a name, a path or a client's descriptor to a catalogue entry and a file. Nobody reads files through us. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "log.h"
#include "pool.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

static const char *file_kind(mode_t mode)
{
    return S_ISDIR(mode)    ? "a directory"
           : S_ISFIFO(mode) ? "a FIFO"
           : S_ISSOCK(mode) ? "a socket"
           : S_ISCHR(mode)  ? "a character device"
           : S_ISBLK(mode)  ? "a block device"
                            : "not a regular file";
}

static void identity_fill(const struct stat *st, struct rv_file_identity *identity)
{
    *identity = (struct rv_file_identity){
        .device = st->st_dev,
        .inode = st->st_ino,
        .size = (uint64_t)st->st_size,
        .mtime_sec = st->st_mtim.tv_sec,
        .mtime_nsec = st->st_mtim.tv_nsec,
    };
}

static bool lies_in_a_folder(const struct rv_config *config, const char *path)
{
    for (uint32_t i = 0; i < config->folder_count; i++) {
        size_t n = strlen(config->folders[i]);

        if (n > 1 && config->folders[i][n - 1] == '/')
            n--;
        if (strncmp(path, config->folders[i], n) == 0 && (path[n] == '/' || n == 1))
            return true;
    }
    return false;
}

/* True = the text climbs by "..": then only its resolved form can be judged. */
static bool climbs(const char *path)
{
    return strstr(path, "/../") || (strlen(path) >= 3 && strcmp(path + strlen(path) - 3, "/..") == 0);
}

static int not_permitted(const char *shown, struct rv_error *err)
{
    rv_error_set(err, EACCES, ERROR(NOT_PERMITTED), "%s is not inside a configured model folder", shown);
    rv_error_remedy(err, "add its folder to model_folders, or send your own open descriptor of the file");
    return -EACCES;
}

static int open_failed(const char *shown, int number, bool by_name, struct rv_error *err)
{
    if (number == ENOENT || number == ENOTDIR)
        return rv_error_set(err, ENOENT, ERROR(NO_SUCH_MODEL), "there is no file %s", shown);
    rv_error_set(err, number, ERROR(FILE), "%s cannot be opened: %s", shown, strerror(number));
    if (number == EACCES)
        rv_error_remedy(err, "make it readable for the user that runs resvisor%s",
                        by_name ? "" : ", or send your own open descriptor of the file");
    return -number;
}

/*
 * Opens a model file by O_PATH, which has no side effects on FIFOs and devices, and says where it really is.
 * `free_path`: the operator named it in the configuration, so it may lie anywhere.
 */
static int open_model(const struct rv_supervisor *s, const char *path, bool free_path, char real[PATH_MAX],
                      struct rv_file_identity *ret_identity, struct rv_error *err)
{
    char shown[RV_ERROR_TEXT_MAX / 2], link[64];
    struct stat st;
    ssize_t n;
    int fd = open(path, O_PATH | O_CLOEXEC);

    (void)rv_escape(shown, sizeof(shown), path, strlen(path));
    if (fd < 0) {
        /* Whether a file outside the folders exists is nobody's business. */
        if (!free_path && (climbs(path) || !lies_in_a_folder(s->config, path)))
            return not_permitted(shown, err);
        return open_failed(shown, errno, free_path, err);
    }
    (void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    n = readlink(link, real, PATH_MAX - 1);
    if (n < 0 || fstat(fd, &st) < 0) {
        int r = rv_error_set(err, errno, ERROR(FILE), "%s: %s", shown, strerror(errno));

        (void)close(fd);
        return r;
    }
    real[n] = '\0';
    if (!free_path && !lies_in_a_folder(s->config, real)) {
        (void)close(fd);
        return not_permitted(shown, err);
    }
    if (!S_ISREG(st.st_mode)) {
        (void)close(fd);
        return rv_error_set(err, EINVAL, ERROR(FILE), "%s is %s, not a model file", shown, file_kind(st.st_mode));
    }
    identity_fill(&st, ret_identity);
    return fd;
}

/* Paths become names in messages and lines of logs: one that would break those is no path of a model. */
static int check_shown(const char *real, struct rv_error *err)
{
    char shown[PATH_MAX + RV_ERROR_TEXT_MAX];

    (void)rv_escape(shown, sizeof(shown), real, strlen(real));
    if (strcmp(shown, real) == 0)
        return 0;
    rv_error_set(err, EILSEQ, ERROR(FILE), "the path %s has bytes that are not UTF-8, or control characters", shown);
    rv_error_remedy(err, "rename it");
    return -EILSEQ;
}

/*
 * A path from /proc/self/fd is where the file is for the one who opened it, which with a mount namespace of its own can
 * be any text. Only if the file is there for us too, it is that file's entry; else it gets one that nobody can ask for.
 */
static void name_by_fd(const struct stat *st, char real[PATH_MAX])
{
    struct stat here;
    char elsewhere[PATH_MAX];

    if (stat(real, &here) == 0 && here.st_dev == st->st_dev && here.st_ino == st->st_ino)
        return;
    (void)snprintf(elsewhere, sizeof(elsewhere), "descriptor:%llu:%llu:%.*s", (unsigned long long)st->st_dev,
                   (unsigned long long)st->st_ino, PATH_MAX - 64, real);
    (void)snprintf(real, PATH_MAX, "%s", elsewhere);
}

/* Does the configuration pin the model of that name? */
static bool is_pinned_by_configuration(const struct rv_supervisor *s, const char *name)
{
    for (uint32_t i = 0; i < s->config->model_count; i++)
        if (strcmp(s->config->models[i].name, name) == 0)
            return s->config->models[i].pin;
    return false;
}

/*
 * The entry of a file on a device. `named` is that of the name that was asked for, wherever it lies; NULL = a path was
 * asked for.
 */
static struct rv_model *entry_for(struct rv_supervisor *s, struct rv_model *named, const char *real, int device,
                                  struct rv_error *err)
{
    struct rv_model *model = rv_model_by_path(&s->state, real, device), *here;

    /* So that unload and unpin by this name mean the file's entries too, whichever name they have. */
    if (named && rv_model_set_path(named, real) < 0)
        goto full;
    if (model)
        return model; /* also when another name leads to the same file */
    if (!named) {
        model = rv_model_add(&s->state, real, real, "auto", false, device);
        if (model)
            return model;
        goto full;
    }
    here = rv_model_by_name(&s->state, named->name, device);
    if (here) {
        if (rv_model_set_path(here, real) == 0)
            return here;
        goto full;
    }
    model = rv_model_place(&s->state, named, device);
    if (model) {
        model->pinned = model->configured && is_pinned_by_configuration(s, model->name);
        return model;
    }
full:
    rv_error_set(err, EBUSY, ERROR(LIMIT), "the catalogue is full: %u models", RV_MODELS_MAX);
    return NULL;
}

/* The usual case, by one call of the kernel instead of four: the file behind a configured name is what is in memory. */
static bool is_unchanged(const struct rv_model *model, struct rv_file_identity *identity)
{
    const struct rv_generation *current = rv_model_current(model);
    struct stat st;

    if (!model->configured || !current || stat(model->source, &st) < 0 || !S_ISREG(st.st_mode))
        return false;
    identity_fill(&st, identity);
    return rv_identity_equal(&current->identity, identity);
}

int rv_catalog_find(struct rv_supervisor *s, const char *name_or_path, int device, struct rv_model **ret_model,
                    int *ret_fd, struct rv_file_identity *ret_identity, struct rv_error *err)
{
    struct rv_model *named = rv_model_by_name(&s->state, name_or_path, RV_ANYWHERE), *model;
    struct rv_model *here = rv_model_by_name(&s->state, name_or_path, device);
    bool configured = named && named->configured;
    char real[PATH_MAX], shown[RV_ERROR_TEXT_MAX / 2];
    int fd;

    if (!named && name_or_path[0] != '/')
        return rv_error_set(err, ENOENT, ERROR(NO_SUCH_MODEL), "no model is named \"%s\" (a path must be absolute)",
                            rv_escape(shown, sizeof(shown), name_or_path, strlen(name_or_path)));
    if (strlen(name_or_path) >= RV_PATH_MAX)
        return rv_error_set(err, ENAMETOOLONG, ERROR(BAD_REQUEST), "a path over %u bytes", RV_PATH_MAX);
    if (here && is_unchanged(here, ret_identity)) {
        *ret_model = here;
        *ret_fd = -1;
        return 0;
    }
    fd = open_model(s, named ? named->source : name_or_path, configured, real, ret_identity, err);
    if (fd < 0) {
        if (fd == -ENOENT && here && rv_model_current(here)) {
            /* The weights are ours: that somebody removed the file does not take them from those who use them. */
            rv_log_warning("%s: its file is gone; what is in memory is used", here->name);
            *ret_identity = rv_model_current(here)->identity;
            *ret_model = here;
            *ret_fd = -1;
            return 0;
        }
        return fd;
    }
    if (check_shown(real, err) < 0) {
        (void)close(fd);
        return -EILSEQ;
    }
    model = entry_for(s, named, real, device, err);
    if (!model) {
        (void)close(fd);
        return -EBUSY;
    }
    *ret_model = model;
    *ret_fd = fd;
    return 0;
}

int rv_catalog_find_by_fd(struct rv_supervisor *s, int fd, int device, struct rv_model **ret_model,
                          struct rv_file_identity *ret_identity, struct rv_error *err)
{
    char link[64], real[PATH_MAX];
    struct stat st;
    ssize_t n;
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0 || (flags & O_PATH) || (flags & O_ACCMODE) == O_WRONLY)
        return rv_error_set(err, EBADF, ERROR(BAD_REQUEST), "the descriptor is not open for reading");
    if (fstat(fd, &st) < 0)
        return rv_error_set(err, errno, ERROR(FILE), "the descriptor: %s", strerror(errno));
    if (!S_ISREG(st.st_mode))
        return rv_error_set(err, EINVAL, ERROR(FILE), "the descriptor is %s, not a model file", file_kind(st.st_mode));
    (void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    n = readlink(link, real, sizeof(real) - 1);
    if (n < 0)
        return rv_error_set(err, errno, ERROR(FILE), "the descriptor: %s", strerror(errno));
    real[n] = '\0';
    if (check_shown(real, err) < 0)
        return -EILSEQ;
    name_by_fd(&st, real);
    *ret_model = entry_for(s, NULL, real, device, err);
    if (!*ret_model)
        return -EBUSY;
    identity_fill(&st, ret_identity);
    return 0;
}
