"""Seals of a model's journal: a hash chain over its entries (ADR 0061). Pure.

A seal is an entry of `j:{m}:seals` whose id is that of the last journal entry it covers. It covers the entries after
the seal before it, or from the journal's beginning. Its one field, `s`, is msgpack, and more at its end is left unread:

    [1, number, first, count, sealed_ms, previous, digest]

`number` counts from 1. `first` is the id of the first entry covered, `count` how many there are, `sealed_ms` the time
of the seal in milliseconds since the epoch. `previous` is the link of the seal before; the first one has the `origin`
of its model. `digest` is SHA-256 over the entries. Of each: the number of its fields and the length of its id (4 bytes
each, little-endian), the id, and for each field its length (4 bytes) and bytes; names and values both are fields.

The *link* of a seal is SHA-256 over a prefix, the lengths of the model's name and of the seal's id (4 bytes each), both
of them, and its bytes as they are stored: so what later releases add is covered, too.

`batcher.housekeeping.journal_sealing` writes seals, `charonia.operations.history.chain_verification` reads them.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from charonia.errors import InvalidRecord
from charonia.tensors import Buffer

FIELD_SEAL = b"s"
HASH_BYTES = 32

_VERSION = 1
_ORIGIN = b"charonia.journal.origin\0"
_LINK = b"charonia.journal.seal\0"
_ENTRY_ID = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")
_PAIR = struct.Struct("<II")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Seal:
    """One seal. `last` is its own id; `link` is what the next seal has as `previous` (32 bytes, as `digest`)."""

    number: int
    first: bytes
    last: bytes
    count: int
    sealed_ms: int
    previous: bytes
    digest: bytes
    link: bytes


class SegmentDigest:
    """Adds up the entries of one seal, oldest first."""

    __slots__ = ("_hash", "count", "first", "last")

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.count = 0
        self.first = b""
        self.last = b""

    def add(self, entry_id: bytes, fields: Sequence[Buffer]) -> None:
        """Takes one entry, with its fields as the log has them: name, value, name, value."""
        parts: list[Buffer] = [_PAIR.pack(len(fields), len(entry_id)), entry_id]
        for field in fields:
            parts.append(_LENGTH.pack(len(field)))
            parts.append(field)
        self._hash.update(b"".join(parts))
        if not self.count:
            self.first = entry_id
        self.last = entry_id
        self.count += 1

    @property
    def digest(self) -> bytes:
        return self._hash.digest()


def origin(model: str) -> bytes:
    """What the first seal of a model has as `previous`."""
    return hashlib.sha256(_ORIGIN + model.encode()).digest()


def make_seal(model: str, before: Seal | None, segment: SegmentDigest, sealed_ms: int) -> tuple[Seal, bytes]:
    """The seal of a segment that is not empty, and its bytes for the log."""
    number = before.number + 1 if before is not None else 1
    previous = before.link if before is not None else origin(model)
    packed: bytes = msgpack.packb((_VERSION, number, segment.first, segment.count, sealed_ms, previous, segment.digest))
    link = _link(model, segment.last, packed)
    about = (number, segment.first, segment.last, segment.count, sealed_ms, previous, segment.digest, link)
    return Seal(*about), packed


def read_seal(model: str, seal_id: bytes, fields: Sequence[Buffer]) -> Seal:
    """The seal of an entry of `j:{m}:seals`. Raises `InvalidRecord` for one that is none, or of a newer version."""
    values = {bytes(fields[at]): bytes(fields[at + 1]) for at in range(0, len(fields) - 1, 2)}
    try:
        packed = values[FIELD_SEAL]
        version, number, first, count, sealed_ms, previous, digest, *_ = msgpack.unpackb(packed)
        well = version == _VERSION and all(type(one) is int for one in (number, count, sealed_ms))
        well = well and number > 0 and count > 0 and sealed_ms >= 0
        well = well and all(type(one) is bytes and len(one) == HASH_BYTES for one in (previous, digest))
        well = well and all(type(one) is bytes and _ENTRY_ID.fullmatch(one) for one in (first, seal_id))
    except Exception as error:  # msgpack, and whatever a stranger's types lead to
        raise InvalidRecord(f"no seal: {error!r}") from None
    if not well:
        raise InvalidRecord(f"no seal of version {_VERSION}")
    link = _link(model, seal_id, packed)
    return Seal(number, first, seal_id, count, sealed_ms, previous, digest, link)


def in_order(entry_id: bytes) -> tuple[int, int]:
    """An entry's id as numbers: milliseconds, and which of them it is. Raises ValueError for one that is no id."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)


def _link(model: str, seal_id: bytes, packed: bytes) -> bytes:
    name = model.encode()
    lengths = _PAIR.pack(len(name), len(seal_id))
    return hashlib.sha256(b"".join((_LINK, lengths, name, seal_id, packed))).digest()
