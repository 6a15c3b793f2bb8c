"""The Python package's DLPack of libresvisor, taken by a consumer of our own: who ends it, what keeps it, and on devices."""

import subprocess
import sys
import textwrap

import pytest
from harness import models, procfs
from harness.python import environment, run_python

# A library that takes tensors, by ctypes: the layout is that of dlpack.h of DLPack 1.1.
CONSUMER = """
    import ctypes, gc, json, sys, threading, resvisor
    from resvisor._dlpack import BYTES, VERSIONED, capsule
    from resvisor._library import library

    class Tensor(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
            ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]
    class Plain(ctypes.Structure):
        _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p))]
    class Versioned(ctypes.Structure):
        _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
            ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)), ("flags", ctypes.c_uint64), ("tensor", Tensor)]
    KINDS = {b"dltensor": (Plain, b"used_dltensor"), b"dltensor_versioned": (Versioned, b"used_dltensor_versioned")}
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]

    class Taken:
        def __init__(self, made):
            name = api.PyCapsule_GetName(made)
            kind, self.used = KINDS[name]
            self.address = api.PyCapsule_GetPointer(made, name)
            self.managed = kind.from_address(self.address)
            api.PyCapsule_SetName(made, self.used)
            self.tensor = self.managed.tensor
            self.shape = self.tensor.shape[0:self.tensor.ndim]
            self.strides = self.tensor.strides[0:self.tensor.ndim]
        def end(self):
            self.managed.deleter(self.address)

    def alive(lease):
        return library().rv_lease_dlpack_count(lease._held().pointer)
"""


@pytest.fixture
def service(make_service):
    made = make_service()
    models.write_every_dtype(made.models / "every.safetensors")
    models.write_plain(made.models / "plain.safetensors", mib=8)
    made.config["models"] = {"plain": {"path": "plain.safetensors"}, "every": {"path": "every.safetensors"}}
    return made.start()


def test_a_capsule_that_nobody_takes_is_ended_with_it(service):
    code = CONSUMER + """
    lease = resvisor.connect().attach("plain")
    name = next(iter(lease))
    for flags in (0, VERSIONED, BYTES, VERSIONED | BYTES):
        made = capsule(lease._held().pointer, name, flags)
        assert alive(lease) == 1
        del made
        assert alive(lease) == 0
    for _ in range(20000):
        capsule(lease._held().pointer, name, VERSIONED)
    print(json.dumps(alive(lease)))
    """
    assert run_python(service, code) == 0


def test_a_capsule_that_was_taken_is_ended_by_its_taker_alone(service):
    code = CONSUMER + """
    lease = resvisor.connect().attach("plain")
    name = next(iter(lease))
    for flags in (0, VERSIONED):
        made = capsule(lease._held().pointer, name, flags)
        taken = Taken(made)
        assert (taken.tensor.data, taken.shape) == (lease[name].address, list(lease[name].shape))
        assert (taken.tensor.device_type, taken.tensor.code, taken.tensor.bits, taken.tensor.lanes) == (1, 2, 32, 1)
        del made
        gc.collect()
        assert alive(lease) == 1
        thread = threading.Thread(target=taken.end)
        thread.start()
        thread.join()
        assert alive(lease) == 0
    print(json.dumps(True))
    """
    assert run_python(service, code)


