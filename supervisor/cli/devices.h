/* How a device is shown: `devices`, and the devices' part of `status`. */
#ifndef RV_CLI_DEVICES_H
#define RV_CLI_DEVICES_H

#include <jansson.h>

#include "rpc.pb-c.h"

/* One device, as in `devices --json` and `status --json`. */
json_t *rv_device_json(const Resvisor__V1__DeviceStatus *device);

/* The table of devices, one row each. */
void rv_devices_print_table(Resvisor__V1__DeviceStatus *const *devices, size_t count);

#endif
