#include "runtime.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "log.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define LOCK_NAME "lock"
#define OTHERS_WRITE (S_IWGRP | S_IWOTH)
#define HOLDER_TRIES 20u
#define HOLDER_STEP_NS 5000000
#define LOCK_TRIES 16 /* the holder may remove the file between our open and our lock */

static const char *const sockets[] = {RV_SOCKET_CONTROL, RV_SOCKET_ROUTER, RV_SOCKET_RPC, RV_SOCKET_EVENTS};

static int check_ours(const char *path, const struct stat *st, struct rv_error *err)
{
    /* One that others write to, such as /tmp, is nobody's runtime directory: to close it would harm them. */
    const char *problem = !S_ISDIR(st->st_mode)        ? "not a directory"
                          : st->st_uid != geteuid()    ? "owned by another user"
                          : st->st_mode & OTHERS_WRITE ? "writable by others"
                                                       : NULL;

    if (!problem)
        return 0;
    rv_error_set(err, EPERM, ERROR(CONFIG), "runtime_dir: %s is %s", path, problem);
    rv_error_remedy(err, "give another --runtime-dir, or remove it");
    return -EPERM;
}

/* Makes a directory of ours with that mode and group; one that is there must be ours and not writable by others. */
static int make_directory(const char *path, mode_t mode, int gid, struct rv_error *err)
{
    struct stat st;

    if (mkdir(path, 0700) < 0 && errno != EEXIST)
        return rv_error_set(err, errno, ERROR(CONFIG), "runtime_dir: cannot make %s: %s", path, strerror(errno));
    if (lstat(path, &st) < 0)
        return rv_error_set(err, errno, ERROR(CONFIG), "runtime_dir: %s: %s", path, strerror(errno));
    if (check_ours(path, &st, err) < 0)
        return -EPERM;
    if (gid >= 0 && chown(path, (uid_t)-1, (gid_t)gid) < 0)
        return rv_error_set(err, errno, ERROR(CONFIG), "%s cannot be given to group %d: %s", path, gid,
                            strerror(errno));
    if (chmod(path, mode) < 0)
        return rv_error_set(err, errno, ERROR(CONFIG), "runtime_dir: cannot set the mode of %s: %s", path,
                            strerror(errno));
    return 0;
}

/* The directory of the lock and those above it. Modes are set later, under the lock. */
static int make_path(const char *path, struct rv_error *err)
{
    char part[RV_PATH_MAX];
    struct stat st;

    (void)snprintf(part, sizeof(part), "%s", path);
    for (char *slash = part + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        if (mkdir(part, 0755) < 0 && errno != EEXIST)
            return rv_error_set(err, errno, ERROR(CONFIG), "runtime_dir: cannot make %s: %s", part, strerror(errno));
        *slash = '/';
    }
    if (mkdir(part, 0700) < 0 && errno != EEXIST)
        return rv_error_set(err, errno, ERROR(CONFIG), "runtime_dir: cannot make %s: %s", part, strerror(errno));
    return lstat(path, &st) < 0 ? rv_error_set(err, errno, ERROR(CONFIG), "runtime_dir: %s: %s", path, strerror(errno))
                                : check_ours(path, &st, err);
}

/* Under the lock: the holder's configuration alone decides who gets in, and nobody removes them at the same time. */
static int make_directories(const struct rv_config *config, struct rv_error *err)
{
    bool shared = config->clients_gid >= 0 || config->rpc_gid >= 0;
    char control[RV_PATH_MAX + 16], rpc[RV_PATH_MAX + 16];
    int r = make_directory(config->runtime_dir, shared ? 0711 : 0700, -1, err);

    (void)snprintf(control, sizeof(control), "%s/control", config->runtime_dir);
    (void)snprintf(rpc, sizeof(rpc), "%s/rpc", config->runtime_dir);
    if (r == 0)
        r = make_directory(control, config->clients_gid >= 0 ? 0750 : 0700, config->clients_gid, err);
    if (r == 0)
        r = make_directory(rpc, config->rpc_gid >= 0 ? 0750 : 0700, config->rpc_gid, err);
    return r;
}

