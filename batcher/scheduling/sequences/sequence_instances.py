"""The live sequences of one model version, and the instance slots they have (S34, S36). Pure. `sequence_slots` decides
who gets a slot and when. A sequence keeps its slot until it is released or its instance is removed.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from batcher.scheduling.observations import RequestQueued
from charonia.facts.sequence_states import SequenceAbout, sequence_key


class LiveSequence:
    """A sequence, from its START to its end. One of its requests runs at a time, the others wait in `queue`, in order.

    `run` is the id of the request that started it, b"" before that was dispatched; `former` are ids that the log may
    have instead, because the first request of the current run has not been answered. `closed`: its END has arrived, so
    that the id is free for another. `predecessor` is the sequence of the same id that must end before. `binding` is the
    number of its current slot; `wanted` is where a new owner found it: executor, instance, slot, content hash.
    """

    __slots__ = (
        "again",
        "binding",
        "closed",
        "done",
        "former",
        "instance",
        "key",
        "predecessor",
        "queue",
        "run",
        "running",
        "slot",
        "version",
        "wanted",
    )

    def __init__(self, version: int, key: bytes, predecessor: LiveSequence | None = None) -> None:
        self.version = version
        self.key = key
        self.predecessor = predecessor
        self.queue: deque[RequestQueued] = deque()
        self.running: RequestQueued | None = None
        self.again: RequestQueued | None = None
        """The request at the head of the queue that had a turn and wants another (S41)."""
        self.run = b""
        self.former: tuple[bytes, ...] = ()
        self.closed = False
        self.done = False
        self.instance: SequenceInstance | None = None
        self.slot = 0
        self.binding = 0
        self.wanted: tuple[str, int, int, str] | None = None

    @staticmethod
    def found(about: SequenceAbout, key: bytes) -> LiveSequence:
        """A live sequence of a predecessor's owner."""
        sequence = LiveSequence(about.version, key)
        sequence.run, sequence.binding = about.run, about.binding
        sequence.wanted = (about.executor, about.instance, about.slot, about.content_hash)
        return sequence

    def begin(self, run: bytes) -> None:
        """A START is dispatched."""
        if run != self.run:
            if self.run:
                self.former = (*self.former, self.run)
            self.run = run

    def unbegin(self) -> None:
        """The request that began the current run ended without having run, as far as is known."""
        last_known = self.former[0] if self.former else b""
        self.former = (*self.former[1:], self.run)
        self.run = last_known

    def waits_for(self) -> LiveSequence | None:
        """The sequence of the same id that must end before this one; earlier ones that were given up do not count."""
        before = self.predecessor
        while before is not None and before.done:
            before = before.predecessor
        self.predecessor = before
        return before

    @property
    def record_key(self) -> bytes:
        """Its name in the log."""
        return sequence_key(self.version, self.key)

    @property
    def is_ready(self) -> bool:
        """Whether a request of it may be dispatched."""
        return self.running is None and bool(self.queue) and self.instance is not None

    @property
    def rests(self) -> bool:
        """Whether none of its requests waits or runs."""
        return self.running is None and not self.queue


class SequenceInstance:
    """One instance of an executor. `batch` is the id of its batch, "" for none; `ready` may be in the next."""

    __slots__ = ("_free", "_untouched", "batch", "content_hash", "executor", "index", "ready", "size", "slots")

    def __init__(self, executor: str, index: int, content_hash: str, slots: int) -> None:
        self.executor = executor
        self.index = index
        self.content_hash = content_hash
        self.slots: dict[int, LiveSequence] = {}
        self.ready: dict[LiveSequence, None] = {}
        self.batch = ""
        self.size = slots
        self._free: list[int] = []  # below `_untouched`; no sequence has had one from there on: there may be billions
        self._untouched = 0

    @property
    def room(self) -> int:
        """The number of slots without a sequence."""
        return self.size - len(self.slots)

    @property
    def rows(self) -> int:
        """The highest slot that a sequence has, counted from 1."""
        return max(self.slots, default=-1) + 1

    def take(self, sequence: LiveSequence, slot: int = -1) -> bool:
        """Allocate a sequence the lowest free slot, or the one it asks for; False when that is not free."""
        if slot < 0:
            slot = heappop(self._free) if self._free else self._untouched
        elif slot in self.slots or slot >= self.size:
            return False
        elif slot < self._untouched:
            self._free.remove(slot)
            heapify(self._free)
        else:
            self._free.extend(range(self._untouched, slot))  # greater than all others: the list remains a heap
        self._untouched = max(self._untouched, slot + 1)
        self.slots[slot] = sequence
        sequence.instance, sequence.slot, sequence.wanted = self, slot, None
        self.refresh(sequence)
        return True

    def release(self, sequence: LiveSequence) -> None:
        """A sequence releases its slot."""
        del self.slots[sequence.slot]
        heappush(self._free, sequence.slot)
        self.ready.pop(sequence, None)
        sequence.instance = None

    def refresh(self, sequence: LiveSequence) -> None:
        """A sequence's queue or running request has changed."""
        if sequence.is_ready:
            self.ready[sequence] = None
        else:
            self.ready.pop(sequence, None)


class SequenceInstances:
    """The instances of one version, on all executors."""

    __slots__ = ("_by_place",)

    def __init__(self) -> None:
        self._by_place: dict[tuple[str, int], SequenceInstance] = {}

    def all(self) -> list[SequenceInstance]:
        return list(self._by_place.values())

    def find(self, executor: str, index: int) -> SequenceInstance | None:
        return self._by_place.get((executor, index))

    def roomiest(self) -> SequenceInstance | None:
        """The instance with most free slots, None when all are taken: sequences are spread."""
        best = max(self._by_place.values(), key=lambda instance: instance.room, default=None)
        return best if best is not None and best.room else None

    def serve(
        self, executor: str, content_hash: str, count: int, slots: int
    ) -> tuple[list[SequenceInstance], list[LiveSequence]]:
        """An executor has `count` instances of `slots` each, in this incarnation of the version. Returns new instances,
        and sequences that lost their slot. Sequences keep their slots when one incarnation follows another.
        """
        new: list[SequenceInstance] = []
        displaced: list[LiveSequence] = []
        for index in range(count):
            before = self._by_place.get((executor, index))
            if before is not None and (before.content_hash, before.size) == (content_hash, slots):
                continue
            instance = self._by_place[executor, index] = SequenceInstance(executor, index, content_hash, slots)
            new.append(instance)
            if before is None:
                continue
            instance.batch = before.batch
            for slot, sequence in list(before.slots.items()):
                before.release(sequence)
                if not instance.take(sequence, slot):
                    displaced.append(sequence)
        for place in [(e, i) for e, i in self._by_place if e == executor and i >= count]:
            displaced += self._drop(place)
        return new, displaced

    def withdraw(self, executor: str) -> list[LiveSequence]:
        """The executor's instances are gone; returns the sequences that had slots there."""
        return [s for place in [p for p in self._by_place if p[0] == executor] for s in self._drop(place)]

    def _drop(self, place: tuple[str, int]) -> list[LiveSequence]:
        instance = self._by_place.pop(place)
        displaced = list(instance.slots.values())
        for sequence in displaced:
            instance.release(sequence)
        return displaced
