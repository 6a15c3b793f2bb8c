/*
 * Framing by wslay, reading and writing by the loop. Two traps of wslay: its callbacks must set an error each time they
 * return -1, and a context must not be freed inside one of them. So a link only notes that it is broken, and ends in a
 * turn of its own.
 */
#include <errno.h>
#include <event2/event.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <wslay/wslay.h>

#include "clock.h"
#include "ws_link.h"

#define WASTE_PER_TURN 16u /* pieces read after the close frame */

/* The end comes in a turn of its own, through the write event. */
static void break_off(struct rv_ws_link *link, const char *why)
{
    if (!link->broken)
        link->broken = why;
    event_active(link->write_event, EV_WRITE, 0);
}

/* ---- wslay's callbacks ------------------------------------------------------------------------------------------ */

static ssize_t fail(struct rv_ws_link *link, int error, const char *why)
{
    wslay_event_set_error(link->wslay, error);
    if (why && !link->broken)
        link->broken = why;
    return -1;
}

static ssize_t take_early(struct rv_ws_link *link, uint8_t *buffer, size_t size)
{
    size_t n = link->early_length - link->early_at;

    n = n < size ? n : size;
    memcpy(buffer, link->early + link->early_at, n);
    link->early_at += n;
    if (link->early_at == link->early_length) {
        free(link->early);
        link->early = NULL;
    }
    link->turn += n;
    return (ssize_t)n;
}

static ssize_t on_receive(wslay_event_context_ptr wslay, uint8_t *buffer, size_t size, int flags, void *context)
{
    struct rv_ws_link *link = context;
    ssize_t n;

    (void)wslay;
    (void)flags;
    if (link->paused || link->broken || link->turn >= RV_WS_TURN_BYTES ||
        wslay_event_get_queued_msg_count(link->wslay) >= RV_WS_UNSENT_MAX)
        return fail(link, WSLAY_ERR_WOULDBLOCK, NULL);
    if (link->early)
        return take_early(link, buffer, size);
    n = recv(link->socket, buffer, size, MSG_DONTWAIT);
    if (n > 0) {
        link->turn += (size_t)n;
        return n;
    }
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return fail(link, WSLAY_ERR_WOULDBLOCK, NULL);
    return fail(link, WSLAY_ERR_CALLBACK_FAILURE, n == 0 ? "it left without a close frame" : "the connection broke");
}

static ssize_t on_send(wslay_event_context_ptr wslay, const uint8_t *data, size_t length, int flags, void *context)
{
    struct rv_ws_link *link = context;
    ssize_t n = send(link->socket, data, length, MSG_DONTWAIT | MSG_NOSIGNAL | (flags & WSLAY_MSG_MORE ? MSG_MORE : 0));

    (void)wslay;
    if (n > 0) {
        link->sent += (uint64_t)n;
        return n;
    }
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return fail(link, WSLAY_ERR_WOULDBLOCK, NULL);
    return fail(link, WSLAY_ERR_CALLBACK_FAILURE, "the connection broke");
}

static int on_mask(wslay_event_context_ptr wslay, uint8_t *buffer, size_t length, void *context)
{
    (void)wslay;
    return getrandom(buffer, length, 0) == (ssize_t)length
               ? 0
               : (int)fail(context, WSLAY_ERR_CALLBACK_FAILURE, "no random bytes");
}

static void on_frame_start(wslay_event_context_ptr wslay, const struct wslay_event_on_frame_recv_start_arg *frame,
                           void *context)
{
    struct rv_ws_link *link = context;

    (void)wslay;
    if (wslay_is_ctrl_frame(frame->opcode))
        return;
    if (frame->opcode != WSLAY_CONTINUATION_FRAME)
        link->fragments = 0;
    if (++link->fragments > RV_WS_FRAGMENTS_MAX)
        link->broken = "it sent a message in too many fragments";
}

static void on_message(wslay_event_context_ptr wslay, const struct wslay_event_on_msg_recv_arg *message, void *context)
{
    struct rv_ws_link *link = context;

    (void)wslay;
    if (message->opcode != WSLAY_TEXT_FRAME && message->opcode != WSLAY_BINARY_FRAME)
        return;
    if (!link->closing && !link->broken)
        link->handlers->message(link, message->opcode == WSLAY_TEXT_FRAME, message->msg, message->msg_length);
}

