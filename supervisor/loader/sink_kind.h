/* Between sink.c and the two kinds of sinks. */
#ifndef RV_LOADER_SINK_KIND_H
#define RV_LOADER_SINK_KIND_H

#include "sink.h"

/* The first member of each kind's own struct. */
struct rv_sink {
    const struct rv_sink_kind *kind;
    const struct rv_backend *backend;
    struct rv_arena arena;          /* from begin on */
    struct rv_reader_memory memory; /* allocate NULL = ordinary */
    char note[96];
    int fault; /* CUresult */
    char fault_what[RV_ERROR_TEXT_MAX];
};

struct rv_sink_kind {
    int (*create)(const struct rv_sink_wish *wish, struct rv_sink **ret_sink, struct rv_error *err);
    int (*plan)(struct rv_sink *sink, uint64_t used, uint64_t *ret_bytes, struct rv_error *err);
    int (*begin)(struct rv_sink *sink, uint64_t used, const struct rv_arena *given, struct rv_error *err);
    int (*put)(struct rv_sink *sink, uint64_t offset, const uint8_t *data, uint64_t length, struct rv_error *err);
    /* NULL = everything is done when put returns */
    int (*mark)(struct rv_sink *sink, uint64_t *ret_mark, struct rv_error *err);
    uint64_t (*reached)(struct rv_sink *sink);
    int (*wait)(struct rv_sink *sink, uint64_t mark, struct rv_error *err);
    int (*finish)(struct rv_sink *sink, struct rv_error *err);
    void (*stop)(struct rv_sink *sink);
    int (*hand_over)(struct rv_sink *sink, int *ret_fd, struct rv_error *err);
    void (*destroy)(struct rv_sink *sink); /* frees the struct too */
};

extern const struct rv_sink_kind rv_sink_host, rv_sink_device;

#endif
