"""Which calls between models can never run, because of who waits for whom. Pure.

A request that calls a model holds its instance until it is answered. A call that waits in a queue is stuck when every
instance that could take it is held by a batch that waits, itself or through others, for calls that are stuck: then none
of them ever ends by itself. All that may yet move is taken out step by step; what is left is stuck. Only what is known
here is judged: an instance that is free, of unknown work, or missing (its executor may come) leaves hope.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Version = tuple[str, int]
"""(model, version)."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A batch that holds an instance of a version at an executor, or waits for one there; `ids` are its requests."""

    version: Version
    executor: str
    ids: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class CalledRequest:
    """A request that a model made. `ancestors` are the ids of those that wait for it. It waits in its queue unless it
    is among the ids of a holder.
    """

    id: bytes
    version: Version
    ancestors: tuple[bytes, ...]


def stuck_calls(
    instances: Mapping[Version, Mapping[str, int]], holders: Sequence[Holder], called: Iterable[CalledRequest]
) -> list[CalledRequest]:
    """The calls that wait and can never run; `instances` is how many a version has at each executor.

    Ending any of them may free all.
    """
    calls = list(called)
    held_by = {request_id: number for number, holder in enumerate(holders) for request_id in holder.ids}
    waits_for: dict[int, list[CalledRequest]] = {}
    for call in calls:
        for ancestor in call.ancestors:
            if ancestor in held_by:
                waits_for.setdefault(held_by[ancestor], []).append(call)
    stuck = set(waits_for)
    while stuck:
        full = _full(instances, holders, stuck)
        left = {
            number
            for number in stuck
            if any(_is_stuck(call, held_by.get(call.id), holders, instances, full, stuck) for call in waits_for[number])
        }
        if left == stuck:
            break
        stuck = left
    full = _full(instances, holders, stuck)
    return [
        call
        for call in calls
        # one that runs is not in anybody's way by itself
        if held_by.get(call.id) not in stuck
        and _is_stuck(call, held_by.get(call.id), holders, instances, full, stuck)
        and any(held_by.get(ancestor) in stuck for ancestor in call.ancestors)
    ]


def _full(
    instances: Mapping[Version, Mapping[str, int]], holders: Sequence[Holder], stuck: set[int]
) -> set[tuple[Version, str]]:
    """Where every instance is held by a batch that is stuck."""
    counts: dict[tuple[Version, str], int] = {}
    for number in stuck:
        place = (holders[number].version, holders[number].executor)
        counts[place] = counts.get(place, 0) + 1
    return {
        (version, executor)
        for (version, executor), count in counts.items()
        if count >= instances.get(version, {}).get(executor, 0) > 0
    }


def _is_stuck(
    call: CalledRequest,
    holder: int | None,
    holders: Sequence[Holder],
    instances: Mapping[Version, Mapping[str, int]],
    full: set[tuple[Version, str]],
    stuck: set[int],
) -> bool:
    if holder is not None:
        # it runs, or waits at its executor behind what holds all instances there
        return holder in stuck or (holders[holder].version, holders[holder].executor) in full
    places = [executor for executor, count in instances.get(call.version, {}).items() if count > 0]
    return bool(places) and all((call.version, executor) in full for executor in places)