/* ---- the loop --------------------------------------------------------------------------------------------------- */

static void watch_reading(struct rv_ws_link *link)
{
    bool wanted = link->lingering || (!link->paused && !link->broken && wslay_event_get_read_enabled(link->wslay) &&
                                      wslay_event_get_queued_msg_count(link->wslay) < RV_WS_UNSENT_MAX);
    uint64_t now;

    if (!wanted) {
        (void)event_del(link->read_event);
        link->reading = false;
        return;
    }
    if (link->closing && !link->patient) {
        struct timeval left;

        now = rv_now_us();
        left = rv_timeval(link->close_by > now ? link->close_by - now : 0);
        (void)event_add(link->read_event, &left);
    } else if (!link->reading) {
        (void)event_add(link->read_event, NULL);
    }
    link->reading = true;
    if (link->early && !link->paused) /* no new bytes will wake us for them */
        event_active(link->read_event, EV_READ, 0);
}

/* wslay has sent its close frame, or ours. The other side gets its end of the stream, and closes. */
static void linger(struct rv_ws_link *link)
{
    link->lingering = true;
    if (link->server)
        (void)shutdown(link->socket, SHUT_WR);
}

static void flush(struct rv_ws_link *link)
{
    struct timeval stall = rv_timeval(RV_WS_STALL_US);
    uint64_t sent = link->sent;

    if (!link->started && !link->broken)
        return;
    /* While it waits to be writable, only that event may send: bits that fit in between would look like a reader's
     * progress. One that has sent its end may still read: pongs and the close frame are tried once. */
    if ((!event_pending(link->write_event, EV_WRITE, NULL) || link->broken) && wslay_event_want_write(link->wslay) &&
        wslay_event_send(link->wslay) < 0 && !link->broken)
        link->broken = "no memory for a message";
    if (link->broken) {
        break_off(link, link->broken);
        return;
    }
    if (!link->closing && !wslay_event_get_read_enabled(link->wslay)) { /* wslay answers a close frame, or an offence */
        link->closing = true;
        link->close_by = rv_now_us() + RV_WS_CLOSE_US;
    }
    if (!link->lingering && wslay_event_get_close_sent(link->wslay) &&
        (wslay_event_get_close_received(link->wslay) || !wslay_event_get_read_enabled(link->wslay)))
        linger(link);
    if (!wslay_event_want_write(link->wslay))
        (void)event_del(link->write_event);
    else if (link->sent != sent || !event_pending(link->write_event, EV_WRITE, NULL))
        (void)event_add(link->write_event, &stall); /* counted anew only when something was taken */
    watch_reading(link);
}

/* Only its end matters now. */
static void read_waste(struct rv_ws_link *link)
{
    char waste[4096];

    for (unsigned i = 0; i < WASTE_PER_TURN; i++) {
        ssize_t n = recv(link->socket, waste, sizeof(waste), MSG_DONTWAIT);

        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            break_off(link, wslay_event_get_close_received(link->wslay) ? "closed" : "it broke the protocol");
        if (n <= 0)
            return;
    }
}

static void tell_drained(struct rv_ws_link *link, bool waited)
{
    if (waited && !link->broken && rv_ws_link_unsent(link) == 0 && link->handlers->drained)
        link->handlers->drained(link);
}

static void on_readable(int fd, short what, void *context)
{
    struct rv_ws_link *link = context;
    bool waited = rv_ws_link_unsent(link) > 0;

    (void)fd;
    if (link->closing && !link->patient && rv_now_us() >= link->close_by) {
        break_off(link, "it did not answer the close frame");
        return;
    }
    if (what & EV_READ && link->lingering) {
        read_waste(link);
    } else if (what & EV_READ) {
        link->turn = 0;
        /* Of an offence against framing itself wslay answers with a close frame, as of others. */
        if (wslay_event_recv(link->wslay) == WSLAY_ERR_NOMEM && !link->broken)
            link->broken = "no memory for a message";
    }
    flush(link);
    tell_drained(link, waited);
}

