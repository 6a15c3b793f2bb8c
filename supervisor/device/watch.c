/*
 * The watch: NVML's numbers, and the Xids by which the kernel's driver tells of faults. NVML can block for minutes
 * while the driver looks for memory; then only this process waits. It loads no libcuda and makes no context.
 */
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "child.h"
#include "clock.h"
#include "memory.h"
#include "nvml.h"
#include "rv_limits.h"
#include "works.h"

#define LIBRARY "libnvidia-ml.so.1"
#define WATCH_MS_DEFAULT 1000u
#define WATCH_MS_MIN 50u
#define WATCH_MS_MAX 3600000u
#define PROCESSES_MAX 512u /* of one device; with more than that none is told */
#define EVENT_MS 1000u
#define EVENT_FAILURES_MAX 10u /* in a row: the events are given up */
#define XID_LOST 79u           /* what NVML calls GPU_IS_LOST */

struct gpu {
    rv_nvml_device handle;
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
    bool memory, processes, events; /* it answers */
    bool lost;                      /* told already */
};

struct watch {
    int socket;
    struct rv_nvml nvml;
    struct gpu gpus[RV_DEVICES_MAX];
    uint32_t count;
    rv_nvml_event_set set;
};

/* Meanings: "Xid Catalog", docs.nvidia.com/deploy/xid-errors. In our words, of those that a machine for models sees. */
static const struct {
    uint16_t xid;
    const char *text;
} xids[] = {
    {13, "a program's work broke a rule of the engine"},
    {31, "a program touched memory that it must not"},
    {32, "a program's commands were damaged"},
    {43, "a program's channel was reset"},
    {45, "a program's channel was cleaned up after an earlier fault"},
    {48, "a memory error that cannot be corrected"},
    {61, "its micro-controller stopped at a breakpoint"},
    {62, "its micro-controller halted"},
    {63, "a row of memory is to be replaced"},
    {64, "a row of memory could not be replaced"},
    {69, "a program's work broke a rule of the graphics engine"},
    {74, "an NVLink error"},
    {79, "it has fallen off the bus"},
    {92, "many corrected memory errors"},
    {94, "a memory error that was contained in one program"},
    {95, "a memory error that was not contained"},
    {109, "switching between programs took too long"},
    {119, "its system processor (GSP) does not answer"},
    {120, "its system processor (GSP) failed"},
    {140, "a memory error that cannot be corrected"},
};

static const char *xid_text(unsigned long long xid)
{
    for (size_t i = 0; i < sizeof(xids) / sizeof(xids[0]); i++)
        if (xids[i].xid == xid)
            return xids[i].text;
    return "the kernel's log says more";
}

/* ---- finding them ----------------------------------------------------------------------------------------------- */

static int digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx". */
static bool parse_uuid(const char *text, uint8_t ret_uuid[RV_DEVICE_UUID_SIZE])
{
    unsigned digits = 0;

    if (strncmp(text, "GPU-", 4) != 0)
        return false;
    for (const char *p = text + 4; *p; p++) {
        int value = digit(*p);

        if (*p == '-')
            continue;
        if (value < 0 || digits == 2 * RV_DEVICE_UUID_SIZE)
            return false;
        ret_uuid[digits / 2] = (uint8_t)(digits % 2 ? ret_uuid[digits / 2] << 4 | value : value);
        digits++;
    }
    return digits == 2 * RV_DEVICE_UUID_SIZE;
}

/* NULL = all there; else why not, in words (static, or of dlerror). */
static const char *load(struct rv_nvml *nvml)
{
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);

    if (!library)
        return LIBRARY " is not installed";
#define X(member, symbol, arguments, needed)             \
    *(void **)(&nvml->member) = dlsym(library, #symbol); \
    if (needed && !nvml->member)                         \
        return LIBRARY " lacks " #symbol;
    RV_NVML_FUNCTIONS(X)
#undef X
    *(void **)(&nvml->error_text) = dlsym(library, "nvmlErrorString");
    return NULL;
}

