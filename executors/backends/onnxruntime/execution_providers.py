"""Maps a model configuration to onnxruntime's execution providers and their options. Pure.

Names of accelerators and of their parameters follow Triton's onnxruntime backend. Parameters of the CUDA provider may
also stand in `parameters`, as they did there before; those of the accelerator win.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import PurePath

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument, Unsupported

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"

_GPU_ACCELERATORS = {"tensorrt": TENSORRT, "cuda": CUDA}
_CPU_ACCELERATORS = {"openvino": OPENVINO}
_REMEDIES = {
    CUDA: "install charonia[gpu] in place of charonia[cpu]",
    TENSORRT: "install charonia[gpu] in place of charonia[cpu], and tensorrt",
    OPENVINO: "install onnxruntime-openvino in place of charonia[cpu], or name the backend 'openvino' in place of it",
}
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
"""Those that may stand in `parameters`; the accelerator may have any."""
_CUDA_FLAGS = frozenset(("do_copy_in_default_stream", "use_ep_level_unified_stream", "enable_cuda_graph"))
_CUDA_WORDS = {
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
}
_PRECISIONS = {"FP32": None, "FP16": "trt_fp16_enable", "BF16": "trt_bf16_enable", "INT8": "trt_int8_enable"}

Options = dict[str, str]


def execution_providers(
    source: ModelSource, kind: str, device_id: int, available: Collection[str]
) -> list[tuple[str, Options]]:
    """The providers of an instance of this kind, the first first, the CPU last (C15).

    Accelerators for the other kind do not count. Raises `InvalidArgument` for an unknown accelerator or parameter,
    `Unsupported` for a provider that is not among the `available`.
    """
    accelerators = source.config.optimization.execution_accelerators
    on_gpu = kind == "GPU"
    written = accelerators.gpu_execution_accelerator if on_gpu else accelerators.cpu_execution_accelerator
    known = _GPU_ACCELERATORS if on_gpu else _CPU_ACCELERATORS
    found: dict[str, Options] = {}
    for entry in written:
        provider = known.get(entry.name)
        if provider is None:
            raise InvalidArgument(f"unknown Execution Accelerator '{entry.name}' is requested")
        _check_built(source, f"the execution accelerator '{entry.name}'", provider, available)
        found[provider] = _OPTIONS[provider](source, max(device_id, 0), dict(entry.parameters))
    if on_gpu:
        _check_built(source, "a GPU instance", CUDA, available)
    if on_gpu or (kind == "MODEL" and CUDA in available):
        cuda = found.pop(CUDA, None)  # a fallback of the others, whatever the order
        found[CUDA] = cuda_options(source, max(device_id, 0), {}) if cuda is None else cuda
    return [*found.items(), (CPU, {})]


def cuda_options(source: ModelSource, device_id: int, parameters: Mapping[str, str]) -> Options:
    """The options of the CUDA provider on one device."""
    options = {key: said for key in _CUDA_KEYS if (said := source.parameter(key)) is not None}
    options |= {key: value for key, value in parameters.items() if value}
    for key, words in _CUDA_WORDS.items():
        if key in options:
            value = words.get(options[key], options[key])
            if value not in words.values():
                raise InvalidArgument(f"unsupported {key} value '{value}' is requested")
            options[key] = value
    for key in _CUDA_FLAGS.intersection(options):
        options[key] = _flag(source, key, options[key])
    if options.get("gpu_mem_limit"):
        options["gpu_mem_limit"] = _integer(source, "gpu_mem_limit", options["gpu_mem_limit"])
    return options | {"device_id": str(device_id)}


def tensorrt_options(source: ModelSource, device_id: int, parameters: Mapping[str, str]) -> Options:
    """The options of the TensorRT provider on one device.

    Without profiles, engines are made for 1 to `max_batch_size` rows where the other dims are fixed: else the provider
    makes one for each shape that it meets, which takes minutes. With `trt_engine_cache_path` in the server's
    `--backend-config`, each version keeps its engines in a folder there.
    """
    options: Options = {}
    for key, value in sorted(parameters.items()):
        if not value:
            continue
        if key == "precision_mode":
            if value not in _PRECISIONS:
                raise InvalidArgument(f"unsupported precision mode '{value}' is requested")
            if (flag := _PRECISIONS[value]) is not None:
                options[flag] = "1"
            continue
        if key not in _TENSORRT:
            raise InvalidArgument(f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator")
        name, check = _TENSORRT[key]
        options[name] = check(source, key, value)
    if not any(key.startswith("trt_profile_") for key in options):
        options |= _profile(source)
    folder = source.backend_config.get("trt_engine_cache_path")
    if folder and "trt_engine_cache_path" not in options:
        own = str(PurePath(folder) / source.name / str(source.version))
        options = {"trt_engine_cache_enable": "1", "trt_engine_cache_path": own} | options
        options = {"trt_timing_cache_enable": "1", "trt_timing_cache_path": own} | options
    return options | {"device_id": str(device_id)}


def openvino_options(source: ModelSource, device_id: int, parameters: Mapping[str, str]) -> Options:
    """The options of the OpenVINO provider. Triton has none; the provider itself judges those that are given."""
    return {"device_type": "CPU"} | dict(parameters)


def _check_built(source: ModelSource, what: str, provider: str, available: Collection[str]) -> None:
    if provider not in available:
        raise Unsupported(
            f"model '{source.name}' asks for {what}, but the installed onnxruntime has no {provider}: "
            f"{_REMEDIES[provider]}"
        )


def _profile(source: ModelSource) -> Options:
    """One profile over all batch sizes, where nothing but them varies."""
    config = source.config
    shapes = {item.name: list(item.reshape.shape if item.HasField("reshape") else item.dims) for item in config.input}
    if config.max_batch_size <= 0 or not shapes or any(dim <= 0 for dims in shapes.values() for dim in dims):
        return {}

    def of(rows: int) -> str:
        return ",".join(f"{name}:{'x'.join(map(str, [rows, *dims]))}" for name, dims in sorted(shapes.items()))

    largest = of(config.max_batch_size)
    return {"trt_profile_min_shapes": of(1), "trt_profile_opt_shapes": largest, "trt_profile_max_shapes": largest}


def _text(source: ModelSource, key: str, value: str) -> str:
    return value


def _flag(source: ModelSource, key: str, value: str) -> str:
    return "1" if source.read_flag(key, value) else "0"


def _integer(source: ModelSource, key: str, value: str) -> str:
    return str(source.read_integer(key, value))


def _integer_or_automatic(source: ModelSource, key: str, value: str) -> str:
    """-1 leaves the number to TensorRT."""
    return str(source.read_integer(key, value, -1))


_Check = Callable[[ModelSource, str, str], str]
_TENSORRT: dict[str, tuple[str, _Check]] = {
    "max_workspace_size_bytes": ("trt_max_workspace_size", _integer),
    "int8_calibration_table_name": ("trt_int8_calibration_table_name", _text),
    "int8_use_native_calibration_table": ("trt_int8_use_native_calibration_table", _flag),
    "trt_auxiliary_streams": ("trt_auxiliary_streams", _integer_or_automatic),
    **{
        key: (key, _integer)
        for key in (
            "trt_max_partition_iterations",
            "trt_min_subgraph_size",
            "trt_dla_core",
            "trt_builder_optimization_level",
            "trt_ep_context_embed_mode",
        )
    },
    **{
        key: (key, _flag)
        for key in (
            "trt_dla_enable",
            "trt_engine_cache_enable",
            "trt_dump_subgraphs",
            "trt_force_sequential_engine_build",
            "trt_context_memory_sharing_enable",
            "trt_layer_norm_fp32_fallback",
            "trt_timing_cache_enable",
            "trt_force_timing_cache",
            "trt_detailed_build_log",
            "trt_build_heuristics_enable",
            "trt_sparsity_enable",
            "trt_cuda_graph_enable",
            "trt_dump_ep_context_model",
        )
    },
    **{
        key: (key, _text)
        for key in (
            "trt_engine_cache_path",
            "trt_engine_cache_prefix",
            "trt_timing_cache_path",
            "trt_tactic_sources",
            "trt_extra_plugin_lib_paths",
            "trt_profile_min_shapes",
            "trt_profile_max_shapes",
            "trt_profile_opt_shapes",
            "trt_ep_context_file_path",
        )
    },
}
"""Triton's parameter, and the provider's option."""

_OPTIONS = {CUDA: cuda_options, TENSORRT: tensorrt_options, OPENVINO: openvino_options}
