/* The actor's side of link.h: a process that does what it is told to a device. It never returns anything but by its
 * channel, and never ends its context at exit: the kernel does. */
#ifndef RV_DEVICE_ACTOR_H
#define RV_DEVICE_ACTOR_H

#include "link.h"
#include "rv_cuda.h"

/* Serves steps until the channel closes. Returns the exit code. parent: it ends with that process. */
int rv_actor_main(int parent);

/* ---- steps that lie in files of their own ---- */

#define RV_PIECE (4u * 1024 * 1024) /* bytes, of pinned memory: what is compared and copied at once */

/*
 * Measures and fills answer->values: copies from pinned memory to an arena of its own, the device's copies out of it to
 * pinned memory, and memset. The median of several each.
 */
int rv_speed_measure(struct rv_cuda_device *device, uint32_t backend, uint64_t size, struct rv_answer *answer,
                     struct rv_error *err);

/*
 * Makes arenas and gives them back in every order that is allowed: unmap, release, close the descriptor, free the
 * address, end the context. 0 = no call failed that must not; answer->number: orders; answer->values[0]: bytes that the
 * device did not get back; answer->text: what a call said after the end of its context, which is no failure. cuda-vmm
 * needs driver.h; without the Toolkit -EOPNOTSUPP.
 */
int rv_orders_vmm(struct rv_cuda *cuda, uint32_t ordinal, uint64_t size, struct rv_answer *answer,
                  struct rv_error *err);

/* Closes (an importer) or frees (its owner) cuda-ipc memory by the bare call: rv_cuda_memory_close forgives errors. */
int rv_orders_close_ipc(struct rv_cuda *cuda, uint32_t ordinal, struct rv_cuda_memory *memory, struct rv_error *err);

/* Bytes that the device has free; 0 = not known, or they say nothing since the machine's memory is meant. */
uint64_t rv_orders_free(struct rv_cuda *cuda, uint32_t ordinal);

#endif
