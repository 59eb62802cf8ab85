"""Positions of the id and the tensors within the bytes of a request, and the bytes between them. Pure.

Requests with the same layout differ only in those parts, so the bytes between are compared instead of parsed. A trace
context differs from request to request, too: before the bytes are compared, `NO_CONTEXT` takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from charonia.tensors import Buffer

_ID = 3
_INPUT = 5
_RAW = 7
_LENGTH_DELIMITED = 2
_CONTENTS = 5
_AS_THEY_ARE = (6, 7)
"""Typed contents with the same bytes as the raw tensor: packed FP32 and FP64."""


class Layout:
    """A request's bytes as fixed parts with parts of fixed length between them.

    `head` is the beginning. `parts` are (start, end) of the id, if `id_bytes`, and then of the raw inputs; `fixed` are
    (start, bytes) of the parts between and behind them.
    """

    __slots__ = ("fixed", "head", "id_bytes", "only_part_at", "parts")

    def __init__(
        self, head: bytes, parts: Sequence[tuple[int, int]], fixed: Sequence[tuple[int, bytes]], id_bytes: int
    ) -> None:
        self.head = head
        self.parts = tuple(parts)
        self.fixed = tuple(fixed)
        self.id_bytes = id_bytes
        self.only_part_at = 0 if fixed or id_bytes or len(parts) != 1 else parts[0][0]
        """Start of the only raw input, if it is all that follows `head`; otherwise 0."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return (self.head, self.parts, self.fixed, self.id_bytes) == (
            other.head,
            other.parts,
            other.fixed,
            other.id_bytes,
        )

    def __hash__(self) -> int:
        return hash((self.head, self.parts))

    @staticmethod
    def of(data: bytes, parts: Sequence[tuple[int, int]], id_bytes: int) -> Layout:
        """The layout of `data` with these parts, which are in order and do not overlap."""
        fixed: list[tuple[int, bytes]] = []
        at = 0
        for start, end in parts:
            if start > at:
                fixed.append((at, data[at:start]))
            at = end
        if at < len(data):
            fixed.append((at, data[at:]))
        head = fixed.pop(0)[1] if fixed and fixed[0][0] == 0 else b""
        return Layout(head, parts, fixed, id_bytes)

    def behind(self, prefix: bytes) -> Layout:
        """The layout with `prefix` before it."""
        by = len(prefix)
        return Layout(
            prefix + self.head,
            [(start + by, end + by) for start, end in self.parts],
            [(start + by, part) for start, part in self.fixed],
            self.id_bytes,
        )

    def cut(self, data: bytes, at: int) -> tuple[tuple[bytes, ...], bytes] | None:
        """The raw inputs and the id of a request that begins at `at` with `head`; None if it does not match."""
        for start, part in self.fixed:
            if not data.startswith(part, at + start):
                return None
        if not self.id_bytes:
            if len(self.parts) == 1:
                start, end = self.parts[0]
                return (data[at + start : at + end],), b""
            return tuple([data[at + start : at + end] for start, end in self.parts]), b""
        start, end = self.parts[0]
        request_id = data[at + start : at + end]
        if request_id.translate(None, _PLAIN):  # other ids are left to the full way, which checks them
            return None
        if len(self.parts) == 2:
            start, end = self.parts[1]
            return (data[at + start : at + end],), request_id
        return tuple([data[at + start : at + end] for start, end in self.parts[1:]]), request_id

    def join(self, inputs: Sequence[Buffer], request_id: bytes) -> bytes:
        """The inverse of `cut`: the bytes of a request."""
        values: list[Buffer] = [request_id, *inputs] if self.id_bytes else list(inputs)
        pieces: list[tuple[int, Buffer]] = [(0, self.head), *self.fixed]
        pieces += [(start, value) for (start, _), value in zip(self.parts, values, strict=True)]
        return b"".join([part for _, part in sorted(pieces, key=itemgetter(0))])


CONTEXT_BYTES = 55
"""The length of a `traceparent` of version 00 (W3C Trace Context)."""
NO_CONTEXT = b"?" * CONTEXT_BYTES
_CONTEXT_DIGITS = b"0123456789abcdef-"


def is_context(value: bytes) -> bool:
    """Whether these bytes may be a `traceparent`; if so, nothing in them can end a header."""
    return len(value) == CONTEXT_BYTES and not value.translate(None, _CONTEXT_DIGITS)


def is_sampled(context: bytes) -> bool:
    """Whether the caller's span is sampled, if `context` is a trace context at all (flag 1, the last digit's)."""
    return context[-1:] not in b"02468ace-"


_PLAIN = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.:"


def is_plain(request_id: bytes) -> bool:
    """Whether an id has only letters, digits and `-_.:`, which are the same in protobuf, JSON and any encoding."""
    return not request_id.translate(None, _PLAIN)


def protobuf_layout(data: bytes, inputs: int) -> Layout | None:
    """The layout of a `ModelInferRequest` with raw inputs only, or typed FP32 or FP64 ones; None for any other.

    Also None if its fields are not in the usual order.
    """
    parts: list[tuple[int, int]] = []
    id_bytes = raw = typed = at = last = 0
    size = len(data)
    while at < size:
        tag, at = read_varint(data, at)
        field = tag >> 3
        if tag & 7 != _LENGTH_DELIMITED or field < last:
            return None
        length, at = read_varint(data, at)
        end = at + length
        if end > size:
            return None
        if field == _ID:
            if id_bytes or not length or not is_plain(data[at:end]):
                return None
            id_bytes = length
            parts.append((at, end))
        elif field == _INPUT:
            values = _typed_values(data, at, end)
            if values is None:
                return None
            if values[0] < values[1]:
                typed += 1
                parts.append(values)
        elif field == _RAW:
            if not length:
                return None
            raw += 1
            parts.append((at, end))
        last, at = field, end
    if not inputs or (raw, typed) not in ((inputs, 0), (0, inputs)):
        return None
    return Layout.of(data, parts, id_bytes)


def _typed_values(data: bytes, at: int, end: int) -> tuple[int, int] | None:
    """Start and end of the values of an `InferInputTensor` with one packed field; an empty range without contents.

    None for contents of another form.
    """
    while at < end:
        tag, at = read_varint(data, at)
        if tag & 7 != _LENGTH_DELIMITED:
            return None
        length, at = read_varint(data, at)
        if at + length > end:
            return None
        if tag >> 3 == _CONTENTS:
            if at + length != end or not length:
                return None
            tag, at = read_varint(data, at)
            length, at = read_varint(data, at)
            is_whole = tag & 7 == _LENGTH_DELIMITED and at + length == end and length > 0
            return (at, end) if tag >> 3 in _AS_THEY_ARE and is_whole else None
        at += length
    return end, end


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint of protobuf, and its end."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return len(data) + 1, len(data)
