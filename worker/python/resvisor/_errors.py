"""Errors of libresvisor as exceptions."""

import errno
import os

from ._codes import ErrorCode
from ._library import Failure


class Error(Exception):
    """What libresvisor or the supervisor refused, with a code of the error table (docs/errors.md).

    The subclasses below are for the codes that programs tell apart; any other code comes as Error itself.
    """

    code: ErrorCode
    message: str
    remedy: str

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL, remedy: str = "") -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message = message
        self.code = code
        self.remedy = remedy

    def __reduce__(self) -> tuple[type, tuple[str, ErrorCode, str]]:
        return type(self), (self.message, self.code, self.remedy)


class NotRunning(Error, ConnectionError):
    """Nothing listens at the socket, or the supervisor has ended."""


class NotPermitted(Error, PermissionError):
    """This user, path or process is not admitted."""


class NoSuchModel(Error, FileNotFoundError):
    """No model of that name, no file at that path."""


class ModelInvalid(Error, ValueError):
    """The model file is malformed, or memory differs from its digest; the message says where."""


class ModelChanged(Error):
    """The model file changed while it was read."""


class FileUnreadable(Error, OSError):
    """The file cannot be opened or read."""


class OverBudget(Error, MemoryError):
    """The model does not fit into the pool's budget."""


class NoMemory(Error, MemoryError):
    """The kernel gave no memory."""


class Deadline(Error, TimeoutError):
    """The time limit has passed."""


class Cancelled(Error):
    """Given up by the caller, or cancelled by a client."""


class Unsupported(Error):
    """Understood, but this version cannot do it."""


class NoSuchDevice(Error):
    """resvisor has no such device, or this process does not see it."""


class DeviceFailed(Error):
    """The driver of a device failed; the message has the call and its error."""


class DeviceLost(DeviceFailed):
    """The device is gone: whatever lay there is lost, and this process cannot use it any more."""


class ShuttingDown(Error, ConnectionError):
    """resvisor is stopping."""


_CLASSES: dict[ErrorCode, type[Error]] = {
    ErrorCode.NOT_RUNNING: NotRunning,
    ErrorCode.NOT_PERMITTED: NotPermitted,
    ErrorCode.NO_SUCH_MODEL: NoSuchModel,
    ErrorCode.MODEL_INVALID: ModelInvalid,
    ErrorCode.MODEL_CHANGED: ModelChanged,
    ErrorCode.FILE: FileUnreadable,
    ErrorCode.OVER_BUDGET: OverBudget,
    ErrorCode.NO_MEMORY: NoMemory,
    ErrorCode.DEADLINE: Deadline,
    ErrorCode.CANCELLED: Cancelled,
    ErrorCode.UNSUPPORTED: Unsupported,
    ErrorCode.SHUTTING_DOWN: ShuttingDown,
    ErrorCode.NO_SUCH_DEVICE: NoSuchDevice,
    ErrorCode.DEVICE: DeviceFailed,
    ErrorCode.DEVICE_LOST: DeviceLost,
}

# For functions that fill no rv_failure.
_CODES = {
    errno.EPERM: ErrorCode.NOT_PERMITTED,
    errno.EBADMSG: ErrorCode.MODEL_INVALID,
    errno.EOPNOTSUPP: ErrorCode.UNSUPPORTED,
    errno.ENOMEM: ErrorCode.NO_MEMORY,
    errno.ENOENT: ErrorCode.NO_SUCH_MODEL,
    errno.ECONNRESET: ErrorCode.NOT_RUNNING,
    errno.ENODEV: ErrorCode.NO_SUCH_DEVICE,
    errno.EIO: ErrorCode.DEVICE,
}


def make_error(message: str, code: int, remedy: str = "") -> Error:
    """The exception for a code; a code of a newer library comes as INTERNAL."""
    try:
        known = ErrorCode(code)
    except ValueError:
        known, message = ErrorCode.INTERNAL, f"{message} (code {code})"
    return _CLASSES.get(known, Error)(message, known, remedy)


def check(result: int, failure: Failure | None = None, what: str = "") -> None:
    """Raises what a negative result and its rv_failure mean."""
    if result >= 0:
        return
    if failure is not None and failure.code:
        raise make_error(
            failure.message.decode(errors="replace"), failure.code, failure.remedy.decode(errors="replace")
        )
    if result == -errno.EPERM:
        raise make_error(f"{what}: it belongs to another process, as after a fork", ErrorCode.NOT_PERMITTED)
    raise make_error(f"{what}: {os.strerror(-result)}", _CODES.get(-result, ErrorCode.INTERNAL))
