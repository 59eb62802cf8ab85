"""Length-prefixed messages of gRPC within the data of a stream, and their compression (G29). Pure."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from struct import Struct

from gateway.grpc.statuses import Status

PREFIX_BYTES = 5
PREFIX = Struct(">BL")
"""Compressed or not, length in bytes."""
LARGEST_MESSAGE_BYTES = 0x7FFFFFFF
"""As grpcio and Triton: protobuf can hold no larger one."""

_WINDOW_BITS = {"gzip": 31, "deflate": 15}
_STEP_BYTES = 1 << 20
_WORTH_A_VIEW_BYTES = 1 << 16
LARGE_MESSAGE_BYTES = 1 << 16
"""From here on a message is received into memory that was made for it."""

Room = Callable[[int, memoryview], memoryview | None]
"""Memory for a message of so many bytes that begins with these; None where there is none."""


class MessageFault(Exception):
    """A message that cannot be read: its call ends with this status."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


class Packed:
    """A compressed message that came whole. It stays one until it is wanted: many may wait, and each may become a
    thousand times its size.
    """

    __slots__ = ("_data", "_encoding", "_limit_bytes")

    def __init__(self, encoding: str, data: bytes, limit_bytes: int) -> None:
        self._encoding = encoding
        self._data = data
        self._limit_bytes = limit_bytes

    def __len__(self) -> int:
        return len(self._data)

    def unpacked(self) -> bytes:
        """The message. Raises `MessageFault`."""
        return decompressed(self._encoding, self._data, self._limit_bytes)


class Assembler:
    """Puts messages together from the data of one stream. `limit_bytes` bounds what a compressed one may become.

    With `room` a large message that is not compressed is put where that says, in one copy, and is a view of that.
    """

    __slots__ = ("_chunks", "_encoding", "_flag", "_into", "_left", "_limit_bytes", "_prefix", "_room")

    def __init__(self, encoding: str, limit_bytes: int, room: Room | None = None) -> None:
        self._encoding = encoding
        self._limit_bytes = limit_bytes
        self._room = room
        self._into: memoryview | None = None
        """Where a large message goes."""
        self._prefix = b""
        """What there is of an incomplete prefix."""
        self._flag = 0
        self._left = -1
        """Bytes missing of a message; -1 between messages."""
        self._chunks: list[bytes | memoryview] = []

    @property
    def is_between(self) -> bool:
        """Whether no part of a message is here."""
        return self._left < 0 and not self._prefix

    @property
    def target(self) -> memoryview | None:
        """Where the rest of a large message goes. Who writes there says how much with `wrote`."""
        return None if self._into is None else self._into[len(self._into) - self._left :]

    def wrote(self, size_bytes: int) -> memoryview | None:
        """The next bytes are in `target`; the message when it is whole with them."""
        self._left -= size_bytes
        if self._left:
            return None
        whole, self._into, self._left = self._into, None, -1
        return whole

    def feed(self, data: bytes | memoryview) -> list[bytes | memoryview | Packed]:
        """The messages that are whole with this data. Raises `MessageFault`; nothing can be read after it."""
        view = memoryview(data)
        messages: list[bytes | memoryview | Packed] = []
        at = 0
        while at < len(view) or not self._left:
            if self._left < 0:
                taken = bytes(view[at : at + PREFIX_BYTES - len(self._prefix)])
                at += len(taken)
                self._prefix += taken
                if len(self._prefix) < PREFIX_BYTES:
                    break
                self._begin(view[at:])
            part = view[at : at + self._left]
            at += len(part)
            if self._into is not None:
                start = len(self._into) - self._left
                self._into[start : start + len(part)] = part
                if (large := self.wrote(len(part))) is not None:
                    messages.append(large)
                continue
            self._left -= len(part)
            if self._left:
                # a view keeps all that was read with it
                self._chunks.append(part if len(part) >= _WORTH_A_VIEW_BYTES else bytes(part))
                continue
            whole = b"".join((*self._chunks, part)) if self._chunks else bytes(part)
            self._chunks.clear()
            self._left = -1
            messages.append(self._read(self._flag, whole))
        return messages

    def _begin(self, come: memoryview) -> None:
        self._flag, self._left = PREFIX.unpack(self._prefix)
        self._prefix = b""
        if self._left > LARGEST_MESSAGE_BYTES:
            text = f"Received message larger than max ({self._left} vs. {LARGEST_MESSAGE_BYTES})"
            raise MessageFault(Status.RESOURCE_EXHAUSTED, text)
        if self._room is not None and not self._flag and self._left >= LARGE_MESSAGE_BYTES:
            self._into = self._room(self._left, come[: self._left])

    def _read(self, flag: int, data: bytes) -> bytes | Packed:
        if not flag:
            return data
        if flag != 1 or self._encoding not in _WINDOW_BITS:
            raise MessageFault(Status.INTERNAL, "message is marked as compressed, but its call names no compression")
        if not data:
            return data  # as gRPC's own servers: there was nothing to compress
        return Packed(self._encoding, data, self._limit_bytes)


def decompressed(encoding: str, data: bytes, limit_bytes: int) -> bytes:
    """The message in `data`. Raises `MessageFault` for a broken one, or one that is larger than the limit.

    It is bounded while it is decompressed, so that a small bomb never becomes a large buffer.
    """
    decoder = zlib.decompressobj(_WINDOW_BITS[encoding])
    parts: list[bytes] = []
    total, rest = 0, data
    try:
        while not decoder.eof:
            part = decoder.decompress(rest, min(_STEP_BYTES, limit_bytes - total + 1))
            total += len(part)
            if total > limit_bytes:
                text = (
                    f"decompressed request exceeds the maximum allowed input size of {limit_bytes} bytes. Use "
                    "--http-max-input-size to increase the limit."
                )
                raise MessageFault(Status.RESOURCE_EXHAUSTED, text)
            parts.append(part)
            rest = decoder.unconsumed_tail
            if not part and not rest and not decoder.eof:
                raise MessageFault(Status.INTERNAL, "failed to decompress the message: it is truncated")
    except zlib.error as error:
        raise MessageFault(Status.INTERNAL, f"failed to decompress the message: {error}") from None
    if decoder.unused_data:
        raise MessageFault(Status.INTERNAL, "failed to decompress the message: there is more after its end")
    return b"".join(parts)


def framed(message: bytes, level: int = 0) -> list[bytes]:
    """A message with its prefix; compressed by gzip where `level` is not 0 and that makes it smaller."""
    if level:
        encoder = zlib.compressobj(level, zlib.DEFLATED, _WINDOW_BITS["gzip"])
        packed = encoder.compress(message) + encoder.flush()
        if len(packed) < len(message):
            return [PREFIX.pack(1, len(packed)), packed]
    return [PREFIX.pack(0, len(message)), message]
