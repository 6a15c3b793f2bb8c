/*
 * The supervisor process: everything that its one event loop works on. One thread.
 *
 * Modules, each with its own header: children/ (processes), pool/ (models and leases), control/ (peers and requests),
 * keeper_link (the keeper's other end). Facts are in state.h; this struct ties them to the running loop.
 */
#ifndef RV_SUPERVISOR_H
#define RV_SUPERVISOR_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "config.h"
#include "state.h"

struct event;
struct event_base;
struct rv_children;
struct rv_control;
struct rv_devices;
struct rv_pool;

struct rv_supervisor {
    struct rv_config *config;
    struct rv_state state;
    struct event_base *base;
    pid_t keeper_pid;
    struct event *keeper_event;
    struct event *signal_events[4];
    struct rv_children *children; /* workers, router, loaders: children/children.h */
    struct rv_pool *pool;         /* catalogue at work: pool/pool.h */
    struct rv_devices *devices;   /* pool/devices.h */
    struct rv_control *control;   /* listener and sessions: control/control.h */
    bool stopping;
    bool ready_told;
    int exit_code; /* of the process, after an orderly end */
};

/* The hidden command `resvisor _supervisor`: started by the keeper with descriptor 3. Returns the exit code. */
int rv_supervisor_main(int argc, char **argv);

/* Begins the orderly end: drain, SIGTERM, SIGKILL, then the loop ends. Called twice: SIGKILL at once. */
void rv_supervisor_stop(struct rv_supervisor *s, const char *why);

/* Ends the loop if stopping and no child is left. */
void rv_supervisor_check_stopped(struct rv_supervisor *s);

/* The router takes requests: whoever waits for the start is told, once. */
void rv_supervisor_tell_ready(struct rv_supervisor *s);

#endif
