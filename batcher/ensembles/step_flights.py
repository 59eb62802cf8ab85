"""The awaited steps of an ensemble and their ids, which are the same for every owner."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from batcher.entries.carriers import carried_of
from batcher.scheduling.ensembles.ensemble_planner import SubmitStep
from batcher.scheduling.ensembles.ensemble_run import Path
from batcher.scheduling.observations import RequestQueued
from charonia.calls.waiters import OpenRequest, Visible
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError
from charonia.wire import Reference, SequenceMark

from .step_sequences import NO_SEQUENCE, step_mark
from .step_tensors import rows_of


def step_id(request_id: bytes, step: int, path: Path) -> bytes:
    """The request id of a step: the same for every owner."""
    place = ",".join(map(str, (step, *path))).encode()
    return hashlib.blake2b(request_id + place, digest_size=16).digest()


class Flight(OpenRequest):
    """One awaited step; `accepted` is also true when the log had it before this owner sent it. `not_taken` is called
    with the error when the log does not take it.
    """

    __slots__ = ("_not_taken", "decision", "level", "reference", "since_ns", "telling", "told", "visible", "wanted")

    def __init__(self, decision: SubmitStep, not_taken: Callable[[Flight, CharoniaError], None]) -> None:
        super().__init__(decision.step.model, step_id(decision.request.id, decision.step.index, decision.path))
        self.decision = decision
        self._not_taken = not_taken
        self.level = 0
        self.since_ns = monotonic_ns()
        self.reference: Reference | None = None
        """Where its answer lies while the cache stores it."""
        self.visible = Visible(repeatable=False)
        """The responses of a decoupled step that were processed."""
        self.wanted = self.told = 0
        """For a step with a window: the responses wanted; `told` is the number last sent to its model's owner (S55)."""
        self.telling = False

    def failed(self, error: CharoniaError) -> None:
        self._not_taken(self, error)

    @property
    def rows(self) -> int:
        """Its batch size, 0 if its model does not batch."""
        return rows_of(self.decision.step, self.decision.inputs)

    @property
    def mark(self) -> SequenceMark:
        """The sequence it belongs to."""
        own = carried_of(self.request).record.sequence or NO_SEQUENCE
        return step_mark(own, [value.mark for value in self.decision.inputs.values()], self.model)

    @property
    def request(self) -> RequestQueued:
        return self.decision.request

    @property
    def tenant(self) -> str:
        lineage = carried_of(self.request).record.lineage
        return lineage.tenant if lineage is not None else ""
