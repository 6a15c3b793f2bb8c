/* What resvisor-device is started for; each runs to the end of the process and returns its exit code. */
#ifndef RV_DEVICE_WORKS_H
#define RV_DEVICE_WORKS_H

#include "control.pb-c.h"

/* WORK_TEST: finds devices, tells of them, tests those whose results are not known, tells that it is done. */
int rv_work_test(int socket, const Rv__DeviceStart *start);

/* WORK_HOLD: allocates and frees as it is told. Ends when the channel closes; the kernel gives back what is left. */
int rv_work_hold(int socket, const Rv__DeviceStart *start);

/* WORK_WATCH: tells NVML's numbers every watch_ms and Xids when they come. 0 after an Error that says why, if there is
 * nothing to watch. */
int rv_work_watch(int socket, const Rv__DeviceStart *start);

/* By hand: `--list`, `--self-test [DEVICE] [--timeout SECONDS]`. */
int rv_by_hand(int argc, char **argv);

/* A DeviceEvent. error: CUresult, xid: of the kernel driver; 0 = none. Any thread. */
void rv_tell_event(int socket, const uint8_t *uuid, int32_t error, uint32_t xid, const char *what);

#endif