static void on_writable(int fd, short what, void *context)
{
    struct rv_ws_link *link = context;
    bool waited = rv_ws_link_unsent(link) > 0;

    (void)fd;
    if (what & EV_TIMEOUT && !link->broken)
        link->broken = "it did not read what was sent to it";
    if (!link->broken)
        flush(link);
    if (link->broken) {
        (void)event_del(link->read_event);
        (void)event_del(link->write_event);
        link->handlers->ended(link, link->broken);
        return;
    }
    tell_drained(link, waited);
}

/* ---- for its owner ---------------------------------------------------------------------------------------------- */

int rv_ws_link_init(struct rv_ws_link *link, struct event_base *base, int socket, bool server, uint64_t message_max,
                    const struct rv_ws_handlers *handlers, void *context)
{
    static const struct wslay_event_callbacks callbacks = {
        .recv_callback = on_receive,
        .send_callback = on_send,
        .genmask_callback = on_mask,
        .on_frame_recv_start_callback = on_frame_start,
        .on_msg_recv_callback = on_message,
    };
    int r;

    *link = (struct rv_ws_link){.socket = socket, .server = server, .handlers = handlers, .context = context};
    link->read_event = event_new(base, socket, EV_READ | EV_PERSIST, on_readable, link);
    link->write_event = event_new(base, socket, EV_WRITE, on_writable, link);
    r = server ? wslay_event_context_server_init(&link->wslay, &callbacks, link)
               : wslay_event_context_client_init(&link->wslay, &callbacks, link);
    if (r < 0 || !link->read_event || !link->write_event) {
        rv_ws_link_fini(link);
        return -ENOMEM;
    }
    wslay_event_config_set_max_recv_msg_length(link->wslay, message_max);
    return 0;
}

int rv_ws_link_start(struct rv_ws_link *link, const void *early, size_t length)
{
    if (length > 0) {
        link->early = malloc(length);
        if (!link->early)
            return -ENOMEM;
        memcpy(link->early, early, length);
        link->early_length = length;
    }
    link->started = true;
    flush(link);
    return 0;
}

int rv_ws_link_send(struct rv_ws_link *link, bool text, const void *bytes, size_t length)
{
    struct wslay_event_msg message = {text ? WSLAY_TEXT_FRAME : WSLAY_BINARY_FRAME, bytes, length};
    int r;

    if (link->closing || link->broken)
        return -ESHUTDOWN;
    r = wslay_event_queue_msg(link->wslay, &message);
    if (r < 0) {
        break_off(link, r == WSLAY_ERR_NOMEM ? "no memory for a message" : "it is closing");
        return r == WSLAY_ERR_NOMEM ? -ENOMEM : -ESHUTDOWN;
    }
    if (!event_pending(link->write_event, EV_WRITE, NULL)) /* else it waits behind others */
        flush(link);
    return 0;
}

size_t rv_ws_link_unsent(const struct rv_ws_link *link)
{
    return link->wslay ? wslay_event_get_queued_msg_length(link->wslay) : 0;
}

void rv_ws_link_pause(struct rv_ws_link *link, bool paused)
{
    if (link->paused == paused || link->closing || link->broken)
        return;
    link->paused = paused;
    if (link->started)
        watch_reading(link);
}

void rv_ws_link_close(struct rv_ws_link *link, uint16_t code, const char *reason, bool patient)
{
    if (link->closing || link->broken)
        return;
    link->paused = false; /* its answer must be read */
    link->closing = true;
    link->patient = patient;
    link->close_by = rv_now_us() + RV_WS_CLOSE_US;
    if (wslay_event_queue_close(link->wslay, code, (const uint8_t *)reason, strlen(reason)) < 0)
        break_off(link, "no memory for a message");
    else
        flush(link);
}

void rv_ws_link_abort(struct rv_ws_link *link, const char *why)
{
    break_off(link, why);
}

void rv_ws_link_fini(struct rv_ws_link *link)
{
    if (!link->handlers)
        return;
    if (link->read_event)
        event_free(link->read_event);
    if (link->write_event)
        event_free(link->write_event);
    if (link->wslay)
        wslay_event_context_free(link->wslay);
    free(link->early);
    *link = (struct rv_ws_link){.socket = -1};
}
