/*
 * What the WebSocket part reads and writes itself: handshakes of both sides, and the few events of ComfyUI that it must
 * understand. Pure functions on bytes of a stranger: no state, nothing allocated unless said. Unit tests and a fuzz
 * target call them as they are.
 */
#ifndef RV_WS_PARTS_H
#define RV_WS_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../http/parse.h"

#define RV_WS_KEY_LENGTH 24u           /* 16 bytes in base64 */
#define RV_WS_ACCEPT_LENGTH 28u        /* 20 bytes in base64 */
#define RV_WS_CLIENT_ID_MAX 128u       /* bytes */
#define RV_WS_REQUEST_MAX 16384u       /* of our request to a worker: a target of RV_HTTP_URI_MAX, encoded anew */
#define RV_WS_RESPONSE_MAX 8192u       /* of a worker's answer to it */
#define RV_WS_PROMPT_ID_MAX 64u        /* bytes; ComfyUI's are UUIDs */
#define RV_WS_NODE_MAX 64u             /* of a node's id and class */
#define RV_WS_EVENT_MAX (1024u * 1024) /* larger texts are given on without a look into them */

/* ---- ws_handshake.c --------------------------------------------------------------------------------------------- */

/*
 * A client's request. 0 and the answer's Sec-WebSocket-Accept, or the HTTP status to refuse with; *why is a static
 * text.
 */
unsigned rv_ws_check_request(const struct rv_http_head *head, char ret_accept[RV_WS_ACCEPT_LENGTH + 1],
                             const char **why);

/* Sec-WebSocket-Accept for a key. */
void rv_ws_accept(const char key[RV_WS_KEY_LENGTH], char ret_accept[RV_WS_ACCEPT_LENGTH + 1]);

/* A new random key for a handshake of ours; false = there are no random bytes. */
bool rv_ws_make_key(char ret_key[RV_WS_KEY_LENGTH + 1]);

/*
 * What a worker is asked for: "/ws?clientId=…", with what else the client's own target asked for. The length, or 0 = it
 * does not fit.
 */
size_t rv_ws_write_target(char *buffer, size_t size, const struct rv_http_target *target, const char *client_id);

/* Our request to a worker; `host` is the client's own field. The length, or 0 = it does not fit. */
size_t rv_ws_write_request(char *buffer, size_t size, const char *target, const char *host, const char *key);

enum rv_ws_response { RV_WS_RESPONSE_MORE, RV_WS_RESPONSE_GOOD, RV_WS_RESPONSE_BAD };

/* A worker's answer as far as it came. GOOD: *ret_length is the head's; frames may follow. BAD: *why is a static text.
 */
enum rv_ws_response rv_ws_read_response(const char *text, size_t length, const char *accept, size_t *ret_length,
                                        const char **why);

/* ---- ws_merge.c ------------------------------------------------------------------------------------------------- */

enum rv_ws_kind {
    RV_WS_OTHER, /* given on unseen */
    RV_WS_STATUS,
    RV_WS_FEATURE_FLAGS,
    RV_WS_EXECUTION_START,
    RV_WS_EXECUTING,
    RV_WS_EXECUTION_SUCCESS,
    RV_WS_EXECUTION_ERROR,
    RV_WS_EXECUTION_INTERRUPTED,
};

struct rv_ws_event {
    enum rv_ws_kind kind;
    char prompt_id[RV_WS_PROMPT_ID_MAX + 1]; /* "" = none */
    char node[RV_WS_NODE_MAX + 1];           /* of executing: "" = none runs */
};

/* What a text message is. Only the kinds above are parsed, and only they cost more than a look at the first bytes. */
void rv_ws_read_event(const char *text, size_t length, struct rv_ws_event *ret_event);

/* A status of ours: the number of prompts that wait or run, and for the first one of a connection its id (else NULL).
 * malloc; NULL = no memory. */
char *rv_ws_status_text(uint64_t remaining, const char *sid);

/*
 * A worker's status, for a client: without `sid`, and with the number for all workers. malloc; NULL = it says nothing
 * that ours does not say, or there is no memory.
 */
char *rv_ws_merge_status(const char *text, size_t length, uint64_t remaining);

/* How a prompt ended that no worker tells about. Texts must be UTF-8. */
struct rv_ws_verdict {
    const char *prompt_id, *node, *node_type; /* "" = unknown; clients count on texts */
    bool interrupted;                         /* execution_interrupted, not execution_error */
    const char *exception_type, *message;
};

/* malloc; NULL = no memory. */
char *rv_ws_verdict_text(const struct rv_ws_verdict *verdict);

#endif
