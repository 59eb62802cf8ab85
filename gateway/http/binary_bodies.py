"""Receives large bodies of known length straight into their memory, past the parser (docs/adr/0017).

Once the headers are read, such a body goes directly to where it stays: one with binary tensors, whose JSON part has a
known length too (`Inference-Header-Content-Length`), to memory that executors read, and JSON alone to a file in memory
that the worker maps which parses it (`charonia.offload.handover`). All others go through the parser (`bodies`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable

from charonia.offload.handed_memory import file_of
from charonia.offload.transfers import Step

from .codec.response_codec import HEADER_LENGTH

PAST_PARSER_BYTES = 1 << 16
"""Bodies with binary tensors of this size are received past the parser; below it a second reader costs more than it
saves."""
_TEXT_BYTES, _MOST_TEXT_BYTES = 1 << 20, 1 << 26
"""And JSON alone of these sizes. What is larger is refused where the limit (`http-max-input-size`) is not raised, and
the parser drops the rest of a refused body instead of keeping it.
"""

_AT_ONCE_BYTES = 1 << 20
_TEXT_AT_ONCE_BYTES = 1 << 16
"""After so much other connections are served first: a socket may hold several MB, and the loop reads on for as long as
it fills what it is given. JSON is received to the same small memory again and again and written to its file from there:
that costs less than the pages of a mapping, which the loop would have to wait for one by one."""

AllocateBody = Callable[[int, int], memoryview | None]
"""`gateway.handler.Handler.allocate_body`: memory for a size, aligned at an offset; None where there is none."""

_EXCLUDING_HEADERS = frozenset({b"transfer-encoding", b"content-encoding", b"expect"})
_MAX_DIGITS = 12


def size_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, int] | None:
    """The size of a large body, and of the JSON part before its binary tensors, 0 for JSON alone; None for any other
    body.
    """
    sizes: dict[bytes, int] = {}
    for name, value in headers:
        if name in _EXCLUDING_HEADERS:
            return None
        if name in (b"content-length", HEADER_LENGTH):
            if name in sizes or not value.isdigit() or len(value) > _MAX_DIGITS:
                return None
            sizes[name] = int(value)
    size = sizes.get(b"content-length", 0)
    head = sizes.get(HEADER_LENGTH)
    if head is None:
        return (size, 0) if _TEXT_BYTES <= size <= _MOST_TEXT_BYTES else None
    return (size, head) if size >= PAST_PARSER_BYTES and 0 < head <= size else None


class BinaryBody:
    """A body being received: the first `at` bytes of `view` have arrived. `view` may be a file (`file_of`)."""

    __slots__ = ("at", "file", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.file = file_of(view)
        self.at = 0

    @property
    def is_whole(self) -> bool:
        return self.at == len(self.view)

    def take(self, data: bytes | bytearray | memoryview) -> int:
        """Copy data of the body, up to its end; returns how many bytes were of it. Raises `OSError` for a file that
        there is no more memory for.
        """
        size = min(len(data), len(self.view) - self.at)
        part = memoryview(data)[:size]
        if self.file is None:
            self.view[self.at : self.at + size] = part
        else:
            done = 0
            while done < size:
                done += os.pwrite(self.file, part[done:], self.at + done)
        self.at += size
        return size

    def receives(self, connection: int) -> Step:
        """A step that reads the body from a connection that does not block (`charonia.offload.transfers.move`)."""
        memory = None if self.file is None else memoryview(bytearray(_TEXT_AT_ONCE_BYTES))

        def step(at: int, end: int) -> int:
            if memory is None:
                size = os.readv(connection, [self.view[at:end]])
                self.at += size
            else:
                size = os.readv(connection, [memory[: end - at]])
                self.take(memory[:size])
            return size

        return step


class BinaryBodyReader(asyncio.BufferedProtocol):
    """Reads a large body from a connection's transport. `on_received` is called with the size of each piece, and
    `rest_a_turn` when another turn of the event loop is to come before the next one.
    """

    def __init__(
        self,
        body: BinaryBody,
        connection: asyncio.Protocol,
        on_received: Callable[[int], None],
        rest_a_turn: Callable[[], None],
    ) -> None:
        self._body = body
        self._connection = connection
        self._on_received = on_received
        self._rest_a_turn = rest_a_turn
        self._memory = None if body.file is None else memoryview(bytearray(_TEXT_AT_ONCE_BYTES))
        self._asked_bytes = 0

    def get_buffer(self, _sizehint: int) -> memoryview:
        at, left = self._body.at, len(self._body.view) - self._body.at
        if self._memory is None:
            buffer = self._body.view[at : at + _AT_ONCE_BYTES]
        else:
            buffer = self._memory[:left]
        self._asked_bytes = len(buffer)
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._memory is None:
            self._body.at += nbytes
        else:
            self._body.take(self._memory[:nbytes])
        if nbytes == self._asked_bytes and not self._body.is_whole:
            self._rest_a_turn()
        if self._body.is_whole:  # uvloop keeps this reader until the connection ends, and it must not keep the memory
            self._body, self._memory = BinaryBody(memoryview(b"")), None
        self._on_received(nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()
