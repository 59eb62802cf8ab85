"""Returns the requests of unfinished batches to the queue, or isolates them. Pure. `poison_isolation` has the rule;
this module moves the requests.
"""

from __future__ import annotations

from batcher.scheduling.decisions import Decision
from batcher.scheduling.observations import (
    BatchDied,
    BatchLost,
    BatchTooLarge,
    ExecutorLost,
    RequestQueued,
    RequestState,
)
from batcher.scheduling.poison.poison_isolation import (
    CULPRIT_OF_LOSSES,
    FRESH_WAIT_NS,
    MAX_LOSSES_APART,
    PARTS_AFTER_DEATH,
    PARTS_AFTER_LOSS,
    TOGETHER_NS,
    Blame,
    Isolation,
)
from charonia.errors import ErrorCode

from .model_state import ModelState

QUEUED = RequestState.QUEUED
DELAYED = RequestState.DELAYED
SUSPECT = RequestState.SUSPECT
DISPATCHED = RequestState.DISPATCHED

PARTS_OF_LARGE = 2
"""Into how many batches one is divided that has too many bytes."""


class Recalls:
    """Takes batches of one model back from executors."""

    __slots__ = ("_blame", "_counted", "_lately", "_since", "_state")

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self._blame = Blame()
        self._since: dict[str, int] = {}
        """When each executor was first seen to serve the model."""
        self._lately: list[tuple[int, list[RequestQueued]]] = []
        """When executors were lost recently, and the requests that each loss counts against."""
        self._counted: list[RequestQueued] | None = []
        """Those of the current loss; None when it counts against no request."""

    def served(self, executor: str, now_ns: int) -> None:
        """An executor serves the model."""
        self._since.setdefault(executor, now_ns)

    def lose(self, event: ExecutorLost, now_ns: int, decisions: list[Decision]) -> None:
        state = self._state
        for number, version in state.versions.items():
            version.instances.lose(event.executor)
            if version.routing is not None:
                version.routing.lose(event.executor)
            state.touch(number)
        since_ns = self._since.pop(event.executor, now_ns)
        if not event.drained:
            self._note_loss(event.executor, since_ns, now_ns)
        for batch_id in [batch_id for batch_id, batch in state.batches.items() if batch.executor == event.executor]:
            if event.drained:
                self.take_back(batch_id, "its executor was stopped", now_ns, decisions)
            else:
                self._lose_batch(batch_id, now_ns, decisions)
        self._counted = []
        if state.kept.give_up(event.executor):
            state.refresh()

    def returned(self, executor: str) -> None:
        """An executor is heard of; it may have been presumed dead."""
        self._blame.returned(executor)

    def _note_loss(self, executor: str, since_ns: int, now_ns: int) -> None:
        """The loss of several executors at once is no request's fault and does not count against any. At once means
        within `TOGETHER_NS`, and that this executor existed when the other was lost: one that came later may have been
        ended by requests of the first.
        """
        self._lately = [loss for loss in self._lately if now_ns - loss[0] <= TOGETHER_NS]
        together = [counted for lost_ns, counted in self._lately if since_ns < lost_ns]
        for counted in together:
            for request in counted:
                request.losses_apart = max(0, request.losses_apart - 1)
            counted.clear()
        mine: list[RequestQueued] = []
        self._counted = None if together else mine
        self._lately.append((now_ns, mine))
        self._blame.lost(executor, mine)

    def take_back(self, batch_id: str, why: str, now_ns: int, decisions: list[Decision]) -> None:
        """No request is to blame: the requests of a batch return to the front of their levels."""
        state = self._state
        batch, left = state.recall(batch_id, why, now_ns, decisions)
        if state.ledger.resumable:
            for request in left:
                request.responding = False  # not in its next run so far
        if batch.suspects is not None:
            self._isolate(batch.version, left).add(left, apart=batch.apart, until_ns=batch.suspects.until_ns)
            return
        self._put_back(batch.version, left)

    def divide(self, event: BatchTooLarge, now_ns: int, decisions: list[Decision]) -> None:
        """A batch could not be sent: run its halves, and end a request that cannot be sent by itself."""
        state = self._state
        batch = state.batches.get(event.batch_id)
        if batch is None or batch.executor != event.executor:
            return
        _, left = state.recall(event.batch_id, "its batch was too large", now_ns, decisions)
        if len(batch.requests) > 1:
            self._isolate(batch.version, left).split(left, PARTS_OF_LARGE)
            return
        for request in left:
            state.ledger.reject(request, ErrorCode.INVALID_ARG, event.message, "OTHER", decisions)

    def _put_back(self, version: int, requests: list[RequestQueued]) -> None:
        """These requests return to the front of their levels."""
        state = self._state
        for request in reversed(requests):
            state.ledger.count_again(request)
            state.set_lane(request)
            state.versions[version].queue.put_back(request)

    def _spare(self, version: int, left: list[RequestQueued]) -> list[RequestQueued]:
        """Queue the requests that gave new responses in this run again as they were; returns the others."""
        if not self._state.ledger.resumable:
            return left
        progressed = [request for request in left if request.responding]
        for request in progressed:
            request.responding = False
            request.losses_apart = 0
        self._put_back(version, progressed)
        return [request for request in left if request not in progressed]

    def die(self, event: BatchDied, now_ns: int, decisions: list[Decision]) -> None:
        state = self._state
        batch = state.batches.get(event.batch_id)
        if batch is None:
            self._suspect(event, decisions)
        if batch is None or batch.executor != event.executor:
            return
        for request in batch.requests:
            if request.id not in event.ids:
                request.settled = True
        if event.blameless:
            self.take_back(event.batch_id, event.reason, now_ns, decisions)
            return
        _, left = state.recall(event.batch_id, event.reason, now_ns, decisions, suspect=True)
        left = self._spare(batch.version, left)
        if batch.requests and not left:
            return
        if event.in_company and len(batch.requests) == 1 and not batch.apart:
            self._isolate(batch.version, left).add(left, apart=True)
        elif len(batch.requests) == 1:
            for request in left:
                state.ledger.condemn(request, event.reason, event.stderr, batch.executor, decisions)
        else:
            self._isolate(batch.version, left).split(left, PARTS_AFTER_DEATH)

    def _suspect(self, event: BatchDied, decisions: list[Decision]) -> None:
        """A predecessor's batch failed; requests that run by now were dispatched before this was known."""
        state = self._state
        known = state.ledger.known
        left = [known[i] for i in event.ids if i in known and known[i].state in (QUEUED, DELAYED, SUSPECT)]
        if event.blameless or not left:
            return
        left.sort(key=lambda request: request.order)
        for request in left:
            state.remove(request, DISPATCHED)
        if len(event.ids) == 1 and event.in_company:
            self._isolate(left[0].version, left).add(left, apart=True)
        elif len(event.ids) == 1:
            state.ledger.condemn(left[0], event.reason, event.stderr, event.executor, decisions)
        else:
            self._isolate(left[0].version, left).split(left, PARTS_AFTER_DEATH)

    def _lose_batch(self, batch_id: str, now_ns: int, decisions: list[Decision]) -> None:
        batch, left = self._state.recall(batch_id, "its executor was lost", now_ns, decisions, suspect=True)
        left = self._spare(batch.version, left)
        if batch.requests and not left:
            return
        if batch.suspects is None or len(batch.requests) > 1:
            self._isolate(batch.version, left).split(left, PARTS_AFTER_LOSS)
        else:
            self._lose_alone(left, batch.version, batch.executor, now_ns, decisions, apart=batch.apart)

    def lose_unseen(self, event: BatchLost, now_ns: int, decisions: list[Decision]) -> None:
        """The rule of `lose`, for a batch that was lost with its owner."""
        left = [r for r in event.requests if self._state.ledger.known.get(r.id) is r and r.state in (QUEUED, DELAYED)]
        if event.stalled and not event.suspects:
            return
        left.sort(key=lambda request: request.order)
        for request in left:
            self._state.remove(request, DISPATCHED)
        if not left:
            return
        version = left[0].version
        if event.stalled:
            self._isolate(version, left).add(left, apart=event.suspects == "apart")
            return
        if event.members == 1:
            self._lose_alone(left, version, event.executor, now_ns, decisions, apart=event.suspects == "apart")
        else:
            isolation = self._isolate(version, left)
            isolation.split(left, PARTS_AFTER_LOSS, apart=not event.suspects)

    def _lose_alone(
        self,
        left: list[RequestQueued],
        version: int,
        executor: str,
        now_ns: int,
        decisions: list[Decision],
        *,
        apart: bool,
    ) -> None:
        """An executor was lost with a request alone in its batch."""
        for request in left:
            if apart and self._counted is not None:
                request.losses_apart += 1
                self._counted.append(request)
            if request.losses_apart >= MAX_LOSSES_APART:
                self._state.ledger.condemn(request, CULPRIT_OF_LOSSES, "", executor, decisions)
                return
        until_ns = now_ns + FRESH_WAIT_NS if apart else 0
        self._isolate(version, left).add(left, apart=True, until_ns=until_ns)

    def _isolate(self, version: int, requests: list[RequestQueued]) -> Isolation:
        """These requests wait, in groups that the caller forms."""
        state = self._state
        for request in requests:
            state.ledger.count_again(request, timed=False)
        return state.versions[version].isolation
