"""A worker in Python: resvisor starts the script, hands it jobs, and takes the results.

    from resvisor.worker import Worker

    for job in Worker.open():
        with job:
            weights = job.models["flux"].torch()
            picture = paint(weights, job.params["prompt"], step=lambda i: job.progress(i, 20, "painting"))
            job.add_output("image.png", picture, "image/png")

docs/python.md explains it.
"""

import atexit
import builtins
import ctypes
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType

from ._codes import ErrorCode
from ._errors import Cancelled, Error, check
from ._lease import Connection, Lease, MappingMode, _Handle, set_default_connection
from ._library import Failure, library

MODELS_ENVIRONMENT = "RESVISOR_MODELS"
MAPPING_ENVIRONMENT = "RESVISOR_MAPPING"
_FAILED = int(ErrorCode.JOB_FAILED)


class JobCancelled(Cancelled):
    """Raised by Job.progress when the job was cancelled: leave the job."""


class Job:
    """One job. `with job:` ends it: finished at the end of the block, failed with the text of an exception.

    Ordinary exceptions stop at the `with` and are printed to the worker's log; KeyboardInterrupt and SystemExit fail the
    job and go on, so that they end the worker. finish() and fail() end a job by hand; then there is nothing left to end.
    """

    id: str
    model: str  #: the model that the job names; may be empty
    params: dict[str, str]
    payload: bytes
    models: dict[str, Lease]  #: the worker's models, and the job's own, of their newest generations

    def __init__(self, pointer: int) -> None:
        lib = library()
        self._pointer: int | None = pointer
        self.id = lib.rv_job_id(pointer).decode()
        self.model = lib.rv_job_model(pointer).decode()
        self.params = {}
        key, value = ctypes.c_char_p(), ctypes.c_char_p()
        for i in range(lib.rv_job_param_count(pointer)):
            lib.rv_job_param_at(pointer, i, key, value)
            self.params[(key.value or b"").decode()] = (value.value or b"").decode()
        size = ctypes.c_size_t()
        data = lib.rv_job_payload(pointer, size)
        self.payload = ctypes.string_at(data, size.value) if size.value else b""
        self.models = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<resvisor.worker.Job {self.id!r}{', ended' if self.ended else ''}>"

    @property
    def ended(self) -> bool:
        return self._pointer is None

    def _running(self) -> int:
        if self._pointer is None:
            raise ValueError(f"job {self.id} has ended")
        return self._pointer

    @property
    def cancelled(self) -> bool:
        with self._lock:
            return bool(library().rv_job_cancelled(self._running()))

    def progress(self, done: int, total: int = 0, text: str = "") -> None:
        """Says how far the job is; the sign of life that stall_timeout waits for. JobCancelled if it was cancelled."""
        with self._lock:
            going = library().rv_job_progress(self._running(), done, total, text.encode(errors="replace") or None)
        if not going:
            raise JobCancelled(f"job {self.id} was cancelled", ErrorCode.CANCELLED)

    def add_output(
        self, name: str, data: "bytes | bytearray | memoryview | str", content_type: str = "application/octet-stream"
    ) -> None:
        """Adds an output: a file name, its bytes (a text is sent as UTF-8), its MIME type. At most 8 of 4 GiB."""
        view = memoryview(data.encode() if isinstance(data, str) else data).cast("B")
        failure = Failure()
        keep: object
        if view.readonly:
            # a ctypes array needs a writable buffer; bytes lend their address, anything else is copied
            keep = data if isinstance(data, bytes) else bytes(view)
            address = ctypes.cast(ctypes.c_char_p(keep), ctypes.c_void_p).value
        else:
            keep = (ctypes.c_ubyte * len(view)).from_buffer(view)
            address = ctypes.addressof(keep)
        with self._lock:
            result = library().rv_job_add_output(
                self._running(), name.encode(), content_type.encode(), address, len(view), failure
            )
        del keep
        check(result, failure, f"output {name}")

    def count_load(self, load_us: int, read_bytes: int) -> None:
        """Reports what the job read from files by itself; what attach read is counted already."""
        with self._lock:
            library().rv_job_count_load(self._running(), load_us, read_bytes)

    def finish(self) -> None:
        """Ends the job with its outputs."""
        with self._lock:
            check(library().rv_job_finish(self._running()), what=f"end of job {self.id}")
            self._pointer = None
        self.models = {}

    def fail(self, message: str, code: int = _FAILED) -> None:
        """Ends the job as failed. A cancelled job ends as cancelled whatever the code, unless it is another one."""
        if code == _FAILED:
            code = 0  # the library then tells a cancelled job from a failed one
        with self._lock:
            check(library().rv_job_fail(self._running(), code, message.encode(errors="replace")), what=f"end of {self.id}")
            self._pointer = None
        self.models = {}

    def __enter__(self) -> "Job":
        self._running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if os.getpid() != self._process:  # a forked child leaves the block: the job is its parent's
            return False
        if error is None:
            if not self.ended:
                self.finish()
            return False
        if not isinstance(error, Exception):
            if not self.ended:
                self.fail(f"the worker ended in this job: {_describe(error)}")
            return False
        if not isinstance(error, JobCancelled):
            traceback.print_exception(kind, error, trace, file=sys.stderr)
        if not self.ended:
            self.fail(_describe(error), error.code if isinstance(error, Error) else _FAILED)
        return True


