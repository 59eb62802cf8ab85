"""Reads recorded requests from a model's journal (`charonia.facts.journal`).

Entries have times in whole milliseconds, those of the log server. A time within its millisecond is drawn at random with
a fixed seed, in the order of the entries: so differences have no bias, and an interval is uncertain by some 0.5 ms
(standard deviation, `service_times` takes that out). A batch begins, here, when it was sent to its executor. The
journal names neither rows nor priorities, tenants or time-outs: each request is one row without them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from charonia.facts.jobs import JobState
from charonia.facts.journal import JournalFact, read_facts
from charonia.tensors import Buffer

from .processor_shares import Said
from .recorded_requests import Outcome, RecordedRequest, Recording, recording

SOURCE = "journal"
RESOLUTION_NS = 1_000_000
"""Ids of entries are milliseconds."""
_REFUSED = (JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED)


@dataclass(slots=True)
class _Batch:
    executor: str
    begun_ns: int


class JournalRecording:
    """Folds entries, oldest first. Requests whose beginning is not in the entries are left out."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._requests: dict[bytes, RecordedRequest] = {}
        self._batches: dict[str, _Batch] = {}
        self._done: list[RecordedRequest] = []
        self._random = random.Random(0)
        self._ms = 0
        self._waiting: list[list[JournalFact]] = []
        self._said: list[Said] = []

    def fold(self, entry_id: bytes, fields: Sequence[Buffer]) -> None:
        """Takes one entry. Raises `InvalidRecord` for one that is no journal fact."""
        ms = int(entry_id.partition(b"-")[0])
        if ms != self._ms:
            self._apply_waiting()
            self._ms = ms
        self._waiting.append(read_facts(fields))

    def recording(self) -> Recording:
        """What was read; requests without an end are LOST."""
        self._apply_waiting()
        requests = [*self._done, *self._requests.values()]
        return recording(self._model, requests, SOURCE, RESOLUTION_NS, knows_starts=False, said=self._said)

    def _apply_waiting(self) -> None:
        """Applies the entries of one millisecond, at times within it in their order."""
        waiting, self._waiting = self._waiting, []
        times = sorted(self._random.randrange(RESOLUTION_NS) for _ in waiting)
        for facts, within_ns in zip(waiting, times, strict=True):
            for fact in facts:
                self._apply(fact, self._ms * RESOLUTION_NS + within_ns)

    def _apply(self, fact: JournalFact, now_ns: int) -> None:
        match fact.kind:
            case "accepted":
                for request_id in fact.ids:
                    self._requests[request_id] = RecordedRequest(now_ns, journalled=True)
            case "batched" | "started":
                if fact.use is not None:
                    self._said.append((fact.executor, fact.use))
                batch = self._batches.setdefault(fact.batch_id, _Batch(fact.executor, now_ns))
                for request_id in fact.ids:
                    self._change(request_id, batch=fact.batch_id, executor=batch.executor)
            case "ended":
                self._ended(fact.ids, fact.outcomes, now_ns)

    def _change(self, request_id: bytes, batch: str, executor: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._requests[request_id] = replace(request, batch=batch, executor=executor)

    def _ended(self, ids: Sequence[bytes], outcomes: Sequence[JobState], now_ns: int) -> None:
        for request_id, outcome in zip(ids, outcomes, strict=True):
            request = self._requests.pop(request_id, None)
            if request is None:
                continue
            batch = self._batches.get(request.batch)
            if batch is None or outcome in _REFUSED:
                self._done.append(replace(request, batch="", ended_ns=now_ns, outcome=Outcome.REFUSED))
                continue
            self._done.append(
                replace(
                    request,
                    started_ns=batch.begun_ns,
                    computed_ns=max(now_ns, batch.begun_ns + 1),
                    ended_ns=now_ns,
                    outcome=Outcome.ANSWERED,
                )
            )
