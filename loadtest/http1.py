"""Reads HTTP/1.1 answers from bytes; no I/O. It leaves sockets, time and what an answer means to the driver.

Only what a load generator meets is understood: a status line, headers and a body of a stated length or in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

_HEADS_KEPT = 256
_HEAD_LIMIT_BYTES = 64 << 10


class ProtocolError(Exception):
    """Bytes that are not an answer this reader understands."""


@dataclass(frozen=True, slots=True)
class Head:
    """Of an answer: status, body length in bytes (None: chunked), length of the JSON part (None: all), close after."""

    status: int
    content_length: int | None
    json_length: int | None
    close: bool


def parse_head(raw: bytes) -> Head:
    """A head without its final empty line. Raises ProtocolError."""
    lines = raw.split(b"\r\n")
    version, _, rest = lines[0].partition(b" ")
    status = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not status.isdigit() or rest[3:4] not in (b"", b" "):
        raise ProtocolError(f"not an HTTP/1.1 status line: {lines[0][:80]!r}")
    content_length = json_length = None
    close = version == b"HTTP/1.0"
    chunked = False
    for line in lines[1:]:
        name, mark, value = line.partition(b":")
        if not mark:
            raise ProtocolError(f"not a header: {line[:80]!r}")
        name, value = name.lower(), value.strip()
        if name in (b"content-length", b"inference-header-content-length"):
            if not value.isdigit():
                raise ProtocolError(f"bad length in {line[:80]!r}")
            if name == b"content-length":
                content_length = int(value)
            else:
                json_length = int(value)
        elif name == b"connection":
            close = value.lower() == b"close"
        elif name == b"transfer-encoding":
            chunked = value.lower() == b"chunked"
    if chunked:
        content_length = None
    elif content_length is None:
        raise ProtocolError("an answer without Content-Length")
    return Head(int(status), content_length, json_length, close)


class ResponseReader:
    """Feeds on received bytes and gives back whole answers, one request in flight at a time.

    Heads repeat (only the date changes, each second), so parsed ones are kept by their bytes.
    """

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0
        self._needed_bytes = 0

    @property
    def idle(self) -> bool:
        """No part of an answer is waiting for its rest."""
        return not self._pieces

    def feed(self, data: bytes) -> tuple[Head, bytes] | None:
        """The answer that `data` completes, else None. Raises ProtocolError, after which the reader is spent."""
        if self._pieces:
            self._pieces.append(data)
            self._pieces_bytes += len(data)
            # Joining once per answer keeps large bodies linear.
            if self._pieces_bytes < self._needed_bytes:
                return None
            data = b"".join(self._pieces)
            self._pieces.clear()
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _HEAD_LIMIT_BYTES:
                raise ProtocolError("an answer head over 64 KiB")
            self._keep(data, 0)
            return None
        raw = data[:end]
        head = self._heads.get(raw)
        if head is None:
            head = parse_head(raw)
            if len(self._heads) >= _HEADS_KEPT:
                self._heads.clear()
            self._heads[raw] = head
        if head.content_length is None:
            body = _join_chunks(data, end + 4)
            if body is None:
                self._keep(data, 0)
                return None
            return head, body
        size = end + 4 + head.content_length
        if len(data) < size:
            self._keep(data, size)
            return None
        if len(data) > size:
            raise ProtocolError(f"{len(data) - size} bytes after the answer")
        return head, data[end + 4 :]

    def _keep(self, data: bytes, needed_bytes: int) -> None:
        self._pieces.append(data)
        self._pieces_bytes = len(data)
        self._needed_bytes = needed_bytes


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
