"""The template: a process that has imported what ComfyUI workers need, and from which the supervisor has them forked.

`python -m resvisor.comfyui.template DIRECTORY ARGS…`, started by the supervisor with descriptor 3. It serves one request
after the other. A worker is forked twice, so that the keeper, and not this process, is its parent:

    template forks middle; middle forks the worker and exits; template waits for middle, then lets the worker go

The worker then makes itself what the supervisor would have cloned and executed, and says who it is by its pidfd.
"""

import argparse
import atexit
import ctypes
import gc
import os
import pathlib
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from . import launcher, wire
from .preload import Preloaded, Unfit
from .report import log

CONTROL_FD = 3
EXIT_OF_NO_USE = 78  # the supervisor makes no other one by itself
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
NAME = "rv-template"  # as ps shows it; at most 15 bytes
INCARNATION = b"RESVISOR_INCARNATION="
INCARNATION_DIGITS = 20

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Request:
    """TemplateFork"""

    id: int
    worker: str
    keeper: int
    incarnation: int
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    umask: int
    limits: list[tuple[int, int, int]]
    fds: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, frame: wire.Fields, fds: list[int]) -> "Request":
        body = wire.decode(wire.texts(frame, wire.TEMPLATE_FORK)[-1])
        limits = [wire.decode(limit) for limit in wire.texts(body, 8)]
        pairs = [os.fsdecode(text).partition("=") for text in wire.texts(body, 5)]
        variables = [os.fsdecode(text) for text in wire.texts(body, 9)]
        if len(fds) != 2 + len(variables):
            raise wire.Malformed(f"{len(fds)} descriptors")
        environment = {key: value for key, equal, value in pairs if equal}
        environment.update(zip(variables, map(str, fds[2:]), strict=True))
        return cls(
            id=wire.number(frame, wire.FRAME_ID),
            worker=wire.texts(body, 1)[-1].decode(),
            keeper=wire.number(body, 2),
            incarnation=wire.number(body, 3),
            arguments=[os.fsdecode(text) for text in wire.texts(body, 4)],
            environment=environment,
            directory=os.fsdecode(wire.texts(body, 6)[-1]),
            umask=wire.number(body, 7),
            limits=[(wire.number(found, 1), wire.number(found, 2), wire.number(found, 3)) for found in limits],
            fds=fds,
        )


# ---- the template's side ----


def _fork() -> bool:
    """True in the worker, which has been let go. In the template False, once that is so. Unfit if nothing came of it."""
    go, let_go = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            if os.fork() != 0:
                os._exit(0)
            os.setpgid(0, 0)  # the template's end is none of ours from here on
            os.close(let_go)
            # Nothing to read: the template has died, or does not want us.
            if os.read(go, 1) != b"g":
                os._exit(1)
            os.close(go)
            return True
        except OSError:
            os._exit(1)
    os.close(go)
    try:
        _, status = os.waitpid(middle, 0)
        if status == 0:
            os.write(let_go, b"g")  # a worker that was killed meanwhile is seen by its channel
            return False
    except BrokenPipeError:
        return False
    finally:
        os.close(let_go)
    code = os.waitstatus_to_exitcode(status)
    raise Unfit(f"the process between template and worker was killed by signal {-code}" if code < 0 else "no process could be forked")


def serve(control: socket.socket, preloaded: Preloaded) -> Request | None:
    """Answers requests. The request that this process is the worker of; None = the supervisor has gone."""
    while (received := wire.receive(control)) is not None:
        frame, fds = received
        if wire.TEMPLATE_FORK not in frame:
            for fd in fds:
                os.close(fd)
            continue
        request = Request.read(frame, fds)
        code, refusal, useless = wire.ERROR_INTERNAL, "", False
        try:
            changed = preloaded.files.changed()
            if changed:
                code, refusal = wire.ERROR_NOT_READY, changed
            else:
                useless = True
                preloaded.check()
                useless = False
                if _fork():
                    return request
        except (Unfit, OSError) as error:
            refusal = str(error)
        if refusal:  # before its channel is closed, which says only that there is no worker
            wire.send(control, wire.ERROR, [(1, code), (2, refusal)], request.id)
        for fd in request.fds:
            os.close(fd)
        if changed:
            return None
        if useless:
            raise Unfit(refusal)
    return None


# ---- the worker's side ----


def _die_with_keeper(keeper: int) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != keeper:  # looked at after it: the keeper may have died in between
        os._exit(1)


