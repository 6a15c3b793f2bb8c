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
#include "paths.h"
#include "pool.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define BUDGET_PERCENT 90u /* of a device that the configuration does not name: the default of devices.NAME.budget */

/* ---- names ------------------------------------------------------------------------------------------------------ */

int rv_devices_by_uuid(const struct rv_supervisor *s, const uint8_t *uuid)
{
    for (uint32_t i = 0; i < s->state.device_count; i++)
        if (memcmp(s->state.devices[i].uuid, uuid, RV_DEVICE_UUID_SIZE) == 0)
            return (int)i;
    return -1;
}

int rv_devices_by_bytes(const struct rv_supervisor *s, const ProtobufCBinaryData *uuid)
{
    return uuid->len == RV_DEVICE_UUID_SIZE ? rv_devices_by_uuid(s, uuid->data) : -1;
}

int rv_devices_by_name(const struct rv_supervisor *s, const char *name)
{
    for (uint32_t i = 0; i < s->state.device_count; i++) {
        char uuid[RV_DEVICE_UUID_TEXT];

        if (strcmp(s->state.devices[i].name, name) == 0 ||
            strcasecmp(rv_device_uuid_text(s->state.devices[i].uuid, uuid), name) == 0)
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
    i = rv_devices_by_name(s, name);
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

/* Bytes that /proc/meminfo calls MemAvailable; 0 = it does not tell. */
static uint64_t mem_available(void)
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

/* What is free on the device itself, by who can tell; UINT64_MAX = nobody can. */
static uint64_t free_on(const struct rv_supervisor *s, const struct rv_device_record *d, const char **ret_source)
{
    if (d->unified) { /* never NVML: it does not know what the machine's memory is used for */
        *ret_source = "meminfo";
        return left_of(mem_available(), s->config->cuda_reserve);
    }
    if (rv_device_watch_knows(d)) {
        *ret_source = "nvml";
        return d->free_bytes;
    }
    *ret_source = "";
    return UINT64_MAX;
}

/* Is there a device that takes of the machine's memory, by whichever backend? */
static bool host_is_unified(const struct rv_supervisor *s)
{
    for (uint32_t i = 0; i < s->state.device_count; i++)
        if (s->state.devices[i].unified)
            return true;
    return false;
}

uint64_t rv_devices_allocatable(const struct rv_supervisor *s, int device, const char **ret_source)
{
    const struct rv_device_record *d;
    uint64_t promised = 0, held, budget, room;
    const char *source;

    *ret_source = "nothing limits it";
    if (device == RV_HOST) {
        if (!host_is_unified(s))
            return UINT64_MAX;
        (void)rv_pool_device_bytes(s, RV_HOST, &promised);
        *ret_source = "MemAvailable - cuda.reserve";
        return left_of(left_of(mem_available(), s->config->cuda_reserve), promised);
    }
    if (device < 0 || (uint32_t)device >= s->state.device_count)
        return 0;
    d = &s->state.devices[device];
    held = rv_pool_device_bytes(s, device, &promised);
    budget = d->budget_bytes ? left_of(d->budget_bytes, held + promised) : UINT64_MAX;
    /* A loader allocates all of its arena at once, so what is promised is in these numbers a moment later. In that
     * moment two loads may both be let in. On memory of its own the driver then refuses one of them; where it is the
     * machine's, running out takes all of the machine, so there the promise counts until the load has ended. */
    room = free_on(s, d, &source);
    if (d->unified)
        room = left_of(room, promised);
    if (room < budget)
        *ret_source = d->unified ? "MemAvailable - cuda.reserve" : "what NVML says is free";
    else if (budget != UINT64_MAX)
        *ret_source = "its budget";
    return room < budget ? room : budget;
}

uint32_t rv_device_configured(const struct rv_supervisor *s, const struct rv_device_record *d, uint64_t *ret_budget)
{
    uint32_t wish = RV_BACKEND_NONE, percent = BUDGET_PERCENT;
    uint64_t bytes = 0;
    char uuid[RV_DEVICE_UUID_TEXT];

    (void)rv_device_uuid_text(d->uuid, uuid);
    for (uint32_t i = 0; i < s->config->device_count; i++) {
        const struct rv_config_device *c = &s->config->devices[i];
        const struct rv_backend *backend;

        if (strcmp(c->name, d->name) != 0 && strcasecmp(c->name, uuid) != 0)
            continue;
        backend = rv_backend_by_name(c->backend);
        wish = backend ? backend->id : RV_BACKEND_NONE; /* "auto" is the name of none */
        percent = c->budget_percent;
        bytes = c->budget;
        break;
    }
    *ret_budget = percent ? d->total_bytes / 100 * percent : bytes;
    return wish;
}

bool rv_device_in_use(const struct rv_supervisor *s, int device)
{
    uint64_t promised = 0, held = rv_pool_device_bytes(s, device, &promised);

    return held + promised > 0 || rv_load_is_at(s, device);
}

/* ---- messages --------------------------------------------------------------------------------------------------- */

void rv_devices_fill(const struct rv_supervisor *s, int device, Rv__Device *ret_message)
{
    const struct rv_device_record *d = &s->state.devices[device];

    ret_message->name = (char *)d->name;
    ret_message->uuid = (ProtobufCBinaryData){RV_DEVICE_UUID_SIZE, (uint8_t *)d->uuid};
}

/* Everything that the rows point to, in one piece. */
struct row {
    Resvisor__V1__DeviceStatus status;
    char uuid[RV_DEVICE_UUID_TEXT];
    Resvisor__V1__DeviceTest tests[RV_DEVICE_TESTS_MAX], *test_pointers[RV_DEVICE_TESTS_MAX];
    Resvisor__V1__DeviceAttribute attributes[RV_DEVICE_ATTRIBUTES_MAX], *attribute_pointers[RV_DEVICE_ATTRIBUTES_MAX];
    Resvisor__V1__DeviceProcess processes[RV_DEVICE_PROCESSES_MAX], *process_pointers[RV_DEVICE_PROCESSES_MAX];
};

/* Whose process that is, if it is one of ours. */
static const char *owner_of(const struct rv_supervisor *s, pid_t pid)
{
    for (uint32_t i = 0; i < s->state.worker_count; i++)
        if (s->state.workers[i].process.pid == pid)
            return s->state.workers[i].id;
    for (uint32_t i = 0; i < s->state.device_count; i++)
        if (s->state.devices[i].holder.process.pid == pid)
            return "holder";
    return rv_child_name_of_pid(s, pid);
}

static void fill_details(const struct rv_supervisor *s, uint32_t i, struct row *row)
{
    const struct rv_device_record *d = &s->state.devices[i];
    const struct rv_device_extra *extra = &s->devices->extras[i];

    for (uint32_t k = 0; k < d->test_count; k++) {
        resvisor__v1__device_test__init(&row->tests[k]);
        row->tests[k].backend = (char *)rv_backend_by_id(d->tests[k].backend)->name;
        row->tests[k].name = (char *)d->tests[k].name;
        row->tests[k].result = (char *)d->tests[k].result;
        row->tests[k].detail = (char *)d->tests[k].detail;
        row->tests[k].bytes_per_second = d->tests[k].bytes_per_second;
        row->tests[k].duration_us = d->tests[k].duration_us;
        row->tests[k].no_memory = d->tests[k].no_memory;
        row->test_pointers[k] = &row->tests[k];
    }
    for (uint32_t k = 0; k < d->attribute_count; k++) {
        resvisor__v1__device_attribute__init(&row->attributes[k]);
        row->attributes[k].number = d->attributes[k].number;
        row->attributes[k].name = (char *)d->attributes[k].name;
        row->attributes[k].value = d->attributes[k].value;
        row->attribute_pointers[k] = &row->attributes[k];
    }
    for (uint32_t k = 0; k < extra->process_count; k++) {
        resvisor__v1__device_process__init(&row->processes[k]);
        row->processes[k].pid = extra->processes[k].pid;
        row->processes[k].bytes = extra->processes[k].bytes;
        row->processes[k].worker = (char *)owner_of(s, extra->processes[k].pid);
        row->process_pointers[k] = &row->processes[k];
    }
    row->status.n_tests = d->test_count;
    row->status.tests = row->test_pointers;
    row->status.n_attributes = d->attribute_count;
    row->status.attributes = row->attribute_pointers;
    row->status.n_processes = extra->process_count;
    row->status.processes = row->process_pointers;
}

static void fill_row(const struct rv_supervisor *s, uint32_t i, struct row *row)
{
    const struct rv_device_record *d = &s->state.devices[i];
    Resvisor__V1__DeviceStatus *m = &row->status;
    const char *source;
    uint64_t room;

    resvisor__v1__device_status__init(m);
    m->name = (char *)d->name;
    m->uuid = rv_device_uuid_text(d->uuid, row->uuid);
    m->product = (char *)d->product;
    m->state = (char *)rv_device_state_name(d->state);
    m->backend = d->backend ? (char *)rv_backend_by_id(d->backend)->name : (char *)"";
    m->reason = (char *)d->reason;
    m->driver = (char *)d->driver;
    m->capability = (char *)d->capability;
    m->unified = d->unified;
    m->cached = d->cached;
    m->total_bytes = d->total_bytes;
    m->budget_bytes = d->budget_bytes;
    m->pool_bytes = rv_pool_device_bytes(s, (int)i, &m->promised_bytes);
    m->used_bytes = rv_device_watch_knows(d) ? d->used_bytes : 0;
    room = free_on(s, d, &source);
    m->free_bytes = room == UINT64_MAX ? 0 : room;
    m->memory_source = (char *)source;
    m->holder_pid = (uint32_t)d->holder.process.pid;
    fill_details(s, i, row);
}

Resvisor__V1__DeviceStatus **rv_devices_status(const struct rv_supervisor *s, size_t *ret_count, void **ret_arena)
{
    size_t count = s->state.device_count;
    Resvisor__V1__DeviceStatus **pointers = calloc(1, (count + 1) * (sizeof(*pointers) + sizeof(struct row)));
    struct row *rows = (void *)(pointers + count + 1);

    if (!pointers)
        return NULL;
    for (uint32_t i = 0; i < count; i++) {
        fill_row(s, i, &rows[i]);
        pointers[i] = &rows[i].status;
    }
    *ret_count = count;
    *ret_arena = pointers;
    return pointers;
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */

void rv_device_send_list(struct rv_session *session, uint64_t id, int only)
{
    struct rv_supervisor *s = session->supervisor;
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__DeviceList list = RESVISOR__V1__DEVICE_LIST__INIT;
    struct rv_error err = {0};
    void *arena = NULL;

    list.devices = rv_devices_status(s, &list.n_devices, &arena);
    if (!list.devices) {
        rv_error_set(&err, ENOMEM, ERROR(NO_MEMORY), "no memory for the list of devices");
        rv_session_reply(session, id, &err);
        return;
    }
    if (only >= 0) {
        list.devices += only;
        list.n_devices = 1;
    }
    list.reason = s->state.devices_reason;
    frame.id = id;
    frame.body_case = RV__FRAME__BODY_DEVICE_LIST;
    frame.device_list = &list;
    rv_session_send(session, &frame, NULL, 0);
    free(arena);
}

/* May it be tested anew? One that is used would be tested under its users' feet. */
static int check_test(struct rv_supervisor *s, int device, struct rv_error *err)
{
    if (s->stopping)
        return rv_error_set(err, EBUSY, ERROR(SHUTTING_DOWN), "resvisor is stopping");
    if (strcmp(s->config->cuda, "off") == 0)
        return rv_error_set(err, ENODEV, ERROR(NO_SUCH_DEVICE), "%s", s->state.devices_reason);
    for (uint32_t i = 0; i < s->state.device_count; i++) {
        const struct rv_device_record *d = &s->state.devices[i];

        if ((device >= 0 && device != (int)i) || d->state == RV_DEVICE_LOST || !rv_device_in_use(s, (int)i))
            continue;
        rv_error_set(err, EBUSY, ERROR(MODEL_IN_USE), "%s holds models, or one is being loaded there", d->name);
        rv_error_remedy(err, "unload them first: `resvisor models` shows which");
        return -EBUSY;
    }
    return 0;
}

void rv_device_request(struct rv_session *session, uint64_t id, const Resvisor__V1__DeviceRequest *request)
{
    struct rv_supervisor *s = session->supervisor;
    int device = request->device[0] ? rv_devices_by_name(s, request->device) : -1;
    struct rv_error err = {0};
    int r = 0;

    if (request->device[0] && device < 0 && !s->state.devices_known)
        r = rv_error_set(&err, EAGAIN, ERROR(NOT_READY), "the devices are being searched for");
    else if (request->device[0] && device < 0)
        r = no_such_device(s, request->device, &err);
    else if (request->action == RESVISOR__V1__DEVICE_ACTION__DEVICE_TEST)
        r = check_test(s, device, &err);
    if (r == 0 && request->action == RESVISOR__V1__DEVICE_ACTION__DEVICE_TEST)
        r = rv_device_search_wait(s, session, id, device, &err);
    if (r < 0)
        rv_session_reply(session, id, &err);
    else if (request->action == RESVISOR__V1__DEVICE_ACTION__DEVICE_TEST)
        rv_device_search_start(s, device);
    else
        rv_device_send_list(session, id, device);
}

/* ---- children --------------------------------------------------------------------------------------------------- */

int rv_device_spawn(struct rv_supervisor *s, struct rv_child *child, const char *name, struct rv_error *err)
{
    const char *argv[] = {"resvisor-device", NULL}, *env[] = {"RESVISOR_CONTROL_FD=3", NULL};
    char path[RV_PATH_MAX];
    int r = rv_installed_path(RV_LIBEXEC, "resvisor-device", path, sizeof(path));

    if (r < 0)
        return rv_error_set(err, -r, ERROR(INTERNAL), "resvisor-device is not found: %s", strerror(-r));
    if (!child->log)
        child->log = rv_log_create(s, "device", "device");
    return rv_child_spawn(s, child, &(struct rv_spawn_options){RV_CHILD_DEVICE, name, path, argv, env, NULL, NULL, 0},
                          err);
}

void rv_device_send(struct rv_child *child, Rv__Frame *frame)
{
    if (child->session)
        rv_session_send(child->session, frame, NULL, 0);
}

void rv_device_on_hello(struct rv_supervisor *s, struct rv_child *child)
{
    int holder = rv_holder_of_child(s, child);

    if (rv_device_search_is(s, child))
        rv_device_search_on_hello(s);
    else if (rv_device_watch_is(s, child))
        rv_device_watch_on_hello(s);
    else if (holder >= 0)
        rv_holder_on_hello(s, holder);
}

bool rv_device_on_frame(struct rv_supervisor *s, struct rv_child *child, const Rv__Frame *frame)
{
    int holder = rv_holder_of_child(s, child);

    if (rv_device_search_is(s, child))
        return rv_device_search_on_frame(s, frame);
    if (rv_device_watch_is(s, child))
        return rv_device_watch_on_frame(s, frame);
    return holder >= 0 && rv_holder_on_frame(s, holder, frame);
}

/* ---- life ------------------------------------------------------------------------------------------------------- */

int rv_devices_init(struct rv_supervisor *s)
{
    int r;

    s->devices = calloc(1, sizeof(*s->devices));
    if (!s->devices)
        return -ENOMEM;
    s->devices->supervisor = s;
    r = rv_device_search_init(s);
    if (r == 0)
        r = rv_device_watch_init(s);
    if (r == 0)
        r = rv_holders_init(s);
    if (r == 0)
        r = rv_device_lost_init(s);
    return r;
}

void rv_devices_fini(struct rv_supervisor *s)
{
    if (!s->devices)
        return;
    rv_device_search_fini(s);
    rv_device_watch_fini(s);
    rv_holders_fini(s);
    rv_device_lost_fini(s);
    free(s->devices);
    s->devices = NULL;
}

void rv_devices_start(struct rv_supervisor *s)
{
    (void)snprintf(s->state.devices_reason, sizeof(s->state.devices_reason), "they are being searched for");
    if (strcmp(s->config->cuda, "off") != 0) {
        rv_device_search_start(s, -1);
        return;
    }
    (void)snprintf(s->state.devices_reason, sizeof(s->state.devices_reason),
                   "the configuration says so (cuda.enabled is off)");
    s->state.devices_known = true;
    rv_pool_devices_known(s);
}

void rv_devices_stop(struct rv_supervisor *s, bool now)
{
    if (!s->devices)
        return;
    rv_device_search_stop(s);
    rv_device_watch_stop(s);
    if (now || rv_workers_all_stopped(s))
        rv_holders_stop(s, now);
}
