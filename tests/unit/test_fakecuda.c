/* The double's rules, each as fakecuda.h states it: library, devices, contexts, virtual memory management. */
#include <errno.h>
#include <pthread.h>

#include "fakecuda_case.h"

/* ---- the library ------------------------------------------------------------------------------------------------ */

CASE(functions_are_found_by_name_and_version)
{
    void *pointer = &pointer;
    CUdriverProcAddressQueryResult status;
    driver_load("driver 12040");
    OK(search("cuMemCreate", &pointer, 10020, 0, &status));
    CHECK(pointer == (void *)cu.MemCreate && status == CU_GET_PROC_ADDRESS_SUCCESS);
    OK(search("cuMemCreate", &pointer, 10010, 0, &status));
    CHECK(pointer == NULL && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    pointer = &pointer;
    OK(search("cuNoSuchThing", &pointer, 12000, 0, &status));
    CHECK(pointer == NULL && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    OK(search("cuMemAlloc_v2", &pointer, 12000, 0, NULL)); /* names of the ABI are not base names */
    CHECK(pointer == NULL);
    OK(search("cuGetProcAddress", &pointer, 12000, 0, NULL));
    CHECK(pointer == (void *)search);
    WANT(search("cuInit", &pointer, 12050, 0, NULL), CUDA_ERROR_INVALID_VALUE);
    WANT(search("cuInit", NULL, 12000, 0, NULL), CUDA_ERROR_INVALID_VALUE);
    WANT(search("cuInit", &pointer, 12000, 3, NULL), CUDA_ERROR_INVALID_VALUE);
}

CASE(a_request_of_13_is_another_function)
{
    void *pointer;
    CUdriverProcAddressQueryResult status;
    driver_load("");
    OK(search("cuCtxSynchronize", &pointer, 13000, 0, &status));
    CHECK(pointer != (void *)cu.CtxSynchronize);
}

CASE(a_function_can_be_missing)
{
    driver_load("missing cuMemCreate; missing cuIpcOpenMemHandle");
    CHECK(cu.MemCreate == NULL && cu.IpcOpenMemHandle == NULL && cu.MemMap != NULL);
}

CASE(only_the_search_is_exported)
{
    static const char *const names[] = {"cuInit", "cuMemAlloc", "cuMemAlloc_v2", "cuGetProcAddress", "fake_Init"};
    void *library = dlopen(RV_FAKECUDA "/libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        CHECK(dlsym(library, names[i]) == NULL);
    library = dlopen(RV_FAKECUDA "/old/libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL && dlsym(library, "cuInit") != NULL && dlsym(library, "cuGetProcAddress_v2") == NULL);
}

CASE(nothing_works_before_init)
{
    int number;
    CUcontext context;
    size_t size;
    const char *text;
    driver_load("driver 13010");
    OK(cu.DriverGetVersion(&number));
    CHECK(number == 13010);
    OK(cu.GetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
    CHECK(strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY") == 0);
    WANT(cu.GetErrorString((CUresult)12345, &text), CUDA_ERROR_INVALID_VALUE);
    CHECK(text == NULL);
    WANT(cu.DeviceGetCount(&number), CUDA_ERROR_NOT_INITIALIZED);
    WANT(cu.DevicePrimaryCtxRetain(&context, 0), CUDA_ERROR_NOT_INITIALIZED);
    WANT(cu.CtxGetCurrent(&context), CUDA_ERROR_NOT_INITIALIZED);
    WANT(cu.MemGetInfo(&size, &size), CUDA_ERROR_NOT_INITIALIZED);
    WANT(cu.MemAddressReserve(&(CUdeviceptr){0}, 2 * MIB, 0, 0, 0), CUDA_ERROR_NOT_INITIALIZED);
    WANT(cu.Init(1), CUDA_ERROR_INVALID_VALUE);
    OK(cu.Init(0));
    OK(cu.Init(0));
    OK(cu.DeviceGetCount(&number));
    CHECK(number == 1);
}

CASE(init_can_fail)
{
    int number;
    driver_load("init 34");
    WANT(cu.Init(0), CUDA_ERROR_STUB_LIBRARY);
    WANT(cu.DeviceGetCount(&number), CUDA_ERROR_NOT_INITIALIZED);
}

CASE(there_can_be_no_device)
{
    driver_load("devices none");
    WANT(cu.Init(0), CUDA_ERROR_NO_DEVICE);
}

CASE(a_child_by_fork_gets_nothing)
{
    CUcontext context = driver_start("");
    CUdeviceptr at;
    pid_t child = fork();
    if (child == 0) {
        int number;
        WANT(cu.Init(0), CUDA_ERROR_NOT_INITIALIZED);
        WANT(cu.DeviceGetCount(&number), CUDA_ERROR_NOT_INITIALIZED);
        WANT(cu.CtxSetCurrent(context), CUDA_ERROR_NOT_INITIALIZED);
        WANT(cu.MemAlloc(&at, MIB), CUDA_ERROR_NOT_INITIALIZED);
        exit(0);
    }
    WANT(child_wait(child), 0);
    OK(cu.MemAlloc(&at, MIB));
}

static void at_the_end(void)
{
    int number;
    if (cu.DeviceGetCount(&number) != CUDA_ERROR_DEINITIALIZED)
        _exit(1);
}

CASE(what_runs_after_the_driver_gets_deinitialized)
{
    atexit(at_the_end);
    driver_start("");
}

/* ---- devices ---------------------------------------------------------------------------------------------------- */

static int attribute(int number, CUdevice device)
{
    int value;
    OK(cu.DeviceGetAttribute(&value, (CUdevice_attribute)number, device));
    return value;
}

CASE(devices_are_what_the_configuration_says)
{
    CUdevice device;
    char text[64];
    size_t bytes;
    CUuuid first, second;
    driver_load(
        "device discrete memory=3GiB name=Fake_One; device unified count=2 memory=64MiB attr.125=0 attr.99=none");
    OK(cu.Init(0));
    OK(cu.DeviceGet(&device, 2));
    WANT(cu.DeviceGet(&device, 3), CUDA_ERROR_INVALID_DEVICE);
    OK(cu.DeviceGetName(text, sizeof(text), 0));
    CHECK(strcmp(text, "Fake One") == 0);
    OK(cu.DeviceTotalMem(&bytes, 0));
    CHECK(bytes == 3ull << 30);
    OK(cu.DeviceTotalMem(&bytes, 1));
    CHECK(bytes == 64 * MIB);
    CHECK(attribute(18, 0) == 0 && attribute(18, 1) == 1 && attribute(88, 0) == 0 && attribute(100, 2) == 1);
    CHECK(attribute(102, 1) == 1 && attribute(103, 1) == 1 && attribute(125, 0) == 1 && attribute(125, 1) == 0);
    CHECK(attribute(75, 1) == 12 && attribute(76, 1) == 1 && attribute(113, 1) == 0);
    WANT(cu.DeviceGetAttribute(&device, (CUdevice_attribute)99, 1), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.DeviceGetAttribute(&device, (CUdevice_attribute)4000, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.DeviceGetAttribute(&device, (CUdevice_attribute)18, 7), CUDA_ERROR_INVALID_DEVICE);
    OK(cu.DeviceGetUuid(&first, 0));
    OK(cu.DeviceGetUuid(&second, 1));
    CHECK(memcmp(&first, &second, sizeof(first)) != 0);
    OK(cu.DeviceGetPCIBusId(text, sizeof(text), 1));
    CHECK(strcmp(text, "0000:02:00.0") == 0);
    WANT(cu.DeviceGetPCIBusId(text, 5, 1), CUDA_ERROR_INVALID_VALUE);
}

CASE(visible_devices_hide_and_reorder)
{
    int count;
    CUuuid uuid;
    setenv("CUDA_VISIBLE_DEVICES", "2,GPU-fa4ec0da-0000-4000-8000-000000000000,nonsense,1", 1);
    driver_load("device discrete count=3");
    OK(cu.Init(0));
    OK(cu.DeviceGetCount(&count));
    CHECK(count == 2);
    OK(cu.DeviceGetUuid(&uuid, 0));
    CHECK(uuid.bytes[15] == 2);
    OK(cu.DeviceGetUuid(&uuid, 1));
    CHECK(uuid.bytes[15] == 0);
}

CASE(visible_devices_can_hide_all)
{
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    driver_load("device discrete count=3");
    WANT(cu.Init(0), CUDA_ERROR_NO_DEVICE);
}

/* ---- contexts --------------------------------------------------------------------------------------------------- */

CASE(a_primary_context_is_counted)
{
    CUcontext one, two, current;
    unsigned flags;
    int active;
    CUdeviceptr at;
    driver_load("device discrete count=2");
    OK(cu.Init(0));
    OK(cu.DevicePrimaryCtxGetState(0, &flags, &active));
    CHECK(active == 0);
    WANT(cu.DevicePrimaryCtxRelease(0), CUDA_ERROR_INVALID_CONTEXT);
    OK(cu.CtxGetCurrent(&current));
    CHECK(current == NULL);
    WANT(cu.MemAlloc(&at, MIB), CUDA_ERROR_INVALID_CONTEXT);
    OK(cu.DevicePrimaryCtxRetain(&one, 0));
    OK(cu.DevicePrimaryCtxRetain(&two, 0));
    CHECK(one == two);
    OK(cu.CtxSetCurrent(one));
    OK(cu.DevicePrimaryCtxRelease(0));
    OK(cu.DevicePrimaryCtxGetState(0, &flags, &active));
    CHECK(active == 1);
    OK(cu.MemAlloc(&at, MIB));
    OK(cu.DevicePrimaryCtxRelease(0));
    OK(cu.DevicePrimaryCtxGetState(0, &flags, &active));
    CHECK(active == 0);
    WANT(cu.MemFree(at), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    WANT(cu.CtxSynchronize(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    WANT(cu.CtxSetCurrent((CUcontext)&at), CUDA_ERROR_INVALID_CONTEXT);
    WANT(cu.CtxSetCurrent(one), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    OK(cu.DevicePrimaryCtxRetain(&two, 0));
    OK(cu.CtxSetCurrent(two));
    CHECK(used_bytes() == 0);
    WANT(cu.DevicePrimaryCtxRetain(&two, 2), CUDA_ERROR_INVALID_DEVICE);
}

static void *other_thread(void *argument)
{
    CUcontext current;
    (void)argument;
    OK(cu.CtxGetCurrent(&current));
    CHECK(current == NULL);
    WANT(cu.CtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT);
    return NULL;
}

CASE(the_current_context_is_a_threads_own)
{
    pthread_t thread;
    driver_start("");
    CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

/* ---- physical memory -------------------------------------------------------------------------------------------- */

CASE(sizes_and_properties_must_fit)
{
    CUmemAllocationProp prop = properties();
    CUmemGenericAllocationHandle handle;
    size_t granularity;
    driver_load("device discrete memory=64MiB; device no-fd; device no-vmm; device wsl");
    OK(cu.Init(0)); /* no context is needed for handles */
    OK(cu.MemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CHECK(granularity == 2 * MIB);
    WANT(cu.MemCreate(&handle, 3 * MIB, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemCreate(&handle, 0, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemCreate(&handle, 2 * MIB, &prop, 1), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemCreate(&handle, 2 * MIB, NULL, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemCreate(&handle, 66 * MIB, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
    prop.location.id = 9;
    WANT(cu.MemCreate(&handle, 2 * MIB, &prop, 0), CUDA_ERROR_INVALID_DEVICE);
    prop.location.id = 1;
    WANT(cu.MemCreate(&handle, 2 * MIB, &prop, 0), CUDA_ERROR_NOT_SUPPORTED);
    prop.requestedHandleTypes = 0;
    OK(cu.MemCreate(&handle, 2 * MIB, &prop, 0));
    prop.location.id = 2;
    WANT(cu.MemCreate(&handle, 2 * MIB, &prop, 0), CUDA_ERROR_NOT_SUPPORTED);
    WANT(cu.MemGetAllocationGranularity(&granularity, &prop, 0), CUDA_ERROR_NOT_SUPPORTED);
    prop.requestedHandleTypes = FD_HANDLE;
    prop.location.id = 3; /* it says that it can, and cannot */
    CHECK(attribute(103, 3) == 1);
    WANT(cu.MemCreate(&handle, 2 * MIB, &prop, 0), CUDA_ERROR_NOT_SUPPORTED);
    prop.location.id = 0;
    prop.location.type = (CUmemLocationType)2; /* HOST; Toolkit 12.0 has no name for it */
    WANT(cu.MemCreate(&handle, 2 * MIB, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    prop = properties();
    prop.requestedHandleTypes = (CUmemAllocationHandleType)8; /* fabric */
    WANT(cu.MemCreate(&handle, 2 * MIB, &prop, 0), CUDA_ERROR_NOT_SUPPORTED);
}

CASE(memory_lives_while_anything_holds_it)
{
    CUmemGenericAllocationHandle handle;
    driver_start("device discrete memory=8MiB");
    for (unsigned round = 0; round < 5; round++) {
        handle = create(8 * MIB);
        CHECK(used_bytes() == 8 * MIB);
        CUdeviceptr at = map(handle, 8 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        OK(cu.MemRelease(handle));
        WANT(cu.MemRelease(handle), CUDA_ERROR_INVALID_VALUE);
        CHECK(used_bytes() == 8 * MIB);
        OK(cu.MemsetD8Async(at, 7, 8 * MIB, NULL));
        OK(cu.CtxSynchronize());
        OK(cu.MemUnmap(at, 8 * MIB));
        CHECK(used_bytes() == 0);
        OK(cu.MemAddressFree(at, 8 * MIB));
    }
}

CASE(memory_runs_out_at_a_byte)
{
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    const CUmemAllocationProp prop = properties();
    driver_start("device discrete memory=1GiB oom=6MiB");
    handle = create(4 * MIB);
    WANT(cu.MemCreate(&handle, 4 * MIB, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
    WANT(cu.MemAlloc(&at, 3 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cu.MemCreate(&handle, 2 * MIB, &prop, 0));
}

/* ---- addresses and mappings ------------------------------------------------------------------------------------- */

CASE(reservations_are_freed_as_they_were_made)
{
    CUdeviceptr at, other;
    driver_start("");
    WANT(cu.MemAddressReserve(&at, 0, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemAddressReserve(&at, 1000, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemAddressReserve(&at, 2 * MIB, 3 * MIB, 0, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemAddressReserve(&at, 2 * MIB, 0, 0, 1), CUDA_ERROR_INVALID_VALUE);
    OK(cu.MemAddressReserve(&at, 4 * MIB, 64 * MIB, 0, 0));
    CHECK(at % (64 * MIB) == 0);
    WANT(cu.MemAddressFree(at, 2 * MIB), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemAddressFree(at + 2 * MIB, 2 * MIB), CUDA_ERROR_INVALID_VALUE);
    OK(cu.MemAddressFree(at, 4 * MIB));
    WANT(cu.MemAddressFree(at, 4 * MIB), CUDA_ERROR_INVALID_VALUE);
    OK(cu.MemAddressReserve(&other, 4 * MIB, 0, at, 0)); /* the hint is free again */
    CHECK(other == at);
}

CASE(a_mapping_is_whole_and_unmapped_whole)
{
    driver_start("");
    CUmemGenericAllocationHandle handle = create(4 * MIB), second = create(2 * MIB);
    CUdeviceptr at;
    OK(cu.MemAddressReserve(&at, 8 * MIB, 0, 0, 0));
    WANT(cu.MemMap(at, 2 * MIB, 2 * MIB, handle, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemMap(at, 2 * MIB, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemMap(at + 4096, 4 * MIB, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemMap(at + 6 * MIB, 4 * MIB, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemMap(at, 4 * MIB, 0, 12345, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemMap(at, 4 * MIB, 0, handle, 1), CUDA_ERROR_INVALID_VALUE);
    WANT(access_set(at, 4 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ), CUDA_ERROR_INVALID_VALUE);
    OK(cu.MemMap(at, 4 * MIB, 0, handle, 0));
    WANT(cu.MemMap(at + 2 * MIB, 2 * MIB, 0, second, 0), CUDA_ERROR_INVALID_VALUE); /* taken */
    OK(cu.MemMap(at + 4 * MIB, 2 * MIB, 0, second, 0));
    WANT(access_set(at, 3 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ), CUDA_ERROR_INVALID_VALUE);
    WANT(access_set(at, 8 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ), CUDA_ERROR_INVALID_VALUE); /* a hole at the end */
    WANT(access_set(at, 4 * MIB, 2), CUDA_ERROR_INVALID_VALUE);
    OK(access_set(at, 6 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ));
    WANT(cu.MemUnmap(at, 2 * MIB), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemUnmap(at, 6 * MIB), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemUnmap(at + 2 * MIB, 2 * MIB), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemAddressFree(at, 8 * MIB), CUDA_ERROR_INVALID_VALUE); /* still mapped */
    OK(cu.MemUnmap(at, 4 * MIB));
    OK(cu.MemUnmap(at + 4 * MIB, 2 * MIB));
    OK(cu.MemMap(at, 4 * MIB, 0, handle, 0)); /* at the same address again, without access */
    WANT(cu.PointerGetAttribute(&at, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, at), CUDA_ERROR_NOT_SUPPORTED);
}

CASE(devices_are_no_peers)
{
    driver_start("device discrete count=2");
    CUdeviceptr at = map(create(2 * MIB), 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_NONE);
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READ};
    WANT(cu.MemSetAccess(at, 2 * MIB, &access, 1), CUDA_ERROR_INVALID_DEVICE);
}

static void dereference(CUdeviceptr at)
{
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL); /* not a sanitizer's */
        _exit(*(volatile char *)(uintptr_t)at == 0);
    }
    int status = child_wait(child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

CASE(the_host_cannot_touch_device_memory)
{
    CUdeviceptr allocated;
    driver_start("device unified");
    dereference(map(create(2 * MIB), 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    OK(cu.MemAlloc(&allocated, 4 * MIB));
    dereference(allocated + 12345);
}

/* ---- descriptors ------------------------------------------------------------------------------------------------ */

CASE(only_what_asked_for_it_is_exported)
{
    CUmemAllocationProp prop = properties();
    CUmemGenericAllocationHandle handle, plain;
    int fd;
    driver_start("");
    handle = create(2 * MIB);
    prop.requestedHandleTypes = 0;
    OK(cu.MemCreate(&plain, 2 * MIB, &prop, 0));
    WANT(cu.MemExportToShareableHandle(&fd, plain, FD_HANDLE, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_WIN32, 0), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemExportToShareableHandle(&fd, handle, FD_HANDLE, 1), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemExportToShareableHandle(&fd, 4711, FD_HANDLE, 0), CUDA_ERROR_INVALID_VALUE);
    fd = export_fd(handle);
    WANT(fcntl(fd, F_GETFD), 0); /* close-on-exec is the caller's to set */
    close(fd);
}

CASE(a_descriptor_is_opaque)
{
    struct stat status;
    char byte;
    driver_start("");
    int fd = export_fd(create(2 * MIB));
    CHECK(fstat(fd, &status) == 0 && status.st_size == 0 && !S_ISREG(status.st_mode));
    CHECK(pread(fd, &byte, 1, 0) < 0 && ftruncate(fd, 0) < 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) < 0);
    CHECK(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED);
}

CASE(only_exported_descriptors_are_imported)
{
    CUmemGenericAllocationHandle handle = 1;
    int pair[2];
    driver_start("");
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, pair) == 0);
    WANT(import_fd(&handle, pair[0]), CUDA_ERROR_INVALID_VALUE);
    CHECK(send(pair[1], "not of this driver", 18, 0) == 18);
    WANT(import_fd(&handle, pair[0]), CUDA_ERROR_INVALID_VALUE);
    WANT(import_fd(&handle, memfd_create("x", MFD_CLOEXEC)), CUDA_ERROR_INVALID_VALUE);
    WANT(import_fd(&handle, -1), CUDA_ERROR_INVALID_VALUE);
    WANT(import_fd(&handle, 999), CUDA_ERROR_INVALID_VALUE);
    int fd = export_fd(create(2 * MIB));
    WANT(cu.MemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_WIN32),
         CUDA_ERROR_INVALID_VALUE);
    OK(import_fd(&handle, fd));
}

CASE(imports_are_handles_of_their_own)
{
    CUmemGenericAllocationHandle one, two;
    char text[8] = "";
    driver_start("");
    CUmemGenericAllocationHandle handle = create(4 * MIB);
    CUdeviceptr writer = map(handle, 4 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    int fd = export_fd(handle);
    OK(import_fd(&one, fd));
    OK(import_fd(&two, fd));
    CHECK(one != two && one != handle);
    OK(cu.MemRelease(one));
    close(fd);
    CUdeviceptr reader = map(two, 4 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ);
    CHECK(reader != writer);
    OK(cu.MemcpyHtoDAsync(writer + 3 * MIB, "weights", 8, NULL));
    OK(cu.MemcpyDtoHAsync(text, reader + 3 * MIB, 8, NULL));
    CHECK(memcmp(text, "weights", 8) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(functions_are_found_by_name_and_version),
        cmocka_unit_test(a_request_of_13_is_another_function),
        cmocka_unit_test(a_function_can_be_missing),
        cmocka_unit_test(only_the_search_is_exported),
        cmocka_unit_test(nothing_works_before_init),
        cmocka_unit_test(init_can_fail),
        cmocka_unit_test(there_can_be_no_device),
        cmocka_unit_test(a_child_by_fork_gets_nothing),
        cmocka_unit_test(what_runs_after_the_driver_gets_deinitialized),
        cmocka_unit_test(devices_are_what_the_configuration_says),
        cmocka_unit_test(visible_devices_hide_and_reorder),
        cmocka_unit_test(visible_devices_can_hide_all),
        cmocka_unit_test(a_primary_context_is_counted),
        cmocka_unit_test(the_current_context_is_a_threads_own),
        cmocka_unit_test(sizes_and_properties_must_fit),
        cmocka_unit_test(memory_lives_while_anything_holds_it),
        cmocka_unit_test(memory_runs_out_at_a_byte),
        cmocka_unit_test(reservations_are_freed_as_they_were_made),
        cmocka_unit_test(a_mapping_is_whole_and_unmapped_whole),
        cmocka_unit_test(devices_are_no_peers),
        cmocka_unit_test(the_host_cannot_touch_device_memory),
        cmocka_unit_test(only_what_asked_for_it_is_exported),
        cmocka_unit_test(a_descriptor_is_opaque),
        cmocka_unit_test(only_exported_descriptors_are_imported),
        cmocka_unit_test(imports_are_handles_of_their_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
