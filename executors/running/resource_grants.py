"""Passes batches to instances when the rate limiter grants them resources (Q1-Q4).

`executors.running.rate_limiter` decides the order. This module keeps the waiting batches and starts executions. Without
rate limits it is not used: instances take batches from their pool's queue.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from charonia.backend import InstanceSpec
from charonia.facts.resource_waits import Turn, WaitingBatch
from charonia.models.interface import InstanceGroup

from .rate_limiter import RateLimiter, Resource
from .submitted_batch import SubmittedBatch

if TYPE_CHECKING:
    from .workers import Worker


class ResourceGrants:
    """Starts executions as the limiter grants them. One for all models of an executor; used in the event loop."""

    def __init__(self, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self._begin: dict[object, Callable[[], bool]] = {}
        self._passing = False

    def register(self, key: object, spec: InstanceSpec, group: InstanceGroup, begin: Callable[[], bool]) -> None:
        """Add an instance. `begin` starts its next execution and returns False when it has none.

        Raises `InvalidArgument` when the instance could never run (Q3).
        """
        self.limiter.register(key, group.resources, group.priority, spec.device_id)
        self._begin[key] = begin

    def unregister(self, key: object) -> None:
        self.limiter.unregister(key)
        self._begin.pop(key, None)
        self.advance()

    def advance(self) -> None:
        """Start every execution that the limiter grants."""
        if self._passing:
            return  # called from `begin`: the loop below goes on
        self._passing = True
        try:
            while granted := self.limiter.grant():
                for key in granted:
                    if not self._begin[key]():
                        self.limiter.release(key, executed=False)
        finally:
            self._passing = False


class RateLimitedQueue:
    """The waiting batches of one pool, and its workers, each of which gets one batch at a time.

    `worker_of` returns the worker that a batch is bound to; None when any worker may take any batch.
    """

    def __init__(self, grants: ResourceGrants, worker_of: Callable[[SubmittedBatch], Worker] | None = None) -> None:
        self._worker_of = worker_of
        self._grants = grants
        self._limiter = grants.limiter
        self._workers: list[Worker] = []
        self._running: dict[SubmittedBatch, Worker] = {}
        self._waiting: deque[SubmittedBatch] = deque()

    @property
    def waiting(self) -> Collection[SubmittedBatch]:
        """The batches that no instance has started."""
        return self._waiting

    @property
    def waiting_requests(self) -> int:
        """How many requests are in batches that no instance has started."""
        return sum(len(batch.records) + sum(wave.count for wave in batch.waves) for batch in self._waiting)

    def add(self, worker: Worker, group: InstanceGroup) -> None:
        """Add a worker; a passive one never executes, so it is ignored.

        Raises `InvalidArgument` when it could never run (Q3).
        """
        if not worker.passive:
            self._grants.register(worker, worker.spec, group, lambda: self._start(worker))
            self._workers.append(worker)

    def submit(self, batch: SubmittedBatch) -> None:
        self._waiting.append(batch)
        self.request_grants()

    def finished(self, batch: SubmittedBatch, *, died: bool) -> None:
        """Release the resources of a batch that was executed, or whose instance `died`."""
        worker = self._running.pop(batch, None)
        if worker is not None:
            worker.down |= died  # the worker notices only later, and must not get the next batch until then
            self._limiter.release(worker)
            self.request_grants()

    def take_all(self) -> list[SubmittedBatch]:
        """Remove and return the batches that no instance has started."""
        taken = list(self._waiting)
        self._waiting.clear()
        self.request_grants()
        return taken

    def close(self) -> None:
        """Remove this pool's workers from the limiter."""
        for worker in self._workers:
            self._grants.unregister(worker)
        self._workers.clear()

    def request_grants(self) -> None:
        """Request resources for as many free workers as batches wait, those with the fewest executions first.

        Workers with equal needs are counted together, so that no batch waits for the resources of one kind of instance
        while another kind could start.
        """
        wanted = {self._worker_of(batch) for batch in self._waiting} if self._worker_of is not None else None
        asking: Counter[frozenset[tuple[Resource, int]]] = Counter()
        for worker in self._free():
            alike = frozenset(self._limiter.needs(worker).items())
            if asking[alike] < len(self._waiting) if wanted is None else worker in wanted:
                asking[alike] += 1
                self._limiter.ask(worker)
            else:
                self._limiter.withdraw(worker)
        self._grants.advance()

    def snapshot(self, model: str, version: int) -> tuple[list[Turn], list[WaitingBatch]]:
        """Return the state of this pool's workers and of its waiting batches, for deadlock detection.

        Free workers that request nothing while batches wait are left out: others with equal needs stand for them.
        """
        executing = {worker: batch for batch, worker in self._running.items()}
        resting = [worker for worker in self._free() if self._limiter.order(worker) is None] if self._waiting else []
        turns = [
            Turn(
                worker.spec.name,
                (model, version, index if self._worker_of is not None else -1),
                self._limiter.needs(worker),
                _ids(executing[worker]) if worker in executing else (),
                None if worker.down else self._limiter.order(worker),
            )
            for index, worker in enumerate(self._workers)
            if worker not in resting
        ]
        where = self._workers.index
        places = [where(self._worker_of(batch)) if self._worker_of is not None else -1 for batch in self._waiting]
        waiting = zip(places, self._waiting, strict=True)
        return turns, [WaitingBatch((model, version, index), _ids(batch)) for index, batch in waiting]

    def _free(self) -> list[Worker]:
        busy = set(self._running.values())
        return sorted(
            [worker for worker in self._workers if worker not in busy and not worker.down],
            key=self._limiter.scaled_executions,
        )

    def _start(self, worker: Worker) -> bool:
        if not self._waiting or worker.down:
            return False
        if self._worker_of is None:
            batch = self._waiting.popleft()
        else:
            mine = next((batch for batch in self._waiting if self._worker_of(batch) is worker), None)
            if mine is None:
                return False
            self._waiting.remove(mine)
            batch = mine
        self._running[batch] = worker
        worker.submit(batch)
        self.request_grants()  # others may have waited for the same batch
        return True


def _ids(batch: SubmittedBatch) -> tuple[bytes, ...]:
    """The ids of a batch's requests, those in waves included: calls that they make refer to them."""
    return (*[record.id for record in batch.records], *[one for wave in batch.waves for one in wave.ids()])
