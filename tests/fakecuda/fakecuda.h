/*
 * The doubles of libcuda.so.1 and libnvidia-ml.so.1: how they are used and configured, what they answer, and why.
 *
 * They stand in <build>/fakecuda; a program finds them by LD_LIBRARY_PATH. They are never installed. In
 * <build>/fakecuda/old there is a libcuda.so.1 of before 12.0, which lacks cuGetProcAddress_v2.
 *
 * ---- FAKECUDA ----------------------------------------------------------------------------------------------------
 *
 * Statements, separated by ";" or newlines, words by blanks; sizes as 4096, 64KiB, 8MiB, 1GiB. What cannot be read ends
 * the process with 99. Nothing said about devices = one discrete device.
 *
 *   device KIND [count=N] [KEY=VALUE …]   one or N more devices; count comes first
 *       KIND  discrete
 *             unified        integrated, reads the host's memory; NVML knows no memory (DGX Spark)
 *             unified-plain  the same, without VMM and IPC
 *             tegra          integrated, VMM, no IPC of memory, not in NVML
 *             no-vmm         IPC only
 *             no-fd          VMM without descriptors; IPC
 *             no-ipc         VMM only
 *             wsl            says that VMM has descriptors, and fails; IPC
 *             bare           neither VMM nor IPC
 *       KEY   memory=SIZE    (8GiB)
 *             oom=SIZE       allocations beyond fail
 *             context=SIZE   what each process' context takes (0)
 *             cache=SIZE     what cuMemGetInfo calls used though it is not (0)
 *             name=TEXT      "_" for blanks
 *             uuid=GPU-…     (GPU-fa4ec0da-0000-4000-8000-00000000000N)
 *             ipc=0|1        does IPC of memory work
 *             fd=0|1         can VMM really make descriptors
 *             readonly=0     read-only mappings keep no store out
 *             handle=1       its primary contexts have one handle, one after the other
 *             processor=1    the processor copies between addresses of the host: a wrong one is SIGSEGV
 *             outlive=0      memory of VMM ends with the process that made it
 *             nvml=full|silent|hidden
 *             attr.N=VALUE   N of cuda.h's CUdevice_attribute; "none" = the driver does not know it
 *   devices none             cuInit finds no device
 *   driver VERSION           (13000 = 13.0)
 *   init ERROR               cuInit fails; 34 = the Toolkit's stub
 *   late MICROSECONDS        what each asynchronous copy takes at least (200)
 *   missing FUNCTION         cuGetProcAddress does not find it
 *   nvml ERROR               nvmlInit_v2 fails; 9 = driver not loaded
 *   fault FUNCTION|* [KEY=VALUE …]   a call of FUNCTION ("cuMemCreate"), or of any
 *       KEY   nth=N or N+    the Nth such call, or that and all later ones (1); every process counts its own
 *             program=TEXT   only in processes whose command line, words joined by blanks, holds TEXT (without blanks)
 *             error=NUMBER   the call answers that, and does nothing
 *             delay=MS       the call takes so much longer
 *             damage=1       its copy says that all is well, and the first byte is wrong
 *             poison=DEVICE  the device is of no more use to this process: error, or 719, from now on
 *             lose=DEVICE    the same for everybody
 *             xid=DEVICE:N   NVML tells an Xid
 *       DEVICE counts from 0 in the order of this text.
 *
 * ---- FAKECUDA_STATE ----------------------------------------------------------------------------------------------
 *
 * A folder that all processes of one machine share; made if it is absent. Without it everything is a process' own, and
 * memory counts as free when the process that made it has closed it. tests/harness/devices.py has it for Python.
 *
 *   memory/PID.N   one file per allocation or context: "DEVICE SIZE PID KIND", KIND vmm, alloc or context. It is locked
 *                  (flock) through a descriptor that goes wherever the memory goes, so that the kernel counts: the lock
 *                  falls with the last process, mapping, exported descriptor or descriptor in flight
 *   lock           locked while records are counted or made
 *   lostN          device N is lost; its content is the error (empty = 719)
 *   holdN          while it is there, no asynchronous operation of device N begins
 *   xid            a line "DEVICE XID" per event, oldest first; what is appended is told to NVML's waiters
 *   faults         statements "fault", read anew, and counted from 0, when the file changes
 *
 * ---- rules of libcuda, each with its source -------------------------------------------------------------------
 *
 * [H] = text of cuda.h 13.0 at the function or type that is named; [G] = CUDA C Programming Guide; [T] = CUDA for Tegra
 * application note; [D] = NVIDIA's open kernel modules; [R] = reported by users of the driver; [P] = a pessimistic
 * reading: the driver may allow it, and nobody may count on that.
 *
 * Search of functions
 *   - Only cuGetProcAddress_v2 is exported, so that nobody uses a name that means another ABI elsewhere. [P]
 *   - Unknown name: success, NULL, SYMBOL_NOT_FOUND. Version below the function's: success, NULL,
 *     VERSION_NOT_SUFFICIENT. Version above the driver's: INVALID_VALUE. Base names only. [H cuGetProcAddress]
 *   - cuCtxSynchronize asked for as 13.0 is not the function of 2.0. [H PFN_cuCtxSynchronize_v13000] It is not
 *     here.
 *   - Per-thread default streams are not here: the search gives the legacy functions.
 * Initialisation
 *   - Before cuInit everything but cuInit, cuDriverGetVersion, cuGetErrorName, cuGetErrorString and the search is
 *     NOT_INITIALIZED. [H CUDA_ERROR_NOT_INITIALIZED] No device, or none visible: NO_DEVICE. [H cuInit]
 *   - In a child by fork, after cuInit in its parent, everything is NOT_INITIALIZED. [R]
 *   - What runs after the driver's own end (exit handlers registered before cuInit) gets DEINITIALIZED. [H
 *     CUDA_ERROR_DEINITIALIZED]
 *   - CUDA_VISIBLE_DEVICES: ordinals or beginnings of GPU-…; from the first wrong word on nothing is visible. [G]
 * Contexts
 *   - Primary contexts are counted; releasing one that is not retained is INVALID_CONTEXT; the last release
 *     destroys it with its allocations, streams, events and opened handles. [H cuDevicePrimaryCtxRelease]
 *   - The current context is a thread's own. None: INVALID_CONTEXT. Destroyed: CONTEXT_IS_DESTROYED, also when a
 *     new primary context of that device exists. [H CUDA_ERROR_CONTEXT_IS_DESTROYED] With handle=1 as the driver does
 *     it: the handle of a destroyed primary context stays current, may be made current, and is that of the next one.
 *     [R, lupinemachines/lupine 846]
 *   - Errors of the device stick, for the rest of the process: "to continue using CUDA, the process must be
 *     terminated and relaunched". [H CUDA_ERROR_ILLEGAL_ADDRESS] So a new primary context does not help, and
 *     unmapping fails. [P]
 * Virtual memory management (needs no current context [R])
 *   - Granularity 2 MiB, for the minimum and the recommended one; sizes of cuMemCreate and addresses of cuMemMap
 *     are multiples. [H cuMemCreate, cuMemMap] cuMemAddressReserve wants multiples of the page. [H]
 *   - cuMemMap: offset 0 [H], the size of the whole allocation [P], inside one reservation, on nothing mapped [H].
 *     No access before cuMemSetAccess [H], which wants whole mappings without a hole [H].
 *   - cuMemUnmap: exactly what was mapped; at the next map access begins at none. [H] cuMemAddressFree: exactly
 *     what was reserved [H], with nothing mapped in it [P]. Released handles are INVALID_VALUE (the driver's is
 *     undefined [H]).
 *   - Memory lives until the last mapping, handle and descriptor are gone. [H cuMemRelease,
 *     cuMemExportToShareableHandle] It outlives its exporter. [D rmobjexportimport.c]
 *   - Only memory created with requestedHandleTypes is exported. [H CUmemAllocationProp] Device without
 *     descriptors, or handle types other than POSIX descriptors: NOT_SUPPORTED. Attributes may promise what does
 *     not work. [R, WSL2]
 *   - An exported descriptor does not have FD_CLOEXEC. What the driver leaves is not documented; who sets it
 *     himself is right either way. [P] It cannot be read, written, mapped, resized or sealed; size 0. [P]
 *   - An imported descriptor stays the caller's; each import is a handle of its own. [H
 *     cuMemImportFromShareableHandle] Not exported by this driver: INVALID_VALUE. Device not visible here:
 *     NOT_SUPPORTED. [H, "cannot support"]
 *   - Locations other than devices are INVALID_VALUE. [P] Devices are no peers: INVALID_DEVICE. [P]
 * Legacy IPC
 *   - Base pointers of cuMemAlloc only; inside of one: INVALID_VALUE; memory of VMM and opened memory too. [H
 *     cuIpcGetMemHandle] Attribute 10 of a pointer says so. [H CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE]
 *   - Small allocations lie together in blocks of 2 MiB; an importer gets the block. [G, Interprocess
 *     Communication]
 *   - The flag LAZY_ENABLE_PEER_ACCESS is a must. Opening again in a context counts and gives the same address;
 *     closing counts down. [H cuIpcOpenMemHandle, cuIpcCloseMemHandle]
 *   - In the process of the allocation itself: INVALID_CONTEXT. [R] Exporter gone: INVALID_VALUE.
 *   - Freed by the exporter, or the exporter dead, while open: undefined [H]; here the next use is
 *     ILLEGAL_ADDRESS, which sticks, and the memory counts as free at once. [P]
 *   - Old Tegra: events yes (attribute 125), memory no: NOT_SUPPORTED. [T]
 * Copies
 *   - Device addresses are PROT_NONE for the host, on unified devices too. [R, of GB10: device memory is not
 *     coherent]
 *   - Ranges are checked when called: INVALID_VALUE. Access is checked when the operation runs, and again what is
 *     mapped: a store through a read-only mapping, an access without cuMemSetAccess or after unmapping is
 *     ILLEGAL_ADDRESS at the next call that waits or asks, sticks, and is Xid 31. [D uvm_map_external.c,
 *     UvmGpuMappingTypeReadOnly]
 *   - Operations begin late, in the order of their stream. From pinned memory bytes are read when the copy
 *     happens; pageable memory is staged before the call returns; to pageable memory the copy is complete then.
 *     [CUDA Driver API manual, "API synchronization behavior"] A wrong host pointer is SIGSEGV.
 *   - The legacy default stream waits for blocking streams and they for it; non-blocking ones stand apart. [H
 *     CU_STREAM_NON_BLOCKING]
 *   - cuMemFree, cuMemFreeHost and cuIpcCloseMemHandle wait for the context; cuMemUnmap does not. [P]
 *   - Pinned memory is a device address. [H cuMemHostAlloc] Attributes 88 and 100: so is every address of the host
 *     that the page tables allow; a store to a page that is not writable is ILLEGAL_ADDRESS. [D uvm_ats_faults.c]
 * Memory
 *   - cuMemGetInfo: what all processes have, with the state folder. On integrated devices the driver's free is the
 *     machine's MemFree, which the page cache lowers [R]: key cache.
 *
 * ---- rules of NVML --------------------------------------------------------------------------------------------
 *
 *   - It shows all devices, whatever CUDA_VISIBLE_DEVICES says; index and uuid as in libcuda.
 *   - silent: no memory, NOT_SUPPORTED, but processes with theirs. [R, of GB10] hidden: the device is not there.
 *   - A lost device: GPU_IS_LOST. Processes are listed while they have a context.
 *   - Events: only Xids, from the creation of the set on; waiting ends at once for one that was appended before.
 */
#ifndef FAKECUDA_H
#define FAKECUDA_H

#define FAKECUDA_ENVIRONMENT "FAKECUDA"
#define FAKECUDA_STATE_ENVIRONMENT "FAKECUDA_STATE"

#endif