def test_what_was_taken_keeps_the_memory_beyond_lease_and_connection(service):
    code = CONSUMER + """
    connection = resvisor.connect()
    lease = connection.attach("plain")
    tensor = next(lease.tensors())
    wanted = tensor.tobytes()
    taken = Taken(capsule(lease._held().pointer, tensor.name, 0))
    lease.close(); connection.close()
    del lease, connection, tensor
    gc.collect()
    with resvisor.connect() as other:
        pass
    print("held", flush=True)
    sys.stdin.readline()
    assert ctypes.string_at(taken.tensor.data, len(wanted)) == wanted
    taken.end()
    print("ended", flush=True)
    sys.stdin.readline()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment(service), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == "held\n"
        assert service.model("plain").leases == 1
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "ended\n"
        procfs.wait_until(lambda: service.model("plain").leases == 0, 10, "no lease left")
        print(file=process.stdin, flush=True)


@pytest.mark.parametrize("take", [False, True])
def test_capsules_that_outlive_the_interpreter_do_no_harm(service, take):
    code = CONSUMER + """
    lease = resvisor.connect().attach("plain")
    name = next(iter(lease))
    kept = [capsule(lease._held().pointer, name, flags) for flags in (0, VERSIONED)]
    class Cycle:
        pass
    cycle = Cycle()
    cycle.own, cycle.capsule = cycle, capsule(lease._held().pointer, name, 0)
    sys.kept = kept      # taken apart last
    """ + ("\n    taken = [Taken(one) for one in kept]\n" if take else "")  # fmt: skip
    result = run_python(service, code, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_every_dtype_has_a_capsule_and_one_of_bytes(service):
    code = CONSUMER + """
    SIZES = {"BOOL": (6, 8), "BF16": (4, 16), "F16": (2, 16), "F32": (2, 32), "F64": (2, 64), "U8": (1, 8), "I64": (0, 64),
             "F8_E4M3": (10, 8), "F8_E5M2": (12, 8)}
    lease, seen = resvisor.connect().attach("every"), 0
    for tensor in lease.tensors():
        plain = Taken(capsule(lease._held().pointer, tensor.name, 0))
        raw = Taken(capsule(lease._held().pointer, tensor.name, BYTES))
        assert plain.shape == list(tensor.shape)
        if tensor.dtype in SIZES:
            assert (plain.tensor.code, plain.tensor.bits) == SIZES[tensor.dtype], tensor
            seen += 1
        assert (raw.tensor.code, raw.tensor.bits) == (1, 8)
        count = 1
        for n in raw.shape:
            count *= n
        assert count == tensor.nbytes
        plain.end(); raw.end()
    print(json.dumps([seen > 0, alive(lease)]))
    """
    assert run_python(service, code) == [True, 0]


# ---- on a device: the double of the driver -------------------------------------------------------------------------


@pytest.fixture
def on_device(make_service, make_devices):
    devices = make_devices(memory="1GiB", count=2)
    made = make_service(env=devices.env)
    models.write_every_dtype(made.models / "every.safetensors")
    models.write_plain(made.models / "plain.safetensors", mib=8)
    made.config["models"] = {"plain": {"path": "plain.safetensors"}, "every": {"path": "every.safetensors"}}
    made.devices = devices
    return made.start()


@pytest.mark.devices
def test_a_lease_on_a_device_says_where_it_is(on_device):
    code = """
        import json, resvisor
        connection = resvisor.connect()
        lease = connection.attach("plain", device="cuda:1")
        tensor = next(lease.tensors())
        by_uuid = connection.attach("plain", device="GPU-fa4ec0da-0000-4000-8000-000000000001")
        print(json.dumps([lease.device, lease.backend, lease.device_type, lease.device_id, lease.mapping, tensor.device, tensor.writable,
            tensor.__dlpack_device__(), by_uuid.generation == lease.generation, lease.revoked]))
    """
    assert run_python(on_device, code) == ["cuda:1", "cuda-vmm", 2, 1, "shared", "cuda:1", False, [2, 1], True, False]


@pytest.mark.devices
def test_a_device_that_is_not_there_is_refused(on_device):
    code = """
        import json, resvisor
        connection, found = resvisor.connect(), []
        for options in ({"device": "cuda:7"}, {"device": "GPU-00000000-0000-4000-8000-000000000000"}, {"device": "cuda:0", "mapping": "private"}):
            try:
                connection.attach("plain", **options)
            except resvisor.Error as error:
                found.append(type(error).__name__)
        print(json.dumps(found))
    """
    assert run_python(on_device, code) == ["NoSuchDevice", "NoSuchDevice", "Unsupported"]


@pytest.mark.devices
def test_bytes_are_copied_out_and_views_are_refused_in_words(on_device):
    code = """
        import json, numpy, resvisor, sys
        connection = resvisor.connect()
        host, device = connection.attach("every", device="host"), connection.attach("every", device="cuda:0")
        assert list(host) == list(device)
        for tensor in host.tensors():
            assert device[tensor.name].tobytes() == tensor.tobytes(), tensor
            assert device[tensor.name].digest == tensor.digest
        name = "large"
        copy = device[name].numpy(copy=True)
        assert copy.tobytes() == host[name].numpy().tobytes() and copy.shape == host[name].shape
        copy[:] = 0
        assert device[name].tobytes() == host[name].tobytes()
        device.verify()
        messages = []
        for view in (device[name].memoryview, device[name].numpy, device.numpy):
            try:
                view()
            except resvisor.Unsupported as error:
                messages.append(str(error))
        print(json.dumps(messages))
    """
    messages = run_python(on_device, code)
    assert len(messages) == 3 and all("lies on cuda:0, which the CPU cannot read; copy it by .numpy(copy=True)" in text for text in messages)


@pytest.mark.devices
def test_dlpack_on_a_device_follows_the_array_api(on_device):
    code = CONSUMER + """
    lease = resvisor.connect().attach("plain", device="cuda:1")
    tensor = next(lease.tensors())
    old = Taken(tensor.__dlpack__())
    new = Taken(tensor.__dlpack__(stream=-1, max_version=(1, 1), dl_device=(2, 1), copy=False))
    assert (old.used, new.used) == (b"used_dltensor", b"used_dltensor_versioned")
    assert new.managed.flags & 1 and (new.managed.major, old.tensor.data) == (1, tensor.address)
    assert (new.tensor.device_type, new.tensor.device_id) == (2, 1)
    refused = []
    for options in ({"dl_device": (1, 0)}, {"dl_device": (2, 0)}, {"copy": True}, {"stream": 0}, {"stream": "1"}, {"stream": -2}):
        try:
            tensor.__dlpack__(**options)
        except (BufferError, ValueError) as error:
            refused.append(type(error).__name__)
    old.end(); new.end()
    print(json.dumps([refused, alive(lease)]))
    """
    assert run_python(on_device, code) == [["BufferError"] * 3 + ["ValueError"] * 3, 0]


READ = """
    def read(taken, count):
        '''As another CUDA library would: by the driver, in the primary context.'''
        find, context, device = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2, ctypes.c_void_p(), ctypes.c_int()
        def call(name, *arguments):
            function = ctypes.c_void_p()
            assert find(name, ctypes.byref(function), 12000, ctypes.c_uint64(1), None) == 0 and function
            assert ctypes.CFUNCTYPE(ctypes.c_int, *map(type, arguments))(function.value)(*arguments) == 0, name
        call(b"cuInit", ctypes.c_uint(0))
        call(b"cuDeviceGet", ctypes.pointer(device), ctypes.c_int(taken.tensor.device_id))
        call(b"cuDevicePrimaryCtxRetain", ctypes.pointer(context), device)
        call(b"cuCtxSetCurrent", context)
        found = (ctypes.c_ubyte * count)()
        call(b"cuMemcpyDtoHAsync", found, ctypes.c_uint64(taken.tensor.data), ctypes.c_size_t(count), ctypes.c_void_p())
        call(b"cuStreamSynchronize", ctypes.c_void_p())
        return bytes(found)
