"""Validates the `model_warmup` blocks, and the file names in a configuration (C12, C17).

A configuration may come over the network (a load override), so a file name must not lead out of its directory. Links
are checked where the file is opened (`executors.repository.files.contained`).
"""

from __future__ import annotations

from charonia.models.config_errors import InstanceError
from protos import model_config_pb2 as pb


def check_file_names(config: pb.ModelConfig) -> None:
    """Raise `InstanceError` for a model, warm-up or initial-state file outside its directory."""
    _check_inside(config.default_model_filename, "model file", config.name)
    for filename in config.cc_model_filenames.values():
        _check_inside(filename, "model file", config.name)
    for warmup in config.model_warmup:
        for tensor in warmup.inputs.values():
            _check_inside(tensor.input_data_file, "warmup file", config.name)
    for state in config.sequence_batching.state:
        for initial in state.initial_state:
            _check_inside(initial.data_file, "initial state file", config.name)


def _check_inside(filename: str, what: str, model_name: str) -> None:
    parts = filename.replace("\\", "/").split("/")
    if filename and (parts[0] == "" or ".." in parts or "\0" in filename):
        raise InstanceError(f"{what} path '{filename}' in model '{model_name}' is outside model directory")


def check_warmups(config: pb.ModelConfig) -> None:
    """Raise `InstanceError` for a warm-up request that does not fit the model (C17)."""
    inputs = {item.name: item for item in config.input}
    for warmup in config.model_warmup:
        subject = f"model warmup '{warmup.name}' of model '{config.name}'"
        if not warmup.name:
            raise InstanceError(f"model warmup of model '{config.name}' must specify 'name'")
        if max(1, warmup.batch_size) > max(1, config.max_batch_size):
            raise InstanceError(
                f"{subject} has batch size {warmup.batch_size}, but the model's maximum is "
                f"{max(1, config.max_batch_size)}"
            )
        for name, tensor in sorted(warmup.inputs.items()):
            known = inputs.get(name)
            if known is None:
                raise InstanceError(f"{subject} has unknown input '{name}'")
            _check_tensor(tensor, known, f"{subject}: input '{name}'")
        missing = sorted(name for name, item in inputs.items() if not item.optional and name not in warmup.inputs)
        if missing:
            raise InstanceError(f"{subject} lacks required input '{missing[0]}'")


def _check_tensor(tensor: pb.ModelWarmup.Input, known: pb.ModelInput, subject: str) -> None:
    if tensor.data_type != known.data_type:
        raise InstanceError(
            f"{subject} has data type {_type(tensor.data_type)}, but the model expects {_type(known.data_type)}"
        )
    if any(dim < 1 for dim in tensor.dims):
        raise InstanceError(f"{subject} must have fixed dims")
    fits = len(tensor.dims) == len(known.dims) and all(
        want in (-1, have) for have, want in zip(tensor.dims, known.dims, strict=True)
    )
    if not fits:
        raise InstanceError(f"{subject} has dims {list(tensor.dims)}, but the model expects {list(known.dims)}")
    if tensor.WhichOneof("input_data_type") is None:
        raise InstanceError(f"{subject} must specify one of 'zero_data', 'random_data' and 'input_data_file'")


def _type(number: int) -> str:
    return {value: name for name, value in pb.DataType.items()}.get(number, str(number))
