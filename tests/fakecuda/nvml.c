/*
 * The double of libnvidia-ml.so.1: the functions that resvisor-device takes by name. Types are those of nvml.h (NVML
 * API reference, "Field Value Enums" and "Device Structs"), declared afresh, because the Toolkit may lack that header.
 */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

#include "config.h"
#include "fakecuda.h"
#include "state.h"

#define EXPORT __attribute__((visibility("default")))
#define PROCESSES_MAX 64u
#define XID_CRITICAL 0x8ull /* nvmlEventTypeXidCriticalError */

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10 };
enum { GPU_IS_LOST = 15, VERSION_MISMATCH = 25 };

typedef const struct fake_gpu *device_t;

struct memory {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
#define MEMORY_V2 (unsigned)(sizeof(struct memory_v2) | 2u << 24)

struct process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

struct event {
    device_t device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

struct event_set {
    int notify;   /* inotify on the state folder; -1 = nothing can come */
    off_t offset; /* into the file xid */
    bool wanted[FAKE_GPUS_MAX];
};

EXPORT int nvmlInit_v2(void);
EXPORT int nvmlShutdown(void);
EXPORT const char *nvmlErrorString(int result);
EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned length);
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version);
EXPORT int nvmlDeviceGetCount_v2(unsigned *count);
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device);
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device);
EXPORT int nvmlDeviceGetUUID(device_t device, char *text, unsigned length);
EXPORT int nvmlDeviceGetName(device_t device, char *text, unsigned length);
EXPORT int nvmlDeviceGetIndex(device_t device, unsigned *index);
EXPORT int nvmlDeviceGetMemoryInfo(device_t device, struct memory *memory);
EXPORT int nvmlDeviceGetMemoryInfo_v2(device_t device, struct memory_v2 *memory);
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, struct process *processes);
EXPORT int nvmlDeviceGetSupportedEventTypes(device_t device, unsigned long long *types);
EXPORT int nvmlDeviceRegisterEvents(device_t device, unsigned long long types, struct event_set *set);
EXPORT int nvmlEventSetCreate(struct event_set **set);
EXPORT int nvmlEventSetWait_v2(struct event_set *set, struct event *data, unsigned timeout_ms);
EXPORT int nvmlEventSetFree(struct event_set *set);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct fake_config config;
static unsigned inits;

static void config_open(void)
{
    fake_config_read(getenv(FAKECUDA_ENVIRONMENT), &config);
}

static int inits_add(int change)
{
    int result = OK;
    pthread_mutex_lock(&mutex);
    if (change < 0 && inits == 0)
        result = UNINITIALIZED;
    else
        inits = (unsigned)((int)inits + change);
    if (change == 0 && inits == 0)
        result = UNINITIALIZED;
    pthread_mutex_unlock(&mutex);
    return result;
}

int nvmlInit_v2(void)
{
    pthread_once(&once, config_open);
    return config.nvml_error != 0 ? config.nvml_error : inits_add(1);
}

int nvmlShutdown(void)
{
    return inits_add(-1);
}

