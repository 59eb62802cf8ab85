"""Hands batches from the event loop to the threads of instances: each batch wakes one thread, and only if one waits.

A `queue.SimpleQueue` with several threads waiting wakes the next of them after each item, for nothing: two changes of
threads and a fight for the interpreter's lock with every batch.
"""

from __future__ import annotations

import threading
from collections import deque

from .job import Job


class Seat:
    """Where one thread waits for its next batch."""

    __slots__ = ("_given", "_waits")

    def __init__(self) -> None:
        self._waits = threading.Lock()
        self._waits.acquire()
        self._given: Job | None = None

    def give(self, job: Job | None) -> None:
        """Wake the thread that waits here."""
        self._given = job
        self._waits.release()

    def wait(self) -> Job | None:
        self._waits.acquire()
        given, self._given = self._given, None
        return given


class Handover:
    """Batches in order, for threads that take one at a time; None ends one thread."""

    __slots__ = ("_idle", "_jobs", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Job | None] = deque()
        self._idle: list[Seat] = []

    def put(self, job: Job | None) -> None:
        """To the thread that began to wait last, whose caches are warm, or to whoever asks first."""
        with self._lock:
            seat = self._idle.pop() if self._idle else None
            if seat is None:
                self._jobs.append(job)
        if seat is not None:
            seat.give(job)

    def get(self, seat: Seat) -> Job | None:
        """The next batch, once there is one; `seat` is the calling thread's own."""
        with self._lock:
            if self._jobs:
                return self._jobs.popleft()
            self._idle.append(seat)
        return seat.wait()

    def take_all(self) -> list[Job]:
        """The batches no thread has taken, which none will get; the ends stay."""
        with self._lock:
            taken = [job for job in self._jobs if job is not None]
            ends = len(self._jobs) - len(taken)
            self._jobs = deque([None] * ends)
        return taken
