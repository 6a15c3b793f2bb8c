/* The table of devices: names, what may be placed where, and the rows that people see. */
#include "devices.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "clock.h"
#include "config.h"
#include "control/control.h"
#include "devices_private.h"
#include "log.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define UUID_TEXT 41 /* "GPU-" and 36 characters, NUL */

/* ---- names ------------------------------------------------------------------------------------------------------ */

int rv_devices_by_uuid(const struct rv_supervisor *s, const uint8_t *uuid)
{
    for (uint32_t i = 0; i < s->state.device_count; i++)
        if (memcmp(s->state.devices[i].uuid, uuid, RV_DEVICE_UUID_SIZE) == 0)
            return (int)i;
    return -1;
}

/* As nvidia-smi writes it. Like rv_device_uuid_text of rv_cuda.h, which is for programs that touch the driver. */
static char *uuid_text(const uint8_t *uuid, char buffer[UUID_TEXT])
{
    static const char digits[] = "0123456789abcdef";
    char *p = buffer;

    memcpy(p, "GPU-", 4);
    p += 4;
    for (unsigned i = 0; i < RV_DEVICE_UUID_SIZE; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            *p++ = '-';
        *p++ = digits[uuid[i] >> 4];
        *p++ = digits[uuid[i] & 15];
    }
    *p = '\0';
    return buffer;
}

static int by_name(const struct rv_supervisor *s, const char *name)
{
    for (uint32_t i = 0; i < s->state.device_count; i++) {
        char uuid[UUID_TEXT];

        if (strcmp(s->state.devices[i].name, name) == 0 ||
            strcasecmp(uuid_text(s->state.devices[i].uuid, uuid), name) == 0)
            return (int)i;
    }
    return -1;
}

static int no_such_device(const struct rv_supervisor *s, const char *name, struct rv_error *err)
{
    char shown[RV_NAME_MAX], known[RV_DEVICES_MAX * 20] = "";
    size_t used = 0;

    (void)rv_escape(shown, sizeof(shown), name, strlen(name));
    if (s->state.device_count == 0)
        return rv_error_set(err, ENODEV, ERROR(NO_SUCH_DEVICE), "no device %s: there are none: %.300s", shown,
                            s->state.devices_reason);
    for (uint32_t i = 0; i < s->state.device_count; i++)
        used += (size_t)snprintf(known + used, sizeof(known) - used, ", %s", s->state.devices[i].name);
    return rv_error_set(err, ENODEV, ERROR(NO_SUCH_DEVICE), "no device %s: there are host%s", shown, known);
}

int rv_devices_find(struct rv_supervisor *s, const char *name, int *ret_device, int *ret_user, struct rv_error *err)
{
    const struct rv_device_record *d;
    int i;

    if (strcmp(name, "host") == 0) {
        *ret_device = *ret_user = RV_HOST;
        return 0;
    }
    if (!s->state.devices_known)
        return -EAGAIN;
    i = by_name(s, name);
    if (i < 0)
        return no_such_device(s, name, err);
    d = &s->state.devices[i];
    switch (d->state) {
    case RV_DEVICE_UNTESTED:
    case RV_DEVICE_TESTING:
        return -EAGAIN;
    case RV_DEVICE_LOST:
        return rv_error_set(err, ENODEV, ERROR(DEVICE_LOST), "%s is lost: %.400s", d->name, d->reason);
    case RV_DEVICE_READY:
        break;
    default:
        return rv_error_set(err, EIO, ERROR(DEVICE), "%s cannot be used: %.400s", d->name, d->reason);
    }
    *ret_device = d->backend == RV_BACKEND_MEMFD ? RV_HOST : i;
    *ret_user = i;
    return 0;
}

/* "cuda:N" of a text that starts with the number N and then ends or goes on with a comma; else NULL. */
static const char *name_of_number(const char *text)
{
    static char names[RV_DEVICES_MAX][16];
    char *end;
    unsigned long n = strtoul(text, &end, 10);

    if (end == text || (*end && *end != ',') || n >= RV_DEVICES_MAX || *text < '0' || *text > '9')
        return NULL;
    (void)snprintf(names[n], sizeof(names[n]), "cuda:%lu", n);
    return names[n];
}

/* The device that ComfyUI uses: the first that its process sees. */
static const char *comfyui_device(const struct rv_config_type *type)
{
    const char *visible = rv_config_type_argument(type, "--cuda-device"), *name;

    for (uint32_t i = 0; i < type->env_count && !visible; i++)
        if (strcmp(type->env[i].key, "CUDA_VISIBLE_DEVICES") == 0)
            visible = type->env[i].value;
    if (!visible)
        return "cuda:0";
    if (strncmp(visible, "GPU-", 4) == 0 && !strchr(visible, ','))
        return visible;
    name = name_of_number(visible);
    return name ? name : "cuda:0";
}

