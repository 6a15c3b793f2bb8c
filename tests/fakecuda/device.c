/* Devices and what is known of them without a context. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "fake.h"

static unsigned visible[FAKE_GPUS_MAX]; /* ordinal of this process -> index */
static unsigned visible_count;
static CUresult poison[FAKE_GPUS_MAX];

static int gpu_named(const char *word)
{
    const struct fake_config *config = fake_config();
    char *end;
    unsigned long ordinal = strtoul(word, &end, 10);
    if (isdigit((unsigned char)*word) && *end == '\0')
        return ordinal < config->gpu_count ? (int)ordinal : -1;
    for (unsigned i = 0; strlen(word) > 4 && i < config->gpu_count; i++) {
        char text[41];
        fake_uuid_text(config->gpus[i].uuid, text);
        if (strncasecmp(text, word, strlen(word)) == 0)
            return (int)i;
    }
    return -1;
}

/* CUDA_VISIBLE_DEVICES: everything from the first wrong word on is invisible. */
bool fake_device_init(void)
{
    const struct fake_config *config = fake_config();
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (visible_count > 0)
        return true;
    for (unsigned i = 0; list == NULL && i < config->gpu_count; i++)
        visible[visible_count++] = i;
    while (list != NULL && *list != '\0' && visible_count < FAKE_GPUS_MAX) {
        char word[64];
        size_t length = strcspn(list, ",");
        snprintf(word, sizeof(word), "%.*s", (int)length, list);
        int gpu = gpu_named(word);
        if (gpu < 0 || fake_ordinal_of((unsigned)gpu) >= 0)
            break;
        visible[visible_count++] = (unsigned)gpu;
        list += length + (list[length] == ',');
    }
    return visible_count > 0;
}

int fake_gpu_of(CUdevice device)
{
    return device >= 0 && (unsigned)device < visible_count ? (int)visible[device] : -1;
}

int fake_ordinal_of(unsigned gpu)
{
    for (unsigned i = 0; i < visible_count; i++)
        if (visible[i] == gpu)
            return (int)i;
    return -1;
}

int fake_gpu_by_uuid(const uint8_t uuid[16])
{
    const struct fake_config *config = fake_config();
    for (unsigned i = 0; i < config->gpu_count; i++)
        if (memcmp(config->gpus[i].uuid, uuid, 16) == 0)
            return (int)i;
    return -1;
}

CUresult fake_gpu_health(unsigned gpu)
{
    if (poison[gpu] == CUDA_SUCCESS)
        poison[gpu] = (CUresult)fake_state_lost(gpu);
    return poison[gpu];
}

void fake_gpu_poison(unsigned gpu, CUresult error)
{
    if (poison[gpu] == CUDA_SUCCESS)
        poison[gpu] = error;
    fake_changed();
}

bool fake_gpu_attribute(unsigned gpu, int attribute)
{
    int value = fake_config()->gpus[gpu].attributes[attribute];
    return value != 0 && value != FAKE_ATTRIBUTE_UNKNOWN;
}

/* The way into calls that name a device. */
static CUresult device_enter(enum fake_function function, CUdevice device, const void *output,
                             const struct fake_gpu **ret_gpu)
{
    CUresult result = fake_enter(function, FAKE_ANYTIME);
    if (result != CUDA_SUCCESS)
        return result;
    int gpu = fake_gpu_of(device);
    if (output == NULL)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (gpu < 0)
        return fake_leave(CUDA_ERROR_INVALID_DEVICE);
    *ret_gpu = &fake_config()->gpus[gpu];
    return CUDA_SUCCESS;
}

CUresult fake_DeviceGetCount(int *count)
{
    CUresult result = fake_enter(FN_DeviceGetCount, FAKE_ANYTIME);
    if (result != CUDA_SUCCESS)
        return result;
    if (count == NULL)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *count = (int)visible_count;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_DeviceGet(CUdevice *device, int ordinal)
{
    const struct fake_gpu *gpu = NULL;
    CUresult result = device_enter(FN_DeviceGet, ordinal, device, &gpu);
    if (result != CUDA_SUCCESS)
        return result;
    *device = ordinal;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_DeviceGetName(char *name, int length, CUdevice device)
{
    const struct fake_gpu *gpu = NULL;
    CUresult result = device_enter(FN_DeviceGetName, device, name, &gpu);
    if (result != CUDA_SUCCESS)
        return result;
    if (length <= 0)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    snprintf(name, (size_t)length, "%s", gpu->name);
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_DeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    const struct fake_gpu *gpu = NULL;
    CUresult result = device_enter(FN_DeviceGetAttribute, device, value, &gpu);
    if (result != CUDA_SUCCESS)
        return result;
    if ((int)attribute < 1 || (int)attribute >= FAKE_ATTRIBUTES || gpu->attributes[attribute] == FAKE_ATTRIBUTE_UNKNOWN)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *value = gpu->attributes[attribute];
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_DeviceTotalMem(size_t *bytes, CUdevice device)
{
    const struct fake_gpu *gpu = NULL;
    CUresult result = device_enter(FN_DeviceTotalMem, device, bytes, &gpu);
    if (result != CUDA_SUCCESS)
        return result;
    *bytes = gpu->total;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_DeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    const struct fake_gpu *gpu = NULL;
    CUresult result = device_enter(FN_DeviceGetUuid, device, uuid, &gpu);
    if (result != CUDA_SUCCESS)
        return result;
    memcpy(uuid->bytes, gpu->uuid, sizeof(uuid->bytes));
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_DeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    const struct fake_gpu *gpu = NULL;
    CUresult result = device_enter(FN_DeviceGetPCIBusId, device, text, &gpu);
    if (result != CUDA_SUCCESS)
        return result;
    if (length < 13)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    snprintf(text, (size_t)length, "0000:%02X:00.0", (unsigned)gpu->attributes[CU_DEVICE_ATTRIBUTE_PCI_BUS_ID]);
    return fake_leave(CUDA_SUCCESS);
}
