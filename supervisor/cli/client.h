/*
 * The command line's connection to the supervisor or the router: one request at a time, waiting for its answer. Every
 * function fills *err on failure and returns a negative errno.
 */
#ifndef RV_CLI_CLIENT_H
#define RV_CLI_CLIENT_H

#include <stdbool.h>
#include <stdint.h>

#include "error.h"
#include "frame.h"
#include "options.h"

#define RV_CLIENT_TIMEOUT_US UINT64_C(10000000) /* answers that need no work */
#define RV_CLIENT_PATH_MAX 4096u

struct rv_client {
    int socket; /* -1 = not connected */
    uint64_t last_id;
    int peer_pid;
    bool operator;
    char path[RV_CLIENT_PATH_MAX];
};

#define RV_CLIENT_INIT \
    {                  \
        .socket = -1   \
    }

/* Connects to RUNTIME_DIR/suffix (RV_SOCKET_CONTROL, RV_SOCKET_ROUTER) and says Hello. timeout_us covers both. */
int rv_client_connect(struct rv_client *client, const char *runtime_dir, const char *suffix, uint64_t timeout_us,
                      struct rv_error *err);
void rv_client_close(struct rv_client *client);

/*
 * Sends a request and waits for its answer; an Error answer is a failure. on_progress (may be NULL) is called for
 * LoadProgress frames on the way. The answer is the caller's to end by rv_frame_fini; its body is what `wanted` says.
 */
typedef void (*rv_client_progress)(const Rv__LoadProgress *progress, void *context);
int rv_client_request(struct rv_client *client, Rv__Frame *request, Rv__Frame__BodyCase wanted, uint64_t timeout_us,
                      rv_client_progress on_progress, void *context, struct rv_frame *ret_answer, struct rv_error *err);

/* The same for a request of the public contract: ret_answer->message->rpc_reply is the success. */
int rv_client_rpc(struct rv_client *client, Resvisor__V1__Request *request, uint64_t timeout_us,
                  struct rv_frame *ret_answer, struct rv_error *err);

/* True if the failure was of the connection, or says that a repeat can help soon: router restarting. */
bool rv_client_may_repeat(int r, const struct rv_error *err);

/* Finds the runtime directory that the arguments, environment and configuration file name. */
int rv_cli_runtime_dir(const struct rv_args *args, char *buffer, size_t size, struct rv_error *err);

/* Both steps: runtime directory and connection to the supervisor, or the router. */
int rv_cli_connect(struct rv_client *client, const struct rv_args *args, const char *suffix, struct rv_error *err);

#endif
