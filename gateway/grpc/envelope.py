"""Splits a large `ModelInferRequest` into its raw tensors, which stay where they were received, and the rest. Pure.

Protobuf copies `bytes` fields when it parses them. So the top-level fields are separated by hand: raw tensors become
views of the message, and protobuf parses the few hundred bytes of the rest.
"""

from __future__ import annotations

from charonia.tensors import Buffer

_RAW = 7  # raw_input_contents
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class NoEnvelope(ValueError):
    """The message is truncated or malformed; parsing it with protobuf yields the error text."""


def split(message: memoryview, max_fields: int = 10_000) -> tuple[list[memoryview], list[memoryview]]:
    """The parts of a serialised message without its raw tensors, and the raw tensors, both in order.

    Raises `NoEnvelope`, also for more than `max_fields` fields, which would take too long here.
    """
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    at, size = 0, len(message)
    while at < size:
        if len(rest) + len(raw) >= max_fields:
            raise NoEnvelope
        field, start, end = _field(message, at)
        if end > size:
            raise NoEnvelope
        if field == _RAW:
            raw.append(message[start:end])
        else:
            rest.append(message[at:end])
        at = end
    return rest, raw


def raw_at(begin: Buffer) -> int:
    """The offset of the first raw tensor, by the beginning of a message; 0 if it is not in there."""
    view = memoryview(begin)
    at = 0
    try:
        while at < len(view):
            field, start, end = _field(view, at)
            if field == _RAW:
                return start
            at = end
    except NoEnvelope:
        pass
    return 0


def _field(message: memoryview, at: int) -> tuple[int, int, int]:
    """The field at `at`: its number (0 for raw tensors of another wire type), where its content begins and ends.

    The end may lie behind the end of `message`.
    """
    key, start = _varint(message, at)
    field, kind = key >> 3, key & 7
    if kind == _BYTES:
        size, start = _varint(message, start)
        return field, start, start + size
    if kind == _VARINT:
        end = _varint(message, start)[1]
    elif kind == _FIXED64:
        end = start + 8
    elif kind == _FIXED32:
        end = start + 4
    else:  # groups: the interface has none
        raise NoEnvelope
    return (0 if field == _RAW else field), start, end


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    for position in range(at, min(at + _MAX_VARINT_BYTES, len(message))):
        byte = message[position]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position + 1
        shift += 7
    raise NoEnvelope
