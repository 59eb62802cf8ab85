"""Length-prefixed gRPC messages in the data of a stream, and their compression (G29). Pure."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from struct import Struct

from charonia.tensors import Buffer
from gateway.grpc.calling import LARGEST_MESSAGE_BYTES, too_large
from gateway.grpc.statuses import Status
from gateway.requests.decompression import AFTER_END, TOO_LARGE, TRUNCATED, WINDOW_BITS, DecompressionFault, inflated

PREFIX_BYTES = 5
PREFIX = Struct(">BL")
"""Whether compressed, length in bytes."""
_FAULTS = {AFTER_END: "there is more after its end", TRUNCATED: "it is truncated"}
LARGE_MESSAGE_BYTES = 1 << 16
"""Messages of at least this size are received into their own memory."""

AllocateMessage = Callable[[int, memoryview], memoryview | None]
"""Memory for a message of this size that begins with these bytes; None where there is none."""


class MessageFault(Exception):
    """A message that cannot be read: its call ends with this status."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


class Packed:
    """A complete compressed message, decompressed when needed: many may wait, and each may grow a thousandfold."""

    __slots__ = ("data", "encoding", "limit_bytes")

    def __init__(self, encoding: str, data: Buffer, limit_bytes: int) -> None:
        self.encoding = encoding
        self.data = data
        self.limit_bytes = limit_bytes

    def unpacked(self) -> bytes:
        """The decompressed message. Raises `MessageFault`."""
        try:
            return inflated(self.encoding, self.data, self.limit_bytes, several=False)
        except DecompressionFault as error:
            raise fault_of(error, self.limit_bytes) from None


class Assembler:
    """Assembles messages from the data of one stream. `limit_bytes` bounds the decompressed size.

    With `allocate` a large message is a view of memory. An uncompressed one is copied once, into the allocated view.
    """

    __slots__ = (
        "_allocate",
        "_come",
        "_encoding",
        "_flag",
        "_into",
        "_largest_bytes",
        "_left",
        "_limit_bytes",
        "_prefix",
    )

    def __init__(
        self,
        encoding: str,
        limit_bytes: int,
        allocate: AllocateMessage | None = None,
        largest_bytes: int = LARGEST_MESSAGE_BYTES,
    ) -> None:
        self._encoding = encoding
        self._limit_bytes = min(limit_bytes, largest_bytes)
        self._largest_bytes = largest_bytes
        self._allocate = allocate
        self._into: memoryview | None = None
        """The destination of a large message."""
        self._prefix = b""
        """Bytes of an incomplete prefix."""
        self._flag = 0
        self._left = -1
        """Missing bytes of a message; -1 between messages."""
        self._come = bytearray()
        """Bytes of a message without destination. Grows in place: joining pieces at the end would stall the loop."""

    @property
    def is_between(self) -> bool:
        """Whether no message is incomplete."""
        return self._left < 0 and not self._prefix

    @property
    def target(self) -> memoryview | None:
        """The destination of the rest of a large message. After writing to it call `wrote`."""
        return None if self._into is None else self._into[len(self._into) - self._left :]

    def wrote(self, size_bytes: int) -> memoryview | None:
        """The next bytes are in `target`; returns the message if it is complete."""
        self._left -= size_bytes
        if self._left:
            return None
        whole, self._into, self._left = self._into, None, -1
        return whole

    def feed(self, data: bytes | memoryview) -> list[bytes | memoryview | Packed]:
        """The messages that this data completes. Raises `MessageFault`, after which nothing can be read."""
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
            if self._left or self._come:
                self._come += part
            if self._left:
                continue
            self._left = -1
            come, self._come = self._come, bytearray()
            messages.append(self._read(self._flag, come or bytes(part)))
        return messages

    def _begin(self, come: memoryview) -> None:
        self._flag, self._left = PREFIX.unpack(self._prefix)
        self._prefix = b""
        if self._left > self._largest_bytes:
            raise MessageFault(Status.RESOURCE_EXHAUSTED, too_large(self._left, self._largest_bytes))
        if self._allocate is not None and not self._flag and self._left >= LARGE_MESSAGE_BYTES:
            self._into = self._allocate(self._left, come[: self._left])

    def _read(self, flag: int, data: bytes | bytearray) -> bytes | memoryview | Packed:
        if not flag:
            return memoryview(data) if self._allocate is not None and len(data) >= LARGE_MESSAGE_BYTES else bytes(data)
        if flag != 1 or self._encoding not in WINDOW_BITS:
            raise MessageFault(Status.INTERNAL, "message is marked as compressed, but its call names no compression")
        if not data:
            return b""  # as gRPC's own servers do for an empty message
        return Packed(self._encoding, data, self._limit_bytes)


def fault_of(error: DecompressionFault, limit_bytes: int) -> MessageFault:
    """What a message that cannot be decompressed ends its call with."""
    if error.fault == TOO_LARGE:
        text = (
            f"decompressed request exceeds the maximum allowed input size of {limit_bytes} bytes. Use "
            "--http-max-input-size to increase the limit."
        )
        return MessageFault(Status.RESOURCE_EXHAUSTED, text)
    text = _FAULTS.get(error.fault, error.fault)
    return MessageFault(Status.INTERNAL, f"failed to decompress the message: {text}")


def framed(parts: Sequence[Buffer], level: int = 0) -> list[Buffer]:
    """A message in parts, with its prefix; gzip-compressed if `level` is not 0 and that makes it smaller."""
    size = sum(map(len, parts))
    if level:
        encoder = zlib.compressobj(level, zlib.DEFLATED, WINDOW_BITS["gzip"])
        packed = b"".join([*map(encoder.compress, parts), encoder.flush()])
        if len(packed) < size:
            return [PREFIX.pack(1, len(packed)), packed]
    return [PREFIX.pack(0, size), *parts]