const char *rv_devices_of_type(const struct rv_config_type *type)
{
    if (type->device && strcmp(type->device, "auto") != 0)
        return type->device;
    if (strcmp(type->kind, "comfyui") == 0 && rv_config_type_argument(type, "--gpu-only"))
        return comfyui_device(type);
    return "host";
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

uint64_t rv_devices_mem_available(void)
{
    FILE *f = fopen("/proc/meminfo", "re");
    unsigned long long kib = 0;
    char line[128];

    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            break;
    if (f)
        (void)fclose(f);
    return kib * 1024;
}

/* What is left of `whole` when `used` is taken. */
static uint64_t left_of(uint64_t whole, uint64_t used)
{
    return used < whole ? whole - used : 0;
}

uint64_t rv_devices_allocatable(const struct rv_supervisor *s, int device, const char **ret_source)
{
    *ret_source = "nothing";
    if (device < 0 || (uint32_t)device >= s->state.device_count)
        return UINT64_MAX;
    if (s->state.devices[device].unified) {
        *ret_source = "MemAvailable - cuda.reserve";
        return left_of(rv_devices_mem_available(), s->config->cuda_reserve);
    }
    return UINT64_MAX;
}

/* ---- messages --------------------------------------------------------------------------------------------------- */

void rv_devices_fill(const struct rv_supervisor *s, int device, Rv__Device *ret_message)
{
    const struct rv_device_record *d = &s->state.devices[device];

    ret_message->name = (char *)d->name;
    ret_message->uuid = (ProtobufCBinaryData){RV_DEVICE_UUID_SIZE, (uint8_t *)d->uuid};
}

Resvisor__V1__DeviceStatus **rv_devices_status(const struct rv_supervisor *s, size_t *ret_count, void **ret_arena)
{
    size_t count = s->state.device_count;
    struct row {
        Resvisor__V1__DeviceStatus status;
        char uuid[UUID_TEXT];
    } * rows;
    Resvisor__V1__DeviceStatus **pointers = calloc(1, (count + 1) * (sizeof(*pointers) + sizeof(*rows)));

    if (!pointers)
        return NULL;
    rows = (void *)(pointers + count + 1);
    for (size_t i = 0; i < count; i++) {
        const struct rv_device_record *d = &s->state.devices[i];
        Resvisor__V1__DeviceStatus *m = &rows[i].status;

        resvisor__v1__device_status__init(m);
        m->name = (char *)d->name;
        m->uuid = uuid_text(d->uuid, rows[i].uuid);
        m->product = (char *)d->product;
        m->state = (char *)rv_device_state_name(d->state);
        m->backend = d->backend ? (char *)rv_backend_by_id(d->backend)->name : (char *)"";
        m->reason = (char *)d->reason;
        pointers[i] = m;
    }
    *ret_count = count;
    *ret_arena = pointers;
    return pointers;
}

void rv_device_request(struct rv_session *session, uint64_t id, const Resvisor__V1__DeviceRequest *request)
{
    struct rv_supervisor *s = session->supervisor;
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__DeviceList list = RESVISOR__V1__DEVICE_LIST__INIT;
    struct rv_error err = {0};
    void *arena = NULL;

    if (request->device[0] && by_name(s, request->device) < 0)
        (void)no_such_device(s, request->device, &err);
    else if (!(list.devices = rv_devices_status(s, &list.n_devices, &arena)))
        (void)rv_error_set(&err, ENOMEM, ERROR(NO_MEMORY), "no memory for the list of devices");
    if (err.code) {
        rv_session_reply(session, id, &err);
        return;
    }
    list.reason = s->state.devices_reason;
    frame.id = id;
    frame.body_case = RV__FRAME__BODY_DEVICE_LIST;
    frame.device_list = &list;
    rv_session_send(session, &frame, NULL, 0);
    free(arena);
}

/* ---- life ------------------------------------------------------------------------------------------------------- */

int rv_devices_init(struct rv_supervisor *s)
{
    s->devices = calloc(1, sizeof(*s->devices));
    if (!s->devices)
        return -ENOMEM;
    s->devices->supervisor = s;
    return 0;
}

void rv_devices_fini(struct rv_supervisor *s)
{
    free(s->devices);
    s->devices = NULL;
}

void rv_devices_start(struct rv_supervisor *s)
{
    (void)snprintf(s->state.devices_reason, sizeof(s->state.devices_reason), "no device was searched for");
    s->state.devices_known = true;
}

void rv_devices_stop(struct rv_supervisor *s, bool now)
{
    (void)s;
    (void)now;
}

/* ---- children --------------------------------------------------------------------------------------------------- */

void rv_device_on_hello(struct rv_supervisor *s, struct rv_child *child)
{
    (void)s;
    (void)child;
}

bool rv_device_on_frame(struct rv_supervisor *s, struct rv_child *child, const Rv__Frame *frame)
{
    (void)s;
    (void)child;
    (void)frame;
    return false; /* no child was started */
}

void rv_device_on_event(struct rv_supervisor *s, struct rv_session *session, const Rv__DeviceEvent *event)
{
    (void)s;
    rv_log_warning("%s says that a device failed it with error %d", rv_session_describe(session), event->error);
}
