"""A queue between the event loop and the threads of instances. Each batch wakes at most one thread.

A `queue.SimpleQueue` on which several threads wait also wakes the next thread after each item, in vain. That costs two
context switches and contention for the interpreter's lock per batch.
"""

from __future__ import annotations

import threading
from collections import deque

from .submitted_batch import SubmittedBatch


class WaitingThread:
    """One thread's place to wait for its next batch."""

    __slots__ = ("_batch", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._batch: SubmittedBatch | None = None

    def wake(self, batch: SubmittedBatch | None) -> None:
        """Pass a batch (None: the end) to the thread and wake it."""
        self._batch = batch
        self._lock.release()

    def wait(self) -> SubmittedBatch | None:
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
        """Pass a batch to the thread that began to wait last, whose caches are warm; queue it when none waits."""
        with self._lock:
            waiting = self._idle.pop() if self._idle else None
            if waiting is None:
                self._batches.append(batch)
        if waiting is not None:
            waiting.wake(batch)

    def get(self, waiting: WaitingThread) -> SubmittedBatch | None:
        """Wait for the next batch and return it. `waiting` belongs to the calling thread."""
        with self._lock:
            if self._batches:
                return self._batches.popleft()
            self._idle.append(waiting)
        return waiting.wait()

    def take_all(self) -> list[SubmittedBatch]:
        """Remove and return the batches that no thread has taken. The ends (None) stay in the queue."""
        with self._lock:
            taken = [batch for batch in self._batches if batch is not None]
            ends = len(self._batches) - len(taken)
            self._batches = deque([None] * ends)
        return taken