def _describe(error: BaseException) -> str:
    if isinstance(error, Error):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Worker:
    """The connection of a process that resvisor has started as a worker (types.NAME with `kind: python`).

    Iterating gives the jobs, and ends when the worker shall end. The first iteration says that the worker is ready: do
    before it what must be done before the first job.
    """

    id: str  #: "image/0"
    type: str  #: "image"
    connection: Connection

    def __init__(self, pointer: int, models: Sequence[str], mapping: MappingMode) -> None:
        lib = library()
        self._pointer: int | None = pointer
        self._next = _Next(pointer)
        self._mapping: MappingMode = mapping
        self._names = list(models)
        self._is_ready = False
        self._last: Job | None = None
        self.id = lib.rv_worker_id(pointer).decode()
        self.type = lib.rv_worker_type(pointer).decode()
        self.connection = Connection(_Handle(lib.rv_worker_connection(pointer), owned=False))
        self.models: dict[str, Lease] = {}
        set_default_connection(self.connection)

    @classmethod
    def open(cls, models: Sequence[str] | None = None, *, mapping: MappingMode | None = None) -> "Worker":
        """Opens the worker and attaches its models; None = those of the configuration (types.NAME.models, mapping).

        Outside a worker: resvisor.Error with the code USAGE.
        """
        failure, pointer = Failure(), ctypes.c_void_p()
        if models is None:
            models = [name for name in os.environ.get(MODELS_ENVIRONMENT, "").split(",") if name]
        if mapping is None:
            mapping = "shared" if os.environ.get(MAPPING_ENVIRONMENT) == "shared" else "auto"
        check(library().rv_worker_open(pointer, failure), failure, "worker")
        assert pointer.value is not None
        worker = cls(pointer.value, models, mapping)
        atexit.register(_close_at_exit, weakref.ref(worker))
        for name in worker._names:
            worker._refresh(name)
        return worker

    def _refresh(self, name: str) -> Lease:
        """The model's newest generation. One that is still the same keeps its mapping: its pages are touched already."""
        lease = self.connection.attach(name, mapping=self._mapping)
        old = self.models.get(name)
        if old is not None and not old.closed and old.generation == lease.generation:
            lease.close()
            return old
        self.models[name] = lease
        return lease

    def ready(self, detail: str = "") -> None:
        """Says that the worker can take jobs; iterating does it by itself."""
        failure = Failure()
        if self._pointer is None:
            raise ValueError("the worker is closed")
        size = sum(lease.bytes for lease in self.models.values())
        text = detail or f"{len(self.models)} model{'' if len(self.models) == 1 else 's'}, {size / 2**20:.1f} MiB mapped"
        check(library().rv_worker_ready(self._pointer, text.encode(errors="replace"), failure), failure, "ready")
        self._is_ready = True

    def _prepare(self, job: Job) -> bool:
        """Gives the job its models; False = they cannot be had, and the job has failed."""
        try:
            if job.model and job.model not in self._names:
                job.models[job.model] = self.connection.attach(job.model, mapping=self._mapping)
            for name in self._names:
                job.models[name] = self._refresh(name)
            return True
        except Error as error:
            print(f"job {job.id} failed: {error}", file=sys.stderr, flush=True)
            job.fail(str(error), error.code)
            return False

    def next(self) -> Job | None:
        """Waits for the next job; None = the worker shall end."""
        if self._last is not None and not self._last.ended:
            self._last.fail("the worker's script went on to the next job without ending this one; use `with job:`")
        if self._pointer is None:
            return None
        if not self._is_ready:
            self.ready()
        while (pointer := self._next.wait()) is not None:
            job = self._last = Job(pointer)
            if self._prepare(job):
                return job
        return None

    def __iter__(self) -> Iterator[Job]:
        while (job := self.next()) is not None:
            yield job
            del job  # its leases end with it
        self.close()

    def close(self) -> None:
        """Lets the router take the last results (up to 1 s) and ends the worker; again is fine."""
        pointer, self._pointer = self._pointer, None
        self.models = {}
        if pointer is None:
            return
        self.connection.close()
        if not self._next.busy:  # else an interrupted wait still stands in the library: the process's end does it
            if self._last is not None:
                self._last._pointer = None  # the library frees it
            library().rv_worker_close(pointer)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: "builtins.type[BaseException] | None", error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close_at_exit(reference: "weakref.ref[Worker]") -> None:
    worker = reference()
    if worker is not None:
        worker.close()


class _Next:
    """rv_worker_next on a thread of its own, so that the main thread's wait can be interrupted by a signal's handler."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.busy = False
        self._asked = threading.Semaphore(0)
        self._answered = threading.Semaphore(0)
        self._result = 0
        self._job = ctypes.c_void_p()
        self._thread: threading.Thread | None = None

    def _serve(self) -> None:
        while True:
            self._asked.acquire()
            self._result = library().rv_worker_next(self.worker, self._job)
            self._answered.release()
            if self._result <= 0:
                return

    def wait(self) -> int | None:
        """The next job's pointer; None = no more."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="resvisor-next", daemon=True)
            self._thread.start()
        if not self.busy:  # a wait that was interrupted is taken up again
            self.busy = True
            self._asked.release()
        self._answered.acquire()
        self.busy = False
        check(self._result, what="the next job")
        return self._job.value if self._result > 0 else None