static const char *reason_of(const struct rv_nvml *nvml, const char *call, int result, char *buffer, size_t size)
{
    const char *text = nvml->error_text ? nvml->error_text(result) : NULL;
    char escaped[128] = "";

    if (text)
        (void)rv_escape(escaped, sizeof(escaped), text, strlen(text));
    (void)snprintf(buffer, size, "%s: %d %s", call, result, escaped);
    return buffer;
}

static void register_events(struct watch *w, struct gpu *gpu)
{
    if (w->set && w->nvml.event_register)
        gpu->events = w->nvml.event_register(gpu->handle, RV_NVML_EVENT_XID, w->set) == RV_NVML_SUCCESS;
}

static void add(struct watch *w, unsigned index)
{
    struct gpu *gpu = &w->gpus[w->count];
    char text[RV_NVML_UUID_SIZE] = "";
    struct rv_nvml_memory memory;
    unsigned processes = 0;
    int r;

    *gpu = (struct gpu){0};
    if (w->nvml.handle(index, &gpu->handle) != RV_NVML_SUCCESS ||
        w->nvml.uuid(gpu->handle, text, sizeof(text)) != RV_NVML_SUCCESS)
        return;
    text[sizeof(text) - 1] = '\0';
    if (!parse_uuid(text, gpu->uuid))
        return;
    gpu->memory = w->nvml.memory && w->nvml.memory(gpu->handle, &memory) != RV_NVML_NOT_SUPPORTED;
    r = w->nvml.processes ? w->nvml.processes(gpu->handle, &processes, NULL) : RV_NVML_NOT_SUPPORTED;
    gpu->processes = r == RV_NVML_SUCCESS || r == RV_NVML_INSUFFICIENT_SIZE;
    register_events(w, gpu);
    w->count++;
}

/* NULL = there is something to watch; else why there is nothing. */
static const char *find(struct watch *w, char *buffer, size_t size)
{
    const char *reason = load(&w->nvml);
    unsigned count = 0;
    bool any = false;
    int r;

    if (reason)
        return reason;
    r = w->nvml.init();
    if (r != RV_NVML_SUCCESS)
        return reason_of(&w->nvml, "nvmlInit_v2", r, buffer, size);
    r = w->nvml.count(&count);
    if (r != RV_NVML_SUCCESS)
        return reason_of(&w->nvml, "nvmlDeviceGetCount_v2", r, buffer, size);
    if (!w->nvml.event_set_create || !w->nvml.event_wait || w->nvml.event_set_create(&w->set) != RV_NVML_SUCCESS)
        w->set = NULL;
    for (unsigned i = 0; i < count && w->count < RV_DEVICES_MAX; i++)
        add(w, i);
    for (uint32_t i = 0; i < w->count; i++)
        any = any || w->gpus[i].memory || w->gpus[i].processes || w->gpus[i].events;
    if (w->count == 0)
        return "NVML sees no device";
    return any ? NULL : "NVML says nothing of the devices: neither memory, nor processes, nor events";
}

/* ---- events ----------------------------------------------------------------------------------------------------- */

static struct gpu *by_handle(struct watch *w, rv_nvml_device handle)
{
    for (uint32_t i = 0; i < w->count; i++)
        if (w->gpus[i].handle == handle)
            return &w->gpus[i];
    return NULL;
}

static void on_event(struct watch *w, const struct rv_nvml_event *event)
{
    const struct gpu *gpu = by_handle(w, event->device);
    char text[128];

    if (!gpu || !(event->type & RV_NVML_EVENT_XID))
        return;
    (void)snprintf(text, sizeof(text), "Xid %llu: %s", event->data, xid_text(event->data));
    rv_tell_event(w->socket, gpu->uuid, 0, (uint32_t)event->data, text);
}

/* A thread: it waits for events while the main thread waits for the next time to ask, or for NVML. */
static void *watch_events(void *context)
{
    struct watch *w = context;
    unsigned failures = 0;

    while (failures < EVENT_FAILURES_MAX) {
        struct rv_nvml_event event = {0};
        int r = w->nvml.event_wait(w->set, &event, EVENT_MS);

        if (r == RV_NVML_SUCCESS)
            on_event(w, &event);
        failures = r == RV_NVML_SUCCESS || r == RV_NVML_TIMEOUT ? 0 : failures + 1;
    }
    (void)fprintf(stderr, "resvisor-device: NVML gives no events any more; Xids are not seen from now on\n");
    return NULL;
}