/* Opens and locks the file, and makes sure that the name still means it. -EAGAIN = somebody else holds it. */
static int lock_open(const char *path)
{
    for (unsigned i = 0; i < LOCK_TRIES; i++) {
        struct stat by_fd, by_name;
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);

        if (fd < 0)
            return -errno;
        if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
            int r = errno == EWOULDBLOCK ? -EAGAIN : -errno;

            (void)close(fd);
            return r;
        }
        if (fstat(fd, &by_fd) == 0 && stat(path, &by_name) == 0 && by_fd.st_ino == by_name.st_ino &&
            by_fd.st_dev == by_name.st_dev)
            return fd;
        (void)close(fd); /* removed by an earlier holder: take the new one */
    }
    return -EAGAIN;
}

/* The winner of two starts writes its pid a moment after it has the lock. */
static long lock_holder(const char *path)
{
    static const struct timespec step = {0, HOLDER_STEP_NS};
    long pid = 0;

    for (unsigned i = 0; i < HOLDER_TRIES && pid <= 0; i++) {
        char text[32] = "";
        int fd;

        if (i > 0)
            (void)nanosleep(&step, NULL);
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        if (fd >= 0) {
            (void)!read(fd, text, sizeof(text) - 1);
            (void)close(fd);
        }
        pid = strtol(text, NULL, 10);
    }
    return pid;
}

static int held_by_another(const char *path, struct rv_error *err)
{
    long pid = lock_holder(path);

    if (pid <= 0)
        return rv_error_set(err, EBUSY, ERROR(ALREADY_RUNNING),
                            "resvisor is being started by another process, which "
                            "holds %s",
                            path);
    return rv_error_set(err, EBUSY, ERROR(ALREADY_RUNNING), "resvisor is already running: pid %ld holds %s", pid, path);
}

int rv_runtime_open(const struct rv_config *config, struct rv_error *err)
{
    char path[RV_PATH_MAX + 16], text[32];
    int lock, n, r = make_path(config->runtime_dir, err);

    if (r < 0)
        return r;
    (void)snprintf(path, sizeof(path), "%s/" LOCK_NAME, config->runtime_dir);
    lock = lock_open(path);
    if (lock == -EAGAIN)
        return held_by_another(path, err);
    if (lock < 0)
        return rv_error_set(err, -lock, ERROR(CONFIG), "runtime_dir: %s: %s", path, strerror(-lock));
    n = snprintf(text, sizeof(text), "%d\n", (int)getpid());
    if (ftruncate(lock, 0) < 0 || pwrite(lock, text, (size_t)n, 0) != n)
        r = rv_error_set(err, errno, ERROR(CONFIG), "runtime_dir: cannot write %s: %s", path, strerror(errno));
    if (r == 0)
        r = make_directories(config, err);
    if (r == 0)
        r = rv_runtime_clean(config->runtime_dir, err);
    if (r < 0) {
        (void)unlink(path);
        (void)close(lock);
        return r;
    }
    return lock;
}

int rv_runtime_clean(const char *runtime_dir, struct rv_error *err)
{
    char path[RV_PATH_MAX + 64];
    struct stat st;

    for (unsigned i = 0; i < sizeof(sockets) / sizeof(sockets[0]); i++) {
        (void)snprintf(path, sizeof(path), "%s/%s", runtime_dir, sockets[i]);
        if (lstat(path, &st) < 0)
            continue;
        if (!S_ISSOCK(st.st_mode) || st.st_uid != geteuid()) {
            rv_error_set(err, EEXIST, ERROR(CONFIG), "%s is in the place of our socket and is not one", path);
            rv_error_remedy(err, "move it away, or give another --runtime-dir");
            return -EEXIST;
        }
        (void)unlink(path); /* we hold the lock, so nobody of ours listens there */
    }
    return 0;
}

void rv_runtime_close(const char *runtime_dir, int lock)
{
    char path[RV_PATH_MAX + 16];

    (void)rv_runtime_clean(runtime_dir, NULL);
    (void)snprintf(path, sizeof(path), "%s/rpc", runtime_dir);
    (void)rmdir(path);
    (void)snprintf(path, sizeof(path), "%s/control", runtime_dir);
    (void)rmdir(path);
    (void)snprintf(path, sizeof(path), "%s/" LOCK_NAME, runtime_dir);
    (void)unlink(path);
    (void)close(lock);
}
