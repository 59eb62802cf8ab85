"""What a batcher tells the others about calls that wait, so that each can find deadlocks among models of several.

The whole of it is one note in the log with a number that grows; a batcher whose calls do not wait for long writes none.
Executors whose rates are limited write notes of their own (`charonia.facts.resource_waits`). A deadlock in these notes
is certain once two looks, with notes written between them, find it: a call that holds an instance at both looks held it
all the time, and a call that waits at both waited all the time. So the deadlock existed between the looks, and a
deadlock does not end by itself. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgpack

from batcher.scheduling.deadlock.wait_cycles import StuckCall, stuck_calls
from batcher.scheduling.deadlock.waits import CalledRequest, Holder, Situation, SlotGroup, Step, lasting
from charonia.errors import InvalidRecord
from charonia.facts.resource_waits import TurnsNote

TTL_S = 5


@dataclass(frozen=True, slots=True)
class Waiting:
    """One batcher's note. `number` grows with each note. `since_ns` is the wall clock at which a call was accepted."""

    number: int = 0
    situation: Situation = field(default_factory=Situation)
    since_ns: Mapping[bytes, int] = field(default_factory=dict)

    def pack(self) -> bytes:
        there, calls = self.situation, self.situation.calls.values()
        return bytes(
            msgpack.packb(
                [
                    self.number,
                    [[*version, dict(slots)] for version, slots in there.instances.items()],
                    [[*h.version, h.executor, sorted(h.ids)] for h in there.holders],
                    [[c.id, *c.version, c.ancestors, self.since_ns[c.id]] for c in calls],
                    [[c.id, c.step.before, c.step.instance, c.step.has_slot] for c in calls if c.step is not None],
                    [
                        [*version, [[g.executor, g.index, g.size, g.batches, g.running] for g in groups]]
                        for version, groups in there.slots.items()
                    ],
                ]
            )
        )

    @staticmethod
    def unpack(data: bytes) -> Waiting:
        """Raises `InvalidRecord`."""
        try:
            number, instances, holders, calls, *more = msgpack.unpackb(data, use_list=False)
            steps, slots = more[:2] if len(more) > 1 else ((), ())  # written by a release without sequences
            of_sequences = {bytes(i): Step(_ids(before), _ids(at), bool(placed)) for i, before, at, placed in steps}
            situation = Situation(
                {(str(model), int(version)): _slots(slots) for model, version, slots in instances},
                tuple(
                    Holder((str(model), int(version)), str(executor), frozenset(map(bytes, ids)))
                    for model, version, executor, ids in holders
                ),
                {
                    bytes(i): CalledRequest(bytes(i), (str(model), int(version)), _ids(ancestors), of_sequences.get(i))
                    for i, model, version, ancestors, _ in calls
                },
                {
                    (str(model), int(version)): tuple(
                        SlotGroup(str(executor), int(index), int(size), _ids(batches), _ids(running))
                        for executor, index, size, batches, running in groups
                    )
                    for model, version, groups in slots
                },
            )
            since_ns = {bytes(call_id): int(since_ns) for call_id, _, _, _, since_ns in calls}
            return Waiting(int(number), situation, since_ns)
        except Exception as error:
            raise InvalidRecord(f"a note of waiting calls cannot be read: {error}") from None


def _slots(slots: Mapping[object, object]) -> dict[str, int]:
    return {str(executor): int(str(count)) for executor, count in slots.items()}


def _ids(packed: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(map(bytes, packed))


class Suspicions:
    """What one batcher knew at its last check."""

    def __init__(self) -> None:
        self._before = Situation()
        self._seen: dict[str, int] = {}

    def judge(
        self, mine: Waiting, others: Mapping[str, Waiting], turns: Mapping[str, TurnsNote] | None = None
    ) -> list[StuckCall]:
        """The calls to end, out of all that were checked; `mine` is the current state, `others` by incarnation, `turns`
        by executor.
        """
        if not mine.situation.calls:
            self._before, self._seen = Situation(), {}
            return []
        turns = turns or {}
        numbers = {name: one.number for name, one in others.items()}
        numbers |= {f"turns of {name}": one.number for name, one in turns.items()}
        if any(self._seen.get(name) == number for name, number in numbers.items()):
            return []  # one of them has written nothing since the last check: this does not count as a second one
        now = mine.situation.joined([*(one.situation for one in others.values()), Situation(turns=turns)])
        ages = {call_id: since for one in (mine, *others.values()) for call_id, since in one.since_ns.items()}
        situation, chosen = lasting(self._before, now), list[StuckCall]()
        while stuck := stuck_calls(situation):
            # the same choice in every batcher, so that no two of them end different calls
            chosen.append(max(stuck, key=lambda one: (ages[one.call.id], one.call.id)))
            situation = situation.without(chosen[-1].call.id)
        self._before, self._seen = now, numbers
        return chosen
