"""The live sequences of one model version, and which slots of which instances they have (S34, S36).

Who gets a slot and when is the scheduler's; here is only who has one. A sequence keeps its slot until it is released or
its instance goes.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from batcher.scheduling.observations import QueuedRequest
from charonia.facts.sequence_states import SequenceAbout, sequence_key


class LiveSequence:
    """From its START to its end. Of its requests one runs at a time, the others wait in `queue`, in order.

    `run` is the id of the request that started it, b"" before that was dispatched; `former` those that the log may
    know instead, because the request that began the present run has not been answered. `closed`: its END has come, so
    that the id is free for another. `predecessor` is the sequence of the same id that has to be over before.
    `binding` is the number of its present place; `wanted` where a new owner found it: executor, instance, slot,
    content hash.
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
        self.queue: deque[QueuedRequest] = deque()
        self.running: QueuedRequest | None = None
        self.again: QueuedRequest | None = None
        """The request at the head of the queue that has had a turn and wants another (S41)."""
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
        """Of a predecessor's owner."""
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
        """The request that began the present run ended without having run, as far as is known."""
        last_known = self.former[0] if self.former else b""
        self.former = (*self.former[1:], self.run)
        self.run = last_known

    def waits_for(self) -> LiveSequence | None:
        """The sequence of the same id that has to be over before; those before it that were given up do not count."""
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
        """Whether nothing of it waits or runs."""
        return self.running is None and not self.queue


class SequenceInstance:
    """One instance of an executor. `batch` is the id of the batch it has, "" for none; `ready` may be in the next."""

    __slots__ = ("_free", "_untouched", "batch", "content_hash", "executor", "index", "ready", "size", "slots")

    def __init__(self, executor: str, index: int, content_hash: str, slots: int) -> None:
        self.executor = executor
        self.index = index
        self.content_hash = content_hash
        self.slots: dict[int, LiveSequence] = {}
        self.ready: dict[LiveSequence, None] = {}
        self.batch = ""
        self.size = slots
        self._free: list[int] = []  # below `_untouched`, from which on no sequence has had one: there may be billions
        self._untouched = 0

    @property
    def room(self) -> int:
        """Slots that no sequence has."""
        return self.size - len(self.slots)

    @property
    def rows(self) -> int:
        """The highest slot that a sequence has, counted from 1."""
        return max(self.slots, default=-1) + 1

    def take(self, sequence: LiveSequence, slot: int = -1) -> bool:
        """Give a sequence the lowest free slot, or the one it asks for; False when that is not free."""
        if slot < 0:
            slot = heappop(self._free) if self._free else self._untouched
        elif slot in self.slots or slot >= self.size:
            return False
        elif slot < self._untouched:
            self._free.remove(slot)
            heapify(self._free)
        else:
            self._free.extend(range(self._untouched, slot))  # above all that are there: a heap still
        self._untouched = max(self._untouched, slot + 1)
        self.slots[slot] = sequence
        sequence.instance, sequence.slot, sequence.wanted = self, slot, None
        self.refresh(sequence)
        return True

    def release(self, sequence: LiveSequence) -> None:
        """A sequence gives its slot up."""
        del self.slots[sequence.slot]
        heappush(self._free, sequence.slot)
        self.ready.pop(sequence, None)
        sequence.instance = None

    def refresh(self, sequence: LiveSequence) -> None:
        """A sequence's queue changed, or what it runs."""
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
        """The instance with most free slots, None when all are taken: sequences spread."""
        best = max(self._by_place.values(), key=lambda instance: instance.room, default=None)
        return best if best is not None and best.room else None

    def serve(
        self, executor: str, content_hash: str, count: int, slots: int
    ) -> tuple[list[SequenceInstance], list[LiveSequence]]:
        """An executor has `count` instances of `slots` each, in this incarnation.

        Returns those that are new, and who has to go. Sequences keep their place when an incarnation follows another.
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
        """The executor's instances are no more; the sequences that had slots there."""
        return [s for place in [p for p in self._by_place if p[0] == executor] for s in self._drop(place)]

    def _drop(self, place: tuple[str, int]) -> list[LiveSequence]:
        instance = self._by_place.pop(place)
        displaced = list(instance.slots.values())
        for sequence in displaced:
            instance.release(sequence)
        return displaced
