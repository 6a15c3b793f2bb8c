/* rv_connect: where the socket is, and what to say when nobody listens there. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "clock.h"
#include "internal.h"

#define SOCKET_IN_RUNTIME_DIR "control/resvisor.sock"

/* /tmp is everybody's: a directory there counts only if it is ours and closed, or somebody else could play supervisor.
 */
static bool is_private(const char *directory)
{
    struct stat st;

    return lstat(directory, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == geteuid() && (st.st_mode & 022) == 0;
}

/* Writes the default path; -ENAMETOOLONG; -ENOENT with the reason in err. */
static int default_path(char *buffer, size_t size, struct rv_error *err)
{
    const char *socket_path = getenv("RESVISOR_SOCKET"), *dir = getenv("RESVISOR_RUNTIME_DIR");
    const char *xdg = getenv("XDG_RUNTIME_DIR");
    char own[64];
    int n;

    (void)snprintf(own, sizeof(own), "/tmp/resvisor-%u", (unsigned)geteuid());
    if (socket_path && *socket_path)
        n = snprintf(buffer, size, "%s", socket_path);
    else if (dir && *dir)
        n = snprintf(buffer, size, "%s/%s", dir, SOCKET_IN_RUNTIME_DIR);
    else if (geteuid() == 0)
        n = snprintf(buffer, size, "/run/resvisor/%s", SOCKET_IN_RUNTIME_DIR);
    else if (xdg && *xdg)
        n = snprintf(buffer, size, "%s/resvisor/%s", xdg, SOCKET_IN_RUNTIME_DIR);
    else if (is_private(own))
        n = snprintf(buffer, size, "%s/%s", own, SOCKET_IN_RUNTIME_DIR);
    else {
        rv_error_set(err, ENOENT, ERROR(NOT_RUNNING),
                     "resvisor is not running: there is no %s of this user, and XDG_RUNTIME_DIR is not set", own);
        rv_error_remedy(err, "start it with `resvisor start`, or set RESVISOR_RUNTIME_DIR or RESVISOR_SOCKET");
        return -ENOENT;
    }
    if (n < 0 || (size_t)n >= size)
        return rv_error_set(err, ENAMETOOLONG, ERROR(BAD_REQUEST),
                            "the socket's path is longer than the kernel's limit of %zu bytes", size - 1);
    return 0;
}

static int say_refused(int r, const char *path, struct rv_error *err)
{
    char shown[256];

    (void)rv_escape(shown, sizeof(shown), path, strlen(path));
    switch (-r) {
    case ENOENT:
    case ENOTDIR:
    case ECONNREFUSED:
        rv_error_set(err, -r, ERROR(NOT_RUNNING), "resvisor is not running: %s at %s",
                     r == -ECONNREFUSED ? "nobody listens" : "there is no socket", shown);
        rv_error_remedy(err, "start it with `resvisor start`, or set RESVISOR_RUNTIME_DIR or RESVISOR_SOCKET");
        return r == -ENOTDIR ? -ENOENT : r;
    case EACCES:
    case EPERM:
        rv_error_set(err, EACCES, ERROR(NOT_PERMITTED), "this user may not connect to %s", shown);
        rv_error_remedy(err, "ask for membership in the group of clients.group");
        return -EACCES;
    case EPROTOTYPE:
        return rv_error_set(err, EPROTO, ERROR(BAD_VERSION), "%s is a socket of another program", shown);
    case EAGAIN:
        return rv_error_set(err, ETIMEDOUT, ERROR(DEADLINE), "resvisor at %s did not accept within the time limit",
                            shown);
    default:
        return rv_error_set(err, -r, ERROR(INTERNAL), "cannot connect to %s: %s", shown, strerror(-r));
    }
}

/* A connected socket or a negative errno. */
static int open_socket(const struct sockaddr_un *address, uint64_t until_us)
{
    int r, fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    if (fd < 0)
        return -errno;
    do {
        uint64_t now = rv_now_us(), left = until_us > now ? until_us - now : 1;
        /* Only connect waits on it; frames are sent and received without waiting. */
        struct timeval tv = {.tv_sec = (time_t)(left / RV_SEC), .tv_usec = (suseconds_t)(left % RV_SEC)};

        if (until_us != UINT64_MAX)
            (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
        r = connect(fd, (const struct sockaddr *)address, sizeof(*address)) < 0 ? -errno : 0;
    } while (r == -EINTR);
    if (r < 0) {
        (void)close(fd);
        return r;
    }
    return fd;
}

int rv_connect(const char *socket_path, int timeout_ms, struct rv_connection **ret_connection, struct rv_failure *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct rv_error error = {0};
    uint64_t until_us = rv_deadline_us(timeout_ms);
    char instance[48];
    int r = 0, fd;

    if (!ret_connection)
        return rv_failure_from(err, &error, -EINVAL);
    if (!socket_path)
        r = default_path(address.sun_path, sizeof(address.sun_path), &error);
    else if (strlen(socket_path) >= sizeof(address.sun_path) || !*socket_path)
        r = rv_error_set(&error, *socket_path ? ENAMETOOLONG : EINVAL, ERROR(BAD_REQUEST),
                         "the socket's path must have 1 to %zu bytes", sizeof(address.sun_path) - 1);
    else
        (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", socket_path);
    if (r < 0)
        return rv_failure_from(err, &error, r);
    fd = open_socket(&address, until_us);
    if (fd < 0)
        return rv_failure_from(err, &error, say_refused(fd, address.sun_path, &error));
    (void)snprintf(instance, sizeof(instance), "%d-%llu", (int)getpid(), (unsigned long long)rv_now_us());
    r = rv_connection_start(fd, RV__ROLE__ROLE_CLIENT, instance, NULL, NULL, until_us, ret_connection, &error);
    return rv_failure_from(err, &error, r);
}
