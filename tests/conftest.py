"""Fixtures of the Python tests. A test asks for a running resvisor and gets one of its own; at the end nothing may be left."""

import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from harness import devices, models, placement, procfs, protos  # noqa: E402,F401  (protos makes rpc_pb2 importable)
from harness.device_standin import DeviceStandIn  # noqa: E402
from harness.service import BUILD, FAULT_EXECUTOR, MAKE_MODEL, PROGRAM, THREE_TYPES, Service, become_subreaper  # noqa: E402

become_subreaper()

TINY_MIB = 4
BY_THE_CPU = {"three", "make_three", "real_models"}  # fixtures with the shipped executors, which read weights by the CPU


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        if item.get_closest_marker("devices") and not devices.built():
            item.add_marker(pytest.mark.skip(reason="this build has no double of the CUDA driver"))
    if placement.ON:
        items[:] = [item for item in items if not (item.get_closest_marker("host_memory") or BY_THE_CPU & set(item.fixturenames))]


@pytest.fixture(scope="session", autouse=True)
def built():
    if not PROGRAM.exists():
        pytest.exit(f"{PROGRAM} is not built: run tests/run.sh, or set RESVISOR_BUILD", returncode=2)
    return BUILD


@pytest.fixture
def make_service(tmp_path):
    """make_service(config=None, name="service", **kwargs): a Service that is not started yet. All are ended and checked."""
    made = []

    def make(config=None, name="service", **kwargs):
        service = Service(tmp_path / name, config, **kwargs)
        made.append(service)
        return service

    yield make
    problems = []
    for service in reversed(made):
        try:
            service.end()
        except Exception as error:  # every service must be ended, whatever the first one says
            problems.append(error)
    if problems:
        raise problems[0]
    if made and placement.ON:
        procfs.wait_until(lambda: placement.allocated() == 0, 10, "all of the device's memory free again")


@pytest.fixture
def make_devices(tmp_path):
    """make_devices(kind="discrete", count=1, memory="8GiB", …): the GPUs of a machine; Service(env=….env) sees them."""
    made = []

    def make(*args, **kwargs):
        made.append(devices.Devices(tmp_path / f"gpus-{len(made)}", *args, **kwargs))
        return made[-1]

    return make


@pytest.fixture
def bare(make_service):
    """A running service without types or configured models."""
    return make_service().start()


def fault_type(service=None, **keys):
    """Configuration of a type that uses the fault executor."""
    return {"executor": str(FAULT_EXECUTOR), "models": ["small"], "workers": 1, **keys}


@pytest.fixture
def make_faulty(make_service):
    """make_faulty(types={"test": {...}}, **config): one model `small`, and types of the fault executor; not started."""

    def make(types=None, name="service", mib=TINY_MIB, **config):
        types = {"test": {}} if types is None else types
        service = make_service(name=name)
        models.write_plain(service.models / "small.safetensors", mib=mib)
        service.config["models"] = {"small": {"path": "small.safetensors"}, **config.pop("models", {})}
        service.config["types"] = {key: fault_type(**value) for key, value in types.items()}
        service.config.update(config)
        return service

    return make


@pytest.fixture
def faulty(make_faulty):
    """A running service with one type `test` of the fault executor, one worker, one model `small`."""
    service = make_faulty().start()
    service.wait_ready()
    return service


@pytest.fixture(scope="session")
def real_models(tmp_path_factory):
    """A folder with tiny models of all three types and the text encoder, made by resvisor-make-model."""
    folder = tmp_path_factory.mktemp("real-models")
    for kind in ("text-encoder", "image", "video", "audio"):
        make_model(kind, folder / f"{kind}.safetensors")
    return folder


def make_model(kind, path, size="8MiB", seed=1):
    subprocess.run(
        [str(MAKE_MODEL), kind, "--bytes", size, "--seed", str(seed), str(path)], check=True, stdin=subprocess.DEVNULL
    )


@pytest.fixture
def make_three(make_service, real_models):
    """make_three(**config): image, video and audio with their real executors; not started."""

    def make(name="service", workers=1, **config):
        service = make_service(name=name)
        service.config["model_folders"] = [str(real_models)]
        names = ("text-encoder", *THREE_TYPES)
        service.config["models"] = {kind: {"path": f"{kind}.safetensors"} for kind in names}
        service.config["types"] = {
            kind: {"executor": kind, "models": [kind, "text-encoder"], "workers": workers} for kind in THREE_TYPES
        }
        service.config.update(config)
        return service

    return make


@pytest.fixture
def three(make_three):
    """A running service with the three shipped executors on tiny models."""
    service = make_three().start()
    service.wait_ready()
    return service


class Gate:
    """A FIFO at which a job of the fault executor waits: the barrier of the tests."""

    def __init__(self, path):
        self.path = path
        self.fd = -1
        os.mkfifo(path)

    def wait_reached(self, timeout=30):
        """Waits until a job stands at the gate."""

        def reached():
            try:
                fd = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                return False
            self.close()
            self.fd = fd  # kept: a FIFO without a writer would look ended to the job
            return True

        procfs.wait_until(reached, timeout, f"a job at {self.path}")

    def open(self):
        """Lets the job that stands there go on."""
        if self.fd < 0:
            self.wait_reached()
        os.write(self.fd, b"x")

    def close(self):
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


@pytest.fixture
def make_gate(tmp_path):
    made = []

    def make():
        made.append(Gate(tmp_path / f"gate-{len(made)}"))
        return made[-1]

    yield make
    for gate in made:
        gate.close()


@pytest.fixture
def gate(make_gate):
    return make_gate()


@pytest.fixture
def standin(tmp_path):
    """A script in place of resvisor-device, which says what a test wants it to say."""
    return DeviceStandIn(tmp_path)


@pytest.fixture
def make_standin(make_service, standin):
    """make_standin(**config): a service with the stand-in as its resvisor-device; not started."""

    def make(name="service", **config):
        return make_service(config, name=name, program=standin.program)

    return make
