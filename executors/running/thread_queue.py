"""The queue from which the threads of a version's instances take their batches, and runs in a thread's place.

Passing a batch to an instance's thread costs two wake-ups, which take longer than many a small model. A model that was
seen to be quick (`instance_pool.Pace`) therefore runs in the event loop while its instance's thread is borrowed
(docs/adr/0025). The thread of `Interrupter` looks at the loop's execution from time to time and interrupts one that
takes long: its batch then runs in the instance's thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Protocol

from charonia.backend import InterruptibleInstance
from executors.batches.batch_results import Executed

from .submitted_batch import SubmittedBatch

_LOOK_S = 0.02
"""An execution in the event loop is interrupted at the second look."""
_IDLE_LOOKS = 50
"""After so many looks without an execution the thread sleeps until the next."""


class QuickWorker(Protocol):
    """A worker whose thread may be borrowed. Implemented by `executors.running.workers.ThreadWorker`."""

    interruptible: InterruptibleInstance | None

    def run_here(self, batch: SubmittedBatch) -> Executed: ...

    async def replace(self) -> None: ...


class WaitingThread:
    """One thread's place to wait for its next batch. `worker` is whose thread it is.

    `under_way` is how many batches its instance runs already, of one that runs several.
    """

    __slots__ = ("_batch", "_lock", "under_way", "worker")

    def __init__(self, worker: QuickWorker | None = None) -> None:
        self.worker = worker
        self.under_way = 0
        self._lock = threading.Lock()
        self._lock.acquire()
        self._batch: SubmittedBatch | None = None

    def wake(self, batch: SubmittedBatch | None) -> None:
        """Pass a batch (None: the end) to the thread and wake it."""
        self._batch = batch
        self._lock.release()

    def wait(self) -> SubmittedBatch | None:
        """Wait for `wake`, and return its batch."""
        self._lock.acquire()
        batch, self._batch = self._batch, None
        return batch


class ThreadQueue:
    """A FIFO queue of batches for several threads. None ends one thread."""

    __slots__ = ("_batches", "_idle", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: deque[SubmittedBatch | None] = deque()
        self._idle: list[WaitingThread] = []

    def put(self, batch: SubmittedBatch | None) -> None:
        """Pass a batch to the thread that began to wait last, whose caches are warm; queue it when none waits.

        Of instances that run several batches, one that runs fewest gets it.
        """
        with self._lock:
            waiting = self._idle.pop() if self._idle else None
            if waiting is None:
                self._batches.append(batch)
            elif waiting.under_way and self._idle:
                self._idle.append(waiting)
                waiting = min(reversed(self._idle), key=_batches_under_way)
                self._idle.remove(waiting)
        if waiting is not None:
            waiting.wake(batch)

    def put_back(self, batch: SubmittedBatch) -> None:
        """Pass a batch that a thread has taken, and cannot run, to another one; it is the next one to be taken."""
        with self._lock:
            waiting = self._idle.pop() if self._idle else None
            if waiting is None:
                self._batches.appendleft(batch)
        if waiting is not None:
            waiting.wake(batch)

    def get(self, waiting: WaitingThread) -> SubmittedBatch | None:
        """Wait for the next batch and return it. `waiting` belongs to the calling thread."""
        with self._lock:
            if self._batches:
                return self._batches.popleft()
            self._idle.append(waiting)
        return waiting.wait()

    def borrow(self) -> WaitingThread | None:
        """Take the thread that began to wait last, which gets no batches until `give_back`; None when none waits."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give_back(self, waiting: WaitingThread) -> None:
        """Return a borrowed thread, which takes the next batch if one has come meanwhile."""
        with self._lock:
            if not self._batches:
                self._idle.append(waiting)
                return
            batch = self._batches.popleft()
        waiting.wake(batch)

    def take_all(self) -> list[SubmittedBatch]:
        """Remove and return the batches that no thread has taken. The ends (None) stay in the queue."""
        with self._lock:
            taken = [batch for batch in self._batches if batch is not None]
            ends = len(self._batches) - len(taken)
            self._batches = deque([None] * ends)
        return taken


def _batches_under_way(waiting: WaitingThread) -> int:
    return waiting.under_way


class Interrupter:
    """Interrupts executions in the event loop that take long; `begin` and `end` come around each.

    Its thread runs while there are executions, and ends when there was none for a second.
    """

    __slots__ = ("_instance", "_is_looking", "_lock", "_number")

    def __init__(self) -> None:
        self._instance: InterruptibleInstance | None = None
        """What runs now."""
        self._number = 0
        """Counts executions."""
        self._is_looking = False
        self._lock = threading.Lock()

    def begin(self, instance: InterruptibleInstance) -> None:
        self._instance = instance
        self._number += 1
        if not self._is_looking and self._is_first_to_look():
            # a daemon: an execution that cannot be interrupted must not keep the process from ending
            threading.Thread(target=self._look, name="interrupter", daemon=True).start()

    def _is_first_to_look(self) -> bool:
        with self._lock:
            is_first = not self._is_looking
            self._is_looking = True
        return is_first

    def end(self) -> None:
        self._instance = None

    def _look(self) -> None:
        seen, idle = -1, 0
        while True:
            time.sleep(_LOOK_S)
            number, instance = self._number, self._instance
            if number != seen:
                seen, idle = number, 0
            elif instance is not None:
                # if this execution ends just now, the next one may be interrupted, and runs again in a thread
                with contextlib.suppress(Exception):  # one that cannot be interrupted runs to its end
                    instance.interrupt()
            elif (idle := idle + 1) > _IDLE_LOOKS:
                with self._lock:
                    self._is_looking = False  # first: an execution that begins now starts a thread or is seen here
                    if self._number == seen:
                        return
                    self._is_looking = True


INTERRUPTER = Interrupter()
"""Of this process, whose event loop runs one execution at a time."""
