"""Validates the `sequence_batching` block: control tensors, strategies and implicit states (C40-C45).

The server makes and keeps these tensors, so clients do not see them as inputs or outputs of the model's file, except a
state's output that the configuration lists (`without_sequence_tensors`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from charonia.models.config_errors import InstanceError, StructureError
from charonia.models.sequence_batcher import SequenceBatching
from protos import model_config_pb2 as pb

from .validation import check_preferred_sizes

if TYPE_CHECKING:
    from charonia.backend import TensorSignature

_Control = pb.ModelSequenceBatching.Control
_CORRID_TYPES = frozenset({pb.TYPE_UINT64, pb.TYPE_INT64, pb.TYPE_UINT32, pb.TYPE_INT32, pb.TYPE_STRING})


def check_sequence_batching(config: pb.ModelConfig, name: str) -> None:
    """Raise `StructureError` with the text of C42 or C43 for the first rule that the block breaks."""
    block = config.sequence_batching
    _check_controls(block, name)
    if block.HasField("oldest"):
        check_preferred_sizes(
            block.oldest.preferred_batch_size,
            config.max_batch_size,
            name,
            subject="sequence batching preferred batch size",
        )
    if block.HasField("direct") and not 0.0 <= block.direct.minimum_slot_utilization <= 1.0:
        raise StructureError(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}")


def _check_controls(block: pb.ModelSequenceBatching, name: str) -> None:
    tensors: set[str] = set()
    kinds: set[int] = set()
    for tensor in block.control_input:
        if not tensor.name:
            raise StructureError(f"sequence batching control tensor must have a name for {name}")
        if tensor.name in tensors or len(tensor.control) > 1:
            raise StructureError(
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds for {name}"
            )
        tensors.add(tensor.name)
        for control in tensor.control:
            kind = _Control.Kind.Name(control.kind)
            if control.kind in kinds:
                raise StructureError(f"sequence batching specifies multiple {kind} tensors for {name}")
            kinds.add(control.kind)
            if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
                _check_correlation_id(control, kind, name)
            else:
                _check_flag(control, kind, name)


def _check_flag(control: pb.ModelSequenceBatching.Control, kind: str, name: str) -> None:
    """Check a START, END or READY control: one list of a false and a true value."""
    values = _value_lists(control)
    if not values:
        raise StructureError(
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
            f"for {kind} for {name}"
        )
    if len(values) > 1:
        raise StructureError(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {kind} for {name}"
        )
    ((field, length),) = values.items()
    if length != 2:
        raise StructureError(f"sequence batching control '{field}' must have exactly 2 entries for {kind} for {name}")


def _check_correlation_id(control: pb.ModelSequenceBatching.Control, kind: str, name: str) -> None:
    if control.data_type not in _CORRID_TYPES:
        raise StructureError(
            f"unexpected data type for control {kind} for {name}. Allowed data types are TYPE_UINT64, TYPE_INT64, "
            "TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        )
    if _value_lists(control):
        raise StructureError(
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
            f"for {kind} for {name}"
        )


def _value_lists(control: pb.ModelSequenceBatching.Control) -> dict[str, int]:
    lengths = {
        "int32_false_true": len(control.int32_false_true),
        "fp32_false_true": len(control.fp32_false_true),
        "bool_false_true": len(control.bool_false_true),
    }
    return {field: length for field, length in lengths.items() if length}


def check_states(config: pb.ModelConfig) -> None:
    """Raise `InstanceError` for a state whose initial value does not fit it (C45)."""
    seen: set[str] = set()
    inputs = {item.name for item in config.input}
    for tensor in config.sequence_batching.control_input:
        if tensor.name in inputs:
            raise InstanceError(f"sequence batching control tensor '{tensor.name}' must not be an input of the model")
    for state in config.sequence_batching.state:
        name = state.input_name
        if name in seen:
            raise InstanceError(f"State input name '{name}' specified more than once.")
        if not name or not state.output_name:
            raise InstanceError(f"sequence batching state must have 'input_name' and 'output_name' for {config.name}")
        if name in inputs:
            raise InstanceError(f"State input name '{name}' must not be an input of the model")
        if state.data_type not in pb.DataType.values() or state.data_type == pb.TYPE_INVALID:
            raise InstanceError(f"State input '{name}' must specify 'data_type'")
        if any(dim < 1 and dim != -1 for dim in state.dims):
            raise InstanceError(
                f"State input '{name}' dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
            )
        seen.add(name)
        if len(state.initial_state) > 1:
            raise InstanceError(
                f"initial_state field for state input '{name}' must contain exactly one or zero element. "
                f"Found '{len(state.initial_state)}' elements."
            )
        for initial in state.initial_state:
            _check_initial_state(state, initial)


def _check_initial_state(state: pb.ModelSequenceBatching.State, initial: pb.ModelSequenceBatching.InitialState) -> None:
    name = state.input_name
    if not initial.name:
        raise InstanceError(f"Field 'name' must be set when using initial_state for state input '{name}'.")
    if initial.data_type != state.data_type:
        raise InstanceError(
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        )
    if any(dim < 1 for dim in initial.dims):
        raise InstanceError(f"'initial_state' field for state input name '{name}' contains variable dimensions.")
    if len(initial.dims) != len(state.dims):
        raise InstanceError(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"name '{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    for fixed, size in zip(state.dims, initial.dims, strict=True):
        if fixed not in (-1, size):
            raise InstanceError(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {size} != {fixed}"
            )
    if initial.WhichOneof("state_data") is None:
        raise InstanceError(f"initial_state setting expects state'{name}' to have state_data set")


def without_sequence_tensors(
    config: pb.ModelConfig, signatures: Sequence[TensorSignature], what: str
) -> list[TensorSignature]:
    """Return the file's inputs or outputs (`what`) without the sequence batcher's.

    Raises `InstanceError` unless the latter exist with the written type and dims.
    """
    block = SequenceBatching.of(config)
    batch = (-1,) if config.max_batch_size > 0 else ()
    if what == "input":
        made = [("control tensor", c.name, c.datatype.value, (*batch, 1)) for c in block.controls]
        made += [("state input", s.input_name, s.datatype.value, (*batch, *s.dims)) for s in block.states]
        listed: set[str] = set()
    else:
        made = [("state output", s.output_name, s.datatype.value, (*batch, *s.dims)) for s in block.states]
        listed = {item.name for item in config.output}
    known = {signature.name: signature for signature in signatures}
    for role, name, datatype, dims in made:
        found = known.get(name)
        if found is None:
            raise InstanceError(
                f"unable to load model '{config.name}', configuration specified sequence batching {role} '{name}', but "
                "model does not provide that tensor"
            )
        if found.datatype != datatype:
            raise InstanceError(
                f"unable to load model '{config.name}', configuration expects datatype TYPE_{_config(datatype)} for "
                f"{role} '{name}', model provides TYPE_{_config(found.datatype)}"
            )
        if len(found.dims) != len(dims) or any(
            -1 not in (have, want) and have != want for have, want in zip(found.dims, dims, strict=True)
        ):
            raise InstanceError(
                f"unable to load model '{config.name}', configuration expects shape {list(dims)} for {role} '{name}', "
                f"model provides {list(found.dims)}"
            )
    names = {name for _, name, _, _ in made} - listed
    return [signature for signature in signatures if signature.name not in names]


def _config(datatype: str) -> str:
    return "STRING" if datatype == "BYTES" else datatype
