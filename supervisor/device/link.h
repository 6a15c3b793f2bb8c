/*
 * What the self-test and its actors say to each other. An actor is a process of this same program that touches a device
 * as it is told, one step at a time, and is there to be lost: a call that hangs, crashes or poisons its context ends an
 * actor, not the self-test. Both ends are one binary, so the messages are plain structs, one per SOCK_SEQPACKET
 * message.
 */
#ifndef RV_DEVICE_LINK_H
#define RV_DEVICE_LINK_H

#include <stdbool.h>
#include <stdint.h>

#include "rv_cuda.h"

#define RV_ACTOR_FD 3         /* an actor's end */
#define RV_ACTOR_ROLE "actor" /* its first argument; then the process that started it, and what it is there for */

enum rv_step {
    RV_STEP_FIND,    /* opens the driver. number of devices, version */
    RV_STEP_INFO,    /* number: ordinal. info */
    RV_STEP_OPEN,    /* uuid: its primary context */
    RV_STEP_CREATE,  /* backend, size: an arena, filled with the pattern of seed where that needs no device. arena */
    RV_STEP_COPY,    /* backend, seed: fills by memset, compares; copies the pattern in, compares */
    RV_STEP_EXPORT,  /* backend. fd, if it has one */
    RV_STEP_IMPORT,  /* backend, arena, fd: opened as importers do */
    RV_STEP_COMPARE, /* seed: what it has open is the pattern */
    RV_STEP_POKE,    /* number: enum rv_poke; must fail: writes to what it has open */
    RV_STEP_CLOSE,   /* closes what it has open */
    RV_STEP_LEAVE,   /* ends its context, with what it has open still open; then makes a new one */
    RV_STEP_ORDERS,  /* backend, size: closes in every order. number of orders, values: bytes that did not come back */
    RV_STEP_FREE,    /* values[0]: bytes that the device has free; 0 = that says nothing here */
    RV_STEP_SPEED,   /* backend, size: values by enum rv_speed, bytes per second */
    RV_STEP_COUNT
};

enum rv_poke { RV_POKE_FILL, RV_POKE_COPY, RV_POKE_COUNT };
enum rv_speed { RV_SPEED_UP, RV_SPEED_READ, RV_SPEED_FILL, RV_SPEED_COUNT };

struct rv_call {
    uint32_t step;    /* enum rv_step */
    uint32_t backend; /* enum rv_backend_id */
    uint32_t number;
    uint64_t size, seed;
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
    struct rv_arena arena;
};

struct rv_answer {
    int32_t result;     /* 0 or a negative errno */
    int32_t cuda_error; /* with a result < 0; 0 = it was not a call of the driver that failed */
    int32_t code;       /* of the error; text is its message */
    uint32_t number;
    uint64_t values[RV_SPEED_COUNT];
    struct rv_arena arena;
    struct rv_cuda_info info;
    char text[RV_ERROR_TEXT_MAX], remedy[RV_ERROR_TEXT_MAX / 2];
};

const char *rv_step_name(uint32_t step);

/* One struct, with a descriptor if fd >= 0 (it stays the caller's). 0 or negative errno. */
int rv_link_send(int socket, const void *message, uint32_t size, int fd);

/* Waits for one struct of exactly that size. *ret_fd (the caller's) is -1 if none came. -ETIMEDOUT; -ECONNRESET = the
 * other end is closed; -EPROTO. timeout_us UINT64_MAX = as long as it takes. */
int rv_link_receive(int socket, void *ret_message, uint32_t size, int *ret_fd, uint64_t timeout_us);

#endif
