"""One keep-alive connection of HTTP/1.1 with at most one request in flight; `http2_lane` does the same for gRPC.

No HTTP library stands between: the generator has to cost less than the server that it measures.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

_HEADS_KEPT = 256
_HEAD_LIMIT_BYTES = 64 << 10
_ERROR_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a server is; `context` is None without TLS, `socket` the path of a Unix socket in the place of a port."""

    host: str
    port: int
    context: ssl.SSLContext | None = None
    socket: str = ""

    async def connect(self, lane: asyncio.Protocol) -> None:
        """Connects a protocol. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        if self.socket:
            await loop.create_unix_connection(lambda: lane, self.socket)
            return
        hostname = self.host if self.context is not None else None
        transport, _ = await loop.create_connection(
            lambda: lane, self.host, self.port, ssl=self.context, server_hostname=hostname
        )
        connected = transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class ProtocolError(Exception):
    """Bytes that are no answer."""


class Head:
    """Of an answer: its status, body length in bytes (None: chunked), how much of that is JSON (None: all), and whether
    the connection closes after it.
    """

    __slots__ = ("close", "json_length", "length", "status")

    def __init__(self, raw: bytes) -> None:
        """Parses a head without its final empty line. Raises `ProtocolError`."""
        lines = raw.split(b"\r\n")
        version, _, rest = lines[0].partition(b" ")
        if version not in (b"HTTP/1.1", b"HTTP/1.0") or not rest[:3].isdigit() or rest[3:4] not in (b"", b" "):
            raise ProtocolError(f"not an answer of HTTP/1.1: {lines[0][:80]!r}")
        self.status = int(rest[:3])
        self.close = version == b"HTTP/1.0"
        self.length: int | None = -1
        self.json_length: int | None = None
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon:
                raise ProtocolError(f"not a header: {line[:80]!r}")
            name, value = name.lower(), value.strip()
            if name in (b"content-length", b"inference-header-content-length"):
                if not value.isdigit():
                    raise ProtocolError(f"bad length in {line[:80]!r}")
                if name != b"content-length":
                    self.json_length = int(value)
                elif self.length is not None:
                    self.length = int(value)
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.length = None
            elif name == b"connection":
                self.close = value.lower() == b"close"
        if self.length == -1:
            raise ProtocolError("an answer without Content-Length")


class AnswerReader:
    """Takes received bytes and returns the answer that they complete; one request is in flight at a time.

    Heads repeat, so parsed ones are kept by their bytes. Without `keeps_bodies` those of right answers (status 200)
    with a length are counted and come back empty: copying megabytes would count as the server's time.
    """

    def __init__(self, *, keeps_bodies: bool = True) -> None:
        self._keeps_bodies = keeps_bodies
        self._counted: Head | None = None
        self._heads: dict[bytes, Head] = {}
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._needed_bytes = 0

    def feed(self, data: bytes) -> tuple[Head, bytes] | None:
        """The answer that `data` completes, or None. Raises `ProtocolError`."""
        if self._counted is not None:
            return self._count(self._counted, self._needed_bytes - len(data))
        if self._pieces:
            self._pieces.append(data)
            self._held_bytes += len(data)
            if self._held_bytes < self._needed_bytes:  # joining once per answer keeps large bodies linear
                return None
            data = b"".join(self._pieces)
            self._pieces.clear()
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _HEAD_LIMIT_BYTES:
                raise ProtocolError("an answer's head over 64 KiB")
            return self._keep(data, 0)
        raw = data[:end]
        head = self._heads.get(raw)
        if head is None:
            if len(self._heads) >= _HEADS_KEPT:
                self._heads.clear()
            head = self._heads[raw] = Head(raw)
        if head.length is None:
            body = _join_chunks(data, end + 4)
            return self._keep(data, 0) if body is None else (head, body)
        size = end + 4 + head.length
        if head.status == 200 and not self._keeps_bodies:
            return self._count(head, size - len(data))
        if len(data) < size:
            return self._keep(data, size)
        if len(data) > size:
            raise ProtocolError(f"{len(data) - size} bytes after the answer")
        return head, data[end + 4 :]

    def _count(self, head: Head, needed_bytes: int) -> tuple[Head, bytes] | None:
        """The answer when no more bytes of its body are needed."""
        if needed_bytes < 0:
            raise ProtocolError(f"{-needed_bytes} bytes after the answer")
        self._counted, self._needed_bytes = (head, needed_bytes) if needed_bytes else (None, 0)
        return None if needed_bytes else (head, b"")

    def _keep(self, data: bytes, needed_bytes: int) -> tuple[Head, bytes] | None:
        """Waits for the rest of an answer."""
        self._pieces.append(data)
        self._held_bytes = len(data)
        self._needed_bytes = needed_bytes
        return None


def _join_chunks(data: bytes, at: int) -> bytes | None:
    """The body of chunks that begin at `at`; None while the last one is missing."""
    parts: list[bytes] = []
    while True:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return None
        digits = data[at:line_end].partition(b";")[0].strip()
        try:
            size = int(digits, 16)
        except ValueError:
            raise ProtocolError(f"bad chunk size {digits[:20]!r}") from None
        at = line_end + 2 + size + 2
        if len(data) < at:
            return None
        if size == 0:
            if data[line_end + 2 :] != b"\r\n":
                raise ProtocolError("trailers or bytes after the last chunk")
            return b"".join(parts)
        parts.append(data[line_end + 2 : at - 2])


class Http1Lane(asyncio.Protocol):
    """`on_end` is called with the lane and what went wrong, None for a right answer; `call` is the caller's."""

    def __init__(self, destination: Destination, on_end: Callable[[Any, str | None], None]) -> None:
        self._destination = destination
        self._on_end = on_end
        self._reader = AnswerReader(keeps_bodies=False)
        self._transport: asyncio.Transport | None = None
        self._waits = False
        self.call: Any = None
        self.first_ns = 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    async def open(self) -> None:
        """Connects. Raises `OSError`."""
        self._reader = AnswerReader(keeps_bodies=False)
        try:
            await self._destination.connect(self)
        except BaseException:  # cancelled as well: the connection may have been made
            self.close()
            raise

    def send(self, message: bytes) -> None:
        """Sends one request; the lane is open and has none in flight."""
        assert self._transport is not None
        self._waits, self.first_ns = True, 0
        self._transport.write(message)

    def close(self) -> None:
        self._waits = False
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by behaviour, not by class

    def data_received(self, data: bytes) -> None:
        if not self.first_ns:
            self.first_ns = time.perf_counter_ns()
        try:
            answer = self._reader.feed(data)
        except ProtocolError as error:
            self._fail(str(error))
            return
        if answer is None:
            return
        head, body = answer
        if not self._waits:
            self._fail("an answer that was not asked for")
            return
        self._waits = False
        if head.close:
            self.close()
        self._on_end(self, None if head.status == 200 else f"HTTP {head.status}: {_error_text(body)}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._fail(f"the connection was closed by the server{f': {exc}' if exc else ''}")

    def _fail(self, text: str) -> None:
        waited = self._waits
        self.close()
        if waited:
            self._on_end(self, text)


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])[:_ERROR_CHARACTERS]
    except (ValueError, KeyError, TypeError):
        return body[:_ERROR_CHARACTERS].decode(errors="replace")
