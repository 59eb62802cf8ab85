"""Maps a model configuration's `parameters` and `optimization` to onnxruntime's session, run and provider options.

Names follow Triton's onnxruntime backend, so that a repository works unchanged. Unknown parameters are ignored; a known
one with a bad value fails the load (`InvalidArgument`).
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument, Unsupported

_CUDA_KEYS = (
    "gpu_mem_limit",
    "arena_extend_strategy",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
    "do_copy_in_default_stream",
    "cudnn_conv1d_pad_to_nc1d",
    "enable_cuda_graph",
    "tunable_op_enable",
    "use_tf32",
)
_ENUMERATED = {
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
}
_SHRINKAGE = "memory.enable_memory_arena_shrinkage"


def intra_op_threads(source: ModelSource, sharers: int, cores: int) -> int:
    """The threads of one run: the configured number, else the cores divided by the instances that share them."""
    said = _value(source, "intra_op_thread_count")
    return max(1, cores // max(1, sharers)) if said is None else _integer(source, "intra_op_thread_count", said)


def session_options(ort: ModuleType, source: ModelSource, threads: int) -> Any:
    """Return `onnxruntime.SessionOptions`. `threads` 0 is the library's default: every physical core."""
    options: Any = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.graph_optimization_level = _graph_level(ort, source)
    if (inter := _value(source, "inter_op_thread_count")) is not None:
        options.inter_op_num_threads = _integer(source, "inter_op_thread_count", inter)
    if (mode := _value(source, "execution_mode")) is not None:
        parallel = _flag(source, "execution_mode", mode)
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    if (arena := _value(source, "enable_mem_arena")) is not None:
        options.enable_cpu_mem_arena = _flag(source, "enable_mem_arena", arena)
    if (pattern := _value(source, "enable_mem_pattern")) is not None:
        options.enable_mem_pattern = _flag(source, "enable_mem_pattern", pattern)
    for key, parameter in sorted(source.config.parameters.items()):
        if key.startswith(("session.", "optimization.", "ep.", "mlas.")):
            options.add_session_config_entry(key, parameter.string_value)
    for name in source.config.model_operations.op_library_filename:
        _register_operations(options, source, name)
    return options


def operations_path(source: ModelSource, name: str) -> str:
    """Return the path of a library of operators (C18): in the version's or the model's directory, else for the dynamic
    linker to find. Raises `InvalidArgument` for a relative path that leads out of the model.
    """
    if os.path.isabs(name):
        return name
    root = source.directory.resolve()
    for directory in (root / str(source.version), root):
        path = (directory / name).resolve()
        if path.is_file():
            if not path.is_relative_to(root):
                raise InvalidArgument(f"custom operator library '{name}' of model '{source.name}' is outside the model")
            return str(path)
    if "/" in name:
        raise InvalidArgument(f"custom operator library '{name}' of model '{source.name}' does not exist")
    return name


def _register_operations(options: Any, source: ModelSource, name: str) -> None:
    try:
        options.register_custom_ops_library(operations_path(source, name))
    except InvalidArgument:
        raise
    except Exception as error:
        raise InvalidArgument(
            f"custom operator library '{name}' of model '{source.name}' cannot be used: {error}"
        ) from None


def run_entries(source: ModelSource) -> list[tuple[str, str]]:
    """The configuration entries for every run."""
    shrinkage = _value(source, _SHRINKAGE)
    return [] if shrinkage is None else [(_SHRINKAGE, shrinkage)]


def cuda_provider_options(source: ModelSource, device_id: int) -> dict[str, str]:
    """The options of the CUDA provider on one device."""
    options = {"device_id": str(device_id)}
    for key in _CUDA_KEYS:
        said = _value(source, key)
        if said is not None:
            options[key] = _ENUMERATED.get(key, {}).get(said, said)
    return options


def accelerator_providers(ort: ModuleType, source: ModelSource, kind: str) -> list[tuple[str, dict[str, str]]]:
    """Return the providers of the configured execution accelerators for this kind of instance, in order (C15).

    Raises `InvalidArgument` for an unknown accelerator, `Unsupported` for one whose provider the installed library
    lacks.
    """
    accelerators = source.config.optimization.execution_accelerators
    on_gpu = kind == "GPU"
    written = accelerators.gpu_execution_accelerator if on_gpu else accelerators.cpu_execution_accelerator
    known = {"tensorrt": "TensorrtExecutionProvider"} if on_gpu else {"openvino": "OpenVINOExecutionProvider"}
    providers: list[tuple[str, dict[str, str]]] = []
    for entry in written:
        provider = known.get(entry.name)
        if provider is None:
            raise InvalidArgument(f"unknown Execution Accelerator '{entry.name}' is requested")
        if provider not in ort.get_available_providers():
            raise Unsupported(
                f"model '{source.name}' asks for the execution accelerator '{entry.name}', but the installed "
                f"onnxruntime has no {provider}"
            )
        parameters = dict(sorted(entry.parameters.items()))
        providers.append((provider, _tensorrt_options(source, parameters) if on_gpu else parameters))
    return providers


def _tensorrt_options(source: ModelSource, parameters: dict[str, str]) -> dict[str, str]:
    """Translate Triton's parameters of the TensorRT accelerator to the library's; those with prefix `trt_` are kept."""
    options: dict[str, str] = {}
    for key, value in parameters.items():
        if key == "precision_mode" and value in ("FP16", "INT8"):
            options[f"trt_{value.lower()}_enable"] = "True"
        elif key == "precision_mode" and value == "FP32":
            continue
        elif key == "max_workspace_size_bytes":
            options["trt_max_workspace_size"] = value
        elif key.startswith("trt_"):
            options[key] = value
        else:
            raise InvalidArgument(
                f"unknown parameter '{key}' with value '{value}' for the TensorRT execution accelerator of model "
                f"'{source.name}'"
            )
    return options


def _graph_level(ort: ModuleType, source: ModelSource) -> Any:
    """-1 basic, 1 basic and extended, 2 none, else all."""
    levels = ort.GraphOptimizationLevel
    said = source.config.optimization.graph.level
    known = {
        0: levels.ORT_ENABLE_ALL,
        -1: levels.ORT_ENABLE_BASIC,
        1: levels.ORT_ENABLE_EXTENDED,
        2: levels.ORT_DISABLE_ALL,
    }
    if said not in known:
        raise InvalidArgument(f"graph optimization level of '{source.name}' must be -1, 0, 1 or 2, got {said}")
    return known[said]


def _value(source: ModelSource, key: str) -> str | None:
    """A model's parameter, else the server's `--backend-config`, else None."""
    if key in source.config.parameters:
        said = source.config.parameters[key].string_value
    else:
        said = source.backend_config.get(key, "")
    said = said.strip()
    return said or None


def _integer(source: ModelSource, key: str, said: str) -> int:
    try:
        number = int(said)
    except ValueError:
        number = -1
    if number < 0:
        raise InvalidArgument(f"parameter '{key}' of '{source.name}' must be an integer of at least 0, got '{said}'")
    return number


def _flag(source: ModelSource, key: str, said: str) -> bool:
    lowered = said.lower()
    if lowered in ("1", "true", "on"):
        return True
    if lowered in ("0", "false", "off"):
        return False
    raise InvalidArgument(f"parameter '{key}' of '{source.name}' must be 0 or 1, got '{said}'")
