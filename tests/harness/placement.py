"""Where the pool's suite has its models: in the machine's memory, or on a device of the double of the driver.

RESVISOR_TEST_ON=cuda-vmm|cuda-ipc|unified runs the same tests on a device: each service gets the double and a placement on
cuda:0 for what does not say otherwise, and the foreign reader reads by the driver. Tests of what only host memory has are
marked host_memory and left out.
"""

import atexit
import os
import shutil
import tempfile

from . import driver

ON = os.environ.get("RESVISOR_TEST_ON", "")
KINDS = {"": None, "cuda-vmm": "discrete", "cuda-ipc": "no-vmm", "unified": "unified"}
DEVICE = "cuda:0" if ON else ""
BACKEND = "memfd" if ON == "unified" else ON
if ON not in KINDS:
    raise SystemExit(f"RESVISOR_TEST_ON is {ON!r}; allowed are {', '.join(filter(None, KINDS))}")

_opened = []
_doubles = []


def double():
    """The double of this process and of the services of its tests: one machine."""
    if not _doubles:
        from .devices import Devices

        _doubles.append(Devices(tempfile.mkdtemp(prefix="rv-gpus-"), kind=KINDS[ON]))
        atexit.register(shutil.rmtree, _doubles[0].state, ignore_errors=True)
        os.environ.update(_doubles[0].env)
    return _doubles[0]


def environment():
    """What a service's environment needs."""
    if not ON:
        return {}
    # One machine: its first self-test is everybody's.
    return {**double().env, "STATE_DIRECTORY": str(double().state / "results")}


def allocated():
    """Bytes of the device that anybody holds."""
    return double().allocated() if ON else 0


def configure(config):
    """The service's configuration with its types on the device."""
    if not ON:
        return config
    types = {name: {"device": DEVICE, **keys} for name, keys in config.get("types", {}).items()}
    given = config.get("devices", {})
    devices = {**given, DEVICE: {"backend": BACKEND, **given.get(DEVICE, {})}}
    return {**config, "devices": devices, **({"types": types} if types else {})}


def budget(size, **pool):
    """The part of a configuration that limits the memory where models are placed; pool: further keys of `pool`."""
    if BACKEND in ("", "memfd"):
        return {"pool": {"budget": size, **pool}}
    return {"devices": {DEVICE: {"budget": size}}, "pool": pool}


def pool_bytes(status):
    """The memory of all models, wherever they lie."""
    return status.pool_bytes + sum(device.pool_bytes for device in status.devices if device.backend != "memfd")


def open_arenas(reply, fds):
    """The arenas of an attach reply by the driver of this process, in their order."""
    if not _opened:
        double()
        _opened.append(driver.Driver(double().folder / "libcuda.so.1"))
    fds = iter(fds)
    device = _opened[0].device_of(reply.device.uuid)
    return [
        driver.DeviceArena(_opened[0], device, arena, next(fds) if arena.backend == driver.VMM else None)
        for arena in reply.arenas
    ]
