#include "keeper.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clock.h"
#include "error.h"
#include "log.h"

#define END_ALL_US (5 * RV_SEC)

static struct {
    pid_t supervisor;
    int socket, signals, ready_fd;
    pid_t reported; /* the zombie that waits for its ACK; 0 = none */
} keeper = {.socket = -1, .signals = -1, .ready_fd = -1};

/* ---- start ------------------------------------------------------------------------------------------------------ */

/* The signals of the mask stay blocked until the supervisor has its handlers: a stop in its first moments is a stop. */
static void supervisor_exec(char *const *argv, int socket, pid_t parent)
{
    (void)setpgid(0, 0); /* a terminal's Ctrl-C reaches the keeper only, which passes it on */
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(RV_EXIT_INTERNAL);
    if (socket == RV_KEEPER_FD)
        (void)fcntl(socket, F_SETFD, 0);
    else
        (void)dup2(socket, RV_KEEPER_FD);
    execv("/proc/self/exe", argv);
    rv_log_error("cannot execute the supervisor: %s", strerror(errno));
    _exit(RV_EXIT_INTERNAL);
}

/*
 * None of these may end what holds the weights: a log pipe whose reader has gone, a waiting `start --detach` that was
 * killed, a terminal, a signal sent to the wrong process. The supervisor inherits it; its children start with defaults.
 */
static void ignore_signals(void)
{
    static const int ignored[] = {SIGPIPE, SIGUSR1, SIGUSR2, SIGALRM, SIGTTIN, SIGTTOU, SIGXFSZ};

    for (unsigned i = 0; i < sizeof(ignored) / sizeof(ignored[0]); i++)
        (void)signal(ignored[i], SIG_IGN);
}

static int start(const struct rv_keeper_options *options)
{
    static const int handled[] = {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT};
    sigset_t set;
    int pair[2];
    pid_t self = getpid(), pid;

    if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
        return -errno;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return -errno;
    ignore_signals();
    (void)sigemptyset(&set);
    for (unsigned i = 0; i < sizeof(handled) / sizeof(handled[0]); i++)
        (void)sigaddset(&set, handled[i]);
    (void)sigprocmask(SIG_BLOCK, &set, NULL);
    keeper.signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (keeper.signals < 0)
        return -errno;
    pid = fork();
    if (pid < 0)
        return -errno;
    if (pid == 0)
        supervisor_exec(options->supervisor_argv, pair[1], self);
    (void)close(pair[1]);
    keeper.socket = pair[0];
    keeper.supervisor = pid;
    keeper.ready_fd = options->ready_fd;
    return 0;
}

/* ---- exits ------------------------------------------------------------------------------------------------------ */

static void reap(pid_t pid)
{
    /* The zombie still holds its id, so the group cannot be somebody else's. */
    if (getpgid(pid) == pid)
        (void)kill(-pid, SIGKILL);
    (void)waitpid(pid, NULL, 0);
}

/* Reports the first zombie, one at a time: the next after its ACK. True = the supervisor itself has ended. */
static bool report_exit(siginfo_t *ret_supervisor)
{
    siginfo_t info;
    struct rv_keeper_message message = {.kind = RV_KEEPER_EXIT};

    memset(&info, 0, sizeof(info));
    if (waitid(P_PID, (id_t)keeper.supervisor, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0) {
        *ret_supervisor = info;
        return true;
    }
    if (keeper.reported)
        return false;
    memset(&info, 0, sizeof(info));
    if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) < 0 || info.si_pid == 0)
        return false;
    message.pid = info.si_pid;
    message.code = info.si_code;
    message.status = info.si_status;
    /* The socket holds hundreds of these, and one is under way at most: it cannot be full while the supervisor lives.
     */
    if (send(keeper.socket, &message, sizeof(message), MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)sizeof(message))
        keeper.reported = info.si_pid;
    return false;
}

/* systemd's protocol (sd_notify(3)): one datagram to $NOTIFY_SOCKET, whose first '@' stands for NUL. */
static void notify_service_manager(const char *text)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = path ? strlen(path) : 0;
    int fd;

    if (length < 2 || length >= sizeof(address.sun_path) || (path[0] != '/' && path[0] != '@'))
        return;
    memcpy(address.sun_path, path, length);
    if (path[0] == '@')
        address.sun_path[0] = '\0';
    fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    if (sendto(fd, text, strlen(text), MSG_NOSIGNAL, (struct sockaddr *)&address,
               (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length)) < 0)
        rv_log_warning("the service manager at %s was not told: %s", path, strerror(errno));
    (void)close(fd);
}

