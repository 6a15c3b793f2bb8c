"""The codes of the error table. Made from proto/rpc.proto; a test compares them."""

import enum


class ErrorCode(enum.IntEnum):
    """What went wrong, as docs/errors.md lists it."""

    OK = 0
    INTERNAL = 1
    BAD_REQUEST = 2
    BAD_VERSION = 3
    UNAUTHENTICATED = 4
    NOT_PERMITTED = 5
    NO_SUCH_MODEL = 6
    NO_SUCH_TYPE = 7
    NO_SUCH_JOB = 8
    NO_SUCH_RESULT = 9
    JOB_EXISTS = 10
    QUEUE_FULL = 11
    TYPE_FAILED = 12
    DEADLINE = 13
    CANCELLED = 14
    JOB_FAILED = 15
    WORKER_DIED = 16
    JOB_LOST = 17
    QUARANTINED = 18
    MODEL_INVALID = 19
    MODEL_CHANGED = 20
    MODEL_IN_USE = 21
    MODEL_PINNED = 22
    FILE = 23
    OVER_BUDGET = 24
    NO_MEMORY = 25
    TOO_LARGE = 26
    LIMIT = 27
    SHUTTING_DOWN = 28
    NOT_READY = 29
    NOT_RUNNING = 30
    ALREADY_RUNNING = 31
    UNSUPPORTED = 32
    CONFIG = 33
    USAGE = 34
    PORT_TAKEN = 35
    FILE_DAMAGED = 36
    NO_SUCH_DEVICE = 37
    DEVICE = 38
    DEVICE_LOST = 39
