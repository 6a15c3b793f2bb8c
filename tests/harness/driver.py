"""A foreign reader of models that lie on a device: the driver's own functions by ctypes, nothing of resvisor's."""

import ctypes
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p

REQUEST_VERSION = 12000  # the ABI of CUDA 12.0, whatever driver answers
LEGACY_STREAM = 1  # CU_GET_PROC_ADDRESS_LEGACY_STREAM
POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
LOCATION_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ = 1  # CU_MEM_ACCESS_FLAGS_PROT_READ
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that there is
VMM, IPC = 2, 3  # enum rv_backend_id


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location_type", c_int), ("location_id", c_int), ("flags", c_int)]


class Handle(ctypes.Structure):
    """CUipcMemHandle; it is passed by value."""

    _fields_ = [("bytes", c_char * 64)]


class DriverFailed(AssertionError):
    def __init__(self, name, code):
        super().__init__(f"{name}: {code}")
        self.code = code


class Driver:
    """The driver in this process. Its environment must be set before."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path), ctypes.RTLD_LOCAL)
        self.table = {}
        self.contexts = {}
        self.call("cuInit", (c_uint,), 0)

    def call(self, name, types, *arguments):
        function = self.table.get(name)
        if function is None:
            pointer, status = c_void_p(), c_int()
            look_up = self.library.cuGetProcAddress_v2
            look_up.argtypes = [ctypes.c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)]
            code = look_up(name.encode(), byref(pointer), REQUEST_VERSION, LEGACY_STREAM, byref(status))
            if code or not pointer.value:
                raise DriverFailed(f"cuGetProcAddress of {name}", code or status.value)
            function = self.table[name] = ctypes.CFUNCTYPE(c_int, *types)(pointer.value)
        code = function(*arguments)
        if code:
            raise DriverFailed(name, code)

    def device_of(self, uuid):
        """The number here of the device with that uuid, its primary context current."""
        count = c_int()
        self.call("cuDeviceGetCount", (POINTER(c_int),), byref(count))
        for number in range(count.value):
            device, found = c_int(), (c_char * 16)()
            self.call("cuDeviceGet", (POINTER(c_int), c_int), byref(device), number)
            self.call("cuDeviceGetUuid", (c_void_p, c_int), ctypes.addressof(found), device.value)
            if found.raw == uuid:
                self.make_current(device.value)
                return device.value
        raise AssertionError(f"no device has the uuid {uuid.hex()}")

    def make_current(self, device):
        if device not in self.contexts:
            context = c_void_p()
            self.call("cuDevicePrimaryCtxRetain", (POINTER(c_void_p), c_int), byref(context), device)
            self.contexts[device] = context
        self.call("cuCtxSetCurrent", (c_void_p,), self.contexts[device])

    def read(self, address, length):
        buffer = ctypes.create_string_buffer(length or 1)
        if length:
            self.call(
                "cuMemcpyDtoHAsync", (c_void_p, c_uint64, c_size_t, c_void_p), ctypes.addressof(buffer), address, length, None
            )
            self.call("cuCtxSynchronize", ())
        return buffer.raw[:length]

    def write(self, address, data):
        self.call("cuMemcpyHtoDAsync", (c_uint64, c_void_p, c_size_t, c_void_p), address, ctypes.c_char_p(data), len(data), None)
        self.call("cuCtxSynchronize", ())


class DeviceArena:
    """One arena of an attach reply, mapped read-only where that exists. Slices are copies of its bytes."""

    def __init__(self, driver, device, arena, fd=None):
        self.driver, self.device, self.size, self.backend = driver, device, arena.size, arena.backend
        self.address, self.handle = c_uint64(), c_uint64()
        driver.make_current(device)
        if self.backend == IPC:
            assert len(arena.handle) == 64, "a handle of 64 bytes"
            handle = Handle.from_buffer_copy(arena.handle)
            driver.call(
                "cuIpcOpenMemHandle", (POINTER(c_uint64), Handle, c_uint), byref(self.address), handle, LAZY_PEER_ACCESS
            )
            return
        assert self.backend == VMM, f"no backend of a device: {self.backend}"
        driver.call("cuMemImportFromShareableHandle", (POINTER(c_uint64), c_void_p, c_int), byref(self.handle), fd, POSIX_FD)
        driver.call(
            "cuMemAddressReserve", (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
            byref(self.address), self.size, 0, 0, 0,
        )  # fmt: skip
        driver.call(
            "cuMemMap", (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64), self.address, self.size, 0, self.handle, 0
        )
        access = Access(LOCATION_DEVICE, device, READ)
        driver.call("cuMemSetAccess", (c_uint64, c_size_t, c_void_p, c_size_t), self.address, self.size, ctypes.addressof(access), 1)

    def __getitem__(self, part):
        self.driver.make_current(self.device)
        return self.driver.read(self.address.value + part.start, part.stop - part.start)

    def close(self):
        self.driver.make_current(self.device)
        if self.backend == IPC:
            self.driver.call("cuIpcCloseMemHandle", (c_uint64,), self.address)
            return
        self.driver.call("cuMemUnmap", (c_uint64, c_size_t), self.address, self.size)
        self.driver.call("cuMemRelease", (c_uint64,), self.handle)
        self.driver.call("cuMemAddressFree", (c_uint64, c_size_t), self.address, self.size)
