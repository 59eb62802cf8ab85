"""The facts for finding deadlocks: who holds what and who waits for what. `wait_cycles` judges them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from charonia.facts.resource_waits import Turn, TurnsNote

Version = tuple[str, int]
"""(model, version)."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A batch that holds an instance of a version at an executor, or waits for one there; `ids` are its requests. A
    batch without an executor still runs, but its instance has gone on to other batches.
    """

    version: Version
    executor: str
    ids: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Step:
    """What a request of a sequence waits for. Requests stand for their batches. `before` are the running requests of
    its sequence, or of the previous one with the same id; `instance` are in the batches that must end before its
    instance begins the next. `has_slot`: it waits for nothing else; otherwise its sequence, or the one before, has no
    slot.
    """

    before: tuple[bytes, ...] = ()
    instance: tuple[bytes, ...] = ()
    has_slot: bool = False


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """An instance of a version with a sequence batcher, and its `size` slots. `batches` has a request of each batch
    that must end before it begins the next, `running` the running request of each sequence with a slot. A sequence
    without a running request may end by itself, at the latest when it has been idle too long.
    """

    executor: str
    index: int
    size: int
    batches: tuple[bytes, ...] = ()
    running: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class CalledRequest:
    """A request that a model made. `ancestors` are the ids of the requests that wait for it. It waits in its queue
    unless a holder has its id. `step` is set for requests of sequences that wait in their queue.
    """

    id: bytes
    version: Version
    ancestors: tuple[bytes, ...]
    step: Step | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """`instances` counts a version's instances at each executor, where any of them takes any request; `slots` describes
    the others; `turns` are the reports of executors with rate limits.
    """

    instances: Mapping[Version, Mapping[str, int]] = field(default_factory=dict)
    holders: tuple[Holder, ...] = ()
    calls: Mapping[bytes, CalledRequest] = field(default_factory=dict)
    slots: Mapping[Version, tuple[SlotGroup, ...]] = field(default_factory=dict)
    turns: Mapping[str, TurnsNote] = field(default_factory=dict)

    def without(self, call_id: bytes) -> Situation:
        """The same without a call that has ended."""
        return replace(self, calls={i: call for i, call in self.calls.items() if i != call_id})

    def joined(self, others: Iterable[Situation]) -> Situation:
        """Merged with what others know of other models and executors."""
        parts = [self, *others]
        return Situation(
            {version: slots for part in parts for version, slots in part.instances.items()},
            tuple(holder for part in parts for holder in part.holders),
            {call_id: call for part in parts for call_id, call in part.calls.items()},
            {version: slots for part in parts for version, slots in part.slots.items()},
            {executor: note for part in parts for executor, note in part.turns.items()},
        )


def lasting(before: Situation, now: Situation) -> Situation:
    """The waits that existed in both, and so at all times between them: an ended wait does not come back. Where only
    one of them has a fact, the most hopeful assumption is made.
    """
    held = set(before.holders)
    return Situation(
        _most(before.instances, now.instances),
        tuple(holder for holder in now.holders if holder in held),
        {call_id: call for call_id, call in now.calls.items() if before.calls.get(call_id) == call},
        {
            version: _lasting_slots(before.slots.get(version, ()), now.slots.get(version, ()))
            for version in {*before.slots, *now.slots}
        },
        {
            executor: _lasting_turns(before.turns[executor], note)
            for executor, note in now.turns.items()
            if executor in before.turns
        },
    )


def _most(
    before: Mapping[Version, Mapping[str, int]], now: Mapping[Version, Mapping[str, int]]
) -> dict[Version, dict[str, int]]:
    return {
        version: {
            executor: max(found.get(version, {}).get(executor, 0) for found in (before, now))
            for executor in {*before.get(version, {}), *now.get(version, {})}
        }
        for version in {*before, *now}
    }


def _lasting_slots(before: tuple[SlotGroup, ...], now: tuple[SlotGroup, ...]) -> tuple[SlotGroup, ...]:
    was = {(group.executor, group.index): group for group in before}
    found: list[SlotGroup] = []
    for group in now:
        other = was.pop((group.executor, group.index), None) or SlotGroup(group.executor, group.index, group.size)
        found.append(
            SlotGroup(
                group.executor,
                group.index,
                max(group.size, other.size),
                tuple([i for i in group.batches if i in other.batches]),
                tuple([i for i in group.running if i in other.running]),
            )
        )
    return (*found, *(SlotGroup(group.executor, group.index, group.size) for group in was.values()))


def _lasting_turns(before: TurnsNote, now: TurnsNote) -> TurnsNote:
    was = {(turn.room, turn.instance): turn for turn in before.turns}
    turns = [turn if was.pop((turn.room, turn.instance), None) == turn else _free(turn) for turn in now.turns]
    turns += map(_free, was.values())
    counts = {place: max(n.counts.get(place, 0) for n in (before, now)) for place in {*before.counts, *now.counts}}
    waited = set(before.waiting)
    return TurnsNote(now.number, counts, tuple(turns), tuple(batch for batch in now.waiting if batch in waited))


def _free(turn: Turn) -> Turn:
    return replace(turn, running=(), order=None)