static void start_events(struct watch *w)
{
    pthread_t thread;
    bool any = false;

    for (uint32_t i = 0; i < w->count; i++)
        any = any || w->gpus[i].events;
    if (!any)
        return;
    if (pthread_create(&thread, NULL, watch_events, w) == 0)
        (void)pthread_detach(thread);
    else
        (void)fprintf(stderr, "resvisor-device: no thread for NVML's events: Xids are not seen\n");
}

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

static void ask_memory(struct watch *w, struct gpu *gpu, Rv__DeviceMemory *body)
{
    struct rv_nvml_memory memory = {0};
    int r = gpu->memory ? w->nvml.memory(gpu->handle, &memory) : RV_NVML_NOT_SUPPORTED;

    if (r == RV_NVML_SUCCESS) {
        body->total_bytes = memory.total;
        body->used_bytes = memory.used;
        body->free_bytes = memory.free;
    } else if (r == RV_NVML_GPU_IS_LOST && !gpu->lost) {
        gpu->lost = true;
        rv_tell_event(w->socket, gpu->uuid, 0, XID_LOST, "nvmlDeviceGetMemoryInfo: the GPU is lost");
    }
}

static void ask_processes(struct watch *w, const struct gpu *gpu, Rv__DeviceMemory *body)
{
    static struct rv_nvml_process found[PROCESSES_MAX];
    static Resvisor__V1__DeviceProcess processes[PROCESSES_MAX], *rows[PROCESSES_MAX];
    unsigned count = PROCESSES_MAX;

    if (!gpu->processes || w->nvml.processes(gpu->handle, &count, found) != RV_NVML_SUCCESS)
        return;
    for (unsigned i = 0; i < count && i < PROCESSES_MAX; i++) {
        resvisor__v1__device_process__init(&processes[i]);
        processes[i].pid = (int32_t)found[i].pid;
        processes[i].bytes = found[i].used == RV_NVML_NO_VALUE ? 0 : found[i].used;
        rows[body->n_processes++] = &processes[i];
    }
    body->processes = rows;
}

static int tell_memory(struct watch *w, struct gpu *gpu)
{
    Rv__DeviceMemory body = RV__DEVICE_MEMORY__INIT;
    Rv__Frame message = RV__FRAME__INIT;

    ask_memory(w, gpu, &body);
    ask_processes(w, gpu, &body);
    body.uuid = (ProtobufCBinaryData){RV_DEVICE_UUID_SIZE, gpu->uuid};
    message.body_case = RV__FRAME__BODY_DEVICE_MEMORY;
    message.device_memory = &body;
    return rv_child_send(w->socket, &message, NULL, 0);
}

static int tell_nothing(int socket, const char *reason)
{
    struct rv_error err = {0};

    rv_error_set(&err, ENODEV, RESVISOR__V1__ERROR_CODE__ERROR_UNSUPPORTED, "%s", reason);
    rv_child_error(socket, 0, &err);
    return 0;
}

int rv_work_watch(int socket, const Rv__DeviceStart *start)
{
    static struct watch w; /* the thread's too */
    uint64_t ms = start->watch_ms ? start->watch_ms : WATCH_MS_DEFAULT;
    struct pollfd pfd = {.fd = socket, .events = POLLIN};
    char buffer[256];
    const char *reason;
    int r = 0;

    ms = ms < WATCH_MS_MIN ? WATCH_MS_MIN : ms > WATCH_MS_MAX ? WATCH_MS_MAX : ms;
    w.socket = socket;
    rv_child_finished(); /* the regular end: the supervisor closes */
    reason = find(&w, buffer, sizeof(buffer));
    if (reason)
        return tell_nothing(socket, reason);
    start_events(&w);
    while (r == 0) {
        for (uint32_t i = 0; r == 0 && i < w.count; i++)
            r = tell_memory(&w, &w.gpus[i]);
        if (r == 0 && poll(&pfd, 1, (int)ms) > 0)
            break; /* it has closed; it has nothing to say to a watch */
    }
    return 0;
}
