/* The double's rules between processes: sharing memory, its accounting, faults, lost devices, and NVML. */
#include <dirent.h>
#include <errno.h>

#include "fakecuda_case.h"

static CUdeviceptr allocate(size_t size)
{
    CUdeviceptr at;
    OK(cu.MemAlloc(&at, size));
    return at;
}

static void fill(CUdeviceptr at, unsigned char byte, size_t size)
{
    OK(cu.MemsetD8Async(at, byte, size, NULL));
    OK(cu.CtxSynchronize());
}

static int byte_at(CUdeviceptr at)
{
    unsigned char byte;
    OK(cu.MemcpyDtoHAsync(&byte, at, 1, NULL));
    return byte;
}

/* ---- descriptors between processes ------------------------------------------------------------------------------ */

static void exports_and_waits(int socket)
{
    char go;
    driver_start("device discrete memory=64MiB");
    CUmemGenericAllocationHandle handle = create(8 * MIB);
    CUdeviceptr at = map(handle, 8 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    fill(at, 42, 8 * MIB);
    OK(cu.MemUnmap(at, 8 * MIB));
    tell(socket, "x", 1, export_fd(handle));
    hear(socket, &go, 1);
    CHECK(!"it is killed while it waits");
}

CASE(memory_survives_its_exporter)
{
    char byte;
    state_make();
    struct peer exporter = peer_start(exports_and_waits);
    driver_start("device discrete memory=64MiB");
    int fd = hear(exporter.socket, &byte, 1);
    CHECK(fd >= 0 && used_bytes() == 8 * MIB);
    peer_kill(&exporter);
    CHECK(used_bytes() == 8 * MIB); /* the descriptor alone keeps it */
    CUmemGenericAllocationHandle handle;
    OK(import_fd(&handle, fd));
    close(fd);
    CUdeviceptr at = map(handle, 8 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ);
    OK(cu.MemRelease(handle));
    CHECK(byte_at(at + 5 * MIB) == 42 && used_bytes() == 8 * MIB);
    OK(cu.MemUnmap(at, 8 * MIB));
    CHECK(used_bytes() == 0);
    state_remove();
}

static void allocates_and_waits(int socket)
{
    char go;
    driver_start("device discrete memory=64MiB");
    create(32 * MIB);
    allocate(16 * MIB);
    tell(socket, "x", 1, -1);
    hear(socket, &go, 1);
}

CASE(memory_can_be_mortal)
{
    char byte;
    CUmemGenericAllocationHandle handle;
    struct peer exporter = peer_start(exports_and_waits);
    driver_start("device discrete memory=64MiB outlive=0");
    int fd = hear(exporter.socket, &byte, 1);
    OK(import_fd(&handle, fd));
    CUdeviceptr at = map(handle, 8 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ);
    CHECK(byte_at(at) == 42);
    peer_kill(&exporter);
    WANT(cu.MemcpyDtoHAsync(&byte, at, 1, NULL), CUDA_ERROR_ILLEGAL_ADDRESS);
}

CASE(the_memory_of_a_killed_process_is_free)
{
    char byte;
    const CUmemAllocationProp prop = properties();
    CUmemGenericAllocationHandle handle;
    state_make();
    struct peer other = peer_start(allocates_and_waits);
    driver_start("device discrete memory=64MiB");
    hear(other.socket, &byte, 1);
    CHECK(used_bytes() == 48 * MIB);
    WANT(cu.MemCreate(&handle, 18 * MIB, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY); /* the device is one for all */
    peer_kill(&other);
    CHECK(used_bytes() == 0);
    OK(cu.MemCreate(&handle, 64 * MIB, &prop, 0));
    state_remove();
}

/* A descriptor that nobody has taken out of a socket keeps the memory too. */
CASE(a_descriptor_in_flight_keeps_memory)
{
    int pair[2];
    char byte;
    state_make();
    driver_start("");
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    CUmemGenericAllocationHandle handle = create(4 * MIB);
    int fd = export_fd(handle);
    tell(pair[0], "x", 1, fd);
    close(fd);
    OK(cu.MemRelease(handle));
    CHECK(used_bytes() == 4 * MIB);
    fd = hear(pair[1], &byte, 1);
    CHECK(used_bytes() == 4 * MIB);
    OK(import_fd(&handle, fd));
    close(fd);
    OK(cu.MemRelease(handle));
    CHECK(used_bytes() == 0);
    state_remove();
}

static void exports_of_second(int socket)
{
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp prop = properties();
    driver_load("device discrete count=2");
    OK(cu.Init(0));
    prop.location.id = 1;
    OK(cu.MemCreate(&handle, 2 * MIB, &prop, 0));
    tell(socket, "x", 1, export_fd(handle));
}

CASE(memory_of_an_invisible_device_is_not_imported)
{
    char byte;
    CUmemGenericAllocationHandle handle;
    struct peer exporter = peer_start(exports_of_second);
    setenv("CUDA_VISIBLE_DEVICES", "0", 1);
    driver_start("device discrete count=2");
    int fd = hear(exporter.socket, &byte, 1);
    WANT(import_fd(&handle, fd), CUDA_ERROR_NOT_SUPPORTED);
    peer_end(&exporter);
}

/* ---- legacy IPC ------------------------------------------------------------------------------------------------- */

/* Exports one allocation, and does what it is told: f = free, anything else = end. */
static void ipc_exporter(int socket)
{
    CUipcMemHandle handle;
    char order;
    driver_start("");
    CUdeviceptr at = allocate(4 * MIB);
    fill(at, 11, 4 * MIB);
    OK(cu.IpcGetMemHandle(&handle, at));
    tell(socket, &handle, sizeof(handle), -1);
    hear(socket, &order, 1);
    if (order == 'f') {
        OK(cu.MemFree(at));
        tell(socket, "x", 1, -1);
        hear(socket, &order, 1);
    }
    CHECK(order == 'c' || byte_at(at) == 12); /* what an importer has written */
}

CASE(ipc_memory_is_shared_and_counted)
{
    CUipcMemHandle handle;
    CUdeviceptr one, two;
    struct peer exporter = peer_start(ipc_exporter);
    driver_start("");
    hear(exporter.socket, &handle, sizeof(handle));
    WANT(cu.IpcOpenMemHandle(&one, handle, 0), CUDA_ERROR_INVALID_VALUE); /* the only flag is a must */
    OK(cu.IpcOpenMemHandle(&one, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    OK(cu.IpcOpenMemHandle(&two, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    CHECK(one == two && byte_at(one + 3 * MIB) == 11);
    WANT(cu.IpcCloseMemHandle(one + 1), CUDA_ERROR_INVALID_VALUE);
    OK(cu.IpcCloseMemHandle(one));
    fill(one, 12, MIB);
    WANT(cu.MemFree(one), CUDA_ERROR_INVALID_VALUE); /* not its own */
    WANT(cu.IpcGetMemHandle(&handle, one), CUDA_ERROR_INVALID_VALUE);
    OK(cu.IpcCloseMemHandle(one));
    WANT(cu.IpcCloseMemHandle(one), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemsetD8Async(one, 0, 1, NULL), CUDA_ERROR_INVALID_VALUE);
    tell(exporter.socket, "d", 1, -1);
    peer_end(&exporter);
}

CASE(ipc_handles_want_a_base_of_cuMemAlloc)
{
    CUipcMemHandle handle;
    CUdeviceptr at;
    driver_start("");
    CUdeviceptr mine = allocate(4 * MIB);
    WANT(cu.IpcGetMemHandle(&handle, mine + 512), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.IpcGetMemHandle(&handle, map(create(2 * MIB), 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ)),
         CUDA_ERROR_INVALID_VALUE);
    OK(cu.IpcGetMemHandle(&handle, mine));
    WANT(cu.IpcOpenMemHandle(&at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_ERROR_INVALID_CONTEXT); /* own */
    memset(&handle, 7, sizeof(handle));
    WANT(cu.IpcOpenMemHandle(&at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_ERROR_INVALID_VALUE);
}

CASE(ipc_can_be_unsupported)
{
    CUipcMemHandle handle = {{0}};
    CUdeviceptr at;
    int value;
    driver_start("device tegra");
    OK(cu.DeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 0));
    CHECK(value == 1); /* of events, which proves nothing */
    WANT(cu.IpcGetMemHandle(&handle, allocate(2 * MIB)), CUDA_ERROR_NOT_SUPPORTED);
    WANT(cu.IpcOpenMemHandle(&at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_ERROR_INVALID_VALUE);
}

static void small_exporter(int socket)
{
    CUipcMemHandle handle;
    char order;
    driver_start("");
    CUdeviceptr one = allocate(1000), two = allocate(1000);
    fill(one, 1, 1000);
    fill(two, 2, 1000);
    OK(cu.IpcGetMemHandle(&handle, one));
    tell(socket, &handle, sizeof(handle), -1);
    OK(cu.IpcGetMemHandle(&handle, two));
    tell(socket, &handle, sizeof(handle), -1);
    hear(socket, &order, 1);
}

CASE(ipc_shares_the_whole_block)
{
    CUipcMemHandle handle;
    CUdeviceptr one, two;
    struct peer exporter = peer_start(small_exporter);
    driver_start("");
    hear(exporter.socket, &handle, sizeof(handle));
    OK(cu.IpcOpenMemHandle(&one, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    hear(exporter.socket, &handle, sizeof(handle));
    OK(cu.IpcOpenMemHandle(&two, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    CHECK(two - one == 1024 && byte_at(one) == 1 && byte_at(two) == 2);
    OK(cu.IpcCloseMemHandle(one));
    CHECK(byte_at(one) == 1); /* the neighbour keeps the block */
    OK(cu.IpcCloseMemHandle(two));
    tell(exporter.socket, "x", 1, -1);
    peer_end(&exporter);
}

CASE(the_exporters_death_makes_ipc_memory_fatal)
{
    CUipcMemHandle handle;
    CUdeviceptr at;
    char byte;
    state_make();
    struct peer exporter = peer_start(ipc_exporter);
    driver_start("");
    hear(exporter.socket, &handle, sizeof(handle));
    OK(cu.IpcOpenMemHandle(&at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    CHECK(used_bytes() == 4 * MIB);
    peer_kill(&exporter);
    CHECK(used_bytes() == 0);
    WANT(cu.MemcpyDtoHAsync(&byte, at, 1, NULL), CUDA_ERROR_ILLEGAL_ADDRESS);
    WANT(cu.CtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
    state_remove();
}

CASE(a_handle_of_a_dead_process_is_not_opened)
{
    CUipcMemHandle handle;
    CUdeviceptr at;
    struct peer exporter = peer_start(ipc_exporter);
    driver_start("");
    hear(exporter.socket, &handle, sizeof(handle));
    peer_kill(&exporter);
    WANT(cu.IpcOpenMemHandle(&at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_ERROR_INVALID_VALUE);
    OK(cu.CtxSynchronize());
}

CASE(memory_freed_while_it_is_open_is_fatal)
{
    CUipcMemHandle handle;
    CUdeviceptr at;
    char byte;
    struct peer exporter = peer_start(ipc_exporter);
    driver_start("");
    hear(exporter.socket, &handle, sizeof(handle));
    OK(cu.IpcOpenMemHandle(&at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    tell(exporter.socket, "f", 1, -1);
    hear(exporter.socket, &byte, 1);
    WANT(cu.MemcpyDtoHAsync(&byte, at, 1, NULL), CUDA_ERROR_ILLEGAL_ADDRESS);
    tell(exporter.socket, "c", 1, -1);
    peer_end(&exporter);
}

/* ---- faults ----------------------------------------------------------------------------------------------------- */

CASE(faults_hit_the_call_that_they_name)
{
    size_t size;
    driver_start("fault cuMemGetInfo nth=2 error=999; fault cuMemAlloc nth=3+ error=2; fault cuMemFree error=1 "
                 "program=another-program");
    OK(cu.MemGetInfo(&size, &size));
    WANT(cu.MemGetInfo(&size, &size), CUDA_ERROR_UNKNOWN);
    OK(cu.MemGetInfo(&size, &size));
    CUdeviceptr at = allocate(MIB);
    allocate(MIB);
    WANT(cu.MemAlloc(&at, MIB), CUDA_ERROR_OUT_OF_MEMORY);
    WANT(cu.MemAlloc(&at, MIB), CUDA_ERROR_OUT_OF_MEMORY);
}

CASE(a_fault_can_damage_a_copy)
{
    driver_start("fault cuMemsetD8Async damage=1; fault cuMemcpyDtoHAsync nth=2 damage=1");
    CUdeviceptr at = allocate(2 * MIB);
    fill(at, 1, MIB);
    CHECK(byte_at(at) == (1 ^ 0xff) && byte_at(at + 1) == (1 ^ 0xff) && byte_at(at + 1) == 1);
}

CASE(a_devices_read_only_can_be_a_lie)
{
    driver_start("device discrete readonly=0");
    CUdeviceptr at = map(create(2 * MIB), 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ);
    fill(at, 7, MIB);
    CHECK(byte_at(at) == 7);
}

CASE(faults_can_come_while_things_run)
{
    size_t size;
    state_make();
    driver_start("");
    OK(cu.MemGetInfo(&size, &size));
    state_write("faults", "fault cuMemGetInfo error=46 program=test_fakecuda\n");
    WANT(cu.MemGetInfo(&size, &size), CUDA_ERROR_DEVICE_UNAVAILABLE);
    OK(cu.MemGetInfo(&size, &size));
    state_write("faults", "fault * nth=2 error=802\n");
    OK(cu.MemGetInfo(&size, &size));
    WANT(cu.CtxSynchronize(), CUDA_ERROR_SYSTEM_NOT_READY);
    state_clear("faults");
    OK(cu.MemGetInfo(&size, &size));
    state_remove();
}

CASE(a_fault_can_poison_this_process_only)
{
    CUdeviceptr at;
    state_make();
    driver_start("fault cuMemsetD8Async poison=0 error=719");
    at = allocate(2 * MIB);
    WANT(cu.MemsetD8Async(at, 0, 1, NULL), CUDA_ERROR_LAUNCH_FAILED);
    WANT(cu.CtxSynchronize(), CUDA_ERROR_LAUNCH_FAILED);
    WANT(cu.MemFree(at), CUDA_ERROR_LAUNCH_FAILED);
    CHECK(access(state_folder, F_OK) == 0);
    char path[128];
    snprintf(path, sizeof(path), "%s/lost0", state_folder);
    CHECK(access(path, F_OK) != 0);
    state_remove();
}

static void waits_for_the_loss(int socket)
{
    char go;
    CUcontext context;
    driver_start("device discrete count=2");
    tell(socket, "x", 1, -1);
    hear(socket, &go, 1);
    WANT(cu.CtxSynchronize(), CUDA_ERROR_UNKNOWN);
    WANT(cu.DevicePrimaryCtxRetain(&context, 0), CUDA_ERROR_UNKNOWN);
    OK(cu.DevicePrimaryCtxRetain(&context, 1)); /* the others go on */
    OK(cu.CtxSetCurrent(context));
    OK(cu.CtxSynchronize());
}

CASE(a_lost_device_is_lost_for_everybody)
{
    char byte;
    CUdeviceptr at;
    state_make();
    struct peer other = peer_start(waits_for_the_loss);
    driver_start("device discrete count=2; fault cuMemAlloc nth=2 lose=0 error=999");
    hear(other.socket, &byte, 1);
    allocate(MIB);
    OK(cu.CtxSynchronize());
    WANT(cu.MemAlloc(&at, MIB), CUDA_ERROR_UNKNOWN);
    WANT(cu.CtxSynchronize(), CUDA_ERROR_UNKNOWN);
    tell(other.socket, "x", 1, -1);
    peer_end(&other);
    state_remove();
}

/* ---- NVML ------------------------------------------------------------------------------------------------------- */

struct nvml_memory {
    unsigned long long total, free, used;
};
struct nvml_process {
    unsigned pid;
    unsigned long long used;
    unsigned instances[2];
};
struct nvml_event {
    void *device;
    unsigned long long type, data;
    unsigned instances[2];
};

static struct {
    int (*Init)(void);
    int (*Shutdown)(void);
    const char *(*ErrorString)(int);
    int (*DeviceGetCount)(unsigned *);
    int (*ByIndex)(unsigned, void **);
    int (*ByUuid)(const char *, void **);
    int (*Uuid)(void *, char *, unsigned);
    int (*Name)(void *, char *, unsigned);
    int (*Memory)(void *, struct nvml_memory *);
    int (*Processes)(void *, unsigned *, struct nvml_process *);
    int (*DriverVersion)(char *, unsigned);
    int (*CudaVersion)(int *);
    int (*SetCreate)(void **);
    int (*Register)(void *, unsigned long long, void *);
    int (*Wait)(void *, struct nvml_event *, unsigned);
    int (*SetFree)(void *);
} ml;

static const char *const ml_names[] = {
    "nvmlInit_v2",
    "nvmlShutdown",
    "nvmlErrorString",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlEventSetCreate",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetWait_v2",
    "nvmlEventSetFree",
};
_Static_assert(sizeof(ml_names) / sizeof(ml_names[0]) * sizeof(void *) == sizeof(ml), "a name per function");

enum {
    NVML_UNINITIALIZED = 1,
    NVML_INVALID,
    NVML_NOT_SUPPORTED,
    NVML_TOO_SMALL = 7,
    NVML_TIMEOUT = 10,
    NVML_LOST = 15
};
#define NVML_XID_CRITICAL 8ull

static void nvml_load(const char *configuration)
{
    setenv("FAKECUDA", configuration, 1);
    void *library = dlopen(RV_FAKECUDA "/libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    for (size_t i = 0; i < sizeof(ml_names) / sizeof(ml_names[0]); i++) {
        void *function = dlsym(library, ml_names[i]);
        CHECK(function != NULL);
        memcpy((char *)&ml + i * sizeof(function), &function, sizeof(function));
    }
}

#define THREE "device discrete memory=64MiB name=One context=3MiB; device unified; device tegra; driver 12080"

CASE(nvml_tells_devices_and_versions)
{
    unsigned count;
    int version;
    void *device;
    char text[64];
    nvml_load(THREE);
    OK(ml.Init() | ml.Init() | ml.Shutdown());
    OK(ml.DeviceGetCount(&count));
    CHECK(count == 2); /* Tegra's is not there */
    OK(ml.ByUuid("GPU-fa4ec0da-0000-4000-8000-000000000001", &device));
    WANT(ml.ByUuid("GPU-fa4ec0da-0000-4000-8000-000000000002", &device), 6);
    OK(ml.ByIndex(0, &device));
    WANT(ml.ByIndex(2, &device), NVML_INVALID);
    OK(ml.Name(device, text, sizeof(text)));
    CHECK(strcmp(text, "One") == 0);
    WANT(ml.Name(device, text, 2), NVML_TOO_SMALL);
    OK(ml.Uuid(device, text, sizeof(text)));
    CHECK(strcmp(text, "GPU-fa4ec0da-0000-4000-8000-000000000000") == 0);
    OK(ml.DriverVersion(text, sizeof(text)));
    OK(ml.CudaVersion(&version));
    CHECK(version == 12080 && strcmp(ml.ErrorString(NVML_NOT_SUPPORTED), "Not Supported") == 0);
    OK(ml.Shutdown());
    WANT(ml.DeviceGetCount(&count), NVML_UNINITIALIZED);
    WANT(ml.Shutdown(), NVML_UNINITIALIZED);
}

static void works_and_waits(int socket)
{
    char go;
    driver_start(THREE);
    create(8 * MIB);
    tell(socket, "x", 1, -1);
    hear(socket, &go, 1);
}

CASE(nvml_tells_memory_and_processes)
{
    void *device;
    char byte;
    unsigned count = 0;
    struct nvml_memory memory;
    struct nvml_process processes[4];
    state_make();
    struct peer other = peer_start(works_and_waits);
    nvml_load(THREE);
    OK(ml.Init() | ml.ByIndex(0, &device));
    hear(other.socket, &byte, 1);
    OK(ml.Memory(device, &memory));
    CHECK(memory.total == 64 * MIB && memory.used == 11 * MIB && memory.free == 53 * MIB);
    WANT(ml.Processes(device, &count, NULL), NVML_TOO_SMALL);
    CHECK(count == 1);
    OK(ml.Processes(device, &count, processes));
    CHECK(processes[0].pid == (unsigned)other.pid && processes[0].used == 11 * MIB);
    peer_kill(&other);
    OK(ml.Processes(device, &count, processes) | ml.Memory(device, &memory));
    CHECK(count == 0 && memory.used == 0);
    OK(ml.ByIndex(1, &device));
    WANT(ml.Memory(device, &memory), NVML_NOT_SUPPORTED);
    OK(ml.Processes(device, &count, processes));
    state_write("lost1", "");
    WANT(ml.Memory(device, &memory), NVML_LOST);
    state_remove();
}

static void writes_read_only(int socket)
{
    char go;
    driver_start(THREE);
    CUdeviceptr at = map(create(2 * MIB), 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ);
    hear(socket, &go, 1);
    OK(cu.MemsetD8Async(at, 1, 1, NULL));
    WANT(cu.CtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
}

CASE(nvml_tells_xids)
{
    void *device, *set;
    struct nvml_event event;
    state_make();
    state_write("xid", "0 13\n"); /* before anybody asked */
    struct peer other = peer_start(writes_read_only);
    nvml_load(THREE);
    OK(ml.Init() | ml.ByIndex(0, &device) | ml.SetCreate(&set));
    WANT(ml.Register(device, 1, set), NVML_NOT_SUPPORTED);
    OK(ml.Register(device, NVML_XID_CRITICAL, set));
    WANT(ml.Wait(set, &event, 10), NVML_TIMEOUT);
    tell(other.socket, "x", 1, -1);
    OK(ml.Wait(set, &event, CASE_SECONDS * 1000)); /* of the other process: its fault is the device's event */
    CHECK(event.device == device && event.type == NVML_XID_CRITICAL && event.data == 31);
    peer_end(&other);
    state_write("xid", "0 13\n0 31\n1 79\n0 48\n");
    OK(ml.Wait(set, &event, CASE_SECONDS * 1000)); /* device 1 is not asked for */
    CHECK(event.data == 48);
    WANT(ml.Wait(set, &event, 0), NVML_TIMEOUT);
    OK(ml.SetFree(set));
    state_remove();
}

CASE(nvml_can_be_absent)
{
    nvml_load("nvml 9");
    WANT(ml.Init(), 9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_survives_its_exporter),
        cmocka_unit_test(memory_can_be_mortal),
        cmocka_unit_test(the_memory_of_a_killed_process_is_free),
        cmocka_unit_test(a_descriptor_in_flight_keeps_memory),
        cmocka_unit_test(memory_of_an_invisible_device_is_not_imported),
        cmocka_unit_test(ipc_memory_is_shared_and_counted),
        cmocka_unit_test(ipc_handles_want_a_base_of_cuMemAlloc),
        cmocka_unit_test(ipc_can_be_unsupported),
        cmocka_unit_test(ipc_shares_the_whole_block),
        cmocka_unit_test(the_exporters_death_makes_ipc_memory_fatal),
        cmocka_unit_test(a_handle_of_a_dead_process_is_not_opened),
        cmocka_unit_test(memory_freed_while_it_is_open_is_fatal),
        cmocka_unit_test(faults_hit_the_call_that_they_name),
        cmocka_unit_test(a_fault_can_damage_a_copy),
        cmocka_unit_test(a_devices_read_only_can_be_a_lie),
        cmocka_unit_test(faults_can_come_while_things_run),
        cmocka_unit_test(a_fault_can_poison_this_process_only),
        cmocka_unit_test(a_lost_device_is_lost_for_everybody),
        cmocka_unit_test(nvml_tells_devices_and_versions),
        cmocka_unit_test(nvml_tells_memory_and_processes),
        cmocka_unit_test(nvml_tells_xids),
        cmocka_unit_test(nvml_can_be_absent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
