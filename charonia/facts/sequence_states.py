"""What the log keeps of a live sequence (S34-S39): where it is bound, how far it is, and its state.

Written in the very step that settles a request of the sequence (`Work.settle`), so that the record never tells of
another request than the last one answered. Executors write it, owners read where sequences are bound, and an executor
that takes a sequence over reads its state. What a sequence may do next is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from charonia.datatypes import DataType
from charonia.errors import InvalidRecord
from charonia.tensors import Buffer, Tensor

_LAYOUT = 1
_RUN_BYTES = 16


def sequence_key(version: int, key: bytes) -> bytes:
    """Names a sequence among those of all versions of its model; `key` is `SequenceMark.key`."""
    return b"%d:%b" % (version, key)


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """What settling one request does to its sequence's record.

    `about` replaces what is known of it, b"" ends the sequence and its record. `state` replaces the state, None keeps
    what is there.
    """

    key: bytes
    about: bytes
    state: Buffer | None = None


@dataclass(frozen=True, slots=True)
class SequenceAbout:
    """A live sequence: `run` is the id of the request that started it, `step` how often its state has changed.

    `binding` counts the places it was given; `used_us` is wall clock. The packed form begins with `run`, 16 bytes.
    """

    key: bytes
    run: bytes
    version: int
    content_hash: str
    executor: str
    instance: int
    slot: int
    binding: int
    step: int
    used_us: int

    def pack(self) -> bytes:
        place = (self.executor, self.instance, self.slot, self.binding)
        rest = [_LAYOUT, self.version, self.content_hash, *place, self.step, self.used_us]
        return self.run + bytes(msgpack.packb(rest))

    @staticmethod
    def unpack(key: bytes, data: bytes) -> SequenceAbout:
        """Raises `InvalidRecord`."""
        try:
            run = data[:_RUN_BYTES]
            layout, version, content_hash, executor, *numbers = msgpack.unpackb(data[_RUN_BYTES:], use_list=False)
            instance, slot, binding, step, used_us = numbers[:5]
        except Exception as error:
            raise InvalidRecord(f"the record of a sequence cannot be read: {error}") from None
        if layout != _LAYOUT or not type(content_hash) is type(executor) is str:
            raise InvalidRecord("the record of a sequence has another layout")
        if any(type(number) is not int for number in (version, *numbers[:5])):
            raise InvalidRecord("the record of a sequence has a field of another type")
        return SequenceAbout(key, run, version, content_hash, executor, instance, slot, binding, step, used_us)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The state of a sequence after `step` changes: one tensor for each state input, without a batch dimension."""

    run: bytes
    step: int
    tensors: tuple[Tensor, ...]

    def pack(self) -> bytes:
        described = [[t.name, t.datatype.number, t.shape, bytes(t.data)] for t in self.tensors]
        return bytes(msgpack.packb([_LAYOUT, self.run, self.step, described]))

    @staticmethod
    def unpack(data: bytes) -> SequenceState:
        """Raises `InvalidRecord`."""
        try:
            layout, run, step, described = msgpack.unpackb(data, use_list=False)
            tensors: Sequence[Tensor] = [
                Tensor(name, DataType.of_number(number), tuple(shape), raw) for name, number, shape, raw in described
            ]
        except Exception as error:
            raise InvalidRecord(f"the state of a sequence cannot be read: {error}") from None
        if layout != _LAYOUT or type(run) is not bytes or type(step) is not int:
            raise InvalidRecord("the state of a sequence has another layout")
        return SequenceState(run, step, tuple(tensors))