static void forward_signals(void)
{
    struct signalfd_siginfo info;

    while (read(keeper.signals, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        if (info.ssi_signo == SIGCHLD)
            continue;
        if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT)
            notify_service_manager("STOPPING=1");
        (void)kill(keeper.supervisor,
                   (int)(info.ssi_signo == SIGINT || info.ssi_signo == SIGQUIT ? SIGTERM : info.ssi_signo));
    }
}

static void tell_ready(void)
{
    notify_service_manager("READY=1");
    if (keeper.ready_fd < 0)
        return;
    (void)!write(keeper.ready_fd, "ready\n", 6);
    (void)close(keeper.ready_fd);
    keeper.ready_fd = -1;
}

static void receive(void)
{
    struct rv_keeper_message message;
    ssize_t n;

    while ((n = recv(keeper.socket, &message, sizeof(message), MSG_DONTWAIT)) == (ssize_t)sizeof(message)) {
        if (message.kind == RV_KEEPER_READY)
            tell_ready();
        if (message.kind == RV_KEEPER_ACK && message.pid == keeper.reported && keeper.reported) {
            reap(keeper.reported);
            keeper.reported = 0;
        }
    }
}

/* ---- the end ---------------------------------------------------------------------------------------------------- */

/* Kills every child that the kernel lists. Their children become ours when they die, so this is called again. */
static void kill_children(void)
{
    char path[64], text[4096];
    ssize_t n;
    int fd;

    (void)snprintf(path, sizeof(path), "/proc/self/task/%d/children", (int)getpid());
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    n = read(fd, text, sizeof(text) - 1);
    (void)close(fd);
    if (n <= 0)
        return;
    text[n] = '\0';
    if (n == (ssize_t)sizeof(text) - 1) { /* the last number may be cut: the next round gets it */
        char *space = strrchr(text, ' ');

        if (space)
            *space = '\0';
    }
    for (char *p = text, *end; *p; p = end) {
        long pid = strtol(p, &end, 10);

        if (end == p)
            break;
        if (pid > 1) {
            if (getpgid((pid_t)pid) == (pid_t)pid)
                (void)kill(-(pid_t)pid, SIGKILL);
            (void)kill((pid_t)pid, SIGKILL);
        }
        while (*end == ' ')
            end++;
    }
}

/* The policy for a dead supervisor: nobody outlives it. A later version starts a new one here. */
static unsigned end_all(void)
{
    uint64_t until = rv_now_us() + END_ALL_US;
    unsigned ended = 0;

    for (;;) {
        struct pollfd pfd = {.fd = keeper.signals, .events = POLLIN};
        struct signalfd_siginfo info;
        pid_t pid;

        kill_children();
        while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
            ended++;
        if (pid < 0 && errno == ECHILD)
            return ended;
        if (rv_now_us() >= until)
            return ended;
        (void)poll(&pfd, 1, 20);
        while (read(keeper.signals, &info, sizeof(info)) == (ssize_t)sizeof(info))
            ;
    }
}

static int finish(const siginfo_t *info)
{
    bool exited = info->si_code == CLD_EXITED;
    unsigned others;
    int code = exited ? info->si_status : RV_EXIT_SUPERVISOR_DIED;

    others = end_all() - 1; /* the supervisor was among them */
    if (!exited)
        rv_log_error(
            "the supervisor (pid %d) was killed by signal %d (SIG%s); %u other process%s ended; all weights are "
            "released",
            (int)keeper.supervisor, info->si_status,
            sigabbrev_np(info->si_status) ? sigabbrev_np(info->si_status) : "?", others,
            others == 1 ? " was" : "es were");
    else if (info->si_status != 0)
        rv_log_error("the supervisor (pid %d) ended with code %d", (int)keeper.supervisor, info->si_status);
    if (waitpid(-1, NULL, WNOHANG) == 0)
        rv_log_error(
            "processes are left that do not die within %llu s of SIGKILL: see `ps -o pid,stat,wchan --ppid %d`",
            (unsigned long long)(END_ALL_US / RV_SEC), (int)getpid());
    return code;
}

int rv_keeper_run(const struct rv_keeper_options *options)
{
    siginfo_t supervisor = {0};
    int r = start(options);

    if (r < 0) {
        rv_log_error("cannot start the supervisor: %s", strerror(-r));
        return RV_EXIT_INTERNAL;
    }
    while (!report_exit(&supervisor)) {
        struct pollfd pfds[] = {{.fd = keeper.signals, .events = POLLIN}, {.fd = keeper.socket, .events = POLLIN}};

        /* The supervisor's end of the socket may close a moment before it is a zombie: then only SIGCHLD counts. */
        if (poll(pfds, 2, -1) > 0 && (pfds[1].revents & POLLHUP) && !(pfds[1].revents & POLLIN))
            (void)poll(pfds, 1, 1000);
        receive();
        forward_signals();
    }
    return finish(&supervisor);
}
