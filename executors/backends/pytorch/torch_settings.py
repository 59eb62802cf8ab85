"""The parameters of a PyTorch model: Triton's words, and two of our own. Imports no torch.

Some of PyTorch's switches hold for a whole process: the model that is loaded first decides, as in Triton.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from charonia.backend import InstanceSpec, ModelSource
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument, Unsupported

from .model_archives import Form

AUTOCAST = "charonia.autocast"
CHANNELS_LAST = "charonia.channels_last"
OWN_STREAM = "charonia.own_stream"
COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"

_COMPILE_OPTIONS = {
    "fullgraph": bool,
    "dynamic": bool,
    "backend": str,
    "mode": str,
    "options": dict,
    "disable": bool,
}
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """How instances of a model run."""

    threads: int
    """Of one execution, within its operators."""
    shares_weights: bool
    inference_mode: bool
    optimizes: bool
    """Whether TorchScript is compiled further in its first executions."""
    channels_last: bool
    autocast: str | None
    """The name of the type that operators compute in where that is safe, as torch has it."""
    compile_options: dict[str, Any] | None
    own_stream: bool = False
    """Whether an instance on a GPU has a stream of its own there, so that instances overlap."""

    @staticmethod
    def of(spec: InstanceSpec, form: Form) -> TorchSettings:
        """Read the parameters. Raises `InvalidArgument` or `Unsupported` for what makes no sense."""
        source = spec.source
        sharers = sum(group.count for group in spec.interface.instance_groups if group.kind == "KIND_CPU")
        cores = len(spec.cores) or len(os.sched_getaffinity(0))
        written = source.integer("NUM_THREADS") or source.integer("INTRA_OP_THREAD_COUNT")
        precision = (source.parameter(AUTOCAST) or "").lower()
        if precision not in ("", *_PRECISIONS):
            raise InvalidArgument(
                f"parameter '{AUTOCAST}' of '{source.name}' must be {' or '.join(_PRECISIONS)}, got '{precision}'"
            )
        if precision and form is Form.PACKAGE:
            raise Unsupported(
                f"model '{source.name}': '{AUTOCAST}' has no effect on {form.value}; autocast before it is exported"
            )
        return TorchSettings(
            threads=written or max(1, cores // max(1, sharers)),
            shares_weights=bool(source.flag("ENABLE_WEIGHT_SHARING")),
            inference_mode=source.flag("INFERENCE_MODE") is not False,
            optimizes=not source.flag("DISABLE_OPTIMIZED_EXECUTION"),
            channels_last=bool(source.flag(CHANNELS_LAST)),
            autocast=_PRECISIONS.get(precision),
            compile_options=_compile_options(source, form),
            own_stream=bool(source.flag(OWN_STREAM)) and spec.kind == "GPU",
        )


def set_process_switches(torch: Any, source: ModelSource) -> None:
    """Set the switches of the whole process that a model's parameters name."""
    executor, profiling, fuser = (
        source.flag(key) for key in ("ENABLE_JIT_EXECUTOR", "ENABLE_JIT_PROFILING", "ENABLE_TENSOR_FUSER")
    )
    if executor is not None:
        torch._C._jit_set_profiling_executor(executor)
    if profiling is not None:
        torch._C._jit_set_profiling_mode(profiling)
    if fuser is not None:
        torch._C._jit_set_texpr_fuser_enabled(fuser)
    if source.flag("DISABLE_CUDNN"):
        torch.backends.cudnn.enabled = False
    between = source.integer("NUM_INTEROP_THREADS") or source.integer("INTER_OP_THREAD_COUNT")
    if between and between != torch.get_num_interop_threads():
        try:
            torch.set_num_interop_threads(between)
        except RuntimeError:
            _log.warning(
                "model '%s': the threads between operators stay %d in this process: they were set, or used, before",
                source.name,
                torch.get_num_interop_threads(),
            )


def torch_type(torch: Any, datatype: DataType) -> Any:
    """PyTorch's type of elements of a datatype that is none of strings."""
    if datatype is DataType.BF16:
        return torch.bfloat16
    return torch.from_numpy(np.empty(0, datatype.numpy)).dtype


def _compile_options(source: ModelSource, form: Form) -> dict[str, Any] | None:
    written = source.parameter(COMPILE)
    if written is None:
        return None
    if form is not Form.CODE:
        raise Unsupported(f"model '{source.name}': '{COMPILE}' compiles a class, and the model is {form.value}")
    try:
        options = json.loads(written)
    except ValueError as error:
        raise InvalidArgument(f"parameter '{COMPILE}' of '{source.name}' must be JSON: {error}") from None
    if not isinstance(options, dict):
        raise InvalidArgument(f"parameter '{COMPILE}' of '{source.name}' must be a JSON object, got '{written}'")
    for key, value in options.items():
        kind = _COMPILE_OPTIONS.get(key)
        if kind is None or not isinstance(value, kind):
            known = ", ".join(f"{word} ({kind.__name__})" for word, kind in _COMPILE_OPTIONS.items())
            raise InvalidArgument(
                f"parameter '{COMPILE}' of '{source.name}': '{key}': {json.dumps(value)} is none of {known}"
            )
    if not source.config.model_warmup and not options.get("disable"):
        raise InvalidArgument(
            f"model '{source.name}': '{COMPILE}' compiles in the first execution, for seconds or minutes: "
            "add model_warmup, so that no request waits for it"
        )
    return options
