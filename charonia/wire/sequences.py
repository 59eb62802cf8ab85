"""What a request of a sequence says about its place in it (S30-S33): the `sequence` part of a request record."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from charonia.errors import InvalidRecord

_NUMBER = struct.Struct("<BQ")
_START, _END, _TEXT = 1, 2, 4

MAX_CORRELATION_ID_BYTES = 128
"""Longer string correlation ids are refused (S42)."""


@dataclass(frozen=True, slots=True)
class SequenceMark:
    """`correlation_id` is a non-zero unsigned 64-bit number or a non-empty string; one and the other never meet."""

    correlation_id: int | str
    start: bool = False
    end: bool = False

    @property
    def key(self) -> bytes:
        """Names the sequence within its model: `n` and 8 bytes, or `s` and the string's UTF-8."""
        if isinstance(self.correlation_id, str):
            return b"s" + self.correlation_id.encode()
        return b"n" + self.correlation_id.to_bytes(8, "little")

    def pack(self) -> bytes:
        flags = (_START if self.start else 0) | (_END if self.end else 0)
        if isinstance(self.correlation_id, str):
            return bytes((flags | _TEXT,)) + self.correlation_id.encode()
        return _NUMBER.pack(flags, self.correlation_id)

    @staticmethod
    def unpack(data: bytes) -> SequenceMark:
        """Raises `InvalidRecord`."""
        try:
            flags = data[0]
            start, end = bool(flags & _START), bool(flags & _END)
            if flags & _TEXT:
                return SequenceMark(data[1:].decode(), start, end)
            return SequenceMark(_NUMBER.unpack(data)[1], start, end)
        except (IndexError, struct.error, UnicodeDecodeError) as error:
            raise InvalidRecord(f"the sequence part of a request cannot be read: {error}") from None
