/* The double's rules for copies, streams, events, pinned and unified memory; and errors that stick. */
#include <errno.h>
#include <pthread.h>

#include "fakecuda_case.h"

#define BYTES (3 * MIB + 17)

/* Memory that a copy still reads or writes, as a faulty program would use it: the sanitizer need not report it. */
__attribute__((no_sanitize("thread"))) static void change(volatile char *memory, size_t size, char byte)
{
    for (size_t i = 0; i < size; i++)
        memory[i] = byte;
}

__attribute__((no_sanitize("thread"))) static bool all_are(const char *memory, size_t size, char byte)
{
    for (size_t i = 0; i < size; i++)
        if (memory[i] != byte)
            return false;
    return true;
}

static char *pinned(size_t size)
{
    void *memory;
    OK(cu.MemHostAlloc(&memory, size, 0));
    return memory;
}

static CUdeviceptr allocate(size_t size)
{
    CUdeviceptr at;
    OK(cu.MemAlloc(&at, size));
    return at;
}

/* ---- copies ----------------------------------------------------------------------------------------------------- */

CASE(copies_and_sets_reach_every_byte)
{
    static char from[BYTES], back[BYTES];
    driver_start("");
    CUdeviceptr at = allocate(BYTES);
    for (size_t i = 0; i < BYTES; i++)
        from[i] = (char)(i * 31 + i / 257);
    OK(cu.MemcpyHtoDAsync(at, from, BYTES, NULL));
    OK(cu.MemcpyDtoHAsync(back, at, BYTES, NULL));
    CHECK(memcmp(from, back, BYTES) == 0);
    OK(cu.MemsetD8Async(at + 100, 'x', 2 * MIB, NULL));
    OK(cu.MemcpyDtoHAsync(back, at, BYTES, NULL));
    CHECK(back[99] == from[99] && back[100] == 'x' && back[2 * MIB + 99] == 'x' && back[2 * MIB + 100] != 'x');
    OK(cu.MemcpyHtoDAsync(at, from, 0, NULL));
    OK(cu.MemFree(at));
}

