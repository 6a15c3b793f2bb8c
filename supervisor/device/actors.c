#include "actors.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clock.h"
#include "frame.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define PROGRAM "/proc/self/exe"
#define DEATH_MS 5000 /* after SIGKILL; longer means that it hangs inside the kernel's driver */

extern char **environ;

/* Everything else that is open here is O_CLOEXEC. */
static int spawn(int socket, const char *label, pid_t *ret_pid)
{
    char parent[16];
    char *argv[] = {(char *)"resvisor-device", (char *)RV_ACTOR_ROLE, parent, (char *)label, NULL};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none;
    int r;

    (void)snprintf(parent, sizeof(parent), "%d", (int)getpid());
    (void)sigemptyset(&none);
    r = posix_spawn_file_actions_init(&actions);
    if (r != 0)
        return -r;
    r = posix_spawnattr_init(&attributes);
    if (r == 0) {
        (void)posix_spawnattr_setsigmask(&attributes, &none);
        (void)posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
        r = posix_spawn_file_actions_adddup2(&actions, socket, RV_ACTOR_FD);
        if (r == 0)
            r = posix_spawn(ret_pid, PROGRAM, &actions, &attributes, argv, environ);
        (void)posix_spawnattr_destroy(&attributes);
    }
    (void)posix_spawn_file_actions_destroy(&actions);
    return -r;
}

int rv_actor_start(struct rv_actor *actor, const char *label, const uint8_t *uuid, uint64_t answer_us,
                   struct rv_error *err)
{
    struct rv_call call = {.step = RV_STEP_OPEN};
    int pair[2], r = rv_frame_pair(pair);

    if (r < 0)
        return rv_error_set(err, -r, ERROR(NO_MEMORY), "no sockets for a process of the self-test: %s", strerror(-r));
    *actor = (struct rv_actor){.pidfd = -1, .socket = pair[0], .answer_us = answer_us};
    r = spawn(pair[1], label, &actor->pid);
    (void)close(pair[1]);
    if (r < 0) {
        (void)close(actor->socket);
        *actor = (struct rv_actor)RV_ACTOR_INIT;
        return rv_error_set(err, -r, ERROR(NO_MEMORY), "cannot start a process of the self-test: %s", strerror(-r));
    }
    actor->pidfd = (int)syscall(SYS_pidfd_open, actor->pid, 0);
    if (actor->pidfd < 0) {
        r = errno;
        rv_actor_kill(actor);
        return rv_error_set(err, r, ERROR(NO_MEMORY), "no descriptor for a process of the self-test: %s", strerror(r));
    }
    if (!uuid)
        return 0;
    memcpy(call.uuid, uuid, sizeof(call.uuid));
    actor->opening = true;
    (void)rv_link_send(actor->socket, &call, sizeof(call), -1); /* if it is dead, the wait for the answer says how */
    return 0;
}

/* It has closed its end: why? */
static int died(struct rv_actor *actor, uint32_t step, struct rv_error *err)
{
    struct pollfd pfd = {.fd = actor->pidfd, .events = POLLIN};
    siginfo_t info = {0};
    bool known = poll(&pfd, 1, DEATH_MS) > 0 && waitid(P_PID, (id_t)actor->pid, &info, WEXITED | WNOWAIT) == 0;

    if (known && info.si_code == CLD_EXITED)
        rv_error_set(err, ECHILD, ERROR(DEVICE), "its process ended with code %d while %s", info.si_status,
                     rv_step_name(step));
    else if (known)
        rv_error_set(err, ECHILD, ERROR(DEVICE), "its process was killed by signal %d (SIG%s) while %s", info.si_status,
                     sigabbrev_np(info.si_status) ? sigabbrev_np(info.si_status) : "?", rv_step_name(step));
    else
        rv_error_set(err, ECHILD, ERROR(DEVICE), "its process went away while %s", rv_step_name(step));
    rv_actor_kill(actor);
    actor->signal = known && info.si_code != CLD_EXITED ? info.si_status : 0;
    return -ECHILD;
}

static int receive(struct rv_actor *actor, uint32_t step, struct rv_answer *ret_answer, int *ret_fd,
                   struct rv_error *err)
{
    bool slow = step == RV_STEP_OPEN || step == RV_STEP_FIND || step == RV_STEP_ORDERS || step == RV_STEP_LEAVE;
    uint64_t limit = slow ? actor->answer_us * RV_CONTEXT_FACTOR : actor->answer_us;
    int r = rv_link_receive(actor->socket, ret_answer, sizeof(*ret_answer), ret_fd, limit);

    if (r == -ETIMEDOUT) {
        rv_error_set(err, ETIMEDOUT, ERROR(DEVICE), "no answer within %.4g s while %s", (double)limit / (double)RV_SEC,
                     rv_step_name(step));
        rv_actor_kill(actor);
        return -ETIMEDOUT;
    }
    if (r < 0)
        return died(actor, step, err);
    ret_answer->text[sizeof(ret_answer->text) - 1] = '\0';
    ret_answer->remedy[sizeof(ret_answer->remedy) - 1] = '\0';
    if (ret_answer->result < 0) {
        rv_error_set(err, -ret_answer->result, ret_answer->code, "%s", ret_answer->text);
        rv_error_remedy(err, "%s", ret_answer->remedy);
    }
    return ret_answer->result;
}

int rv_actor_do(struct rv_actor *actor, const struct rv_call *call, int fd, struct rv_answer *ret_answer, int *ret_fd,
                struct rv_error *err)
{
    int got = -1, r = 0;

    if (!rv_actor_is_there(actor))
        return rv_error_set(err, ECHILD, ERROR(DEVICE), "its process is gone");
    if (actor->opening) {
        actor->opening = false;
        r = receive(actor, RV_STEP_OPEN, ret_answer, &got, err);
        if (r < 0)
            rv_actor_kill(actor);
    }
    if (r < 0)
        return r;
    r = rv_link_send(actor->socket, call, sizeof(*call), fd);
    r = r < 0 ? died(actor, call->step, err) : receive(actor, call->step, ret_answer, &got, err);
    if (got >= 0 && (r < 0 || !ret_fd))
        (void)close(got);
    else if (ret_fd)
        *ret_fd = got;
    return r;
}

void rv_actor_kill(struct rv_actor *actor)
{
    struct pollfd pfd = {.fd = actor->pidfd, .events = POLLIN};

    if (actor->pid <= 0)
        return;
    (void)kill(actor->pid, SIGKILL); /* it is our child and not reaped: the number is its own */
    /* One that hangs inside the kernel does not die now. It must not take the self-test along; whoever reaps the
     * self-test's children reaps it too. */
    if (actor->pidfd < 0 || poll(&pfd, 1, DEATH_MS) > 0)
        (void)waitpid(actor->pid, NULL, 0);
    if (actor->pidfd >= 0)
        (void)close(actor->pidfd);
    (void)close(actor->socket);
    *actor = (struct rv_actor)RV_ACTOR_INIT;
}
