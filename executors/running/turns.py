"""Gives the instances of a version their batches by turns, when a rate limiter decides whose turn it is (Q1-Q4).

`executors.running.rate_limiter` knows the resources and the order; here is what waits, and the calls when something may
begin. Without a rate limiter nothing of this exists: instances take from their pool's queue.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from charonia.backend import InstanceSpec
from charonia.facts.resource_waits import Turn, WaitingBatch
from charonia.models.interface import InstanceGroup

from .job import Job
from .rate_limiter import Place, RateLimiter

if TYPE_CHECKING:
    from .workers import Worker


class Turnstile:
    """One for all models of an executor. `reservations` are made and called in the event loop."""

    def __init__(self, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self._begin: dict[object, Callable[[], bool]] = {}
        self._passing = False

    def register(self, key: object, spec: InstanceSpec, group: InstanceGroup, begin: Callable[[], bool]) -> None:
        """`begin` starts the instance's next execution, False when there is none. Raises `InvalidArgument` (Q3)."""
        self.limiter.register(key, group.resources, group.priority, spec.device_id)
        self._begin[key] = begin

    def unregister(self, key: object) -> None:
        self.limiter.unregister(key)
        self._begin.pop(key, None)
        self.advance()

    def advance(self) -> None:
        """Let begin whatever may."""
        if self._passing:
            return  # called by something that begins: the loop below goes on
        self._passing = True
        try:
            while granted := self.limiter.grant():
                for key in granted:
                    if not self._begin[key]():
                        self.limiter.release(key, executed=False)
        finally:
            self._passing = False


class Turns:
    """The waiting batches of one pool and its workers, each of which gets one batch at a time.

    `bound` says whose a batch is, where it is not anybody's.
    """

    def __init__(self, turnstile: Turnstile, bound: Callable[[Job], Worker] | None = None) -> None:
        self._bound = bound
        self._turnstile = turnstile
        self._limiter = turnstile.limiter
        self._workers: list[Worker] = []
        self._running: dict[Job, Worker] = {}
        self._waiting: deque[Job] = deque()

    @property
    def waiting(self) -> Collection[Job]:
        """The batches no instance has begun."""
        return self._waiting

    @property
    def waiting_requests(self) -> int:
        """Requests of batches no instance has begun (M2)."""
        return sum(len(job.records) for job in self._waiting)

    def add(self, worker: Worker, group: InstanceGroup) -> None:
        """Raises `InvalidArgument` (Q3). A passive worker never executes, so it needs nothing."""
        if not worker.passive:
            self._turnstile.register(worker, worker.spec, group, lambda: self._start(worker))
            self._workers.append(worker)

    def submit(self, job: Job) -> None:
        self._waiting.append(job)
        self.look()

    def finished(self, job: Job, *, died: bool) -> None:
        """The batch was executed, or its instance `died` under it."""
        worker = self._running.pop(job, None)
        if worker is not None:
            worker.down |= died  # it will find out itself in a moment, when the next batch would be with it already
            self._limiter.release(worker)
            self.look()

    def take_all(self) -> list[Job]:
        """The batches no instance has begun; they will not be."""
        taken = list(self._waiting)
        self._waiting.clear()
        self.look()
        return taken

    def close(self) -> None:
        """No worker of this pool executes any more."""
        for worker in self._workers:
            self._turnstile.unregister(worker)
        self._workers.clear()

    def look(self) -> None:
        """As many free workers wait for their turn as there are batches, those that are most behind first.

        So many of each group: no batch waits for what one of them lacks while another could begin.
        """
        wanted = {self._bound(job) for job in self._waiting} if self._bound is not None else None
        asking: Counter[frozenset[tuple[Place, int]]] = Counter()
        for worker in self._free():
            alike = frozenset(self._limiter.needs(worker).items())
            if asking[alike] < len(self._waiting) if wanted is None else worker in wanted:
                asking[alike] += 1
                self._limiter.ask(worker)
            else:
                self._limiter.withdraw(worker)
        self._turnstile.advance()

    def told(self, model: str, version: int) -> tuple[list[Turn], list[WaitingBatch]]:
        """The workers of this pool, but for those that do not wait where others like them do, and who waits for one."""
        executing = {worker: job for job, worker in self._running.items()}
        resting = [worker for worker in self._free() if self._limiter.order(worker) is None] if self._waiting else []
        turns = [
            Turn(
                worker.spec.name,
                (model, version, index if self._bound is not None else -1),
                self._limiter.needs(worker),
                _ids(executing[worker]) if worker in executing else (),
                None if worker.down else self._limiter.order(worker),
            )
            for index, worker in enumerate(self._workers)
            if worker not in resting
        ]
        where = self._workers.index
        places = [where(self._bound(job)) if self._bound is not None else -1 for job in self._waiting]
        waiting = zip(places, self._waiting, strict=True)
        return turns, [WaitingBatch((model, version, index), _ids(job)) for index, job in waiting]

    def _free(self) -> list[Worker]:
        busy = set(self._running.values())
        return sorted(
            [worker for worker in self._workers if worker not in busy and not worker.down], key=self._limiter.turn
        )

    def _start(self, worker: Worker) -> bool:
        if not self._waiting or worker.down:
            return False
        if self._bound is None:
            job = self._waiting.popleft()
        else:
            mine = next((job for job in self._waiting if self._bound(job) is worker), None)
            if mine is None:
                return False
            self._waiting.remove(mine)
            job = mine
        self._running[job] = worker
        worker.give(job)
        self.look()  # others may have waited for the same batch
        return True


def _ids(job: Job) -> tuple[bytes, ...]:
    return tuple([record.id for record in job.records])
