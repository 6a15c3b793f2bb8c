/*
 * One WebSocket connection on the loop, after its handshake: either end of it. wslay does the framing; messages are
 * given on whole, and fragments are put together. The link does not own its socket: whoever made it closes it after
 * rv_ws_link_fini. An idle link has no timer. Router only, one thread (the loop's).
 */
#ifndef RV_WS_LINK_H
#define RV_WS_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RV_WS_FRAGMENTS_MAX 16384u     /* of one message: each costs some 50 bytes */
#define RV_WS_TURN_BYTES (256u * 1024) /* read from one link before others get their turn */
#define RV_WS_UNSENT_MAX 4096u         /* messages, pongs too: from then on nothing is read from who does not read */
#define RV_WS_STALL_US \
    (10 * UINT64_C(1000000)) /* a peer that takes no byte of what waits for it for so long is dropped */
#define RV_WS_CLOSE_US (3 * UINT64_C(1000000)) /* from a close frame to the end of the connection */

struct event;
struct event_base;
struct rv_ws_link;
struct wslay_event_context;

struct rv_ws_handlers {
    /* A whole message. May send and close; must not call _fini. */
    void (*message)(struct rv_ws_link *link, bool text, const uint8_t *bytes, size_t length);
    /* All that waited has been given to the system; may be NULL. */
    void (*drained)(struct rv_ws_link *link);
    /* Once, at the end, from the loop and never from inside another call: now it may be ended by _fini. `why` is a
     * static text. */
    void (*ended)(struct rv_ws_link *link, const char *why);
};

struct rv_ws_link {
    int socket;
    bool server;
    bool started;   /* before that, what is sent waits */
    bool paused;    /* nothing is read: back-pressure */
    bool reading;   /* the event is there */
    bool closing;   /* a close frame was queued by us, or by wslay */
    bool lingering; /* its close frame is out: what comes now is not looked at, its end is waited for */
    bool patient;   /* waits for that end without a limit */
    uint64_t close_by;
    unsigned fragments;
    size_t turn;   /* bytes read in this turn */
    uint64_t sent; /* bytes that the socket took */
    const char *broken;
    uint8_t *early; /* came with the handshake */
    size_t early_length, early_at;
    struct event *read_event, *write_event;
    struct wslay_event_context *wslay;
    const struct rv_ws_handlers *handlers; /* NULL = not initialised */
    void *context;
};

/* server: the peer is a client, so its frames must be masked. message_max: bytes. */
int rv_ws_link_init(struct rv_ws_link *link, struct event_base *base, int socket, bool server, uint64_t message_max,
                    const struct rv_ws_handlers *handlers, void *context);

/* Bytes that came behind the handshake are taken first. */
int rv_ws_link_start(struct rv_ws_link *link, const void *early, size_t length);

/* Queues a copy, and sends what the socket takes. A negative errno = it is not queued; the link is about to end. */
int rv_ws_link_send(struct rv_ws_link *link, bool text, const void *bytes, size_t length);

/* Bytes that wait to be sent. */
size_t rv_ws_link_unsent(const struct rv_ws_link *link);

void rv_ws_link_pause(struct rv_ws_link *link, bool paused);

/* The close handshake: `ended` follows in RV_WS_CLOSE_US at the latest, or with `patient` when the peer is gone. */
void rv_ws_link_close(struct rv_ws_link *link, uint16_t code, const char *reason, bool patient);

/* No more waiting for a patient one. */
void rv_ws_link_abort(struct rv_ws_link *link, const char *why);

void rv_ws_link_fini(struct rv_ws_link *link);

#endif
