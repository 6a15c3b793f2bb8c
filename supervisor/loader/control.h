/* The loader's messages to the supervisor; child.h has what other children say too. Loader only, main thread only. */
#ifndef RV_LOADER_CONTROL_H
#define RV_LOADER_CONTROL_H

#include "error.h"
#include "frame.h"
#include "plan.h"

/* The LoadStart frame: the caller's to rv_frame_fini; its descriptor 0 is the model file. */
int rv_control_start(int socket, struct rv_frame *ret_frame);

/* Sends the plan and waits for the verdict: 0 = admitted, -ECANCELED = not. */
int rv_control_plan(int socket, const struct rv_plan *plan, uint64_t arena_bytes);

/* At most every 100 ms, and only if it can be sent at once. */
void rv_control_progress(int socket, uint64_t done, uint64_t total);

struct rv_control_result {
    const struct rv_arena *arena;
    int arena_fd, index_fd;
    uint64_t index_size, read_bytes, disk_bytes, load_us;
    const char *method;
};

/* Hands the descriptors over and waits until they were taken. */
int rv_control_done(int socket, const struct rv_plan *plan, const struct rv_control_result *result);

#endif