const char *nvmlErrorString(int result)
{
    static const struct {
        int code;
        const char *text;
    } texts[] = {
        {OK, "Success"},
        {UNINITIALIZED, "Uninitialized"},
        {INVALID, "Invalid Argument"},
        {NOT_SUPPORTED, "Not Supported"},
        {NOT_FOUND, "Not Found"},
        {TOO_SMALL, "Insufficient Size"},
        {9, "Driver Not Loaded"},
        {TIMEOUT, "Timeout"},
        {GPU_IS_LOST, "GPU is lost"},
        {18, "Driver/library version mismatch"},
        {VERSION_MISMATCH, "Argument version mismatch"},
    };
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        if (texts[i].code == result)
            return texts[i].text;
    return "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *text, unsigned length)
{
    char version[16];
    int result = inits_add(0);
    if (result != OK)
        return result;
    /* 580 is the first of 13.0; 525 of 12.0. */
    snprintf(version, sizeof(version), "%d.65.06", config.driver >= 13000 ? 580 : 525);
    if (text == NULL || strlen(version) >= length)
        return text == NULL ? INVALID : TOO_SMALL;
    strcpy(text, version);
    return OK;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    int result = inits_add(0);
    if (result == OK && version == NULL)
        return INVALID;
    if (result == OK)
        *version = config.driver;
    return result;
}

/* ---- devices ---------------------------------------------------------------------------------------------------- */

static unsigned index_of(device_t device)
{
    return (unsigned)(device - config.gpus);
}

/* Is this call allowed on that device? */
static int device_check(device_t device, const void *output)
{
    int result = inits_add(0);
    if (result != OK)
        return result;
    if (output == NULL || device < config.gpus || device >= config.gpus + config.gpu_count)
        return INVALID;
    return fake_state_lost(index_of(device)) != 0 ? GPU_IS_LOST : OK;
}

static device_t device_at(unsigned index)
{
    for (unsigned i = 0; i < config.gpu_count; i++)
        if (config.gpus[i].nvml != FAKE_NVML_HIDDEN && index-- == 0)
            return &config.gpus[i];
    return NULL;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    int result = inits_add(0);
    if (result != OK || count == NULL)
        return result != OK ? result : INVALID;
    for (*count = 0; device_at(*count) != NULL;)
        ++*count;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device)
{
    int result = inits_add(0);
    if (result != OK)
        return result;
    device_t found = device_at(index);
    if (device == NULL || found == NULL)
        return INVALID;
    if (fake_state_lost(index_of(found)) != 0)
        return GPU_IS_LOST;
    *device = found;
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device)
{
    int result = inits_add(0);
    if (result != OK || uuid == NULL || device == NULL)
        return result != OK ? result : INVALID;
    for (unsigned i = 0; device_at(i) != NULL; i++) {
        char text[41];
        fake_uuid_text(device_at(i)->uuid, text);
        if (strcmp(text, uuid) == 0)
            return nvmlDeviceGetHandleByIndex_v2(i, device);
    }
    return NOT_FOUND;
}

static int text_give(const char *value, char *text, unsigned length)
{
    if (strlen(value) >= length)
        return TOO_SMALL;
    strcpy(text, value);
    return OK;
}

int nvmlDeviceGetUUID(device_t device, char *text, unsigned length)
{
    char value[41];
    int result = device_check(device, text);
    if (result != OK)
        return result;
    fake_uuid_text(device->uuid, value);
    return text_give(value, text, length);
}

int nvmlDeviceGetName(device_t device, char *text, unsigned length)
{
    int result = device_check(device, text);
    return result != OK ? result : text_give(device->name, text, length);
}

int nvmlDeviceGetIndex(device_t device, unsigned *index)
{
    int result = device_check(device, index);
    for (unsigned i = 0; result == OK && device_at(i) != NULL; i++)
        if (device_at(i) == device)
            *index = i;
    return result;
}

int nvmlDeviceGetMemoryInfo(device_t device, struct memory *memory)
{
    int result = device_check(device, memory);
    if (result != OK)
        return result;
    if (device->nvml == FAKE_NVML_SILENT)
        return NOT_SUPPORTED;
    memory->total = device->total;
    memory->used = fake_state_used(index_of(device));
    memory->free = memory->used < memory->total ? memory->total - memory->used : 0;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(device_t device, struct memory_v2 *memory)
{
    struct memory plain;
    if (memory != NULL && memory->version != MEMORY_V2)
        return VERSION_MISMATCH;
    int result = nvmlDeviceGetMemoryInfo(device, memory == NULL ? NULL : &plain);
    if (result == OK)
        *memory = (struct memory_v2){MEMORY_V2, plain.total, 0, plain.free, plain.used};
    return result;
}

struct process_list {
    unsigned count;
    struct process processes[PROCESSES_MAX];
};

static struct process *process_find(struct process_list *list, pid_t pid)
{
    for (unsigned i = 0; i < list->count; i++)
        if (list->processes[i].pid == (unsigned)pid)
            return &list->processes[i];
    return NULL;
}

/* A process is listed while it has a context. */
static void process_add(const struct fake_record *record, void *context)
{
    struct process_list *list = context;
    if (strcmp(record->kind, "context") == 0 && list->count < PROCESSES_MAX)
        list->processes[list->count++] = (struct process){(unsigned)record->pid, 0, UINT32_MAX, UINT32_MAX};
}

static void process_sum(const struct fake_record *record, void *context)
{
    struct process *process = process_find(context, record->pid);
    if (process != NULL)
        process->used += record->size;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, struct process *processes)
{
    struct process_list list = {0};
    int result = device_check(device, count);
    if (result != OK)
        return result;
    fake_state_each(index_of(device), process_add, &list);
    fake_state_each(index_of(device), process_sum, &list);
    unsigned room = *count;
    *count = list.count;
    if (room < list.count)
        return TOO_SMALL;
    if (list.count > 0 && processes == NULL)
        return INVALID;
    if (list.count > 0)
        memcpy(processes, list.processes, list.count * sizeof(list.processes[0]));
    return OK;
}

/* ---- events ----------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetSupportedEventTypes(device_t device, unsigned long long *types)
{
    int result = device_check(device, types);
    if (result == OK)
        *types = XID_CRITICAL;
    return result;
}

int nvmlEventSetCreate(struct event_set **ret_set)
{
    int result = inits_add(0), xid;
    if (result != OK || ret_set == NULL)
        return result != OK ? result : INVALID;
    struct event_set *set = calloc(1, sizeof(*set));
    if (set == NULL)
        return 20; /* NVML_ERROR_MEMORY */
    set->notify = -1;
    if (fake_state_exists()) {
        char path[64];
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fake_state_folder());
        set->notify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
        inotify_add_watch(set->notify, path, IN_CLOSE_WRITE | IN_MOVED_TO);
        xid = openat(fake_state_folder(), "xid", O_RDONLY | O_CLOEXEC);
        set->offset = xid < 0 ? 0 : lseek(xid, 0, SEEK_END);
        if (xid >= 0)
            close(xid);
    }
    *ret_set = set;
    return OK;
}

