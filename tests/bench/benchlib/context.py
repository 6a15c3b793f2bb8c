"""What the rows share: programs, models, a running resvisor."""

import contextlib
import os
import pathlib
import shutil

from harness import procfs
from harness.protos import rpc_pb2
from harness.service import BUILD, MAKE_MODEL, PROGRAM, Service

from .measure import HERE, MIB, Helper, drop_cache, run, run_json, say, wait_until, warm_cache

PROGRAMS = BUILD / "bench"
HTTP_BENCH, GRAPH_BENCH = PROGRAMS / "bench_http", PROGRAMS / "bench_graph"
CLIENT, LOADER_BENCH, RPC_BENCH = PROGRAMS / "bench_client", PROGRAMS / "bench_loader", PROGRAMS / "bench_rpc"
EXECUTOR = PROGRAMS / "bench_executor.so"
TOUCH_LIBRARY = PROGRAMS / "libbench_touch.so"
LOADER = BUILD / "libexec" / "resvisor" / "resvisor-loader"
WORKER = BUILD / "bin" / "resvisor-worker"
TENSORS = 1000
LOAD_S = 600


class Context:
    def __init__(self, work, quick, rounds=None):
        self.work, self.quick, self.rounds = pathlib.Path(work), quick, rounds
        self.models = self.work / "models"
        self.models.mkdir(parents=True, exist_ok=True)
        self.missing = {}  # alternative: why it is not there
        self.versions = {}

    def close(self):
        shutil.rmtree(self.work, ignore_errors=True)

    # ---- models ----

    def model(self, size, kind="plain", name=None):
        """A model file of about so many bytes, made once, clean (on the disk)."""
        path = self.models / f"{name or kind}-{size}.safetensors"
        if not path.exists():
            say(f"makes {path.name} ({size / MIB:.0f} MiB)")
            extra = ["--tensors", TENSORS] if kind == "plain" else []
            run([MAKE_MODEL, kind, *extra, "--bytes", size, path])
            drop_cache(path)
        return path

    def fits(self, size):
        """Memory for the model once (a resident arena) and for the rest of the machine, and disk for its file."""
        from .measure import GIB, mem_available

        disk = shutil.disk_usage(self.models).free
        return mem_available() > size + 3 * GIB and disk > size + 2 * GIB

    # ---- a running resvisor ----

    @contextlib.contextmanager
    def service(self, **config):
        folder = self.work / "service"
        shutil.rmtree(folder, ignore_errors=True)
        service = Service(folder, {"model_folders": [str(self.models)], "pool": {"budget": "95%"}, **config})
        service.start(timeout=LOAD_S)
        try:
            service.wait_ready(timeout=LOAD_S)
            yield service
        finally:
            service.end()

    @staticmethod
    def socket(service):
        return service.runtime / "control" / "resvisor.sock"

    @staticmethod
    def rpc_address(service):
        return f"ipc://{service.runtime / 'rpc' / 'rpc.ipc'}"

    @staticmethod
    def load(service, path):
        return service.control.model(rpc_pb2.MODEL_LOAD, path, timeout=LOAD_S)

    @staticmethod
    def unload(service, path):
        """Waits for the end of leases that are just ending: a lease lives as long as its connection."""

        def unloaded():
            from harness.control import Refused

            try:
                service.control.model(rpc_pb2.MODEL_UNLOAD, path, timeout=LOAD_S)
            except Refused as error:
                if error.code == rpc_pb2.ERROR_MODEL_IN_USE:
                    return False
                raise
            return True

        wait_until(unloaded, 30, f"{path} unloaded")

    @staticmethod
    def service_cpu(service):
        """CPU seconds of keeper, supervisor and of all children that have ended (loaders among them)."""
        table = procfs.parents()
        wait_until(
            lambda: not any(b"resvisor-loader" in procfs.read(pid, "cmdline")
                            for pid in procfs.descendants(service.keeper_pid, procfs.parents())),
            30, "the loader reaped",
        )  # fmt: skip
        del table
        ticks = 0
        for pid, fields in ((service.keeper_pid, (11, 12, 13, 14)), (service.status().supervisor_pid, (11, 12))):
            text = procfs.read(pid, "stat")
            values = text[text.rindex(b")") + 2 :].split()
            ticks += sum(int(values[i]) for i in fields)
        return ticks / os.sysconf("SC_CLK_TCK")

    # ---- alternatives ----

    def alternative(self, name, path):
        """A Helper, or None when it is not there."""
        import sys

        if name in self.missing:
            return None
        try:
            helper = Helper([sys.executable, HERE / "benchlib" / "alternative.py", name, path, TOUCH_LIBRARY])
            self.versions[name] = helper.first["version"]
            return helper
        except (RuntimeError, OSError) as error:
            self.missing[name] = str(error).splitlines()[-1]
            say(f"{name} is left out: {self.missing[name]}")
            return None

    def client(self, *arguments):
        return run_json([CLIENT, *arguments])


__all__ = ["Context", "warm_cache"]
