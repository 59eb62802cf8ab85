"""The common part of all records: how entries carry them, references to tensors, and caches of metas.

Fields of an entry are `h` (batch header), `r` (one record), `m` (many) and `w` (a wave). `m` holds the number of
records, their lengths, then the records: each field costs the log as much as a small record.
If large payloads are outside the record, a reference replaces the tensor bytes:
kind (1 byte: `f` a file of the shared payload directory, `b` a blob of the log) | size (8 bytes) | name
The name of bytes in a reused slot (`charonia.eventlog.payload_slots`) is `<owner>/s<number>-<generation>-<offset>`,
numbers in hexadecimal; `<owner>/s<number>` is the slot's file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from charonia.datatypes import DataType
from charonia.errors import InvalidRecord
from charonia.inference import Parameters
from charonia.tensors import Buffer

WIRE_VERSION = 1

META_CACHE_LIMIT = 4096
"""Max cached tensor signatures. A full cache is emptied, so that hostile variety costs only time."""

MAX_CACHED_META_BYTES = 4096
"""Longer metas (large parameters) are decoded each time, so that the caches stay small."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The position of one tensor in a record; `offset` counts from the start of the record's tensor bytes."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


def places_of(tensors: Any) -> tuple[TensorPlace, ...]:
    places = []
    offset = 0
    for name, number, shape, size in tensors:
        if not (
            type(name) is str
            and type(shape) is tuple
            and all(type(dim) is int and dim >= 0 for dim in shape)
            and type(size) is int
            and size >= 0
        ):
            raise InvalidRecord("a tensor's description has a field of another type")
        places.append(TensorPlace(name, DataType.of_number(number), shape, offset, size))
        offset += size
    return tuple(places)


def total_size_bytes(places: tuple[TensorPlace, ...]) -> int:
    return places[-1].offset + places[-1].size_bytes if places else 0


def parameters_of(parameters: Any) -> Parameters:
    if parameters is None:
        return {}
    if type(parameters) is not dict or not all(
        type(key) is str and type(value) in (str, int, bool, float) for key, value in parameters.items()
    ):
        raise InvalidRecord("parameters have a key or value of another type")
    return parameters


_REFERENCE = struct.Struct("<cQ")
_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9_-]+)?")
_SLOT_NAME = re.compile(r"([^/]+/s[0-9a-f]+)-([0-9a-f]+)-([0-9a-f]+)")

FILE = b"f"
BLOB = b"b"


def slot_file(number: int) -> str:
    """The name of a slot's file, without its owner's."""
    return f"s{number:x}"


def slot_name(file: str, generation: int, offset: int) -> str:
    """The name of a payload in a slot, whose `file` may have its owner before it."""
    return f"{file}-{generation:x}-{offset:x}"


def slot_place(name: str) -> tuple[str, int, int]:
    """Of a payload in a slot: the file with its owner, the generation and the offset. Raises `InvalidRecord`."""
    found = _SLOT_NAME.fullmatch(name)
    if found is None:
        raise InvalidRecord("payload lies in no slot")
    return found[1], int(found[2], 16), int(found[3], 16)


@dataclass(frozen=True, slots=True)
class Reference:
    """The location of a record's tensor bytes. `name` is `<incarnation>/<file>` or a blob id, never another path."""

    kind: bytes
    name: str
    size_bytes: int

    def pack(self) -> bytes:
        return _REFERENCE.pack(self.kind, self.size_bytes) + self.name.encode()

    @property
    def is_in_slot(self) -> bool:
        """Whether the bytes lie in a slot, and not in a file of their own."""
        return self.kind == FILE and _SLOT_NAME.fullmatch(self.name) is not None

    def part(self, start: int, size_bytes: int) -> Reference:
        """The reference to `size_bytes` of these bytes from `start` on. Raises `InvalidRecord` for those in no slot."""
        use, _, _ = self.name.rpartition("-")
        return Reference(self.kind, f"{use}-{slot_place(self.name)[2] + start:x}", size_bytes)

    @staticmethod
    def unpack(data: Buffer) -> Reference:
        """Decode a reference. Raises `InvalidRecord`, also for a name that could leave the payload directory."""
        view = memoryview(data)
        try:
            kind, size = _REFERENCE.unpack_from(view)
            name = str(view[_REFERENCE.size :], "ascii")
        except (struct.error, UnicodeDecodeError) as error:
            raise InvalidRecord(f"payload reference cannot be read: {error}") from None
        if kind not in (FILE, BLOB) or not _NAME.fullmatch(name) or name.startswith("."):
            raise InvalidRecord("payload reference names no file or blob")
        return Reference(kind, name, size)


FIELD_HEADER = b"h"
FIELD_RECORD = b"r"
FIELD_RECORDS = b"m"
FIELD_WAVE = b"w"
FIELD_ABOUT = b"m"
"""Of a dead letter: why its request was given up."""

_LENGTH = struct.Struct("<I")


def record_fields(records: Sequence[Buffer]) -> list[Buffer]:
    """The entry fields for these records; several records share one field."""
    if len(records) == 1:
        return [FIELD_RECORD, records[0]]
    lengths = struct.pack(f"<{len(records) + 1}I", len(records), *map(len, records))
    return [FIELD_RECORDS, b"".join((lengths, *records))]


def records_of(fields: Sequence[Buffer]) -> list[Buffer]:
    """The records in an entry, in order, as views; other fields are skipped. Raises `InvalidRecord`."""
    records: list[Buffer] = []
    for at in range(0, len(fields) - 1, 2):
        name = fields[at]
        if name == FIELD_RECORD:
            records.append(fields[at + 1])
        elif name == FIELD_RECORDS:
            view = memoryview(fields[at + 1])
            start, lengths = lengths_of(view)
            for length in lengths:
                records.append(view[start : start + length])
                start += length
    return records


def lengths_of(view: memoryview) -> tuple[int, tuple[int, ...]]:
    """The start and the length of each record in an `m` field. Raises `InvalidRecord`."""
    size = len(view)
    count = _LENGTH.unpack_from(view)[0] if size >= 4 else -1
    start = 4 * (count + 1)
    if not 0 <= start <= size or count < 0:
        raise InvalidRecord(f"{size} bytes cannot hold the lengths of {count} records")
    lengths = struct.unpack_from(f"<{count}I", view, 4)
    if start + sum(lengths) != size:
        raise InvalidRecord(f"{count} records fill {start + sum(lengths)} bytes, the field has {size}")
    return start, lengths