int nvmlDeviceRegisterEvents(device_t device, unsigned long long types, struct event_set *set)
{
    int result = device_check(device, set);
    if (result != OK)
        return result;
    if (types != XID_CRITICAL)
        return NOT_SUPPORTED;
    set->wanted[index_of(device)] = true;
    return OK;
}

/* The next event that this set wants, of those that are in the file already. */
static bool event_next(struct event_set *set, struct event *ret_event)
{
    char text[4096];
    int fd = fake_state_exists() ? openat(fake_state_folder(), "xid", O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return false;
    ssize_t length = pread(fd, text, sizeof(text) - 1, set->offset);
    close(fd);
    text[length > 0 ? length : 0] = '\0';
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        unsigned gpu, xid;
        set->offset += end + 1 - line;
        if (sscanf(line, "%u %u", &gpu, &xid) == 2 && gpu < config.gpu_count && set->wanted[gpu]) {
            *ret_event = (struct event){&config.gpus[gpu], XID_CRITICAL, xid, UINT32_MAX, UINT32_MAX};
            return true;
        }
    }
    return false;
}

static long long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000ll + now.tv_nsec / 1000000;
}

int nvmlEventSetWait_v2(struct event_set *set, struct event *data, unsigned timeout_ms)
{
    int result = inits_add(0);
    if (result != OK || set == NULL || data == NULL)
        return result != OK ? result : INVALID;
    const long long deadline = now_ms() + timeout_ms;
    for (;;) {
        char notices[4096];
        if (event_next(set, data))
            return OK;
        long long left = deadline - now_ms();
        struct pollfd wait = {.fd = set->notify, .events = POLLIN};
        if (left <= 0)
            return TIMEOUT;
        if (poll(&wait, 1, left > 1 << 30 ? 1 << 30 : (int)left) > 0)
            while (read(set->notify, notices, sizeof(notices)) > 0)
                ;
    }
}

int nvmlEventSetFree(struct event_set *set)
{
    if (set == NULL)
        return INVALID;
    if (set->notify >= 0)
        close(set->notify);
    free(set);
    return OK;
}
