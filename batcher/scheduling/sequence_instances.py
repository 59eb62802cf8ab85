"""Which slots of which instances the sequences of one model version have (S34, S36).

Who gets a slot and when is the scheduler's; here is only who has one. A sequence keeps its slot until it is released or
its instance goes.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from .live_sequence import LiveSequence


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
        self._free: list[int] = []  # below `_untouched`, from which on nobody has had one: there may be billions
        self._untouched = 0

    @property
    def room(self) -> int:
        """Slots that nobody has."""
        return self.size - len(self.slots)

    @property
    def rows(self) -> int:
        """The highest slot that somebody has, counted from 1."""
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

    def __bool__(self) -> bool:
        return bool(self._by_place)

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
