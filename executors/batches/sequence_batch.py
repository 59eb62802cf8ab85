"""The sequence steps of one running batch: adds controls and states to its inputs, takes new states from its results
(S34, S39). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from charonia.backend import Array, ModelRequest, ModelResponse
from charonia.errors import CharoniaError
from charonia.tensors import Tensor

from .assembly import RequestPlan
from .sequence_tensors import SequenceTensors, Step

Planned = tuple[int, RequestPlan]


@dataclass(slots=True)
class BatchSteps:
    """The steps of a batch, one per record. `errors` holds the errors of records that cannot run, by index.

    `rows` is how many slots each execution covers, 0 for only the batch's members (`charonia.wire.BatchPlaces`).
    `clears_slots`: a sequence starts in the slot of one that has not ended, so the model must first see that slot
    without a request (S33).
    """

    tensors: SequenceTensors
    rows: int
    steps: list[Step]
    errors: dict[int, CharoniaError]
    clears_slots: bool = False

    def groups(self, runs: Iterable[list[Planned]]) -> Iterator[list[Planned]]:
        """Split runs further, so that the states in each have equal shapes."""
        for run in runs:
            by_shape: dict[tuple[tuple[int, ...], ...], list[Planned]] = {}
            for pair in run:
                by_shape.setdefault(self.tensors.shapes(self.steps[pair[0]]), []).append(pair)
            yield from by_shape.values()

    # -- arrays -------------------------------------------------------------------------------------------------------

    def feed(
        self, indices: Sequence[int], arrays: Mapping[str, Array], outputs: Sequence[str]
    ) -> tuple[dict[str, Array], tuple[str, ...]]:
        """Return the arrays of an execution with controls and states added, and the outputs to request."""
        return self.tensors.feed(self._of(indices), self.rows, arrays), self.tensors.with_state_outputs(outputs)

    def take(self, indices: Sequence[int], results: Mapping[str, Array]) -> dict[str, Array]:
        """Keep the new states and return the members' results. Raises `InternalError`."""
        return self.tensors.take(self._of(indices), self.rows, results)

    def _of(self, indices: Sequence[int]) -> list[Step]:
        return [self.steps[index] for index in indices]

    def feed_empty(
        self, arrays: Mapping[str, Array], outputs: Sequence[str]
    ) -> tuple[dict[str, Array], tuple[str, ...]]:
        """`feed` for an execution without requests."""
        return self.tensors.feed_empty(self.rows, arrays), self.tensors.with_state_outputs(outputs)

    # -- requests -----------------------------------------------------------------------------------------------------

    def prepare(self, index: int, request: ModelRequest) -> None:
        """Add the correlation id, flags, controls and states to a model's request."""
        step = self.steps[index]
        request.correlation_id, request.flags = step.correlation_id, step.flags
        request.inputs = [*request.inputs, *_tensors(self.tensors.extra_inputs(step))]
        request.outputs = self.tensors.with_state_outputs(request.outputs)

    def spread(self, indices: Sequence[int], requests: Sequence[ModelRequest]) -> list[ModelRequest]:
        """Return one request per slot, with null requests, shaped like the first one, in empty slots (S34)."""
        if not self.rows:
            return list(requests)
        slots: dict[int, ModelRequest] = {self.steps[i].slot: r for i, r in zip(indices, requests, strict=True)}
        return [slots.get(slot) or self._null(requests[0]) for slot in range(self.rows)]

    def null_requests(self, like: ModelRequest) -> list[ModelRequest]:
        """Null requests for all slots (S33), shaped like `like`."""
        return [self._null(like) for _ in range(self.rows or 1)]

    def _null(self, like: ModelRequest) -> ModelRequest:
        extra_inputs = _tensors(self.tensors.extra_inputs(None))
        names = {tensor.name for tensor in extra_inputs}
        empty = [
            Tensor(t.name, t.datatype, t.shape, bytes(len(t.data)))
            if t.datatype.size_bytes
            else Tensor.of(t.name, np.full(t.shape, b"", dtype=np.object_))
            for t in like.inputs
            if t.name not in names
        ]
        return ModelRequest(
            id="", correlation_id=0, inputs=[*empty, *extra_inputs], outputs=like.outputs, parameters={}, timeout_us=0
        )

    def keep(self, index: int, response: ModelResponse) -> None:
        """Keep the new states of a response. Raises `InternalError` when one is missing."""
        if self.tensors.states:
            found = {tensor.name: tensor.array() for tensor in response.outputs}
            if response.again and not any(name in found for name in self.tensors.state_outputs):
                self.steps[index].state_after = self.steps[index].state_before
            else:
                self.tensors.keep(self.steps[index], found)

    def keep_from_response(self, index: int, response: ModelResponse) -> bool:
        """Keep the states of one response of several, if it has any; the last ones count.

        Returns whether the response holds anything else for the caller. Raises `InternalError` when it has only some of
        the states.
        """
        states = self.tensors.state_outputs
        if not any(tensor.name in states for tensor in response.outputs):
            return True
        self.tensors.keep(self.steps[index], {tensor.name: tensor.array() for tensor in response.outputs})
        return bool(response.parameters) or any(tensor.name not in states for tensor in response.outputs)

    def keep_partial(self, index: int) -> None:
        """Keep the current states of a rescheduled request."""
        step = self.steps[index]
        if step.state_after is None:
            step.state_after = step.state_before


def _tensors(arrays: Mapping[str, Array]) -> list[Tensor]:
    return [Tensor.of(name, array) for name, array in arrays.items()]
