/* The loader's messages to the supervisor; child.h has what other children say too. Loader only, main thread only. */
#ifndef RV_LOADER_CONTROL_H
#define RV_LOADER_CONTROL_H

#include "error.h"
#include "frame.h"
#include "memory.h"
#include "plan.h"

/* The LoadStart frame: the caller's to rv_frame_fini; its descriptor 0 is the model file. */
int rv_control_start(int socket, struct rv_frame *ret_frame);

/*
 * Sends the plan and waits for the verdict: 0 = admitted, -ECANCELED = not. *ret_given: an arena that was allocated
 * elsewhere and is to be filled; backend RV_BACKEND_NONE = none came with it.
 */
int rv_control_plan(int socket, const struct rv_plan *plan, uint64_t arena_bytes, struct rv_arena *ret_given);

/* At most every 100 ms, and only if it can be sent at once. */
void rv_control_progress(int socket, uint64_t done, uint64_t total);

struct rv_control_result {
    const struct rv_arena *arena;
    int arena_fd; /* -1 = the arena has none */
    int index_fd;
    uint64_t index_size, read_bytes, disk_bytes, load_us;
    const char *method;
};

/* Hands the descriptors over and waits until they were taken. */
int rv_control_done(int socket, const struct rv_plan *plan, const struct rv_control_result *result);

/* A driver's error, for the supervisor to judge the device by; before rv_child_error. uuid: RV_DEVICE_UUID_SIZE. */
void rv_control_fault(int socket, const uint8_t *uuid, int number, const char *what);

#endif
