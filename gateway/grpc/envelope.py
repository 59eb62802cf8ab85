"""The envelope of a large `ModelInferRequest`: all but its raw tensors, which stay where they were received. Pure.

Protobuf copies `bytes` fields when it parses them. Here the top-level fields are told apart by hand, the raw tensors
are views of the message, and protobuf parses the few hundred bytes that are left.
"""

from __future__ import annotations

from charonia.tensors import Buffer

_RAW = 7  # raw_input_contents
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class NoEnvelope(ValueError):
    """The message is cut short or malformed; protobuf has the words for it."""


def split(message: memoryview, max_fields: int = 10_000) -> tuple[list[memoryview], list[memoryview]]:
    """The parts of a serialised message without its raw tensors, and those in order.

    Raises `NoEnvelope`, also for more fields than `max_fields`: going through them by hand would take too long.
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
    """Where the first raw tensor begins in a message, by what has come of it; 0 where that does not tell."""
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
    """The field that begins at `at`: its number (0 for raw tensors of another type), where its content begins and ends.

    The end may lie behind what there is of the message.
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
    else:  # groups, which the interface does not have
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
