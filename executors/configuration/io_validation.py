"""Validates inputs and outputs, batch inputs and outputs, and instance groups (C5-C9, C20-C22)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from charonia.models.config_errors import InstanceError
from protos import model_config_pb2 as pb

_TENSORRT = "tensorrt_plan"


def check_tensors(config: pb.ModelConfig) -> None:
    """Raise `InstanceError` for the first input or output that breaks C5-C7."""
    names: set[str] = set()
    for item in config.input:
        _check_tensor(item, config.max_batch_size, "model input")
        if item.format != pb.ModelInput.FORMAT_NONE and len(item.dims) != 3:
            raise InstanceError("model input NHWC/NCHW require 3 dims")
        _check_tensorrt_only(item, config)
        _check_unique(item.name, names, "input", config.name)
    names = set()
    for output in config.output:
        _check_tensor(output, config.max_batch_size, "model output")
        _check_tensorrt_only(output, config)
        _check_unique(output.name, names, "output", config.name)


def check_reshapes(config: pb.ModelConfig) -> None:
    """Raise `InstanceError` for a written reshape that breaks C7. Call it before tensors are compared with a graph."""
    tensors: list[tuple[pb.ModelInput | pb.ModelOutput, str]] = [(item, "model input") for item in config.input]
    tensors += [(item, "model output") for item in config.output]
    for item, subject in tensors:
        if item.dims and item.HasField("reshape"):
            _check_reshape(item.dims, item.reshape.shape, subject)


def _check_unique(name: str, names: set[str], what: str, model_name: str) -> None:
    if name in names:
        raise InstanceError(f"{what} '{name}' is specified more than once for model '{model_name}'")
    names.add(name)


def _check_tensor(item: pb.ModelInput | pb.ModelOutput, max_batch_size: int, subject: str) -> None:
    if not item.name:
        raise InstanceError(f"{subject} must specify 'name'")
    if item.data_type == pb.TYPE_INVALID:
        raise InstanceError(f"{subject} must specify 'data_type'")
    if item.data_type not in pb.DataType.values():
        raise InstanceError(f"{subject} has the unknown 'data_type' number {item.data_type}")
    if not item.dims:
        raise InstanceError(f"{subject} must specify 'dims'")
    reshaped = item.HasField("reshape")
    if reshaped and not item.reshape.shape and max_batch_size == 0:
        raise InstanceError(
            f"{subject} cannot have empty reshape for non-batching model as scalar tensors are not supported"
        )
    if any(dim < 1 and dim != -1 for dim in item.dims):
        raise InstanceError(f"{subject} dimension must be integer >= 1, or -1 to indicate a variable-size dimension")
    if reshaped:
        _check_reshape(item.dims, item.reshape.shape, subject)


def _check_reshape(dims: Sequence[int], reshape: Sequence[int], subject: str) -> None:
    """Check a reshape (C7): equal products; with variable sizes, equal products of each run between them (I7)."""
    if any(dim < 1 and dim != -1 for dim in reshape):
        raise InstanceError(
            f"{subject} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
        )
    before, after = _fixed_runs(dims), _fixed_runs(reshape)
    if (len(before) > 1) != (len(after) > 1):
        raise InstanceError(f"{subject} has different size for dims and reshape")
    if len(before) != len(after):
        raise InstanceError(f"{subject} has different number of variable-size dimensions for dims and reshape")
    if before != after:
        raise InstanceError(f"{subject} has different size for dims and reshape")


def _fixed_runs(dims: Sequence[int]) -> list[int]:
    """Products of the runs of fixed sizes around the variable ones: [2, 4, -1, 6] is [8, 6]."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [prod(run) for run in runs]


def _check_tensorrt_only(item: pb.ModelInput | pb.ModelOutput, config: pb.ModelConfig) -> None:
    if config.platform == _TENSORRT:
        return
    if item.is_shape_tensor:
        raise InstanceError("shape tensors are only supported for TensorRT platform")
    if item.is_non_linear_format_io:
        raise InstanceError("Non-linear IO format is only supported for the TensorRT platform")


def check_batch_io(config: pb.ModelConfig) -> None:
    """Raise `InstanceError` for the first batch input or output that breaks C20 or C21."""
    inputs = {item.name for item in config.input}
    outputs = {item.name for item in config.output}
    for item in config.batch_input:
        _check_sources(item.source_input, inputs, f"batch input kind '{pb.BatchInput.Kind.Name(item.kind)}'")
        if item.data_type not in (pb.TYPE_INT32, pb.TYPE_FP32):
            raise InstanceError("batch input data type must be TYPE_INT32 or TYPE_FP32")
    targets: set[str] = set()
    for output in config.batch_output:
        _check_sources(output.source_input, inputs, f"batch output kind '{pb.BatchOutput.Kind.Name(output.kind)}'")
        for target in output.target_name:
            if target not in outputs:
                raise InstanceError(f"unknown target output name '{target}'")
            if target in targets:
                raise InstanceError(f"target output name '{target}' can only be specified once")
            targets.add(target)


def _check_sources(sources: Sequence[str], inputs: set[str], subject: str) -> None:
    if len(sources) != 1:
        raise InstanceError(f"{subject} expects 1 source input, got {len(sources)}")
    for source in sources:
        if source not in inputs:
            raise InstanceError(f"unknown source input name '{source}'")


def check_instance_groups(config: pb.ModelConfig, gpus: int) -> None:
    """Raise `InstanceError` with C9's text. `gpus` is the number of devices. The groups' kinds must be resolved."""
    if config.HasField("ensemble_scheduling"):
        return
    if not config.instance_group:
        raise InstanceError(f"must specify one or more 'instance group's for {config.name}")
    kinds = pb.ModelInstanceGroup
    for group in config.instance_group:
        subject = f"instance group {group.name} of model {config.name}"
        if group.kind in (kinds.KIND_MODEL, kinds.KIND_CPU) and group.gpus:
            kind = kinds.Kind.Name(group.kind)
            raise InstanceError(f"{subject} has kind {kind} but specifies one or more GPUs")
        if group.kind == kinds.KIND_GPU:
            if gpus == 0:
                raise InstanceError(f"{subject} has kind KIND_GPU but no GPUs are available")
            if not group.gpus:
                raise InstanceError(f"{subject} has kind KIND_GPU but specifies no GPUs")
            for gpu in group.gpus:
                if not 0 <= gpu < gpus:
                    known = ", ".join(map(str, range(gpus)))
                    raise InstanceError(
                        f"{subject} specifies invalid or unsupported gpu id {gpu}. The available GPUs are: {known}"
                    )
        if group.profile and config.platform != _TENSORRT:
            raise InstanceError(f"{subject} specifies profile field which is only supported for TensorRT models")
