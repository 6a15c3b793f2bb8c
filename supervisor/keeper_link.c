#include "keeper_link.h"

#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "children/children.h"
#include "keeper/keeper.h"
#include "log.h"
#include "supervisor.h"

static void send_to_keeper(const struct rv_keeper_message *message)
{
    /* Blocking on purpose: the keeper reads at once or is dead, and without it nothing of ours goes on. */
    if (send(RV_KEEPER_FD, message, sizeof(*message), MSG_NOSIGNAL) < 0)
        rv_log_error("the keeper does not answer: %m");
}

static void on_message(int socket, short what, void *context)
{
    struct rv_supervisor *s = context;
    struct rv_keeper_message message;
    ssize_t n;

    (void)what;
    while ((n = recv(socket, &message, sizeof(message), MSG_DONTWAIT)) == (ssize_t)sizeof(message)) {
        if (message.kind != RV_KEEPER_EXIT)
            continue;
        /* What the dead one said last is read first; then its group is killed and the pid is free again. */
        rv_children_exited(s, message.pid, message.code, message.status);
        send_to_keeper(&(struct rv_keeper_message){.kind = RV_KEEPER_ACK, .pid = message.pid});
        rv_children_sweep_strays(s);
        rv_supervisor_check_stopped(s);
    }
    if (n == 0) { /* PR_SET_PDEATHSIG kills us in a moment anyway */
        rv_log_error("the keeper is gone; ending");
        (void)event_base_loopbreak(s->base);
    }
}

int rv_keeper_link_init(struct rv_supervisor *s)
{
    if (fcntl(RV_KEEPER_FD, F_SETFD, FD_CLOEXEC) < 0)
        return -errno;
    s->keeper_pid = getppid();
    s->keeper_event = event_new(s->base, RV_KEEPER_FD, EV_READ | EV_PERSIST, on_message, s);
    if (!s->keeper_event || event_priority_set(s->keeper_event, 0) < 0 || event_add(s->keeper_event, NULL) < 0)
        return -ENOMEM;
    return 0;
}

void rv_keeper_link_fini(struct rv_supervisor *s)
{
    if (s->keeper_event)
        event_free(s->keeper_event);
    s->keeper_event = NULL;
}

void rv_keeper_link_ready(struct rv_supervisor *s)
{
    (void)s;
    send_to_keeper(&(struct rv_keeper_message){.kind = RV_KEEPER_READY});
}
