"""Finds calls between models that can never run, because they wait for one another. Pure.

A request that calls a model holds its instance until it is answered, and with it the resources of the instance and the
slot of its sequence. A call is stuck when everything it waits for is held by batches that wait, themselves or through
others, for stuck calls: then none of them ever ends by itself. The algorithm removes step by step all that can still
make progress; the rest is stuck.

Only known facts count: an instance that is free, has unknown work, or is missing (its executor may come) can still make
progress, and so can a sequence of which nothing runs. An instance that waits for a resource holds it back from the
instances behind it (`executors.running.rate_limiter`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from charonia.facts.resource_waits import ResourcePlace, Room, Turn, TurnsNote

from .waits import CalledRequest, Holder, Situation, SlotGroup, Version


def closed_rooms(note: TurnsNote, is_stuck: Callable[[Turn], bool]) -> dict[Room, str]:
    """The `Room`s in which nothing can begin, each with the missing resource, "" for none.

    `is_stuck` says whether an executing instance never ends. All other executions end, and so do all that may begin; an
    instance that neither executes nor waits for its turn may take any batch.
    """
    held = {number for number, turn in enumerate(note.turns) if turn.running and is_stuck(turn)}
    free = dict(note.counts)
    for number in held:
        for place, count in note.turns[number].needs.items():
            free[place] = free.get(place, 0) - count
    rooms: dict[Room, list[int]] = {}
    for number, turn in enumerate(note.turns):
        rooms.setdefault(turn.room, []).append(number)
    closed = dict.fromkeys(rooms, "")
    while True:
        # if another instance may take the batch, it does not wait for the resources of these
        lacking = _lacking(note, free, closed)
        found = {
            room: next((lacking[number] for number in rooms[room] if number in lacking), "")
            for room in closed
            if all(number in held or number in lacking for number in rooms[room])
        }
        if len(found) == len(closed):
            return found
        closed = found


def _lacking(note: TurnsNote, free: Mapping[ResourcePlace, int], closed: Collection[Room]) -> dict[int, str]:
    """For each waiting instance that cannot begin, a resource it waits for. Instances in `closed` rooms keep theirs."""
    lacking: dict[int, str] = {}
    kept: set[ResourcePlace] = set()
    waiting = [(turn.order, number) for number, turn in enumerate(note.turns) if turn.order is not None]
    for _, number in sorted(waiting):
        needs = note.turns[number].needs
        short = [place for place, count in needs.items() if free.get(place, 0) < count or place in kept]
        if short:
            lacking[number] = short[0][1]
            if note.turns[number].room in closed:
                kept |= needs.keys()
    return lacking


_NO_ROOM = ("", ("", 0, 0))


class Lack(Enum):
    """What a call waits for."""

    INSTANCE = auto()
    STEP = auto()
    """The previous step of its sequence."""
    OWN_INSTANCE = auto()
    """The instance that has its sequence."""
    SLOT = auto()
    RESOURCE = auto()


_Lack = tuple[Lack, str]
_INSTANCE: _Lack = (Lack.INSTANCE, "")


@dataclass(frozen=True, slots=True)
class StuckCall:
    """`resource` is the name of the resource it waits for, if it waits for one."""

    call: CalledRequest
    lack: Lack
    resource: str = ""


def stuck_calls(situation: Situation) -> list[StuckCall]:
    """The waiting calls that can never run. Ending any of them may free all."""
    return _Judgement(situation).found() if situation.calls else []


class _Judgement:
    """`stuck` are the numbers of the batches that never end."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._holders = list(situation.holders)
        self._held_by = {i: number for number, holder in enumerate(self._holders) for i in holder.ids}
        self._rooms: dict[int, tuple[str, Room]] = {}
        """The executors where a batch waits for its turn."""
        for executor, note in situation.turns.items():
            for turn in note.turns:
                if turn.running:
                    self._told(turn.room, executor, turn.running)
            for batch in note.waiting:
                self._rooms[self._told(batch.room, executor, batch.ids)] = (executor, batch.room)
        self._waits_for: dict[int, list[CalledRequest]] = {}
        for call in situation.calls.values():
            for ancestor in call.ancestors:
                if ancestor in self._held_by:
                    self._waits_for.setdefault(self._held_by[ancestor], []).append(call)
        self._stuck = {*self._waits_for, *self._rooms}
        self._full: set[tuple[Version, str]] = set()
        self._closed: dict[tuple[str, Room], str] = {}
        self._reduce()

    def found(self) -> list[StuckCall]:
        found: list[StuckCall] = []
        for call in self._situation.calls.values():
            number = self._held_by.get(call.id)
            if number in self._stuck and number not in self._rooms:
                continue  # a running batch alone blocks no other
            lack = self._lack(call)
            if lack is not None and any(map(self._is_held, call.ancestors)):
                found.append(StuckCall(call, *lack))
        return found

    def _told(self, room: Room, executor: str, ids: tuple[bytes, ...]) -> int:
        """The number of a batch that an executor reports; perhaps no other source has it."""
        number = next((self._held_by[i] for i in ids if i in self._held_by), None)
        if number is None:
            number = len(self._holders)
            self._holders.append(Holder(room[:2], executor, frozenset(ids)))
            self._held_by.update(dict.fromkeys(ids, number))
        return number

    def _reduce(self) -> None:
        while True:
            self._full = self._places_held()
            self._closed = {
                (executor, room): resource
                for executor, note in self._situation.turns.items()
                for room, resource in closed_rooms(note, self._executes_for_ever).items()
            }
            left = {number for number in self._stuck if self._never_ends(number)}
            if left == self._stuck:
                return
            self._stuck = left

    def _never_ends(self, number: int) -> bool:
        if self._closed and self._rooms.get(number, _NO_ROOM) in self._closed:
            return True
        return any(map(self._lack, self._waits_for.get(number, ())))

    def _executes_for_ever(self, turn: Turn) -> bool:
        return any(self._is_held(request_id) for request_id in turn.running)

    def _is_held(self, request_id: bytes) -> bool:
        return self._held_by.get(request_id) in self._stuck

    def _places_held(self) -> set[tuple[Version, str]]:
        """The executors where stuck batches hold every instance."""
        counts: dict[tuple[Version, str], int] = {}
        for number in self._stuck:
            place = (self._holders[number].version, self._holders[number].executor)
            counts[place] = counts.get(place, 0) + 1
        instances = self._situation.instances
        return {
            (version, executor)
            for (version, executor), count in counts.items()
            if count >= instances.get(version, {}).get(executor, 0) > 0
        }

    def _lack(self, call: CalledRequest) -> _Lack | None:
        """What a call waits for in vain; None when it may still be answered."""
        number = self._held_by.get(call.id)
        if number is not None:
            holder = self._holders[number]
            if number in self._stuck:
                resource = self._closed.get(self._rooms.get(number, _NO_ROOM), "")
                return (Lack.RESOURCE, resource) if resource else _INSTANCE
            # it runs, or waits at its executor behind the batches that hold all instances there
            return _INSTANCE if (holder.version, holder.executor) in self._full else None
        step = call.step
        if step is not None:
            if any(map(self._is_held, step.before)):
                return Lack.STEP, ""
            if any(map(self._is_held, step.instance)):
                return Lack.OWN_INSTANCE, ""
            if step.has_slot:
                return None
            groups = self._situation.slots.get(call.version, ())
            if groups and all(self._has_no_slot(group) or self._is_busy(group) for group in groups):
                return (Lack.SLOT, "") if all(map(self._has_no_slot, groups)) else _INSTANCE
            return None
        return self._nowhere(call.version)

    def _nowhere(self, version: Version) -> _Lack | None:
        """The same for a call that any instance may take."""
        lack: _Lack | None = None
        for executor, count in self._situation.instances.get(version, {}).items():
            if count <= 0:
                continue
            lack = lack or _INSTANCE
            if (version, executor) in self._full:
                continue
            resource = self._closed.get((executor, (*version, -1)))
            if resource is None:
                return None
            if resource:
                lack = (Lack.RESOURCE, resource)
        return lack

    def _has_no_slot(self, group: SlotGroup) -> bool:
        return sum(map(self._is_held, group.running)) >= group.size

    def _is_busy(self, group: SlotGroup) -> bool:
        return any(map(self._is_held, group.batches))