"""


@pytest.mark.devices
def test_another_library_reads_what_it_has_taken(on_device):
    code = CONSUMER + READ + """
    lease = resvisor.connect().attach("plain", device="cuda:0")
    tensor = next(lease.tensors())
    wanted, taken = tensor.tobytes(), Taken(tensor.__dlpack__())
    lease.close()
    del lease, tensor
    gc.collect()
    assert read(taken, len(wanted)) == wanted
    taken.end()
    print(json.dumps(True))
    """
    assert run_python(on_device, code)
    assert on_device.devices.allocated(0) > 0
    on_device.cli("stop")
    on_device.devices.wait_allocated(0)


@pytest.mark.devices
def test_a_driver_that_was_initialised_forbids_forks(make_devices):
    code = """
        import ctypes, json
        from resvisor.comfyui.preload import _driver_is_used
        found = [_driver_is_used()]
        driver, init = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        found.append(_driver_is_used())
        assert driver.cuGetProcAddress_v2(b"cuInit", ctypes.byref(init), 12000, ctypes.c_uint64(1), None) == 0
        assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(init.value)(0) == 0
        found.append(_driver_is_used())
        print(json.dumps(found))
    """
    assert run_python(None, code, **make_devices().env) == [False, False, True]


@pytest.mark.devices
def test_a_device_that_reads_the_machines_memory_has_both_ways(make_service, make_devices):
    made = make_service(env=make_devices(kind="unified-plain", memory="1GiB").env)
    models.write_plain(made.models / "plain.safetensors", mib=8)
    made.config["models"] = {"plain": {"path": "plain.safetensors"}}
    made.start()
    code = CONSUMER + """
    import numpy
    lease = resvisor.connect().attach("plain", device="cuda:0")
    tensor = next(lease.tensors())
    wanted = tensor.tobytes()
    assert (lease.backend, tensor.__dlpack_device__()) == ("memfd", (2, 0))
    assert bytes(tensor.memoryview()) == tensor.numpy().tobytes() == wanted
    device, host = Taken(tensor.__dlpack__()), Taken(tensor.__dlpack__(dl_device=(1, 0)))
    assert (device.tensor.device_type, host.tensor.device_type) == (2, 1)
    assert device.tensor.data == host.tensor.data == tensor.address
    device.end(); host.end()
    print(json.dumps(alive(lease)))
    """
    assert run_python(made, code) == 0
