"""The fields of a log entry that carry records: `h` (batch header), `r` (one record), `m` (many), `w` (a wave).

`m` holds their number, their lengths, then themselves: each field costs the log as much as a small record does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from charonia.errors import InvalidRecord
from charonia.tensors import Buffer

FIELD_HEADER = b"h"
FIELD_RECORD = b"r"
FIELD_RECORDS = b"m"
FIELD_WAVE = b"w"

_LENGTH = struct.Struct("<I")


def record_fields(records: Sequence[Buffer]) -> list[Buffer]:
    """The entry fields that carry these records; several share one field."""
    if len(records) == 1:
        return [FIELD_RECORD, records[0]]
    lengths = struct.pack(f"<{len(records) + 1}I", len(records), *map(len, records))
    return [FIELD_RECORDS, b"".join((lengths, *records))]


def records_of(fields: Sequence[Buffer]) -> list[Buffer]:
    """The records an entry carries, in order, as views; other fields are skipped. Raises `InvalidRecord`."""
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
    """Where the records of an `m` field begin, and how long each is. Raises `InvalidRecord`."""
    size = len(view)
    count = _LENGTH.unpack_from(view)[0] if size >= 4 else -1
    start = 4 * (count + 1)
    if not 0 <= start <= size or count < 0:
        raise InvalidRecord(f"{size} bytes cannot hold the lengths of {count} records")
    lengths = struct.unpack_from(f"<{count}I", view, 4)
    if start + sum(lengths) != size:
        raise InvalidRecord(f"{count} records fill {start + sum(lengths)} bytes, the field has {size}")
    return start, lengths
