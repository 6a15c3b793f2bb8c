/* Moves the data section into the arena and computes every tensor's digest on the way. Loader only. */
#ifndef RV_LOADER_FILL_H
#define RV_LOADER_FILL_H

#include "plan.h"
#include "reader.h"
#include "sink.h"

/*
 * Two threads: the caller's waits for the disk and hashes, a second one fills, since filling alone takes all of a
 * processor. Writes the digests into the plan's entries. progress is called on the caller's thread.
 */
int rv_fill(const struct rv_plan *plan, struct rv_reader *reader, struct rv_sink *sink,
            void (*progress)(void *context, uint64_t bytes_done), void *context, struct rv_error *err);

#endif
