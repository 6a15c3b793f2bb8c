#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "router.h"

/* 0 = nobody listens there, 1 = somebody does, else a negative errno. */
static int somebody_listens(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    static const int kinds[] = {SOCK_STREAM, SOCK_SEQPACKET};

    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        int r = 0, fd = socket(AF_UNIX, kinds[i] | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

        if (fd < 0)
            return -errno;
        if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) < 0)
            r = errno;
        (void)close(fd);
        if (r == 0 || r == EAGAIN)
            return 1;
        if (r == EPROTOTYPE) /* another kind of socket: ask again with that */
            continue;
        return r == ECONNREFUSED ? 0 : -r;
    }
    return 1;
}

int rv_socket_claim(const char *path, struct rv_error *err)
{
    struct stat st;
    int r;

    if (strlen(path) >= RV_SOCKET_PATH_MAX + 10) /* nanomsg aborts at 108 */
        return rv_error_set(err, ENAMETOOLONG, RV_CODE(CONFIG), "the socket path %s is longer than %u bytes", path,
                            RV_SOCKET_PATH_MAX + 9);
    if (lstat(path, &st) < 0)
        return errno == ENOENT
                   ? 0
                   : rv_error_set(err, errno, RV_CODE(FILE), "cannot look at %s: %s", path, strerror(errno));
    if (!S_ISSOCK(st.st_mode) || st.st_uid != geteuid())
        return rv_error_set(err, EEXIST, RV_CODE(FILE), "%s is there and is not a socket of ours; it stays", path);
    r = somebody_listens(path);
    if (r < 0)
        return rv_error_set(err, -r, RV_CODE(FILE), "cannot find out who listens at %s: %s", path, strerror(-r));
    if (r > 0)
        return rv_error_set(err, EADDRINUSE, RV_CODE(ALREADY_RUNNING), "another process listens at %s", path);
    if (unlink(path) < 0 && errno != ENOENT)
        return rv_error_set(err, errno, RV_CODE(FILE), "cannot remove the dead socket %s: %s", path, strerror(errno));
    return 0;
}

int rv_socket_adopt(struct rv_socket_file *file, const char *path, int gid, struct rv_error *err)
{
    struct stat st;

    /* The group first: the wider mode must never be there with another group. */
    if (gid >= 0 && (lchown(path, (uid_t)-1, (gid_t)gid) < 0 || chmod(path, 0660) < 0))
        return rv_error_set(err, errno, RV_CODE(NOT_PERMITTED), "cannot give %s to group %d: %s", path, gid,
                            strerror(errno));
    if (lstat(path, &st) < 0)
        return rv_error_set(err, errno, RV_CODE(FILE), "cannot look at %s: %s", path, strerror(errno));
    (void)snprintf(file->path, sizeof(file->path), "%s", path);
    file->dev = st.st_dev;
    file->ino = st.st_ino;
    file->bound = true;
    return 0;
}

void rv_socket_release(struct rv_socket_file *file)
{
    struct stat st;

    if (file->bound && lstat(file->path, &st) == 0 && st.st_dev == file->dev && st.st_ino == file->ino)
        (void)unlink(file->path);
    file->bound = false;
}
