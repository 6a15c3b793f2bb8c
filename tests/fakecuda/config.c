#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config.h"

#define STATEMENT_MAX 1024
#define WORDS_MAX 40

/* Attributes that the rules of the double look at; numbers of cuda.h. */
enum {
    INTEGRATED = 18,
    PAGEABLE = 88,
    HOST_REGISTER = 99,
    HOST_TABLES = 100,
    VMM = 102,
    FD_HANDLES = 103,
    READ_ONLY_REGISTER = 113,
    POOL_HANDLES = 119,
    DMA_BUF = 124,
    IPC_EVENT = 125,
    HOST_NUMA_VMM = 141,
    HOST_NUMA_POOLS = 142,
    HOST_NUMA_MULTINODE = 143,
    HOST_POOLS = 144,
    HOST_VMM = 145,
    HOST_DMA_BUF = 146,
    PARTIAL_ATOMICS = 147,
};

static const struct {
    int number, value;
} every_device[] = {
    {1, 1024}, {10, 32}, {16, 84}, {19, 1}, {41, 1}, {78, 1}, {83, 1}, {89, 1}, {91, 1}, {40, 2}, {115, 1}, {31, 1},
};

struct kind {
    const char *name;
    int major, minor;
    bool integrated, pageable, vmm, fd_attribute, fd_works, ipc;
    enum fake_nvml nvml;
};

static const struct kind kinds[] = {
    {"discrete", 9, 0, false, false, true, true, true, true, FAKE_NVML_FULL},
    {"unified", 12, 1, true, true, true, true, true, true, FAKE_NVML_SILENT},
    {"unified-plain", 12, 1, true, true, false, false, false, false, FAKE_NVML_SILENT},
    {"tegra", 8, 7, true, false, true, true, true, false, FAKE_NVML_HIDDEN},
    {"no-vmm", 7, 5, false, false, false, false, false, true, FAKE_NVML_FULL},
    {"no-fd", 8, 0, false, false, true, false, false, true, FAKE_NVML_FULL},
    {"no-ipc", 8, 0, false, false, true, true, true, false, FAKE_NVML_FULL},
    {"wsl", 8, 9, false, false, true, true, false, true, FAKE_NVML_FULL},
    {"bare", 6, 1, false, false, false, false, false, false, FAKE_NVML_FULL},
};

static _Noreturn void wrong(const char *what, const char *text)
{
    fprintf(stderr, "FAKECUDA: %s: \"%s\"\n", what, text);
    _exit(99);
}

static uint64_t number_of(const char *text)
{
    static const struct {
        const char *unit;
        unsigned shift;
    } units[] = {{"", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}};
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 0);
    if (errno != 0 || end == text)
        wrong("no number", text);
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++)
        if (strcmp(end, units[i].unit) == 0)
            return (uint64_t)value << units[i].shift;
    wrong("unknown unit", text);
}

