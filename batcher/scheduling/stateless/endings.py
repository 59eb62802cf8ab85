"""Ends requests of one model without a batch: cancelled, due, settled by others, or their version is gone. Pure.

An executor that has the request is notified to stop, and the first settlement wins; a waiting request leaves its queue.
"""

from __future__ import annotations

from batcher.scheduling.decisions import Decision, RejectReason, RejectRequest, StopExecution
from batcher.scheduling.observations import (
    RequestCancelled,
    RequestQueued,
    RequestState,
    ResponsesSeen,
    VersionsAbandoned,
)
from batcher.scheduling.queues.ledger import (
    CANCELLED,
    DEADLINE_PASSED,
    DEADLINE_PASSED_RUNNING,
    NEVER_NS,
    TIMED_OUT,
    abandoned,
    cut_short,
)
from batcher.scheduling.queues.queueing import moves_behind
from charonia.errors import ErrorCode

from .model_state import ModelState

QUEUED = RequestState.QUEUED
DELAYED = RequestState.DELAYED
SUSPECT = RequestState.SUSPECT
DISPATCHED = RequestState.DISPATCHED


class Endings:
    """Ends requests of one model."""

    __slots__ = ("_state",)

    def __init__(self, state: ModelState) -> None:
        self._state = state

    def seen(self, event: ResponsesSeen, decisions: list[Decision]) -> None:
        """Responses to these were visible before; those that wait are not run again."""
        known = self._state.ledger.known
        for request in sorted([known[i] for i in event.ids if i in known], key=lambda request: request.order):
            request.responding = True
            if request.state is not DISPATCHED:
                self.end_one(request.id, *cut_short("its executor was lost"), decisions)

    def cancel(self, event: RequestCancelled, decisions: list[Decision]) -> None:
        """End a request, or have the model that runs it notified."""
        request = self._state.ledger.known.get(event.id)
        if event.gentle and request is not None and request.state is DISPATCHED:
            if not request.settled:
                request.cancelled = True
                decisions.append(self._stopped(request, gentle=True))
            return
        self.end_one(event.id, *CANCELLED, decisions)

    def end_one(
        self, request_id: bytes, code: ErrorCode, message: str, reason: RejectReason, decisions: list[Decision]
    ) -> None:
        """End a request wherever it is."""
        request = self._state.ledger.known.get(request_id)
        if request is None:
            return
        if request.state is DISPATCHED:
            self._end_running(request, code, message, reason, decisions)
            return
        self._state.remove(request)
        self._state.ledger.reject(request, code, message, reason, decisions)

    def open_wave(self, wave_id: bytes, decisions: list[Decision]) -> None:
        """A request of a queued wave must be handled alone; a running wave goes on as it is."""
        wave = self._state.ledger.known.get(wave_id)
        if wave is not None and wave.wave and wave.state is not DISPATCHED:
            self._burst(wave, decisions)

    def open_waves(self, decisions: list[Decision]) -> None:
        """Burst the queued waves: the queue is held back, and an operator who lists it should see single requests."""
        if self._state.ledger.has_waves:
            for request in [r for r in self._state.ledger.known.values() if r.wave]:
                self.open_wave(request.id, decisions)

    def _burst(self, wave: RequestQueued, decisions: list[Decision]) -> None:
        self._state.remove(wave)
        self._state.ledger.burst(wave, decisions)

    def drop(self, request_id: bytes, decisions: list[Decision]) -> None:
        """A request was settled from outside."""
        request = self._state.ledger.known.get(request_id)
        if request is None:
            return
        if request.state is DISPATCHED:
            self._stop(request, decisions)
        else:
            self._state.remove(request)

    def _end_running(
        self, request: RequestQueued, code: ErrorCode, message: str, reason: RejectReason, decisions: list[Decision]
    ) -> None:
        """End a request that an executor has: the first settlement wins, and it is not run again."""
        if not request.settled:
            decisions.append(RejectRequest(request, code, message, reason))
            self._stop(request, decisions)

    def _stop(self, request: RequestQueued, decisions: list[Decision]) -> None:
        if not request.settled:
            request.settled = True
            if request.due_ns:
                self._state.ledger.due.disarm(request)
            decisions.append(self._stopped(request))

    def _stopped(self, request: RequestQueued, *, gentle: bool = False) -> StopExecution:
        batch_id, batch = next((i, b) for i, b in self._state.batches.items() if request in b.requests)
        return StopExecution(request, batch_id, batch.executor, gentle)

    def abandon(self, event: VersionsAbandoned, decisions: list[Decision]) -> None:
        """Refuse requests for versions that no executor serves any more."""
        waiting = [
            r
            for r in self._state.ledger.known.values()
            if r.version not in event.kept and r.state in (QUEUED, DELAYED, SUSPECT)
        ]
        for request in waiting:
            if request.wave:
                self._burst(request, decisions)  # its requests are refused one by one
                continue
            self._state.remove(request)
            how = abandoned(self._state.ledger.model, request.version, event.failures)
            self._state.ledger.reject(request, *how, decisions)

    def expire(self, now_ns: int, decisions: list[Decision]) -> None:
        """Requests whose time-out or deadline has come (S21-S23)."""
        while (request := self._state.ledger.due.pop(now_ns)) is not None:
            if request.wave:
                self.open_wave(request.id, decisions)
                continue
            if request.state is DISPATCHED:
                code, message = ErrorCode.DEADLINE_EXCEEDED, DEADLINE_PASSED_RUNNING
                self._end_running(request, code, message, "OTHER", decisions)
                continue
            timed_out = 0 < request.timeout_ns <= now_ns
            if timed_out and moves_behind(self._state.ledger.queueing.place(request.level)[1]):
                request.timeout_ns = 0
                request.delayed = True
                version = self._state.versions[request.version]
                version.queue.delay(request)
                self._state.ledger.due.arm(request)
                self._state.touch(request.version)
                continue
            deadline_first = 0 < request.deadline_ns <= (request.timeout_ns or NEVER_NS)
            self._state.remove(request)
            if deadline_first:
                self._state.ledger.reject(request, ErrorCode.DEADLINE_EXCEEDED, DEADLINE_PASSED, "REJECTED", decisions)
            else:
                self._state.ledger.reject(request, ErrorCode.UNAVAILABLE, TIMED_OUT, "REJECTED", decisions, bare=True)