CASE(a_copy_over_neighbouring_mappings)
{
    static char back[4 * MIB];
    CUdeviceptr at;
    driver_start("");
    OK(cu.MemAddressReserve(&at, 6 * MIB, 0, 0, 0));
    OK(cu.MemMap(at, 2 * MIB, 0, create(2 * MIB), 0));
    OK(cu.MemMap(at + 2 * MIB, 2 * MIB, 0, create(2 * MIB), 0));
    OK(access_set(at, 4 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    OK(cu.MemsetD8Async(at, 5, 4 * MIB, NULL));
    OK(cu.MemcpyDtoHAsync(back, at, 4 * MIB, NULL));
    CHECK(all_are(back, sizeof(back), 5));
    WANT(cu.MemsetD8Async(at, 5, 5 * MIB, NULL), CUDA_ERROR_INVALID_VALUE); /* the third part is not mapped */
    OK(cu.CtxSynchronize());
}

CASE(ranges_are_checked_at_once)
{
    char text[16];
    driver_start("device discrete count=2");
    CUdeviceptr at = allocate(4 * MIB), end = at + 4 * MIB;
    WANT(cu.MemcpyDtoHAsync(text, end - 8, 9, NULL), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemcpyHtoDAsync(end, text, 1, NULL), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemsetD8Async(0, 0, 1, NULL), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemsetD8Async(at, 0, UINT64_MAX - 5, NULL), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemcpyDtoHAsync(NULL, at, 1, NULL), CUDA_ERROR_INVALID_VALUE);
    WANT(cu.MemcpyDtoHAsync(text, (uintptr_t)text, 1, NULL), CUDA_ERROR_INVALID_VALUE); /* discrete: no host memory */
    WANT(cu.MemcpyDtoHAsync(text, at, 1, (CUstream)&at), CUDA_ERROR_INVALID_HANDLE);
    CUdeviceptr odd = allocate(2 * MIB + 700); /* the rest of its block is not its own */
    WANT(cu.MemsetD8Async(odd, 0, 2 * MIB + 701, NULL), CUDA_ERROR_INVALID_VALUE);
    OK(cu.CtxSynchronize());
    WANT(cu.MemFree(at + 1), CUDA_ERROR_INVALID_VALUE);
    OK(cu.MemFree(at));
    WANT(cu.MemFree(at), CUDA_ERROR_INVALID_VALUE);
}

CASE(pinned_memory_is_read_when_the_copy_happens)
{
    char back[MIB];
    state_make();
    driver_start("");
    char *host = pinned(MIB);
    CUdeviceptr at = allocate(2 * MIB);
    memset(host, 1, MIB);
    state_write("hold0", "");
    OK(cu.MemcpyHtoDAsync(at, host, MIB, NULL));
    change(host, MIB, 2); /* too early */
    state_clear("hold0");
    OK(cu.CtxSynchronize());
    OK(cu.MemcpyDtoHAsync(back, at, MIB, NULL));
    CHECK(all_are(back, MIB, 2));
    state_remove();
}

CASE(pageable_memory_is_staged_before_the_call_returns)
{
    static char host[MIB], back[MIB];
    state_make();
    driver_start("");
    CUdeviceptr at = allocate(2 * MIB);
    memset(host, 1, MIB);
    state_write("hold0", "");
    OK(cu.MemcpyHtoDAsync(at, host, MIB, NULL));
    memset(host, 2, MIB);
    WANT(cu.StreamQuery(NULL), CUDA_ERROR_NOT_READY);
    state_clear("hold0");
    OK(cu.MemcpyDtoHAsync(back, at, MIB, NULL)); /* complete when it returns */
    CHECK(all_are(back, MIB, 1));
    state_remove();
}

CASE(a_copy_to_pinned_memory_is_late)
{
    state_make();
    driver_start("");
    char *host = pinned(MIB);
    CUdeviceptr at = allocate(2 * MIB);
    OK(cu.MemsetD8Async(at, 9, MIB, NULL));
    OK(cu.CtxSynchronize());
    state_write("hold0", "");
    OK(cu.MemcpyDtoHAsync(host, at, MIB, NULL));
    CHECK(all_are(host, MIB, 0));
    state_clear("hold0");
    OK(cu.CtxSynchronize());
    CHECK(all_are(host, MIB, 9));
    OK(cu.MemFreeHost(host));
    WANT(cu.MemFreeHost(host), CUDA_ERROR_INVALID_VALUE);
    state_remove();
}

/* ---- streams and events ----------------------------------------------------------------------------------------- */

CASE(streams_and_events_say_what_is_done)
{
    CUstream stream;
    CUevent event;
    state_make();
    driver_start("");
    CUdeviceptr at = allocate(2 * MIB);
    OK(cu.StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.EventCreate(&event, CU_EVENT_DISABLE_TIMING));
    OK(cu.EventQuery(event)); /* never recorded: nothing to wait for */
    OK(cu.StreamQuery(stream));
    state_write("hold0", "");
    OK(cu.MemsetD8Async(at, 1, MIB, stream));
    OK(cu.EventRecord(event, stream));
    WANT(cu.EventQuery(event), CUDA_ERROR_NOT_READY);
    WANT(cu.StreamQuery(stream), CUDA_ERROR_NOT_READY);
    state_clear("hold0");
    OK(cu.StreamSynchronize(stream));
    OK(cu.EventQuery(event));
    OK(cu.StreamQuery(stream));
    state_write("hold0", "");
    OK(cu.MemsetD8Async(at, 2, MIB, stream));
    OK(cu.EventRecord(event, stream)); /* again: now it means this place */
    WANT(cu.EventQuery(event), CUDA_ERROR_NOT_READY);
    OK(cu.EventDestroy(event)); /* while it is under way */
    WANT(cu.EventQuery(event), CUDA_ERROR_INVALID_HANDLE);
    OK(cu.StreamDestroy(stream)); /* returns at once */
    WANT(cu.StreamQuery(stream), CUDA_ERROR_INVALID_HANDLE);
    WANT(cu.StreamDestroy(NULL), CUDA_ERROR_INVALID_HANDLE);
    state_clear("hold0");
    OK(cu.CtxSynchronize());
    char back;
    OK(cu.MemcpyDtoHAsync(&back, at, 1, NULL));
    CHECK(back == 2);
    state_remove();
}

CASE(the_default_stream_keeps_the_order_of_blocking_ones)
{
    CUstream blocking, apart;
    state_make();
    driver_start("");
    char *host = pinned(MIB);
    CUdeviceptr at = allocate(2 * MIB), other = allocate(2 * MIB);
    OK(cu.StreamCreate(&blocking, CU_STREAM_DEFAULT));
    OK(cu.StreamCreate(&apart, CU_STREAM_NON_BLOCKING));
    for (char round = 1; round <= 5; round++) {
        OK(cu.MemsetD8Async(at, (unsigned char)round, MIB, blocking));
        OK(cu.MemcpyDtoHAsync(host, at, MIB, NULL));
        OK(cu.MemsetD8Async(at, 99, MIB, blocking));
        OK(cu.MemsetD8Async(other, 1, MIB, apart));
        OK(cu.StreamSynchronize(NULL));
        CHECK(all_are(host, MIB, round));
    }
    OK(cu.CtxSynchronize());
    state_remove();
}

CASE(the_end_of_a_context_ends_its_streams)
{
    CUstream stream;
    CUevent event;
    CUcontext context;
    driver_start("");
    CUdeviceptr at = allocate(2 * MIB);
    OK(cu.StreamCreate(&stream, 0));
    OK(cu.EventCreate(&event, 0));
    OK(cu.MemsetD8Async(at, 1, MIB, stream));
    OK(cu.EventRecord(event, stream));
    OK(cu.DevicePrimaryCtxRelease(0));
    OK(cu.DevicePrimaryCtxRetain(&context, 0));
    OK(cu.CtxSetCurrent(context));
    WANT(cu.StreamQuery(stream), CUDA_ERROR_INVALID_HANDLE);
    WANT(cu.EventQuery(event), CUDA_ERROR_INVALID_HANDLE);
    CHECK(used_bytes() == 0);
}

#define THREADS 4
#define ROUNDS 12

/* What a thread of a program does, over and over. */
static void *thread_work(void *argument)
{
    CUcontext context = argument;
    CUstream stream;
    CUevent event;
    OK(cu.CtxSetCurrent(context));
    char *host = pinned(64 << 10);
    for (unsigned round = 0; round < ROUNDS; round++) {
        OK(cu.StreamCreate(&stream, round % 2));
        OK(cu.EventCreate(&event, CU_EVENT_DISABLE_TIMING));
        CUdeviceptr small = allocate(3000), at;
        CUmemGenericAllocationHandle handle = create(2 * MIB);
        at = map(handle, 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        OK(cu.MemRelease(handle));
        OK(cu.MemsetD8Async(small, 3, 3000, stream));
        OK(cu.MemsetD8Async(at, 4, 64 << 10, stream));
        OK(cu.MemcpyDtoHAsync(host, at, 64 << 10, stream));
        OK(cu.EventRecord(event, stream));
        OK(cu.StreamDestroy(stream));
        OK(cu.EventSynchronize(event));
        CHECK(all_are(host, 64 << 10, 4));
        OK(cu.EventDestroy(event));
        OK(cu.MemUnmap(at, 2 * MIB));
        OK(cu.MemAddressFree(at, 2 * MIB));
        OK(cu.MemFree(small));
    }
    OK(cu.MemFreeHost(host));
    return NULL;
}

CASE(threads_share_the_driver)
{
    pthread_t threads[THREADS];
    CUcontext context = driver_start("late 20");
    for (unsigned i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, thread_work, context) == 0);
    for (unsigned i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(used_bytes() == 0);
}

struct waiting {
    CUcontext context;
    CUstream stream;
    CUevent event;
};

static void *waits_for_event(void *argument)
{
    const struct waiting *waiting = argument;
    if (cu.CtxSetCurrent(waiting->context) == CUDA_ERROR_CONTEXT_IS_DESTROYED)
        return NULL; /* too late */
    CUresult result = cu.EventSynchronize(waiting->event);
    CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_CONTEXT_IS_DESTROYED);
    return NULL;
}

static void *waits_for_stream(void *argument)
{
    const struct waiting *waiting = argument;
    if (cu.CtxSetCurrent(waiting->context) == CUDA_ERROR_CONTEXT_IS_DESTROYED)
        return NULL; /* too late */
    CUresult result = cu.StreamSynchronize(waiting->stream);
    CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_CONTEXT_IS_DESTROYED);
    return NULL;
}

CASE(a_context_ends_while_others_wait)
{
    for (unsigned round = 0; round < 8; round++) {
        struct waiting waiting;
        pthread_t threads[2];
        if (round == 0)
            waiting.context = driver_start("late 5000");
        else
            OK(cu.DevicePrimaryCtxRetain(&waiting.context, 0));
        OK(cu.CtxSetCurrent(waiting.context));
        CUdeviceptr at = allocate(2 * MIB);
        OK(cu.StreamCreate(&waiting.stream, CU_STREAM_NON_BLOCKING));
        OK(cu.EventCreate(&waiting.event, 0));
        OK(cu.MemsetD8Async(at, 1, MIB, waiting.stream));
        OK(cu.EventRecord(waiting.event, waiting.stream));
        CHECK(pthread_create(&threads[0], NULL, waits_for_event, &waiting) == 0);
        CHECK(pthread_create(&threads[1], NULL, waits_for_stream, &waiting) == 0);
        if (round % 2)
            OK(cu.StreamDestroy(waiting.stream));
        OK(cu.DevicePrimaryCtxRelease(0));
        for (unsigned i = 0; i < 2; i++)
            CHECK(pthread_join(threads[i], NULL) == 0);
    }
}

/* ---- faults of the device's own --------------------------------------------------------------------------------- */

static void wants_poisoned(CUresult error)
{
    CUdeviceptr at;
    CUcontext context;
    CUstream stream;
    const CUmemAllocationProp prop = properties();
    CUmemGenericAllocationHandle handle;
    WANT(cu.CtxSynchronize(), error);
    WANT(cu.MemAlloc(&at, MIB), error);
    WANT(cu.StreamCreate(&stream, 0), error);
    WANT(cu.MemCreate(&handle, 2 * MIB, &prop, 0), error);
    WANT(cu.DevicePrimaryCtxRetain(&context, 0), error);
    OK(cu.DevicePrimaryCtxRelease(0));
    WANT(cu.DevicePrimaryCtxRetain(&context, 0), error); /* only a new process helps */
}

static void write_through_a_reader(bool set)
{
    state_make();
    driver_start("");
    CUmemGenericAllocationHandle handle = create(2 * MIB);
    CUdeviceptr reader = map(handle, 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ);
    char byte = 1;
    OK(cu.MemcpyDtoHAsync(&byte, reader, 1, NULL));
    CHECK(byte == 0);
    if (set)
        OK(cu.MemsetD8Async(reader, 1, 100, NULL)); /* the fault is the device's: it shows later */
    else
        OK(cu.MemcpyHtoDAsync(reader, "x", 1, NULL));
    WANT(cu.StreamSynchronize(NULL), CUDA_ERROR_ILLEGAL_ADDRESS);
    wants_poisoned(CUDA_ERROR_ILLEGAL_ADDRESS);
    state_remove();
}

CASE(a_copy_through_a_read_only_mapping_is_fatal)
{
    write_through_a_reader(false);
}

CASE(a_set_through_a_read_only_mapping_is_fatal)
{
    write_through_a_reader(true);
}

CASE(a_mapping_without_access_is_not_read)
{
    char byte;
    driver_start("");
    CUdeviceptr at = map(create(2 * MIB), 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_NONE);
    WANT(cu.MemcpyDtoHAsync(&byte, at, 1, NULL), CUDA_ERROR_ILLEGAL_ADDRESS);
    wants_poisoned(CUDA_ERROR_ILLEGAL_ADDRESS);
}

CASE(memory_unmapped_under_a_copy_is_a_fault)
{
    state_make();
    driver_start("");
    char *host = pinned(MIB);
    CUdeviceptr at = map(create(2 * MIB), 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    state_write("hold0", "");
    OK(cu.MemcpyHtoDAsync(at, host, MIB, NULL));
    OK(cu.MemUnmap(at, 2 * MIB)); /* without waiting */
    state_clear("hold0");
    WANT(cu.CtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
    state_remove();
}

/* ---- unified memory --------------------------------------------------------------------------------------------- */

/* A memfd as the pool makes it: filled, sealed, mapped read-only. */
static char *host_arena(int *ret_fd, int protection)
{
    int fd = memfd_create("arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, 2 * MIB) == 0 && pwrite(fd, "weights", 8, MIB) == 8);
    char *arena = mmap(NULL, 2 * MIB, protection, MAP_SHARED, fd, 0);
    CHECK(arena != MAP_FAILED);
    *ret_fd = fd;
    return arena;
}

CASE(a_unified_device_reads_the_hosts_memory)
{
    char text[8] = "";
    int fd;
    driver_start("device unified");
    char *arena = host_arena(&fd, PROT_READ | PROT_WRITE);
    OK(cu.MemcpyDtoHAsync(text, (uintptr_t)arena + MIB, 8, NULL));
    CHECK(memcmp(text, "weights", 8) == 0);
    OK(cu.MemcpyHtoDAsync((uintptr_t)arena, "from the device", 16, NULL));
    OK(cu.CtxSynchronize());
    CHECK(strcmp(arena, "from the device") == 0);
}

CASE(a_unified_devices_write_to_a_read_only_page_is_fatal)
{
    int fd;
    char text[8];
    driver_start("device unified");
    char *arena = host_arena(&fd, PROT_READ);
    OK(cu.MemcpyDtoHAsync(text, (uintptr_t)arena + MIB, 8, NULL));
    OK(cu.MemsetD8Async((uintptr_t)arena, 1, 8, NULL));
    WANT(cu.CtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
    wants_poisoned(CUDA_ERROR_ILLEGAL_ADDRESS);
}

CASE(pinned_memory_is_a_device_address)
{
    char text[8];
    driver_start("device discrete");
    char *host = pinned(4096);
    memcpy(host, "weights", 8);
    OK(cu.MemcpyDtoHAsync(text, (uintptr_t)host, 8, NULL));
    CHECK(memcmp(text, "weights", 8) == 0);
    OK(cu.MemsetD8Async((uintptr_t)host, 3, 8, NULL));
    OK(cu.CtxSynchronize());
    CHECK(host[0] == 3);
    unsigned kind;
    OK(cu.PointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)host));
    CHECK(kind == CU_MEMORYTYPE_HOST);
}

CASE(pointers_tell_what_they_are)
{
    unsigned value;
    int device;
    CUdeviceptr base;
    CUcontext context = driver_start("device discrete count=2"), owner;
    CUdeviceptr vmm = map(create(2 * MIB), 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ), plain = allocate(4 * MIB);
    OK(cu.PointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, plain));
    CHECK(value == 1);
    OK(cu.PointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, vmm));
    CHECK(value == 0);
    OK(cu.PointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, vmm));
    CHECK(value == CU_MEMORYTYPE_DEVICE);
    OK(cu.PointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, vmm + 100));
    CHECK(device == 0);
    OK(cu.PointerGetAttribute(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, plain + 100));
    CHECK(base == plain);
    OK(cu.PointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, plain));
    CHECK(owner == context);
    WANT(cu.PointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)&value), CUDA_ERROR_INVALID_VALUE);
}

