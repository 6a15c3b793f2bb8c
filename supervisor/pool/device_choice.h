/*
 * Which backend a device uses, and why, in words: from its facts and the rows of its self-test to state, backend and
 * reason of its record. Pure: nothing here asks, logs or allocates.
 */
#ifndef RV_DEVICE_CHOICE_H
#define RV_DEVICE_CHOICE_H

#include "state.h"

/*
 * Sets state (READY or UNUSABLE), backend and reason. wish: enum rv_backend_id that the configuration asks for; it is
 * used or the device is UNUSABLE, never another one instead. RV_BACKEND_NONE = the best that works. missing: why tests
 * that have no row have none ("the self-test ended: …").
 */
void rv_device_choose(struct rv_device_record *device, uint32_t wish, const char *missing);

/* Do the rows say that this backend works? If not, `why` says why not. */
bool rv_device_backend_works(const struct rv_device_record *device, uint32_t backend, const char *missing, char *why,
                             size_t size);

/*
 * The same question of a device that is in use: does it still do what it must? Others take and give back memory while
 * it is tested, so only the rows count that show that it answers, and want of memory is none of its faults.
 */
bool rv_device_answers(const struct rv_device_record *device, uint32_t backend, const char *missing, char *why,
                       size_t size);

#endif
