"""Hands batches from the event loop to the threads of instances: each batch wakes one thread, and only if one waits.

A `queue.SimpleQueue` with several threads waiting wakes the next of them after each item, for nothing: two changes of
threads and a fight for the interpreter's lock with every batch.
"""

from __future__ import annotations

import threading
from collections import deque

from .submitted_batch import SubmittedBatch


class WaitingThread:
    """Where one thread waits for its next batch."""

    __slots__ = ("_batch", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._batch: SubmittedBatch | None = None

    def wake(self, batch: SubmittedBatch | None) -> None:
        """Wake the thread that waits here."""
        self._batch = batch
        self._lock.release()

    def wait(self) -> SubmittedBatch | None:
        self._lock.acquire()
        batch, self._batch = self._batch, None
        return batch


class ThreadQueue:
    """Batches in order, for threads that take one at a time; None ends one thread."""

    __slots__ = ("_batches", "_idle", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: deque[SubmittedBatch | None] = deque()
        self._idle: list[WaitingThread] = []

    def put(self, batch: SubmittedBatch | None) -> None:
        """To the thread that began to wait last, whose caches are warm, or to whoever asks first."""
        with self._lock:
            waiting = self._idle.pop() if self._idle else None
            if waiting is None:
                self._batches.append(batch)
        if waiting is not None:
            waiting.wake(batch)

    def get(self, waiting: WaitingThread) -> SubmittedBatch | None:
        """The next batch, once there is one; `seat` is the calling thread's own."""
        with self._lock:
            if self._batches:
                return self._batches.popleft()
            self._idle.append(waiting)
        return waiting.wait()

    def take_all(self) -> list[SubmittedBatch]:
        """The batches no thread has taken, which none will get; the ends stay."""
        with self._lock:
            taken = [batch for batch in self._batches if batch is not None]
            ends = len(self._batches) - len(taken)
            self._batches = deque([None] * ends)
        return taken
