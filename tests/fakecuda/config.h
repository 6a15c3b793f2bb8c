/* The environment variable FAKECUDA, read once. Grammar: fakecuda.h. Used by both doubles (libcuda, libnvidia-ml). */
#ifndef FAKE_CONFIG_H
#define FAKE_CONFIG_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

#define FAKE_GPUS_MAX 16u
#define FAKE_FAULTS_MAX 32u
#define FAKE_MISSING_MAX 16u
#define FAKE_ATTRIBUTES 148 /* CU_DEVICE_ATTRIBUTE_MAX of 13.0 */
#define FAKE_ATTRIBUTE_UNKNOWN INT_MIN
#define FAKE_NAME_MAX 96
#define FAKE_TEXT_MAX 64

enum fake_nvml { FAKE_NVML_FULL, FAKE_NVML_SILENT, FAKE_NVML_HIDDEN };

struct fake_gpu {
    char name[FAKE_NAME_MAX];
    uint8_t uuid[16];
    uint64_t total;   /* bytes */
    uint64_t oom_at;  /* bytes; allocations beyond fail */
    uint64_t cache;   /* bytes that cuMemGetInfo counts as used */
    uint64_t context; /* bytes that each process' context takes */
    bool ipc_memory;  /* legacy IPC of memory works */
    bool fd_works;    /* handles with descriptors can really be made (false with attribute 103 set: as WSL2) */
    bool writable;    /* read-only mappings do not keep stores out */
    bool one_handle;  /* of all its primary contexts, one after the other */
    bool processor;   /* the processor copies between addresses of the host */
    bool mortal;      /* memory of VMM ends with the process that made it */
    enum fake_nvml nvml;
    int attributes[FAKE_ATTRIBUTES];
};

struct fake_fault {
    char function[FAKE_TEXT_MAX];
    char program[FAKE_TEXT_MAX]; /* "" = every program */
    unsigned nth;                /* 1 = the first call */
    bool onwards;                /* and all after it */
    int error;                   /* CUresult; 0 = none */
    int lose;                    /* device that is lost then, for everybody; -1 = none */
    int poison;                  /* device that is of no more use to this process then; -1 = none */
    int xid_gpu, xid;            /* Xid raised then; xid 0 = none */
    unsigned delay_ms;
    bool damage;    /* the copy of this call moves a wrong first byte */
    unsigned calls; /* counted so far */
};

struct fake_config {
    int driver;       /* CUDA version, such as 13000 */
    int init_error;   /* of cuInit; 0 = none */
    unsigned late_us; /* how long an asynchronous operation takes at least */
    int nvml_error;   /* of nvmlInit_v2; 0 = none */
    unsigned gpu_count;
    struct fake_gpu gpus[FAKE_GPUS_MAX];
    unsigned fault_count;
    struct fake_fault faults[FAKE_FAULTS_MAX];
    unsigned missing_count;
    char missing[FAKE_MISSING_MAX][FAKE_TEXT_MAX]; /* functions that this driver lacks */
};

/* A text that cannot be read ends the process: a test with a wrong configuration proves nothing. */
void fake_config_read(const char *text, struct fake_config *ret_config);
/* Only statements "fault", as in the file faults of the state folder. */
unsigned fake_faults_read(const char *text, struct fake_fault *faults);
void fake_uuid_text(const uint8_t uuid[16], char buffer[41]);

#endif
