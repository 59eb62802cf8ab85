"""What a batcher tells the others about calls that wait, so that each can find deadlocks among models of several.

The whole of it is one note in the log with a number that grows; a batcher whose calls do not wait for long writes none.
What is found in such notes is certain once it is found twice, in notes that were written between the two looks: whoever
holds an instance in both held it throughout, and a call that waits in both waited throughout, so that at the moment
between them the finding was true, and a deadlock does not pass. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgpack

from charonia.errors import InvalidRecord

from .scheduling.deadlocks import CalledRequest, Holder, Version, stuck_calls

TTL_S = 5


@dataclass(frozen=True, slots=True)
class Waiting:
    """`number` grows with each note of a batcher. `since_ns` is the wall clock at which a call was accepted."""

    number: int = 0
    instances: Mapping[Version, Mapping[str, int]] = field(default_factory=dict)
    holders: tuple[Holder, ...] = ()
    calls: tuple[CalledRequest, ...] = ()
    since_ns: Mapping[bytes, int] = field(default_factory=dict)

    def pack(self) -> bytes:
        return bytes(
            msgpack.packb(
                [
                    self.number,
                    [[*version, dict(slots)] for version, slots in self.instances.items()],
                    [[*h.version, h.executor, sorted(h.ids)] for h in self.holders],
                    [[c.id, *c.version, c.ancestors, self.since_ns[c.id]] for c in self.calls],
                ]
            )
        )

    @staticmethod
    def unpack(data: bytes) -> Waiting:
        """Raises `InvalidRecord`."""
        try:
            number, instances, holders, calls, *_ = msgpack.unpackb(data, use_list=False)
            return Waiting(
                int(number),
                {(str(model), int(version)): _slots(slots) for model, version, slots in instances},
                tuple(
                    Holder((str(model), int(version)), str(executor), frozenset(map(bytes, ids)))
                    for model, version, executor, ids in holders
                ),
                tuple(
                    CalledRequest(bytes(call_id), (str(model), int(version)), tuple(map(bytes, ancestors)))
                    for call_id, model, version, ancestors, _ in calls
                ),
                {bytes(call_id): int(since_ns) for call_id, _, _, _, since_ns in calls},
            )
        except Exception as error:
            raise InvalidRecord(f"a note of waiting calls cannot be read: {error}") from None


def _slots(slots: Mapping[object, object]) -> dict[str, int]:
    return {str(executor): int(str(count)) for executor, count in slots.items()}


class Suspicions:
    """What one batcher has found so far."""

    def __init__(self) -> None:
        self._suspects: frozenset[bytes] = frozenset()
        self._seen: dict[str, int] = {}

    def judge(self, mine: Waiting, others: Mapping[str, Waiting]) -> list[bytes]:
        """The calls that must be ended, of all who were looked at; `mine` is of now, `others` by incarnation."""
        if not mine.calls:
            self._suspects, self._seen = frozenset(), {}
            return []
        numbers = {incarnation: one.number for incarnation, one in others.items()}
        if any(self._seen.get(incarnation) == number for incarnation, number in numbers.items()):
            return []  # one of them has said nothing since the last look: this is none
        instances = dict(mine.instances)
        holders, ages = list(mine.holders), dict(mine.since_ns)
        calls = {call.id: call for call in mine.calls}
        for one in others.values():
            instances.update(one.instances)
            holders += one.holders
            calls.update((call.id, call) for call in one.calls)
            ages.update(one.since_ns)
        before, suspects, chosen = self._suspects, set[bytes](), list[bytes]()
        while stuck := stuck_calls(instances, holders, calls.values()):
            suspects |= {call.id for call in stuck}
            again = [call.id for call in stuck if call.id in before]
            if not again:
                break
            # the same wherever it is looked for, so that no two batchers end different ones
            chosen.append(max(again, key=lambda call_id: (ages[call_id], call_id)))
            del calls[chosen[-1]]
        self._suspects, self._seen = frozenset(suspects), numbers
        return chosen