void fake_uuid_text(const uint8_t uuid[16], char buffer[41])
{
    char *at = buffer + sprintf(buffer, "GPU-");
    for (unsigned i = 0; i < 16; i++)
        at += sprintf(at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
}

static void uuid_of(const char *text, uint8_t ret_uuid[16])
{
    const char *at = strncmp(text, "GPU-", 4) == 0 ? text + 4 : text;
    for (unsigned i = 0; i < 16; i++) {
        unsigned byte;
        at += *at == '-';
        if (sscanf(at, "%2x", &byte) != 1)
            wrong("no uuid", text);
        ret_uuid[i] = (uint8_t)byte;
        at += 2;
    }
    if (*at != '\0')
        wrong("no uuid", text);
}

static void gpu_init(struct fake_gpu *gpu, const struct kind *kind, unsigned index)
{
    static const uint8_t uuid[16] = {0xfa, 0x4e, 0xc0, 0xda, 0, 0, 0x40, 0, 0x80};
    *gpu = (struct fake_gpu){.total = 8ull << 30, .oom_at = UINT64_MAX, .ipc_memory = kind->ipc, .nvml = kind->nvml};
    gpu->fd_works = kind->fd_works;
    snprintf(gpu->name, sizeof(gpu->name), "Fake %s %u", kind->name, index);
    memcpy(gpu->uuid, uuid, sizeof(uuid));
    gpu->uuid[15] = (uint8_t)index;
    for (unsigned i = 0; i < sizeof(every_device) / sizeof(every_device[0]); i++)
        gpu->attributes[every_device[i].number] = every_device[i].value;
    int *attributes = gpu->attributes;
    attributes[0] = FAKE_ATTRIBUTE_UNKNOWN;
    attributes[33] = (int)index + 1;
    attributes[75] = kind->major;
    attributes[76] = kind->minor;
    attributes[INTEGRATED] = kind->integrated;
    attributes[PAGEABLE] = attributes[HOST_TABLES] = kind->pageable;
    attributes[HOST_REGISTER] = 1;
    attributes[READ_ONLY_REGISTER] = !kind->integrated;
    attributes[VMM] = kind->vmm;
    attributes[FD_HANDLES] = kind->fd_attribute;
    attributes[POOL_HANDLES] = kind->fd_attribute;
    attributes[DMA_BUF] = !kind->integrated;
    attributes[IPC_EVENT] = kind->ipc || kind->integrated; /* old Tegra: events yes, memory no; cuda.md 1.5 */
    attributes[HOST_NUMA_VMM] = attributes[HOST_VMM] = kind->vmm;
    attributes[HOST_NUMA_POOLS] = attributes[HOST_POOLS] = kind->vmm;
    attributes[HOST_NUMA_MULTINODE] = attributes[HOST_DMA_BUF] = attributes[PARTIAL_ATOMICS] = 0;
}

static void gpu_set(struct fake_gpu *gpu, const char *key, const char *value)
{
    if (strncmp(key, "attr.", 5) == 0) {
        uint64_t number = number_of(key + 5);
        if (number >= FAKE_ATTRIBUTES)
            wrong("no attribute", key);
        gpu->attributes[number] = strcmp(value, "none") == 0 ? FAKE_ATTRIBUTE_UNKNOWN : (int)strtol(value, NULL, 0);
    } else if (strcmp(key, "memory") == 0) {
        gpu->total = number_of(value);
    } else if (strcmp(key, "oom") == 0) {
        gpu->oom_at = number_of(value);
    } else if (strcmp(key, "cache") == 0) {
        gpu->cache = number_of(value);
    } else if (strcmp(key, "context") == 0) {
        gpu->context = number_of(value);
    } else if (strcmp(key, "uuid") == 0) {
        uuid_of(value, gpu->uuid);
    } else if (strcmp(key, "name") == 0) {
        snprintf(gpu->name, sizeof(gpu->name), "%s", value);
        for (char *at = gpu->name; *at != '\0'; at++)
            *at = *at == '_' ? ' ' : *at;
    } else if (strcmp(key, "ipc") == 0) {
        gpu->ipc_memory = number_of(value) != 0;
    } else if (strcmp(key, "fd") == 0) {
        gpu->fd_works = number_of(value) != 0;
    } else if (strcmp(key, "handle") == 0) {
        gpu->one_handle = number_of(value) != 0;
    } else if (strcmp(key, "processor") == 0) {
        gpu->processor = number_of(value) != 0;
    } else if (strcmp(key, "readonly") == 0) {
        gpu->writable = number_of(value) == 0;
    } else if (strcmp(key, "outlive") == 0) {
        gpu->mortal = number_of(value) == 0;
    } else if (strcmp(key, "nvml") == 0 && strcmp(value, "full") == 0) {
        gpu->nvml = FAKE_NVML_FULL;
    } else if (strcmp(key, "nvml") == 0 && strcmp(value, "silent") == 0) {
        gpu->nvml = FAKE_NVML_SILENT;
    } else if (strcmp(key, "nvml") == 0 && strcmp(value, "hidden") == 0) {
        gpu->nvml = FAKE_NVML_HIDDEN;
    } else {
        wrong("unknown key of a device", key);
    }
}

/* Splits "key=value" in place. */
static const char *value_of(char *word)
{
    char *equals = strchr(word, '=');
    if (equals == NULL)
        wrong("wanted key=value", word);
    *equals = '\0';
    return equals + 1;
}

static void device_read(char **words, unsigned count, struct fake_config *config)
{
    const struct kind *kind = NULL;
    for (size_t i = 0; count > 1 && i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (strcmp(words[1], kinds[i].name) == 0)
            kind = &kinds[i];
    if (kind == NULL)
        wrong("unknown kind of device", count > 1 ? words[1] : "");
    uint64_t copies = 1;
    unsigned first = 2;
    if (count > 2 && strncmp(words[2], "count=", 6) == 0) {
        copies = number_of(words[2] + 6);
        first = 3;
    }
    if (copies > FAKE_GPUS_MAX - config->gpu_count)
        wrong("too many devices", words[1]);
    const unsigned begin = config->gpu_count;
    for (uint64_t i = 0; i < copies; i++, config->gpu_count++)
        gpu_init(&config->gpus[config->gpu_count], kind, config->gpu_count);
    for (unsigned word = first; word < count; word++) {
        const char *value = value_of(words[word]);
        for (unsigned i = begin; i < config->gpu_count; i++)
            gpu_set(&config->gpus[i], words[word], value);
    }
}

static void fault_read(char **words, unsigned count, struct fake_fault *fault)
{
    *fault = (struct fake_fault){.nth = 1, .lose = -1, .poison = -1};
    if (count < 2)
        wrong("a fault of which function?", words[0]);
    snprintf(fault->function, sizeof(fault->function), "%s", words[1]);
    for (unsigned i = 2; i < count; i++) {
        const char *value = value_of(words[i]);
        if (strcmp(words[i], "nth") == 0) {
            fault->nth = (unsigned)strtoul(value, NULL, 10);
            fault->onwards = strchr(value, '+') != NULL;
        } else if (strcmp(words[i], "error") == 0) {
            fault->error = (int)number_of(value);
        } else if (strcmp(words[i], "program") == 0) {
            snprintf(fault->program, sizeof(fault->program), "%s", value);
        } else if (strcmp(words[i], "lose") == 0) {
            fault->lose = (int)number_of(value);
        } else if (strcmp(words[i], "poison") == 0) {
            fault->poison = (int)number_of(value);
        } else if (strcmp(words[i], "damage") == 0) {
            fault->damage = number_of(value) != 0;
        } else if (strcmp(words[i], "delay") == 0) {
            fault->delay_ms = (unsigned)number_of(value);
        } else if (strcmp(words[i], "xid") == 0) {
            if (sscanf(value, "%d:%d", &fault->xid_gpu, &fault->xid) != 2)
                wrong("wanted xid=DEVICE:NUMBER", value);
        } else {
            wrong("unknown key of a fault", words[i]);
        }
    }
}

static void statement_read(char **words, unsigned count, struct fake_config *config)
{
    if (strcmp(words[0], "device") == 0) {
        device_read(words, count, config);
    } else if (strcmp(words[0], "fault") == 0) {
        if (config->fault_count == FAKE_FAULTS_MAX)
            wrong("too many faults", words[0]);
        fault_read(words, count, &config->faults[config->fault_count++]);
    } else if (count != 2) {
        wrong("unknown statement", words[0]);
    } else if (strcmp(words[0], "driver") == 0) {
        config->driver = (int)number_of(words[1]);
    } else if (strcmp(words[0], "init") == 0) {
        config->init_error = (int)number_of(words[1]);
    } else if (strcmp(words[0], "late") == 0) {
        config->late_us = (unsigned)number_of(words[1]);
    } else if (strcmp(words[0], "nvml") == 0) {
        config->nvml_error = (int)number_of(words[1]);
    } else if (strcmp(words[0], "devices") == 0 && strcmp(words[1], "none") == 0) {
        config->gpu_count = 0;
    } else if (strcmp(words[0], "missing") == 0 && config->missing_count < FAKE_MISSING_MAX) {
        snprintf(config->missing[config->missing_count++], FAKE_TEXT_MAX, "%s", words[1]);
    } else {
        wrong("unknown statement", words[0]);
    }
}

static void text_read(const char *text, struct fake_config *config)
{
    while (*text != '\0') {
        char statement[STATEMENT_MAX], *words[WORDS_MAX], *rest;
        size_t length = strcspn(text, ";\n");
        if (length >= sizeof(statement))
            wrong("statement too long", text);
        memcpy(statement, text, length);
        statement[length] = '\0';
        text += length + (text[length] != '\0');
        unsigned count = 0;
        for (char *word = strtok_r(statement, " \t", &rest); word != NULL; word = strtok_r(NULL, " \t", &rest)) {
            if (count == WORDS_MAX)
                wrong("too many words", word);
            words[count++] = word;
        }
        if (count > 0 && words[0][0] != '#')
            statement_read(words, count, config);
    }
}

void fake_config_read(const char *text, struct fake_config *ret_config)
{
    *ret_config = (struct fake_config){.driver = 13000, .late_us = 200};
    text_read(text == NULL ? "" : text, ret_config);
    if (ret_config->gpu_count == 0 && (text == NULL || strstr(text, "devices none") == NULL))
        gpu_init(&ret_config->gpus[ret_config->gpu_count++], &kinds[0], 0);
}

unsigned fake_faults_read(const char *text, struct fake_fault *faults)
{
    struct fake_config config = {0};
    text_read(text, &config);
    memcpy(faults, config.faults, config.fault_count * sizeof(*faults));
    return config.fault_count;
}
