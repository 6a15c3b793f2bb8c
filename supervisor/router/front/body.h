/*
 * The body of POST /prompt, as ComfyUI reads it: what the router needs of it, and where the parts lie that it passes on.
 * The graph itself is common/graph.h's.
 *
 * Pure functions, any thread; nothing is allocated. Fields that are not named here are not looked at: they pass through.
 */
#ifndef RV_BODY_H
#define RV_BODY_H

#include "rv_limits.h"
#include "scan.h"

#define RV_UUID_SIZE 37u        /* with its NUL */
#define RV_CLIENT_ID_MAX 128u   /* bytes; ComfyUI's pages send 32 or 36 */
#define RV_PROMPT_DETAILS 256u  /* bytes of an error's details */

struct rv_prompt_body {
    struct rv_span prompt, extra_data; /* objects; extra_data may be absent */
    char client_id[RV_CLIENT_ID_MAX + 1];
    bool has_client_id;
    char prompt_id[RV_UUID_SIZE];      /* "" = to be minted */
    char type[RV_NAME_MAX + 1];        /* extra_data.resvisor.type; "" = none */
    int32_t priority;                  /* extra_data.resvisor.priority */
    bool retry;                        /* extra_data.resvisor.retry */
    bool front, has_number;
    double number;
};

/* In ComfyUI's words. */
struct rv_prompt_fault {
    const char *type, *message;
    char details[RV_PROMPT_DETAILS];
};

/* 0, or -EINVAL with the fault filled in. */
int rv_prompt_body_read(const char *text, size_t length, struct rv_prompt_body *ret_body, struct rv_prompt_fault *ret_fault);

/* As Python writes one: 8-4-4-4-12 lower-case hexadecimal digits. */
bool rv_uuid_is_canonical(const char *text);

/* A random one (version 4) of 16 random bytes. */
void rv_uuid_write(const uint8_t random[16], char ret_text[RV_UUID_SIZE]);

#endif
