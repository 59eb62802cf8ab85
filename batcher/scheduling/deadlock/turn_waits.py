"""Which instances of an executor can never begin, because of who has the resources they need (Q1). Pure.

An instance that waits for a resource holds it back from the instances behind it (`executors.running.rate_limiter`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from charonia.facts.resource_waits import ResourcePlace, Room, Turn, TurnsNote


def closed_rooms(note: TurnsNote, is_stuck: Callable[[Turn], bool]) -> dict[Room, str]:
    """Where nothing can begin, and the resource that is missing there, "" where none is.

    `is_stuck` says of an instance that executes that it never ends. All that executes else ends, and all that may begin
    ends as well; an instance that neither executes nor waits for its turn may take whatever comes.
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
        # where another may take the batch, none has to wait for what these need
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
    """Of each instance that waits and cannot begin, a resource for which it waits. Those of `closed` keep theirs."""
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
