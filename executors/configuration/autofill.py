"""Completes a written configuration from the model's files (C70-C73, R5).

`prepare` runs when a repository is read, before any model file is opened; `from_graph` runs when an executor has probed
the model. Written fields win; a contradiction is an error. `executors.configuration.autocomplete` merges what a python
model sets, `executors.configuration.config` writes general defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from charonia.models.config_errors import InstanceError
from protos import model_config_pb2 as pb

from .config import validate_structure
from .platforms import detect_backend
from .sequence_validation import without_sequence_tensors

if TYPE_CHECKING:
    from charonia.backend import GraphSignature, TensorSignature

DEFAULT_MAX_BATCH_SIZE = 4


def prepare(config: pb.ModelConfig, directory_name: str, files: Iterable[str]) -> pb.ModelConfig:
    """Return a copy with name, backend and platform filled in, and check its structure (R5, C73).

    `files` are the entries of one version directory. Raises `StructureError`.
    """
    done = pb.ModelConfig()
    done.CopyFrom(config)
    done.backend, done.platform = detect_backend(config, directory_name, files)
    validate_structure(done, directory_name)
    done.name = directory_name
    return done


def default_max_batch_size(backend_config: Mapping[str, str]) -> int:
    """A backend's `--backend-config=default-max-batch-size`, else 4 (C71). Raises `InstanceError` if malformed."""
    text = backend_config.get("default-max-batch-size", str(DEFAULT_MAX_BATCH_SIZE))
    try:
        return max(0, int(text))
    except ValueError:
        raise InstanceError(f"backend-config default-max-batch-size must be an integer, got '{text}'") from None


def from_graph(
    config: pb.ModelConfig, graph: GraphSignature, *, default_max_batch: int = DEFAULT_MAX_BATCH_SIZE
) -> pb.ModelConfig:
    """Return a copy completed from a model file's tensors, whose dims include the batch dimension (C71).

    The model has batching when that is written, or when nothing is written and every tensor has a dynamic first
    dimension. Tensors that are written with their full rank mean that there is no batch dimension. Raises
    `InstanceError` for a written tensor that contradicts the file, and for a rank of 0.
    """
    done = pb.ModelConfig()
    done.CopyFrom(config)
    tensors = (*graph.inputs, *graph.outputs)
    batches = bool(tensors) and all(tensor.dims and tensor.dims[0] == -1 for tensor in tensors)
    if done.max_batch_size > 0:
        if not batches:
            _refuse_batching(done.name, tensors)
    elif batches and not _written_without_batch_dimension(done, graph):
        done.max_batch_size = default_max_batch
        if done.max_batch_size > 1 and done.WhichOneof("scheduling_choice") is None:
            done.dynamic_batching.SetInParent()
    _fill(done, done.input, graph.inputs, "input")
    _fill(done, done.output, graph.outputs, "output")
    return done


def check_against_graph(config: pb.ModelConfig, graph: GraphSignature) -> None:
    """Check a model without auto-complete: raises `InstanceError` when the configuration contradicts the file."""
    tensors = (*graph.inputs, *graph.outputs)
    if config.max_batch_size > 0 and not all(tensor.dims and tensor.dims[0] == -1 for tensor in tensors):
        _refuse_batching(config.name, tensors)
    copy = pb.ModelConfig()
    copy.CopyFrom(config)
    _fill(copy, copy.input, graph.inputs, "input")
    _fill(copy, copy.output, graph.outputs, "output")
    if len(copy.input) != len(config.input):
        raise InstanceError(
            f"unable to load model '{config.name}', configuration expects {len(config.input)} inputs, "
            f"model provides {len(graph.inputs)}"
        )


def _refuse_batching(model_name: str, tensors: Sequence[TensorSignature]) -> None:
    for tensor in tensors:
        if not tensor.dims or tensor.dims[0] != -1:
            raise InstanceError(
                f"model '{model_name}', tensor '{tensor.name}': for the model to support batching the shape should "
                f"have at least 1 dimension and the first dimension must be -1; but shape expected by the model is "
                f"{_text(tensor.dims)}"
            )


def _written_without_batch_dimension(config: pb.ModelConfig, graph: GraphSignature) -> bool:
    """Whether a tensor is written with as many dims as the file has, so that none is left for the batch."""
    flat = _scattered(config)
    ranks = {tensor.name: len(tensor.dims) for tensor in (*graph.inputs, *graph.outputs) if tensor.name not in flat}
    written = [(item.name, len(_backend_dims(item))) for item in config.input if not item.allow_ragged_batch]
    written += [(item.name, len(_backend_dims(item))) for item in config.output]
    return any(rank > 0 and ranks.get(name) == rank for name, rank in written)


def _backend_dims(item: pb.ModelInput | pb.ModelOutput) -> list[int]:
    """The dims that the backend sees for a written tensor: its reshape if it has one, else its dims."""
    return list(item.reshape.shape if item.HasField("reshape") else item.dims)