CASE(small_allocations_share_a_block)
{
    CUdeviceptr at[100];
    driver_start("");
    for (unsigned i = 0; i < 100; i++)
        at[i] = allocate(1000);
    CHECK(used_bytes() == 2 * MIB && at[1] - at[0] == 1024);
    WANT(cu.MemsetD8Async(at[3], 0, 1001, NULL), CUDA_ERROR_INVALID_VALUE);
    OK(cu.MemFree(at[50]));
    CHECK(allocate(900) == at[50]);
    for (unsigned i = 0; i < 100; i++)
        OK(cu.MemFree(at[i]));
    CHECK(used_bytes() == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_and_sets_reach_every_byte),
        cmocka_unit_test(a_copy_over_neighbouring_mappings),
        cmocka_unit_test(ranges_are_checked_at_once),
        cmocka_unit_test(pinned_memory_is_read_when_the_copy_happens),
        cmocka_unit_test(pageable_memory_is_staged_before_the_call_returns),
        cmocka_unit_test(a_copy_to_pinned_memory_is_late),
        cmocka_unit_test(streams_and_events_say_what_is_done),
        cmocka_unit_test(the_default_stream_keeps_the_order_of_blocking_ones),
        cmocka_unit_test(the_end_of_a_context_ends_its_streams),
        cmocka_unit_test(threads_share_the_driver),
        cmocka_unit_test(a_context_ends_while_others_wait),
        cmocka_unit_test(a_copy_through_a_read_only_mapping_is_fatal),
        cmocka_unit_test(a_set_through_a_read_only_mapping_is_fatal),
        cmocka_unit_test(a_mapping_without_access_is_not_read),
        cmocka_unit_test(memory_unmapped_under_a_copy_is_a_fault),
        cmocka_unit_test(a_unified_device_reads_the_hosts_memory),
        cmocka_unit_test(a_unified_devices_write_to_a_read_only_page_is_fatal),
        cmocka_unit_test(pinned_memory_is_a_device_address),
        cmocka_unit_test(pointers_tell_what_they_are),
        cmocka_unit_test(small_allocations_share_a_block),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
