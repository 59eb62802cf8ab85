"""The queue from which the tasks of a version's instances take their batches. Used in one event loop only.

A batch may also be run without its worker's task, which is then asleep all the while: `borrow` and `give_back`. Each
way through a task costs a turn of the event loop, so for a lone small request that is much of the work. The event loop
may then wait a moment for the model process's answer (`Looks`, docs/adr/0025).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from .submitted_batch import SubmittedBatch

_IN_VAIN = 20
"""After waiting in vain the loop does not wait for so many times as long."""


class WaitingWorker(Protocol):
    """A worker whose task may be left asleep. Implemented by `executors.running.workers.TaskWorker`."""

    def begin(self, batch: SubmittedBatch, *, looks: bool = False) -> None: ...


class TaskQueue:
    """A FIFO queue of batches for several tasks, the first of which gets the next batch. None ends one task."""

    __slots__ = ("_asleep", "_batches", "_idle")

    def __init__(self) -> None:
        self._batches: deque[SubmittedBatch | None] = deque()
        self._asleep: dict[WaitingWorker, asyncio.Future[SubmittedBatch | None]] = {}
        """Of each worker whose task waits: what wakes it. Some of them are borrowed."""
        self._idle: deque[WaitingWorker] = deque()
        """Those that are not."""

    def put(self, batch: SubmittedBatch | None) -> None:
        """Add a batch, or the end of one task."""
        if self._idle:
            self.hand(self._idle.popleft(), batch)
        else:
            self._batches.append(batch)

    async def get(self, worker: WaitingWorker) -> SubmittedBatch | None:
        """Wait for the next batch and return it. `worker` is whose task this is."""
        if self._batches:
            return self._batches.popleft()
        waking: asyncio.Future[SubmittedBatch | None] = asyncio.get_running_loop().create_future()
        self._asleep[worker] = waking
        self._idle.append(worker)
        return await waking

    def borrow(self) -> WaitingWorker | None:
        """Take the worker that has waited longest, which gets no batches until `give_back` or `hand`; None if none
        waits."""
        return self._idle.popleft() if self._idle else None

    def hand(self, worker: WaitingWorker, batch: SubmittedBatch | None) -> None:
        """Wake the task of a borrowed worker with a batch, which ends the loan."""
        waking = self._asleep.pop(worker)
        if not waking.done():  # else its loop is ending
            waking.set_result(batch)

    def give_back(self, worker: WaitingWorker) -> None:
        """Return a borrowed worker. If something has come meanwhile, it begins with that, or its task wakes."""
        if not self._batches:
            self._idle.append(worker)
            return
        batch = self._batches.popleft()
        if batch is not None and batch.waves:
            worker.begin(batch)
        else:
            self.hand(worker, batch)

    def take_all(self) -> list[SubmittedBatch]:
        """Remove and return the batches that no worker has taken. The ends (None) stay in the queue."""
        taken = [batch for batch in self._batches if batch is not None]
        self._batches = deque([None] * (len(self._batches) - len(taken)))
        return taken


class Looks:
    """How often the event loop may wait for the answer of a model process: for half of the time at most.

    So other models, and other instances of the same one, get their batches while one runs. After an answer that did not
    come it does not wait for a while.
    """

    __slots__ = ("_began_ns", "_next_ns")

    def __init__(self) -> None:
        self._began_ns = self._next_ns = 0

    def begin(self, now_ns: int) -> bool:
        """Whether the loop may wait now; then call `end`. Times are monotonic."""
        self._began_ns = now_ns
        return now_ns >= self._next_ns

    def end(self, now_ns: int, *, answered: bool) -> None:
        """The loop waits no longer; `answered`: it did not wait in vain."""
        took_ns = now_ns - self._began_ns
        self._next_ns = now_ns + (took_ns if answered else _IN_VAIN * took_ns)


LOOKS = Looks()
"""Of this process."""