def _regions() -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the kernel looks for the arguments and the environment that it shows in /proc."""
    with open("/proc/self/stat") as stat:
        fields = [int(text) for text in stat.read().rpartition(")")[2].split()[1:]]
    return (fields[44], fields[45]), (fields[46], fields[47])


def _show(request: Request, comm: bytes) -> None:
    """What others see of a process is what it was started with: here, the template's. So it is written over in place."""
    _libc.prctl(PR_SET_NAME, comm, 0, 0, 0)
    arguments, environment = _regions()
    size = arguments[1] - arguments[0]
    if arguments[0] and size > 0:
        text = f"python\0-m\0resvisor.comfyui\0{request.worker}".encode()[: size - 1]
        ctypes.memmove(arguments[0], text.ljust(size, b"\0"), size)
    size = environment[1] - environment[0]
    at = ctypes.string_at(environment[0], size).find(INCARNATION) if environment[0] and size > 0 else -1
    if at >= 0:  # by it the supervisor knows what a dead worker has left behind
        digits = b"%0*d" % (INCARNATION_DIGITS, request.incarnation)
        ctypes.memmove(environment[0] + at + len(INCARNATION), digits, INCARNATION_DIGITS)


def _take_place(control: socket.socket, request: Request) -> None:
    """Descriptors 0 to 3."""
    channel, output = request.fds[:2]
    control.detach()
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((null, 0), (output, 1), (output, 2), (channel, CONTROL_FD)):
        os.dup2(source, target, inheritable=target != CONTROL_FD)
    for fd in (null, output, channel):
        os.close(fd)


def become(control: socket.socket, request: Request, preloaded: Preloaded, handlers: dict[int, object], comm: bytes) -> None:
    """Makes this fork the process that the supervisor would have cloned and executed, and says who it is."""
    _take_place(control, request)
    _die_with_keeper(request.keeper)
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler and callable(handler):
            signal.signal(number, handler)
        elif signal.getsignal(number) is not handler:
            signal.signal(number, handler if isinstance(handler, signal.Handlers) else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    coerced = {name: os.environ[name] for name in ("LC_CTYPE",) if name in os.environ}  # Python sets it where there is no locale
    os.environ.clear()
    os.environ.update(coerced | request.environment)
    os.umask(request.umask)
    for kind, soft, hard in request.limits:
        resource.setrlimit(kind, tuple(-1 if limit == 2**64 - 1 else limit for limit in (soft, hard)))  # type: ignore[arg-type]
    os.chdir(request.directory)
    _show(request, comm)
    preloaded.renew()
    pidfd = os.pidfd_open(os.getpid())
    with socket.socket(fileno=os.dup(CONTROL_FD)) as channel:
        wire.send(channel, wire.WORKER_BORN, [(1, os.getpid())], fds=[pidfd])
    os.close(pidfd)


def _end(run: Callable[[], int]) -> NoReturn:
    """Ends as Python would, but does not take modules apart: what is frozen would be looked at, and so be copied."""
    try:
        code: object = run()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python does: waits for threads that are no daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code or 0)


# ---- the process ----


def _handlers() -> dict[int, object]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m resvisor.comfyui.template", description="Has ComfyUI imported for workers; resvisor starts it."
    )
    parser.add_argument("--pooling", default="preferred", choices=("preferred", "required", "off"))
    parser.add_argument("directory", metavar="DIRECTORY")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    options = parser.parse_args(arguments)
    handlers = _handlers()
    with open("/proc/self/comm", "rb") as file:
        comm = file.read().strip()
    _libc.prctl(PR_SET_NAME, NAME.encode(), 0, 0, 0)
    control = socket.socket(fileno=CONTROL_FD)
    os.set_inheritable(CONTROL_FD, False)
    wire.send(control, wire.HELLO, [(1, wire.VERSION), (2, wire.ROLE_TEMPLATE), (3, os.getpid()), (4, NAME)])
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    request = None
    try:
        directory = pathlib.Path(os.path.abspath(options.directory))
        preloaded = Preloaded(directory, launcher.own_arguments(options.arguments), options.pooling)
        preloaded.check()
        gc.collect()
        gc.freeze()  # what the collector does not touch stays shared with the workers
        wire.send(control, wire.TEMPLATE_READY, [(1, str(preloaded))])
        sys.stdout.flush()
        sys.stderr.flush()
        request = serve(control, preloaded)
        if request is None:
            return 0
    except (Unfit, SystemExit) as error:
        log(f"template: of no use: {error}")
        wire.send(control, wire.ERROR, [(1, wire.ERROR_INTERNAL), (2, str(error))])
        return EXIT_OF_NO_USE
    try:
        become(control, request, preloaded, handlers, comm)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    return _end(lambda: launcher.main(request.arguments, preloaded))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
