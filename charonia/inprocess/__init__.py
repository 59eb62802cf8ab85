"""Triton's in-process Python API (`tritonserver`): a server that this program owns, asked without a protocol.

`import charonia.inprocess as tritonserver` is all that a program changes; docs/howto/inprocess.md says what differs.
It stands on `charonia.composition` and on the gateway, and may import both; nothing imports it.
Begin reading at `inprocess_server`, then `host`.
"""

from __future__ import annotations

from importlib.metadata import version as _version

from .dlpack_tensors import MemoryBuffer, Tensor
from .inprocess_server import ModelDictionary, Server
from .kinds import (
    AlreadyExistsError,
    DataType,
    DLDeviceType,
    InstanceGroupKind,
    InternalError,
    InvalidArgumentError,
    LogFormat,
    MemoryType,
    MetricFormat,
    MetricKind,
    ModelBatchFlag,
    ModelControlMode,
    ModelTxnPropertyFlag,
    NotFoundError,
    RateLimitMode,
    RequestFlag,
    TritonError,
    UnavailableError,
    UnknownError,
    UnsupportedError,
)
from .models import AsyncResponseIterator, InferenceRequest, InferenceResponse, Model, ResponseIterator
from .options import ModelLoadDeviceLimit, Options, RateLimiterResource
from .program_metrics import Metric, MetricFamily

__all__ = [
    "AlreadyExistsError",
    "AsyncResponseIterator",
    "DLDeviceType",
    "DataType",
    "InferenceRequest",
    "InferenceResponse",
    "InstanceGroupKind",
    "InternalError",
    "InvalidArgumentError",
    "LogFormat",
    "MemoryBuffer",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricFormat",
    "MetricKind",
    "Model",
    "ModelBatchFlag",
    "ModelControlMode",
    "ModelDictionary",
    "ModelLoadDeviceLimit",
    "ModelTxnPropertyFlag",
    "NotFoundError",
    "Options",
    "RateLimitMode",
    "RateLimiterResource",
    "RequestFlag",
    "ResponseIterator",
    "Server",
    "Tensor",
    "TritonError",
    "UnavailableError",
    "UnknownError",
    "UnsupportedError",
]

__version__ = _version("charonia")
