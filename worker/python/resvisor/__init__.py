"""Use model weights that resvisor keeps in memory: no copy, and no read if the model is resident.

    with resvisor.connect() as connection, connection.attach("flux") as lease:
        weights = lease.torch()

docs/python.md explains it.
"""

from ._codes import ErrorCode
from ._errors import (
    Cancelled,
    Deadline,
    DeviceFailed,
    DeviceLost,
    Error,
    FileUnreadable,
    ModelChanged,
    ModelInvalid,
    NoMemory,
    NoSuchDevice,
    NoSuchModel,
    NotPermitted,
    NotRunning,
    OverBudget,
    ShuttingDown,
    Unsupported,
)
from ._files import Fallback, fallbacks
from ._lease import Connection, Lease, MappingMode, Tensor, connect, default_connection, set_default_connection

__version__ = "0.1.0"

__all__ = [
    "Cancelled",
    "Connection",
    "Deadline",
    "DeviceFailed",
    "DeviceLost",
    "Error",
    "ErrorCode",
    "Fallback",
    "FileUnreadable",
    "Lease",
    "MappingMode",
    "ModelChanged",
    "ModelInvalid",
    "NoMemory",
    "NoSuchDevice",
    "NoSuchModel",
    "NotPermitted",
    "NotRunning",
    "OverBudget",
    "ShuttingDown",
    "Tensor",
    "Unsupported",
    "connect",
    "default_connection",
    "fallbacks",
    "set_default_connection",
]
