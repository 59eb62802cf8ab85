"""Ends requests and sequences that do not run to their end: cancelled, abandoned, past their deadline, idle. Pure."""

from __future__ import annotations

from batcher.scheduling.decisions import Decision, RejectRequest, StopExecution
from batcher.scheduling.observations import RequestCancelled, RequestQueued, VersionsAbandoned
from batcher.scheduling.queues.ledger import (
    CANCELLED,
    DEADLINE_PASSED,
    DEADLINE_PASSED_RUNNING,
    NEVER_NS,
    Cut,
    abandoned,
)
from charonia.errors import ErrorCode

from .sequence_instances import LiveSequence
from .sequence_ledger import DISPATCHED, SequenceLedger

TIMED_OUT = "timeout of the corresponding sequence has been expired"


class SequenceEndings:
    """Ends requests and sequences of one model."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: SequenceLedger) -> None:
        self._ledger = ledger

    def cancel(self, event: RequestCancelled, now_ns: int, decisions: list[Decision]) -> None:
        """End a request, or have the model that runs it notified."""
        request, _ = self._ledger.known.get(event.id, (None, None))
        if event.gentle and request is not None and request.state is DISPATCHED:
            if not request.settled:
                request.cancelled = True
                decisions.append(self._stopped(request, gentle=True))
            return
        self.end_one(event.id, CANCELLED, now_ns, decisions)

    def end_one(self, request_id: bytes, how: Cut | None, now_ns: int, decisions: list[Decision]) -> None:
        """End a request wherever it is (`how` None: it was settled from outside)."""
        request, sequence = self._ledger.known.get(request_id, (None, None))
        if request is None or sequence is None:
            return
        if request.state is DISPATCHED:
            self._end_running(request, how, decisions)
        else:
            self._ledger.cut(sequence, request, how, now_ns, decisions)

    def abandon(self, event: VersionsAbandoned, decisions: list[Decision]) -> None:
        """Refuse requests for versions that no executor serves any more."""
        ledger = self._ledger
        for number in [number for number in ledger.versions if number not in event.kept]:
            version = ledger.versions[number]
            how = abandoned(ledger.model, number, event.failures)
            bound = [sequence for instance in version.instances.all() for sequence in instance.slots.values()]
            for sequence in dict.fromkeys((*version.live.values(), *version.backlog, *bound)):
                ledger.refuse_all(sequence, how, decisions)
                if sequence.running is None:
                    ledger.end(sequence, decisions)
                else:
                    sequence.closed = True

    def next_ns(self) -> int:
        """When `expire` is due next."""
        return min(self._ledger.due.next_ns() or NEVER_NS, next(iter(self._ledger.idle.values()), NEVER_NS))

    def expire(self, now_ns: int, decisions: list[Decision]) -> None:
        """End requests past their deadline, and sequences that waited for a slot (S37) or were idle (S38) too long."""
        ledger = self._ledger
        while (request := ledger.due.pop(now_ns)) is not None:
            _, sequence = ledger.known[request.id]
            if request.state is DISPATCHED:
                self._end_running(request, (ErrorCode.DEADLINE_EXCEEDED, DEADLINE_PASSED_RUNNING, "OTHER"), decisions)
            elif 0 < request.deadline_ns <= now_ns:
                how: Cut = (ErrorCode.DEADLINE_EXCEEDED, DEADLINE_PASSED, "REJECTED")
                ledger.cut(sequence, request, how, now_ns, decisions)
            elif sequence.instance is None and sequence.running is None:
                ledger.refuse_all(sequence, (ErrorCode.UNAVAILABLE, TIMED_OUT, "REJECTED"), decisions, bare=True)
                ledger.end(sequence, decisions)
            else:  # it has its slot by now
                request.timeout_ns = 0
                ledger.due.arm(request)
        while (resting := self._rested_until(now_ns)) is not None:
            ledger.end(resting, decisions)

    def _rested_until(self, now_ns: int) -> LiveSequence | None:
        """Ends a sequence that has been idle too long by now."""
        sequence, due_ns = next(iter(self._ledger.idle.items()), (None, NEVER_NS))
        return sequence if due_ns <= now_ns else None

    def _end_running(self, request: RequestQueued, how: Cut | None, decisions: list[Decision]) -> None:
        """End a request that an executor has: the first settlement wins, and it is not run again."""
        if request.settled:
            return
        if how is not None:
            decisions.append(RejectRequest(request, *how))
        request.settled = True
        self._ledger.due.disarm(request)
        decisions.append(self._stopped(request))

    def _stopped(self, request: RequestQueued, *, gentle: bool = False) -> StopExecution:
        batch_id, batch = next((i, b) for i, b in self._ledger.batches.items() if request in b.requests)
        return StopExecution(request, batch_id, batch.executor, gentle)
