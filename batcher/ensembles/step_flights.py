"""Steps of an ensemble that are awaited, and their ids, which are the same at every owner."""

from __future__ import annotations

import hashlib

from batcher.entries.carriers import carrier_of
from batcher.scheduling.ensembles.ensemble_planner import SubmitStep
from batcher.scheduling.ensembles.ensemble_run import Path
from batcher.scheduling.observations import QueuedRequest
from charonia.calls.waiters import OpenRequest, Visible
from charonia.clock import monotonic_ns
from charonia.wire import Reference, SequenceMark

from .step_sequences import NO_SEQUENCE, step_mark
from .step_tensors import rows_of


def step_id(request_id: bytes, step: int, path: Path) -> bytes:
    """The request id of a step: the same at every owner."""
    place = ",".join(map(str, (step, *path))).encode()
    return hashlib.blake2b(request_id + place, digest_size=16).digest()


class Flight(OpenRequest):
    """One step that is awaited; `accepted` is true, too, when the log had it before it was asked for from here."""

    __slots__ = ("decision", "level", "reference", "since_ns", "telling", "told", "visible", "wanted")

    def __init__(self, decision: SubmitStep) -> None:
        super().__init__(decision.step.model, step_id(decision.request.id, decision.step.index, decision.path))
        self.decision = decision
        self.level = 0
        self.since_ns = monotonic_ns()
        self.reference: Reference | None = None
        """Where the answer of a step lies that waits for the cache to take it."""
        self.visible = Visible(repeatable=False)
        """What of a decoupled step's responses was followed up."""
        self.wanted = self.told = 0
        """Of a step with a window: how many responses are wanted; `told` is what its model's owner knows (S55)."""
        self.telling = False

    @property
    def rows(self) -> int:
        """Its batch size, 0 of a model that does not batch."""
        return rows_of(self.decision.step, self.decision.inputs)

    @property
    def mark(self) -> SequenceMark:
        """The sequence it is asked for."""
        own = carrier_of(self.request).record.sequence or NO_SEQUENCE
        return step_mark(own, [value.mark for value in self.decision.inputs.values()], self.model)

    @property
    def request(self) -> QueuedRequest:
        return self.decision.request

    @property
    def tenant(self) -> str:
        lineage = carrier_of(self.request).record.lineage
        return lineage.tenant if lineage is not None else ""
