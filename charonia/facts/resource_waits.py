"""What an executor whose rates are limited (Q1) tells of batches that wait for their turn: a note in the log. Pure.

Who writes it is `executors.running.limiter_reports`, who reads it `batcher.deadlock.deadlock_watch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgpack

from charonia.errors import InvalidRecord

TTL_S = 5

ResourcePlace = tuple[int, str]
"""A device, -1 for all of them, and the name of a resource."""
Room = tuple[str, int, int]
"""Model, version, and the index of the instance where a batch is for one (S34), else -1: who may take a batch."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An instance. `running` are the requests it executes, by id: as long it has what it `needs`.

    `order`: whose turn comes first, among those that wait for theirs; None when it does not wait.
    """

    instance: str
    room: Room
    needs: Mapping[ResourcePlace, int]
    running: tuple[bytes, ...] = ()
    order: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class WaitingBatch:
    """A batch that no instance has begun; `ids` are its requests."""

    room: Room
    ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TurnsNote:
    """`number` grows with each note of an executor; `counts` is how many there are of each resource."""

    number: int = 0
    counts: Mapping[ResourcePlace, int] = field(default_factory=dict)
    turns: tuple[Turn, ...] = ()
    waiting: tuple[WaitingBatch, ...] = ()

    def pack(self) -> bytes:
        return bytes(
            msgpack.packb(
                [
                    self.number,
                    _packed(self.counts),
                    [[t.instance, t.room, _packed(t.needs), t.running, t.order] for t in self.turns],
                    [[w.room, w.ids] for w in self.waiting],
                ]
            )
        )

    @staticmethod
    def unpack(data: bytes) -> TurnsNote:
        """Raises `InvalidRecord`."""
        try:
            number, counts, turns, waiting, *_ = msgpack.unpackb(data, use_list=False)
            return TurnsNote(
                int(number),
                _counts(counts),
                tuple(
                    Turn(str(name), _room(room), _counts(needs), tuple(map(bytes, running)), _order(order))
                    for name, room, needs, running, order, *_ in turns
                ),
                tuple(WaitingBatch(_room(room), tuple(map(bytes, ids))) for room, ids, *_ in waiting),
            )
        except Exception as error:
            raise InvalidRecord(f"a note of turns cannot be read: {error}") from None


def _packed(counts: Mapping[ResourcePlace, int]) -> list[tuple[int, str, int]]:
    return [(device, name, count) for (device, name), count in counts.items()]


def _counts(packed: tuple[tuple[int, str, int], ...]) -> dict[ResourcePlace, int]:
    return {(int(device), str(name)): int(count) for device, name, count in packed}


def _room(packed: tuple[str, int, int]) -> Room:
    model, version, index = packed
    return str(model), int(version), int(index)


def _order(packed: tuple[int, int] | None) -> tuple[int, int] | None:
    if packed is None:
        return None
    scaled, asked = packed
    return int(scaled), int(asked)