def _fill(config: pb.ModelConfig, written: Any, signatures: Sequence[TensorSignature], what: str) -> None:
    if what == "input":
        signatures = _without_batch_inputs(config, signatures)
    if config.HasField("sequence_batching"):
        signatures = without_sequence_tensors(config, signatures, what)
    known = {signature.name: signature for signature in signatures}
    for item in written:
        if item.name and item.name not in known:
            raise InstanceError(
                f"unexpected inference {what} '{item.name}', allowed {what}s are: {', '.join(sorted(known))}"
            )
    found = {item.name: item for item in written}
    # a written list of outputs may leave some of the model's out; inputs are all needed
    complete_list = what == "input" or not written
    for signature in signatures:
        item = found.get(signature.name)
        if item is None:
            if not complete_list:
                continue
            item = written.add(name=signature.name)
        _fill_tensor(config, item, signature, what)


def _scattered(config: pb.ModelConfig) -> set[str]:
    """The outputs that the backend returns flat, to be split by an input's shapes (C21)."""
    return {name for item in config.batch_output for name in item.target_name}


def _without_batch_inputs(config: pb.ModelConfig, signatures: Sequence[TensorSignature]) -> list[TensorSignature]:
    """The file's inputs except those that the server makes (C20), which must exist with the written type."""
    known = {signature.name: signature for signature in signatures}
    made: set[str] = set()
    for item in config.batch_input:
        for name in item.target_name:
            signature = known.get(name)
            if signature is None:
                raise InstanceError(f"unexpected batch input '{name}', allowed inputs are: {', '.join(sorted(known))}")
            provided = _data_type(signature.datatype)
            if item.data_type != provided:
                raise InstanceError(
                    f"unable to load model '{config.name}', configuration expects datatype "
                    f"{pb.DataType.Name(item.data_type)} for batch input '{name}', model provides "
                    f"{pb.DataType.Name(provided)}"
                )
            made.add(name)
    return [signature for signature in signatures if signature.name not in made]


def _fill_tensor(
    config: pb.ModelConfig, item: pb.ModelInput | pb.ModelOutput, signature: TensorSignature, what: str
) -> None:
    if not signature.dims:
        raise InstanceError(f"model '{config.name}', tensor '{signature.name}': a tensor of rank 0 is not supported")
    provided = _data_type(signature.datatype)
    if item.data_type == pb.TYPE_INVALID:
        item.data_type = provided
    elif item.data_type != provided:
        raise InstanceError(
            f"unable to load model '{config.name}', configuration expects datatype "
            f"{pb.DataType.Name(item.data_type)} for {what} '{item.name}', model provides {pb.DataType.Name(provided)}"
        )
    if isinstance(item, pb.ModelInput) and item.allow_ragged_batch:
        if len(signature.dims) != 1 or signature.dims[0] != -1:
            raise InstanceError(
                f"unable to load model '{config.name}', configuration expects model provides input with shape [-1]  "
                f"for ragged input '{item.name}', model provides {_text(signature.dims)}"
            )
        return  # the file sees all requests flat: only the user knows the shape of one
    if what == "output" and item.name in _scattered(config):
        return
    if not item.dims:
        item.dims.extend(signature.dims[1:] if config.max_batch_size > 0 else signature.dims)
        if not item.dims:  # [-1] with batching: a scalar per item, which a configuration writes as [1] with a reshape
            item.dims.append(1)
            item.reshape.SetInParent()
        return
    _check_dims(config, item, signature)


def _check_dims(config: pb.ModelConfig, item: pb.ModelInput | pb.ModelOutput, signature: TensorSignature) -> None:
    seen = _backend_dims(item)
    full = [-1, *seen] if config.max_batch_size > 0 else seen
    batch_note = (
        "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete "
        if config.max_batch_size > 0
        else ""
    )
    mismatch = (
        f"model '{config.name}', tensor '{item.name}': the model expects {len(signature.dims)} dimensions (shape "
        f"{_text(signature.dims)}) but the model configuration specifies {len(full)} dimensions "
        f"({batch_note}shape {_text(full)})"
    )
    if len(full) != len(signature.dims):
        raise InstanceError(mismatch)
    # A fixed size narrows a dynamic one of the file. The reverse is accepted for outputs only: files are often
    # exported with fixed output sizes that do not hold.
    lenient = isinstance(item, pb.ModelOutput)
    if any(
        want not in (-1, have) and not (lenient and have == -1) for have, want in zip(full, signature.dims, strict=True)
    ):
        raise InstanceError(mismatch)


def _data_type(name: str) -> Any:
    """The enum value of a wire name ("FP32", "BYTES") or a config name ("TYPE_FP32")."""
    full = name if name.startswith("TYPE_") else "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"
    return pb.DataType.Value(full)


def _text(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"
