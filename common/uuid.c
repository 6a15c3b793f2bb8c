#include <stdio.h>

#include "memory.h"

char *rv_device_uuid_text(const uint8_t uuid[RV_DEVICE_UUID_SIZE], char buffer[RV_DEVICE_UUID_TEXT])
{
    static const uint8_t dash_before[] = {4, 6, 8, 10};
    char *p = buffer + snprintf(buffer, RV_DEVICE_UUID_TEXT, "GPU-");

    for (unsigned i = 0, dash = 0; i < RV_DEVICE_UUID_SIZE; i++) {
        if (dash < sizeof(dash_before) && i == dash_before[dash]) {
            *p++ = '-';
            dash++;
        }
        p += snprintf(p, 3, "%02x", uuid[i]);
    }
    return buffer;
}
