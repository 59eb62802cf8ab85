"""The words of Triton's in-process Python API: enumerations with its names and numbers, its errors, and how ours map.

They print as there, since error texts name them.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

from charonia.errors import CharoniaError, ErrorCode


class _Word(IntEnum):
    def __str__(self) -> str:
        return f"TRITONSERVER_{type(self).__name__}.{self.name}"

    def __repr__(self) -> str:
        return f"<{self}: {self.value}>"

    def __format__(self, form: str) -> str:
        return format(str(self), form)


class DataType(_Word):
    INVALID = 0
    BOOL = 1
    UINT8 = 2
    UINT16 = 3
    UINT32 = 4
    UINT64 = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FP16 = 10
    FP32 = 11
    FP64 = 12
    BYTES = 13
    BF16 = 14


class MemoryType(_Word):
    CPU = 0
    CPU_PINNED = 1
    GPU = 2


class DLDeviceType(IntEnum):
    """Devices as DLPack numbers them."""

    kDLCPU = 1
    kDLCUDA = 2
    kDLCUDAHost = 3
    kDLOpenCL = 4
    kDLVulkan = 7
    kDLMetal = 8
    kDLVPI = 9
    kDLROCM = 10
    kDLROCMHost = 11
    kDLExtDev = 12
    kDLCUDAManaged = 13
    kDLOneAPI = 14
    kDLWebGPU = 15
    kDLHexagon = 16


class InstanceGroupKind(_Word):
    AUTO = 0
    CPU = 1
    GPU = 2
    MODEL = 3


class LogFormat(_Word):
    DEFAULT = 0
    ISO8601 = 1


class MetricFormat(_Word):
    PROMETHEUS = 0


class MetricKind(_Word):
    COUNTER = 0
    GAUGE = 1


class ModelControlMode(_Word):
    NONE = 0
    POLL = 1
    EXPLICIT = 2


class RateLimitMode(_Word):
    OFF = 0
    EXEC_COUNT = 1


class ModelBatchFlag(_Word):
    UNKNOWN = 1
    FIRST_DIM = 2


class ModelTxnPropertyFlag(_Word):
    ONE_TO_ONE = 1
    DECOUPLED = 2


class RequestFlag(IntFlag):
    """What `InferenceRequest.flags` may say of a sequence's request."""

    SEQUENCE_START = 1
    SEQUENCE_END = 2


class TritonError(Exception):
    """Base of what the API raises. An error of a request's response has that response as its second argument."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UnknownError(TritonError):
    """Also of what Triton's API has no class for: a request that was cancelled."""


class InternalError(TritonError):
    pass


class NotFoundError(TritonError):
    pass


class InvalidArgumentError(TritonError):
    pass


class UnavailableError(TritonError):
    """Also of a bound that is reached and of a deadline that has passed."""


class UnsupportedError(TritonError):
    pass


class AlreadyExistsError(TritonError):
    pass


_CLASSES: dict[ErrorCode, type[TritonError]] = {
    ErrorCode.INTERNAL: InternalError,
    ErrorCode.NOT_FOUND: NotFoundError,
    ErrorCode.INVALID_ARG: InvalidArgumentError,
    ErrorCode.UNAVAILABLE: UnavailableError,
    ErrorCode.UNSUPPORTED: UnsupportedError,
    ErrorCode.ALREADY_EXISTS: AlreadyExistsError,
    ErrorCode.RESOURCE_EXHAUSTED: UnavailableError,
    ErrorCode.DEADLINE_EXCEEDED: UnavailableError,
}


def triton_error(error: CharoniaError) -> TritonError:
    """The same failure as this API raises it."""
    return _CLASSES.get(error.code, UnknownError)(error.message)
