"""Maps a model configuration's `parameters` and `optimization` to onnxruntime's session and run options.

Names follow Triton's onnxruntime backend, so that a repository works unchanged. Unknown keys of `parameters` are
ignored, as there; a known one with a bad value fails the load (`InvalidArgument`). Unsupported fields of a
configuration are another thing: `executors.configuration` refuses them.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument

from .library_setup import has_global_threads, has_shared_arena

_SHRINKAGE = "memory.enable_memory_arena_shrinkage"


def intra_op_threads(source: ModelSource, sharers: int, cores: int) -> int:
    """The threads of one run: the configured number, else the cores divided by the instances that share them."""
    said = source.integer("intra_op_thread_count")
    return max(1, cores // max(1, sharers)) if said is None else said


def session_options(ort: ModuleType, source: ModelSource, threads: int) -> Any:
    """Return `onnxruntime.SessionOptions`. `threads` 0 is the library's default: every physical core."""
    options: Any = ort.SessionOptions()
    options.log_severity_level = 3
    if has_global_threads(source.backend_config):
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads
    if has_shared_arena(source.backend_config):
        options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.graph_optimization_level = _graph_level(ort, source)
    inter = source.integer("inter_op_thread_count")
    if inter is not None and options.use_per_session_threads:
        options.inter_op_num_threads = inter
    if (parallel := source.flag("execution_mode")) is not None:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    if (arena := source.flag("enable_mem_arena")) is not None:
        options.enable_cpu_mem_arena = arena
    if (pattern := source.flag("enable_mem_pattern")) is not None:
        options.enable_mem_pattern = pattern
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
    source.check_native_code(f"the library of operators '{name}'")
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
    shrinkage = source.parameter(_SHRINKAGE)
    return [] if shrinkage is None else [(_SHRINKAGE, shrinkage)]


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
