/* What the files of supervisor/pool/device*.c share among themselves. */
#ifndef RV_DEVICES_PRIVATE_H
#define RV_DEVICES_PRIVATE_H

#include "children/children.h"
#include "devices.h"

struct event;

/* The running side of all devices; their facts are in the state. */
struct rv_devices {
    struct rv_supervisor *supervisor;
};

/* Bytes that /proc/meminfo calls MemAvailable; 0 = it does not tell. */
uint64_t rv_devices_mem_available(void);

/* The device of that uuid; -1 = none. */
int rv_devices_by_uuid(const struct rv_supervisor *s, const uint8_t *uuid);

#endif
