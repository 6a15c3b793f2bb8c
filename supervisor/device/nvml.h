/*
 * What is used of NVML, declared afresh: its header is not part of the Toolkit that resvisor is built with, and the
 * library is found when it runs (libnvidia-ml.so.1, part of the driver).
 *
 * Sources: "NVML API Reference Guide", docs.nvidia.com/deploy/nvml-api. Named behind each line is the chapter.
 * Only versioned names are used; each keeps its ABI.
 */
#ifndef RV_NVML_H
#define RV_NVML_H

typedef struct nvmlDevice_st *rv_nvml_device;      /* Device Structs */
typedef struct nvmlEventSet_st *rv_nvml_event_set; /* Event Handling Methods */

enum { /* nvmlReturn_t: Device Enums */
       RV_NVML_SUCCESS = 0,
       RV_NVML_NOT_SUPPORTED = 3,
       RV_NVML_INSUFFICIENT_SIZE = 7,
       RV_NVML_TIMEOUT = 10,
       RV_NVML_GPU_IS_LOST = 15,
};

#define RV_NVML_UUID_SIZE 96u    /* NVML_DEVICE_UUID_V2_BUFFER_SIZE: Constants */
#define RV_NVML_NO_VALUE (~0ull) /* NVML_VALUE_NOT_AVAILABLE as unsigned long long: Device Structs */
#define RV_NVML_EVENT_XID 0x8ull /* nvmlEventTypeXidCriticalError: Event Types */

struct rv_nvml_memory { /* nvmlMemory_t: Device Structs. Bytes */
    unsigned long long total, free, used;
};

struct rv_nvml_process { /* nvmlProcessInfo_t of the _v3 calls: Device Structs */
    unsigned int pid;
    unsigned long long used; /* bytes, or RV_NVML_NO_VALUE */
    unsigned int gpu_instance, compute_instance;
};

struct rv_nvml_event { /* nvmlEventData_t of nvmlEventSetWait_v2: Event Handling Methods */
    rv_nvml_device device;
    unsigned long long type;
    unsigned long long data; /* the Xid; 999 = not known */
    unsigned int gpu_instance, compute_instance;
};

/* X(member, symbol, arguments, needed): without a needed one there is nothing to ask. All return nvmlReturn_t. */
#define RV_NVML_FUNCTIONS(X)                                                                                         \
    X(init, nvmlInit_v2, (void), 1)                  /* Initialization and Cleanup */                                \
    X(count, nvmlDeviceGetCount_v2, (unsigned *), 1) /* Device Queries, as the next five */                          \
    X(handle, nvmlDeviceGetHandleByIndex_v2, (unsigned, rv_nvml_device *), 1)                                        \
    X(uuid, nvmlDeviceGetUUID, (rv_nvml_device, char *, unsigned), 1)                                                \
    X(memory, nvmlDeviceGetMemoryInfo, (rv_nvml_device, struct rv_nvml_memory *), 0)                                 \
    X(processes, nvmlDeviceGetComputeRunningProcesses_v3, (rv_nvml_device, unsigned *, struct rv_nvml_process *), 0) \
    X(event_set_create, nvmlEventSetCreate, (rv_nvml_event_set *), 0) /* Event Handling Methods, and the rest */     \
    X(event_register, nvmlDeviceRegisterEvents, (rv_nvml_device, unsigned long long, rv_nvml_event_set), 0)          \
    X(event_wait, nvmlEventSetWait_v2, (rv_nvml_event_set, struct rv_nvml_event *, unsigned), 0)

struct rv_nvml {
#define X(member, symbol, arguments, needed) int(*member) arguments;
    RV_NVML_FUNCTIONS(X)
#undef X
    const char *(*error_text)(int); /* nvmlErrorString: Error reporting. NULL = lacking */
};

#endif
