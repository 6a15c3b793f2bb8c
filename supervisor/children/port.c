/*
 * The port of a worker that serves HTTP. The supervisor listens, keeps the socket over the worker's restarts and hands
 * it to each new process: nobody can take the port in between, and a connection that comes during a restart waits for
 * the next process instead of being refused.
 */
#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "children_private.h"
#include "config.h"
#include "log.h"

#define BACKLOG 128
#define HOLDER_SOCKETS_MAX 8u      /* listening sockets of one port that are looked for */
#define HOLDER_PROCESSES_MAX 8192u /* looked at; further ones are not */
#define HOLDER_LINKS_MAX 20000u    /* their descriptors: some ten ms, in which the supervisor does nothing else */
#define HOLDER_COMMAND_MAX 120u    /* bytes of its command line that are shown */
#define TCP_LISTEN_STATE 0x0A      /* in /proc/net/tcp */

/* ---- who has it ------------------------------------------------------------------------------------------------- */

/* "socket:[INODE]" of each socket that listens at the port. */
static unsigned listening_sockets(unsigned port, char found[HOLDER_SOCKETS_MAX][48])
{
    static const char *const tables[] = {"/proc/net/tcp", "/proc/net/tcp6"};
    unsigned count = 0;

    for (unsigned t = 0; t < 2; t++) {
        FILE *f = fopen(tables[t], "re");
        char line[512];

        while (f && count < HOLDER_SOCKETS_MAX && fgets(line, sizeof(line), f)) {
            unsigned local, state;
            unsigned long long inode;

            if (sscanf(line, " %*u: %*[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*x:%*x %*x:%*x %*x %*u %*u %llu", &local,
                       &state, &inode) == 3 &&
                local == port && state == TCP_LISTEN_STATE)
                (void)snprintf(found[count++], sizeof(found[0]), "socket:[%llu]", inode);
        }
        if (f)
            (void)fclose(f);
    }
    return count;
}

static bool process_has(const char *pid, char sockets[HOLDER_SOCKETS_MAX][48], unsigned count, unsigned *links)
{
    char path[64], target[64];
    struct dirent *entry;
    bool has = false;
    DIR *folder;

    (void)snprintf(path, sizeof(path), "/proc/%.16s/fd", pid);
    folder = opendir(path);
    if (!folder)
        return false; /* another user's, or gone */
    while (!has && (*links)++ < HOLDER_LINKS_MAX && (entry = readdir(folder))) {
        ssize_t n = readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1);

        if (n <= 0)
            continue;
        target[n] = '\0';
        for (unsigned i = 0; i < count; i++)
            has |= strcmp(target, sockets[i]) == 0;
    }
    (void)closedir(folder);
    return has;
}

static void describe(const char *pid, char *buffer, size_t size)
{
    char path[64], raw[HOLDER_COMMAND_MAX], shown[4 * HOLDER_COMMAND_MAX];
    ssize_t n = 0;
    int fd;

    (void)snprintf(path, sizeof(path), "/proc/%.16s/cmdline", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        n = read(fd, raw, sizeof(raw));
        (void)close(fd);
    }
    while (n > 0 && raw[n - 1] == '\0')
        n--;
    for (ssize_t i = 0; i < n; i++)
        if (raw[i] == '\0')
            raw[i] = ' ';
    rv_escape(shown, sizeof(shown), raw, n > 0 ? (size_t)n : 0);
    (void)snprintf(buffer, size, "; process %.16s has it: %s", pid, shown);
}

/* "; process 1234 has it: python main.py", as far as this user may see it. */
static void find_holder(unsigned port, char *buffer, size_t size)
{
    char sockets[HOLDER_SOCKETS_MAX][48];
    unsigned count = listening_sockets(port, sockets), looked_at = 0, links = 0;
    DIR *folder = count ? opendir("/proc") : NULL;
    struct dirent *entry;

    buffer[0] = '\0';
    while (folder && looked_at < HOLDER_PROCESSES_MAX && links < HOLDER_LINKS_MAX && (entry = readdir(folder))) {
        if (!isdigit((unsigned char)entry->d_name[0]))
            continue;
        looked_at++;
        if (process_has(entry->d_name, sockets, count, &links)) {
            describe(entry->d_name, buffer, size);
            break;
        }
    }
    if (folder)
        (void)closedir(folder);
}

/* ---- taking it -------------------------------------------------------------------------------------------------- */

/* An IPv4 listening socket. 0 or negative errno. */
static int listen_at(const char *address, unsigned port, int *ret_fd, unsigned *ret_port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    socklen_t length = sizeof(at);
    int fd, one = 1, r = 0;

    if (inet_pton(AF_INET, address, &at.sin_addr) != 1)
        return -EINVAL;
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    /* Connections of the one before may still be in TIME_WAIT; a socket that listens is a conflict all the same. */
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, (struct sockaddr *)&at, sizeof(at)) < 0 || listen(fd, BACKLOG) < 0 ||
        getsockname(fd, (struct sockaddr *)&at, &length) < 0)
        r = -errno;
    if (r < 0) {
        (void)close(fd);
        return r;
    }
    *ret_fd = fd;
    *ret_port = ntohs(at.sin_port);
    return 0;
}

int rv_port_take(const struct rv_config_type *type, unsigned number, struct rv_http_port *port, struct rv_error *err)
{
    const char *given = rv_config_type_argument(type, "--port"), *address = rv_config_type_argument(type, "--listen");
    unsigned wanted = given ? (unsigned)strtoul(given, NULL, 10) : 0;
    char holder[640];
    int r;

    if (port->fd >= 0)
        return 0;
    if (!address || strcmp(address, "localhost") == 0)
        address = "127.0.0.1";
    /* The one that is given is the first worker's, the next worker's is one more. */
    wanted = wanted ? wanted + number : port->number;
    r = listen_at(address, wanted, &port->fd, &port->number);
    if (r == -EADDRINUSE && !given) /* ours of before the worker failed: somebody has it now, so another one */
        r = listen_at(address, 0, &port->fd, &port->number);
    if (r == 0)
        return 0;
    find_holder(wanted, holder, sizeof(holder));
    return rv_error_set(err, -r, RESVISOR__V1__ERROR_CODE__ERROR_PORT_TAKEN, "cannot listen on %s port %u: %s%s",
                        address, wanted, strerror(-r), holder);
}

void rv_port_give_up(struct rv_http_port *port)
{
    if (port->fd >= 0)
        (void)close(port->fd);
    port->fd = -1;
}
