"""Lists the features of a configuration that this version does not support.

Every field is parsed and validated. Unsupported ones are rejected at load time with an error that names them; none is
ignored silently.
"""

from __future__ import annotations

from collections.abc import Iterator

from protos.model_config_pb2 import ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput

# Fields without visible effect are accepted: scheduling hints, CUDA graphs and copies through pinned memory change no
# answer, order or limit. `executors.configuration.io_validation` raises the documented errors for shape tensors and
# profiles outside TensorRT.

_TENSORRT = "tensorrt_plan"
_ONNXRUNTIME = "onnxruntime"


def unsupported_features(config: ModelConfig) -> list[str]:
    """Return one sentence for each unsupported feature that the configuration uses; empty when there is none."""
    return [f"{what} is not supported yet" for what in _features(config)]


def _features(config: ModelConfig) -> Iterator[str]:
    if config.platform == _TENSORRT:
        for tensor in config.input:
            yield from _of_tensor(tensor)
        for output in config.output:
            yield from _of_tensor(output)
    yield from _of_instance_groups(config)
    yield from _of_optimization(config)
    if config.model_operations.op_library_filename and config.backend != _ONNXRUNTIME:
        yield f"'model_operations.op_library_filename' of the backend '{config.backend or config.platform}'"
    if config.cc_model_filenames and any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group):
        yield "'cc_model_filenames' of a GPU instance"
    if "TRITON_BATCH_STRATEGY_PATH" in config.parameters:
        yield "custom batching by a C++ library ('TRITON_BATCH_STRATEGY_PATH'; see 'charonia.batch_strategy')"
    # the second names the backend's usual form, the third a python-based backend (P20)
    if config.runtime not in ("", f"libtriton_{config.backend}.so", "model.py"):
        yield f"the runtime '{config.runtime}'"


def _of_tensor(tensor: ModelInput | ModelOutput) -> Iterator[str]:
    if tensor.is_shape_tensor:
        yield f"'is_shape_tensor' (tensor '{tensor.name}')"
    if tensor.is_non_linear_format_io:
        yield f"'is_non_linear_format_io' (tensor '{tensor.name}')"


def _of_instance_groups(config: ModelConfig) -> Iterator[str]:
    for group in config.instance_group:
        if group.secondary_devices:
            yield f"'secondary_devices' (instance group '{group.name}')"
        if group.profile and config.platform == _TENSORRT:
            yield f"'profile' (instance group '{group.name}')"


def _of_optimization(config: ModelConfig) -> Iterator[str]:
    if config.backend == _ONNXRUNTIME:
        return  # the backend checks what its library supports
    accelerators = config.optimization.execution_accelerators
    for item in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        yield f"the execution accelerator '{item.name}'"
