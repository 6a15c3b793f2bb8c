/* The double's rules, each as fakecuda.h states it: library, devices, contexts, virtual memory management. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "fakecuda_case.h"

static CUmemAllocationProp properties(void)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return prop;
}

static CUdeviceptr map(CUmemGenericAllocationHandle handle, size_t size, CUmemAccess_flags flags)
{
    CUdeviceptr at;
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}, .flags = flags};
    OK(cu.MemAddressReserve(&at, size, 0, 0, 0));
    OK(cu.MemMap(at, size, 0, handle, 0));
    if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE)
        OK(cu.MemSetAccess(at, size, &access, 1));
    return at;
}

CASE(memory_outlives_handle_mapping_and_exporter)
{
    const CUmemAllocationProp prop = properties();
    CUmemGenericAllocationHandle handle;
    int fd = -1;
    char text[16] = "";
    driver_start("");
    OK(cu.MemCreate(&handle, 4 * MIB, &prop, 0));
    CUdeviceptr at = map(handle, 4 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    OK(cu.MemcpyHtoDAsync(at + 3 * MIB, "weights", 8, NULL));
    OK(cu.CtxSynchronize());
    OK(cu.MemUnmap(at, 4 * MIB));
    OK(cu.MemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    OK(cu.MemRelease(handle));
    OK(cu.MemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    at = map(handle, 4 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ);
    OK(cu.MemRelease(handle));
    OK(cu.MemcpyDtoHAsync(text, at + 3 * MIB, 8, NULL));
    CHECK(strcmp(text, "weights") == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_outlives_handle_mapping_and_exporter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
