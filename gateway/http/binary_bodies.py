"""Receives large bodies with binary tensors straight into their memory, past the parser (docs/adr/0017).

The length of such a body is known, and that of its JSON part too (`Inference-Header-Content-Length`), so it needs no
parser: once the headers are read, the transport reads the body directly to the memory that its tensors stay in. All
other bodies, JSON of any size among them, go through the parser (`bodies`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from .codec.response_codec import HEADER_LENGTH

PAST_PARSER_BYTES = 1 << 16
"""Bodies of this size are received past the parser; below it a second reader costs more than it saves."""

AllocateBody = Callable[[int, int], memoryview | None]
"""`gateway.handler.Handler.allocate_body`: memory for a size, aligned at an offset; None where there is none."""

_EXCLUDING_HEADERS = frozenset({b"transfer-encoding", b"content-encoding", b"expect"})
_MAX_DIGITS = 12


def size_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, int] | None:
    """The sizes of a large body with binary tensors and of its JSON part; None for any other body."""
    sizes: dict[bytes, int] = {}
    for name, value in headers:
        if name in _EXCLUDING_HEADERS:
            return None
        if name in (b"content-length", HEADER_LENGTH):
            if name in sizes or not value.isdigit() or len(value) > _MAX_DIGITS:
                return None
            sizes[name] = int(value)
    size, head = sizes.get(b"content-length", 0), sizes.get(HEADER_LENGTH, 0)
    return (size, head) if size >= PAST_PARSER_BYTES and 0 < head <= size else None


class BinaryBody:
    """A body being received: the first `at` bytes of `view` have arrived."""

    __slots__ = ("at", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.at = 0

    @property
    def is_whole(self) -> bool:
        return self.at == len(self.view)

    def take(self, data: bytes | bytearray | memoryview) -> int:
        """Copy data of the body, up to its end; returns how many bytes were of it."""
        size = min(len(data), len(self.view) - self.at)
        self.view[self.at : self.at + size] = memoryview(data)[:size]
        self.at += size
        return size


class BinaryBodyReader(asyncio.BufferedProtocol):
    """Reads a large body from a connection's transport. `on_received` is called with the size of each piece."""

    def __init__(self, body: BinaryBody, connection: asyncio.Protocol, on_received: Callable[[int], None]) -> None:
        self._body = body
        self._connection = connection
        self._on_received = on_received

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._body.view[self._body.at :]

    def buffer_updated(self, nbytes: int) -> None:
        self._body.at += nbytes
        self._on_received(nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()
