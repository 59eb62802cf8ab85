"""The typed form of the `sequence_batching` block (interface items C40, C41).

Only values: `batcher.scheduling` schedules, executors make control tensors and keep states, and
`executors.configuration.sequence_validation` validates the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from charonia.datatypes import DataType
from protos import model_config_pb2 as pb

from .config_errors import InstanceError

CHECKPOINT_EVERY = "charonia.checkpoint_every"
"""Model parameter: after how many steps the state of a sequence is written to the log; 1 by default, 0 never."""

ControlKind = Literal["START", "READY", "END", "CORRID"]

_FLAG_TYPES = {
    "int32_false_true": DataType.INT32,
    "fp32_false_true": DataType.FP32,
    "bool_false_true": DataType.BOOL,
}


@dataclass(frozen=True, slots=True)
class Control:
    """A tensor the server makes for each request: [1], or [rows, 1] with batching (C44). CORRID has no `values`."""

    name: str
    kind: ControlKind
    datatype: DataType
    values: tuple[float, float] = (0, 1)


@dataclass(frozen=True, slots=True)
class InitialState:
    """The initial state: zeros of these dims, or a file of `<model>/initial_state/` if `filename` is set."""

    dims: tuple[int, ...]
    filename: str = ""


@dataclass(frozen=True, slots=True)
class ImplicitState:
    """A model output that is its input at the sequence's next request (S39); dims have no batch dimension."""

    input_name: str
    output_name: str
    datatype: DataType
    dims: tuple[int, ...]
    initial: InitialState


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """The block as written, and `checkpoint_every`. Times in microseconds.

    `direct`: sequences have their own slots (S34); otherwise the oldest requests of up to `candidates` run first (S36).
    """

    direct: bool
    max_idle_us: int
    max_queue_delay_us: int
    minimum_slot_utilization: float
    candidates: int
    preferred_batch_sizes: tuple[int, ...]
    preserve_ordering: bool
    iterative: bool
    controls: tuple[Control, ...]
    states: tuple[ImplicitState, ...]
    checkpoint_every: int

    def slots(self, max_batch_size: int) -> int:
        """Concurrent sequences of one instance (S34, S36)."""
        return max(1, max_batch_size if self.direct else self.candidates or max_batch_size)

    @property
    def correlation_control(self) -> Control | None:
        return next((control for control in self.controls if control.kind == "CORRID"), None)

    @staticmethod
    def of(config: pb.ModelConfig) -> SequenceBatching:
        """Of a normalised, validated configuration. Raises `InstanceError` for a bad checkpoint parameter."""
        block = config.sequence_batching
        direct = not block.HasField("oldest")
        queue = block.direct if direct else block.oldest
        return SequenceBatching(
            direct=direct,
            max_idle_us=block.max_sequence_idle_microseconds,
            max_queue_delay_us=queue.max_queue_delay_microseconds,
            minimum_slot_utilization=block.direct.minimum_slot_utilization,
            candidates=block.oldest.max_candidate_sequences,
            preferred_batch_sizes=tuple(sorted(set(block.oldest.preferred_batch_size))),
            preserve_ordering=block.oldest.preserve_ordering,
            iterative=block.iterative_sequence,
            controls=tuple(_control(item.name, control) for item in block.control_input for control in item.control),
            states=tuple(_state(state) for state in block.state),
            checkpoint_every=checkpoint_every(config),
        )


def checkpoint_every(config: pb.ModelConfig) -> int:
    """Raises `InstanceError` unless the value is an integer of at least 0."""
    if CHECKPOINT_EVERY not in config.parameters:
        return 1
    text = config.parameters[CHECKPOINT_EVERY].string_value
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise InstanceError(f"parameter '{CHECKPOINT_EVERY}' must be an integer >= 0 for {config.name}, got '{text}'")
    return number


def _control(name: str, control: pb.ModelSequenceBatching.Control) -> Control:
    kind: ControlKind = pb.ModelSequenceBatching.Control.Kind.Name(control.kind).rpartition("_")[2]  # type: ignore[assignment]
    if kind == "CORRID":
        return Control(name, kind, DataType.of_number(control.data_type))
    for field, datatype in _FLAG_TYPES.items():
        values = getattr(control, field)
        if values:
            return Control(name, kind, datatype, (float(values[0]), float(values[1])))
    return Control(name, kind, DataType.INT32)


def _state(state: pb.ModelSequenceBatching.State) -> ImplicitState:
    dims = tuple(state.dims)
    initial = InitialState(tuple(max(1, dim) for dim in dims))
    if state.initial_state:
        written = state.initial_state[0]
        initial = InitialState(tuple(written.dims), written.data_file)
    return ImplicitState(state.input_name, state.output_name, DataType.of_number(state.data_type), dims, initial)
