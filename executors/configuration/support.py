"""What a configuration may ask for that this version does not do yet.

Every field is parsed and validated; one whose behaviour is missing must keep the model from loading, with a sentence
that names it. Nothing is ignored silently.
"""

from __future__ import annotations

from collections.abc import Iterator

from protos.model_config_pb2 import ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput

# Fields nobody can notice the absence of: scheduling hints, CUDA graphs and copies through pinned memory change no
# answer, no order and no limit, so a model that sets them loads. Where the documented answer is an error of its own
# (shape tensors and profiles outside TensorRT), `executors.configuration.io_validation` gives that.

_TENSORRT = "tensorrt_plan"
_ONNXRUNTIME = "onnxruntime"


def unsupported_features(config: ModelConfig) -> list[str]:
    """One sentence for each feature the configuration uses and this version lacks; empty when all is supported."""
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
        return  # knows what its library can do
    accelerators = config.optimization.execution_accelerators
    for item in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        yield f"the execution accelerator '{item.name}'"
