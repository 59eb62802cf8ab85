"""Sequences on the wire: a request's sequence (S30-S33), and the slots of a batch's members.

The first is the `sequence` part of a request record, the second a part of the batch header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from charonia.errors import InvalidRecord

_NUMBER = struct.Struct("<BQ")
_SCOPE = struct.Struct("<Q")
_START, _END, _TEXT, _SCOPED = 1, 2, 4, 8

MAX_CORRELATION_ID_BYTES = 128
"""Longer string correlation ids are refused (S42)."""


@dataclass(frozen=True, slots=True)
class SequenceMark:
    """`correlation_id` is a non-zero unsigned 64-bit number or a non-empty string; a number never equals a string.

    `scope` separates tenants' sequences; 0 without tenants.
    """

    correlation_id: int | str
    start: bool = False
    end: bool = False
    scope: int = 0

    @property
    def key(self) -> bytes:
        """The sequence's key within its model: `n` and 8 bytes, or `s` and the string's UTF-8; preceded by a scope."""
        scope = b"t" + _SCOPE.pack(self.scope) if self.scope else b""
        if isinstance(self.correlation_id, str):
            return scope + b"s" + self.correlation_id.encode()
        return scope + b"n" + self.correlation_id.to_bytes(8, "little")

    @property
    def flags(self) -> int:
        """Start and end as the bits of models' control inputs (P13)."""
        return (_START if self.start else 0) | (_END if self.end else 0)

    def pack(self) -> bytes:
        flags = (_START if self.start else 0) | (_END if self.end else 0)
        scope = _SCOPE.pack(self.scope) if self.scope else b""
        if scope:
            flags |= _SCOPED
        if isinstance(self.correlation_id, str):
            return bytes((flags | _TEXT,)) + self.correlation_id.encode() + scope
        return _NUMBER.pack(flags, self.correlation_id) + scope

    @staticmethod
    def unpack(data: bytes) -> SequenceMark:
        """Raises `InvalidRecord`."""
        try:
            flags = data[0]
            start, end = bool(flags & _START), bool(flags & _END)
            scope = 0
            if flags & _SCOPED:
                data, (scope,) = data[: -_SCOPE.size], _SCOPE.unpack(data[-_SCOPE.size :])
            if flags & _TEXT:
                return SequenceMark(data[1:].decode(), start, end, scope)
            return SequenceMark(_NUMBER.unpack(data)[1], start, end, scope)
        except (IndexError, struct.error, UnicodeDecodeError) as error:
            raise InvalidRecord(f"the sequence part of a request cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class SequencePlace:
    """The place of one request of a batch.

    `slot` is its row in a direct batch (S34). `run` identifies the run of the sequence: the id of the request that
    started it. `binding` counts how often the sequence was given a slot: with a new number an executor's cached state
    is stale, and the record in the log counts. `again`: the model asked for a further execution of the same request
    (S41), so that it starts nothing.
    """

    slot: int
    run: bytes
    binding: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class BatchPlaces:
    """The sequences of a batch: the `instance` that runs it, and the place of each record, in order.

    `rows` is the number of slots that the batch covers, empty ones included; 0 if it has only its members (S34, S36).
    """

    instance: int
    rows: int
    places: tuple[SequencePlace, ...]

    def packed(self) -> list[Any]:
        """The form in a batch header."""
        return [self.instance, self.rows, [[p.slot, p.run, p.binding, p.again] for p in self.places]]

    @staticmethod
    def of(packed: Any) -> BatchPlaces:
        """From that form. Raises `InvalidRecord`."""
        try:
            instance, rows, places = packed
            found = tuple(SequencePlace(slot, run, binding, again) for slot, run, binding, again in places)
        except (TypeError, ValueError) as error:
            raise InvalidRecord(f"the places of a batch cannot be read: {error}") from None
        numbers = (instance, rows, *(n for p in found for n in (p.slot, p.binding)))
        if not (
            all(type(n) is int and n >= 0 for n in numbers)
            and all(type(p.run) is bytes and type(p.again) is bool for p in found)
        ):
            raise InvalidRecord("the places of a batch have a field of another type")
        return BatchPlaces(instance, rows, found)
