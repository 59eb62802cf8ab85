"""What the scheduler of one model knows, and the moves that keep its parts in agreement. No rules of its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from batcher.scheduling.decisions import Decision
from batcher.scheduling.observations import QueuedRequest, RequestState
from batcher.scheduling.queues.adaptive_batching import AdaptiveBatching
from batcher.scheduling.queues.fair_sharing import TurnRules
from batcher.scheduling.queues.ledger import RequestLedger, cut_short

from .kept_executors import KeptExecutors
from .model_version import Batch, ModelVersion

ENDED = RequestState.ENDED
SUSPECT = RequestState.SUSPECT


class ModelState:
    """Requests (`ledger`), their queues by version, the batches given out, and what is to be looked at again.

    `held` are finished batches whose answers wait for their order, `changed` the versions to look at, `paused` those
    that wait for an instant to batch, `fresh_waits` those whose suspects wait for a fresh executor until then.
    """

    __slots__ = (
        "batches",
        "changed",
        "fresh_waits",
        "held",
        "kept",
        "ledger",
        "paused",
        "prefetch",
        "turns",
        "versions",
    )

    def __init__(self, prefetch: int, lane_weights: Mapping[int, int]) -> None:
        self.prefetch = prefetch
        self.ledger = RequestLedger()
        self.turns = TurnRules(lane_weights)
        self.kept = KeptExecutors()
        self.versions: dict[int, ModelVersion] = {}
        self.batches: dict[str, Batch] = {}
        self.held: set[str] = set()
        self.changed: dict[int, None] = {}
        self.paused: dict[int, int] = {}
        self.fresh_waits: dict[int, int] = {}

    def version(self, number: int) -> ModelVersion:
        version = self.versions.get(number)
        if version is None:
            version = self.versions[number] = ModelVersion(number, self.prefetch, self.kept, self.turns)
        return version

    def touch(self, number: int) -> None:
        """Something changed for a version: look at its queue again."""
        self.changed[number] = None
        version = self.versions.get(number)
        if version is not None and version.pause is not None:
            version.pause = None
            self.paused.pop(number, None)

    def touch_due(self, now_ns: int) -> None:
        """Look again at what waited for an instant that has come."""
        for waits in (self.paused, self.fresh_waits):
            for number in [number for number, until_ns in waits.items() if until_ns <= now_ns]:
                self.touch(number)

    def measure(self, adaptive: AdaptiveBatching, batch: Batch, now_ns: int) -> None:
        """What a finished batch and its requests took, where batching adapts to it."""
        requests = batch.requests
        if batch.started_ns and batch.suspects is None and not batch.freed:
            adaptive.finished(sum(request.rows for request in requests), now_ns - batch.started_ns, now_ns)
        in_time_since_ns = now_ns - adaptive.target_ns
        adaptive.answered(len(requests), sum(request.enqueued_ns < in_time_since_ns for request in requests))
        for other in self.batches.values():
            # the instance begins with the next of those that waited behind
            if not other.started_ns and other.executor == batch.executor and other.version == batch.version:
                other.started_ns = now_ns
                break

    def set_lane(self, request: QueuedRequest) -> None:
        """Answers in order of arrival leave no turns to take (S6)."""
        if self.ledger.batching is not None and self.ledger.batching.preserve_ordering:
            request.lane = 0

    def recall(
        self, batch_id: str, why: str, now_ns: int, decisions: list[Decision], *, suspect: bool = False
    ) -> tuple[Batch, list[QueuedRequest]]:
        """A batch will not finish, `why`: it, and what is left of its requests. Waves are burst, perhaps as suspects.

        A request that had responses ends here, unless its model is repeatable.
        """
        batch = self.batches.pop(batch_id)
        version = self.free_slot(batch)
        if self.kept:
            self.released(batch)
        if batch.via_owner:
            version.releases.lose(batch.first)
        self.touch(batch.version)
        left: list[QueuedRequest] = []
        for request in batch.requests:
            if request.wave:
                self.ledger.burst(request, decisions, suspect=suspect, executor=batch.executor)
                continue
            request.away_ns += now_ns - batch.dispatched_ns
            if request.due_ns:
                self.ledger.due.disarm(request)
            if request.responding and not request.settled and not self.ledger.repeatable:
                self.ledger.reject(request, *cut_short(why), decisions)
            elif self.ledger.admit(request, now_ns, decisions):
                left.append(request)
        return batch, left

    def free_slot(self, batch: Batch) -> ModelVersion:
        """The batch's instance is free, if it was not before."""
        version = self.version(batch.version)
        if not batch.freed:
            batch.freed = True
            version.instances.release(batch.executor)
        return version

    def remove(self, request: QueuedRequest, state: RequestState = ENDED) -> None:
        """Take a request out of the queue; when that ends it, it is forgotten."""
        version = self.versions[request.version]
        (version.isolation if request.state is SUSPECT else version.queue).remove(request, state)
        self.ledger.uncount(request)
        if state is ENDED:
            del self.ledger.known[request.id]
        self.touch(request.version)

    def released(self, batch: Batch) -> None:
        """An executor has one batch less, perhaps the one it was kept free for."""
        if batch.apart and self.kept.give_up(batch.executor):
            self.refresh()
        elif (waiting := self.kept.get(batch.executor)) is not None:
            self.touch(waiting)

    def refresh(self) -> None:
        """Other executors are kept free now."""
        for number, version in self.versions.items():
            if version.instances.refresh():
                self.touch(number)
