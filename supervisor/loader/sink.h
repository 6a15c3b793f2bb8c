/*
 * Where a load writes: one arena, in ascending order.
 *
 * Arenas of 4 KiB pages are written by write(2): nothing is zeroed first, nothing faults, a full memory filesystem is
 * ENOSPC and never SIGBUS, and no mapping has to go before the seal. Measured: 2.1 GiB/s against 0.65 GiB/s for
 * fallocate ahead and a shared mapping (tests/bench/bench_fill.c). Huge pages know no write(2): there it is a mapping.
 *
 * 4 KiB pages are what an arena promises. Where the kernel can (6.1 and later), ordinary memory is gathered into blocks
 * of 2 MiB just before it is written (MADV_COLLAPSE; needs no privilege and no reserved pages): the fill then costs
 * half the CPU time and a client's first touch a third, since one fault maps a whole block. Where the kernel cannot, or
 * where it costs more than it gains, the rest of the load goes without. RESVISOR_LOADER_GATHER=never in the
 * environment: all of it. One thread at a time.
 */
#ifndef RV_LOADER_SINK_H
#define RV_LOADER_SINK_H

#include <stdint.h>

#include "error.h"
#include "memory.h"

#define RV_SINK_STAGE (64u * 1024) /* small tensors are gathered up to this */

struct rv_sink {
    int fd; /* the arena, not owned */
    struct rv_arena arena;
    uint8_t *map;       /* huge pages only */
    uint64_t allocated; /* bytes of the map that may be touched */
    uint8_t *stage;     /* write(2) only: the bytes [position - staged, position) */
    uint32_t staged;
    uint64_t position;
    uint64_t gathered;      /* write(2) only: blocks before this offset have been asked for */
    unsigned gather_misses; /* times that the kernel had none, or took too long */
};

int rv_sink_init(struct rv_sink *sink, int fd, const struct rv_arena *arena, struct rv_error *err);

/* Writes at offset >= the end of what came before; the gap is zeros. */
int rv_sink_put(struct rv_sink *sink, uint64_t offset, const uint8_t *data, uint64_t length, struct rv_error *err);

/* Writes what is gathered and unmaps: the arena may be sealed after this. */
int rv_sink_finish(struct rv_sink *sink, struct rv_error *err);
void rv_sink_fini(struct rv_sink *sink);

#endif
