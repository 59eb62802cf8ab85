"""The tensors that a sequence batcher adds to a batch: controls and states (C40-C44, S34, S39). Pure.

Slots without a request get rows of zeros, which the READY control marks. `executors.batches.sequences` keeps the state
of each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from charonia.backend import Array
from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument
from charonia.models.interface import ModelInterface
from charonia.models.sequence_batcher import Control, ImplicitState
from charonia.tensors import object_array, shape_text, split_bytes_elements
from executors.repository.files import contained

INITIAL_STATE_DIRECTORY = "initial_state"

Tensors = Mapping[str, Array]
"""A sequence's states by input name, without a batch dimension."""


@dataclass(slots=True)
class Step:
    """One request of a sequence in a batch: its control values, and its states before and after.

    `state_after` is None until the model has returned it. `responses_sent` counts all responses to the request, those
    before it was rescheduled included (S41).
    """

    correlation_id: int | str
    start: bool
    end: bool
    slot: int
    state_before: Tensors
    state_after: Tensors | None = None
    responses_sent: int = 0

    @property
    def flags(self) -> int:
        """The flags that python models see: 1 is START, 2 is END."""
        return (1 if self.start else 0) | (2 if self.end else 0)


class SequenceTensors:
    """Adds controls and states to one model's batches. `directory` is the model's directory.

    Raises `InvalidArgument` for an initial state that cannot be read.
    """

    def __init__(self, interface: ModelInterface, directory: Path) -> None:
        block = interface.sequence_batching
        assert block is not None
        self._interface = interface
        self.controls = block.controls
        self.states = block.states
        self.has_ready_control = any(control.kind == "READY" for control in block.controls)
        self.state_outputs = {state.output_name: state for state in block.states}
        self.initial: Tensors = {s.input_name: _initial(interface.name, s, directory) for s in block.states}

    def shapes(self, step: Step) -> tuple[tuple[int, ...], ...]:
        """The shapes of a step's states. Requests with equal shapes may share a batch."""
        return tuple([step.state_before[state.input_name].shape for state in self.states])

    def with_state_outputs(self, outputs: Sequence[str]) -> tuple[str, ...]:
        """These outputs, and the outputs that become states."""
        return (*outputs, *[name for name in self.state_outputs if name not in outputs])

    def feed(self, steps: Sequence[Step], rows: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays of a batch with controls and states. Row i moves to the slot of step i.

        `rows` is the number of slots, 0 for only the members, in their order.
        """
        places = [step.slot for step in steps] if rows else list(range(len(steps)))
        count = rows or len(steps)
        fed = (
            dict(arrays) if places == list(range(count)) else {n: _spread(a, places, count) for n, a in arrays.items()}
        )
        for control in self.controls:
            fed[control.name] = self._control(control, steps, places, count)
        for state in self.states:
            name = state.input_name
            if self._interface.batching:
                stacked = np.stack([step.state_before[name] for step in steps])
                fed[name] = stacked if len(steps) == count else _spread(stacked, places, count)
            else:
                fed[name] = steps[0].state_before[name]
        return fed

    def feed_empty(self, rows: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays of an execution without requests (S33), with the types and shapes of `arrays`."""
        count = rows or 1
        fed = {n: _spread(a[:0], [], count) if self._interface.batching else _empty(a) for n, a in arrays.items()}
        for control in self.controls:
            fed[control.name] = self._control(control, (), (), count)
        for state in self.states:
            array = self.initial[state.input_name]
            fed[state.input_name] = np.stack([array] * count) if self._interface.batching else array
        return fed

    def take(self, steps: Sequence[Step], rows: int, results: Mapping[str, Array]) -> dict[str, Array]:
        """Keep the new states in the steps, and return the members' rows in their order.

        Raises `InternalError` for a result without one row per slot, or for a bad state.
        """
        if not self._interface.batching:
            for state in self.states:
                steps[0].state_after = {
                    **(steps[0].state_after or {}),
                    state.input_name: self._checked(state, self._output(state, results)).copy(),
                }
            return dict(results)
        places = [step.slot for step in steps] if rows else list(range(len(steps)))
        count = rows or len(steps)
        chosen: dict[str, Array] = {}
        for name, array in results.items():
            if not array.shape or array.shape[0] != count:
                raise InternalError(
                    f"unexpected shape {shape_text(array.shape)} for inference output '{name}' of model "
                    f"'{self._interface.name}', expecting a batch dimension of {count}"
                )
            chosen[name] = array if places == list(range(count)) else array[places]
        for number, step in enumerate(steps):
            step.state_after = {
                state.input_name: self._checked(state, self._output(state, chosen)[number]).copy()
                for state in self.states
            }
        return chosen

    def extra_inputs(self, step: Step | None) -> dict[str, Array]:
        """The controls and states of a single request; `step` is None for an empty slot."""
        head = (1,) if self._interface.batching else ()
        steps = [step] if step is not None else []
        made = {control.name: self._control(control, steps, [0] * len(steps), 1) for control in self.controls}
        for state in self.states:
            before = step.state_before if step is not None else self.initial
            array = before[state.input_name]
            made[state.input_name] = array.reshape((*head, *array.shape))
        return made

    def keep(self, step: Step, outputs: Mapping[str, Array]) -> None:
        """Keep the new states that a model returned for one request. Raises `InternalError`."""
        after: dict[str, Array] = {}
        for state in self.states:
            array = self._output(state, outputs)
            if self._interface.batching:
                if array.shape[:1] != (1,):
                    raise self._unexpected(state, array)
                array = array[0]
            after[state.input_name] = self._checked(state, array).copy()
        step.state_after = after

    def _control(self, control: Control, steps: Sequence[Step], places: Sequence[int], count: int) -> Array:
        if control.kind == "CORRID":
            array = _correlation_ids(control, steps, places, count)
        else:
            false, true = control.values
            array = np.full(count, false, dtype=control.datatype.numpy)
            for step, place in zip(steps, places, strict=True):
                if control.kind == "READY" or (step.start if control.kind == "START" else step.end):
                    array[place] = true
        return array.reshape((count, 1)) if self._interface.batching else array

    def _output(self, state: ImplicitState, results: Mapping[str, Array]) -> Array:
        array = results.get(state.output_name)
        if array is None:
            raise InternalError(f"model '{self._interface.name}' did not produce state output '{state.output_name}'")
        return array

    def _checked(self, state: ImplicitState, array: Array) -> Array:
        """Return a new state, after checking its shape and type. Raises `InternalError`."""
        fits = len(array.shape) == len(state.dims) and all(
            want in (-1, have) for have, want in zip(array.shape, state.dims, strict=True)
        )
        if not fits or array.dtype != state.datatype.numpy:
            raise self._unexpected(state, array)
        return array

    def _unexpected(self, state: ImplicitState, array: Array) -> InternalError:
        return InternalError(
            f"unexpected state output '{state.output_name}' of model '{self._interface.name}': {array.dtype} of shape "
            f"{shape_text(array.shape)}, expecting {state.datatype.config_name} of shape {shape_text(state.dims)}"
        )


def _correlation_ids(control: Control, steps: Sequence[Step], places: Sequence[int], count: int) -> Array:
    array: Array
    if control.datatype is DataType.BYTES:
        array = np.full(count, b"", dtype=np.object_)
        for step, place in zip(steps, places, strict=True):
            array[place] = str(step.correlation_id).encode()
        return array
    array = np.zeros(count, dtype=np.uint64)
    for step, place in zip(steps, places, strict=True):
        array[place] = step.correlation_id if isinstance(step.correlation_id, int) else 0
    return array.astype(control.datatype.numpy)  # a narrower type wraps


def _spread(array: Array, places: Sequence[int], count: int) -> Array:
    """Put rows at these positions, with empty rows between."""
    empty = b"" if array.dtype == np.object_ else 0
    spread = np.full((count, *array.shape[1:]), empty, dtype=array.dtype)
    spread[list(places)] = array
    return spread


def _empty(array: Array) -> Array:
    return np.full(array.shape, b"" if array.dtype == np.object_ else 0, dtype=array.dtype)


def _initial(model: str, state: ImplicitState, directory: Path) -> Array:
    dims = state.initial.dims
    if not state.initial.filename:
        if state.datatype is DataType.BYTES:
            return np.full(dims, b"", dtype=np.object_)
        return np.zeros(dims, dtype=state.datatype.numpy)
    path = contained(directory / INITIAL_STATE_DIRECTORY, state.initial.filename)
    if path is None:
        raise InvalidArgument(
            f"initial state file '{state.initial.filename}' in model '{model}' is outside the model's "
            f"'{INITIAL_STATE_DIRECTORY}' directory"
        )
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InternalError(f"failed to open text file for read {path}: {error.strerror}") from None
    count = int(np.prod(dims, dtype=np.int64))
    if state.datatype is DataType.BYTES:
        return object_array(split_bytes_elements(raw), count).reshape(dims)
    if len(raw) < count * state.datatype.size_bytes:
        raise InvalidArgument(
            f"initial state setting expects {count * state.datatype.size_bytes} bytes, but the data provided from "
            f"'{state.initial.filename}' has {len(raw)} bytes for state '{state.input_name}' of model '{model}'"
        )
    return np.frombuffer(raw, dtype=state.datatype.numpy, count=count).reshape(dims)
