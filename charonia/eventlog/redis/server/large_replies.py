"""Reads replies without a copy that grows with a bulk string: for `transport`, which reads small replies by itself.

hiredis gathers a bulk string in its own memory and copies it into a `bytes` object once the last piece is there: 30 ms
of processor time for 60 MB, during which the event loop stands still. Here a large bulk string is kept from hiredis.
Its pieces are copied as they arrive, each into its place in an object that is allocated at the announced length, so
that the system provides the memory's pages piece by piece too. hiredis gets a boolean in its stead, a type that no
reply has under version 2 of the protocol (RESP2), and the finished reply gets the `bytes` object where the boolean is.

Where a bulk string begins is found without a second parser: whatever looks like a large one's header is one if hiredis,
given all the bytes before it, is between two items.
"""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import hiredis

_PLACEHOLDER = b"#t\r\n"

_LINE_END = b"\r\n"
_NEWLINE = 10

_MAX_CANDIDATES = 64
"""Tried in one piece of data, so that strings full of headers cost no more. After so many hiredis gets the rest."""

_MAX_DIGITS = 10
"""Of the length of a large bulk string; the server's limit, 512 MB unless it is configured, has nine."""

_BEGUN_HEADER = re.compile(rb"\$[0-9]{0,%d}\r?" % _MAX_DIGITS)

INCOMPLETE: Any = object()
"""Returned in place of a reply that has not arrived completely."""


class ReplyReader:
    """The replies of one connection to a server that speaks RESP2.

    A bulk string whose length in bytes has at least `min_digits` digits is large; the default is 10,000 bytes. While
    `is_small(data)` the caller may `feed` it to the parser by itself and call `gets` until that returns `INCOMPLETE`.
    """

    __slots__ = (
        "_bulk",
        "_bulks",
        "_cut",
        "_header",
        "_held",
        "_missing",
        "_number",
        "_parser",
        "_within",
        "feed",
        "gets",
    )

    def __init__(self, min_digits: int = 5) -> None:
        self._parser = hiredis.Reader(notEnoughData=INCOMPLETE)
        self.feed, self.gets = self._parser.feed, self._parser.gets
        self._header = re.compile(rb"\$([1-9][0-9]{%d,%d})\r\n" % (min_digits - 1, _MAX_DIGITS - 1))
        self._number = slice(-min_digits - len(_LINE_END), -len(_LINE_END))
        self._within = False
        """The data ended in `_bulk`, in a line or between a placeholder and the end of its reply."""
        self._cut = False
        """The last byte that the parser got ends no line."""
        self._held = b""
        """The beginning of a possible header, which the parser has not got yet."""
        self._bulk: io.BytesIO | None = None
        self._missing = 0
        """Bytes of `_bulk` that have not arrived, its line end included."""
        self._bulks: deque[bytes] = deque()
        """The large bulk strings of the reply that is incomplete, in their order."""

    def is_small(self, data: bytes) -> bool:
        """Whether no large bulk string is under way, and `data`, received next, shows no sign of the beginning of one.

        A complete reply ends with a line end, and a piece of data in which a large bulk string begins seldom does. If
        it does, because the string contains line ends too, hiredis reads that string, which is slow and correct.
        """
        return not self._within and data[-2:] == _LINE_END and not data[self._number].isdigit()

    def replies(self, data: bytes) -> Iterator[Any]:
        """The replies that are complete with `data`, received next, as hiredis returns them. Iterate to the end.

        Raises `hiredis.ProtocolError`.
        """
        if self._held:
            data = self._held + data
            self._held = b""
        at = 0
        while at < len(data):
            if self._bulk is not None:
                at = self._fill(data, at)
                yield from self._parsed()
                continue
            after, tries = at, 0
            while (header := self._header.search(data, after)) and tries < _MAX_CANDIDATES:
                tries += 1
                start, after = header.span()
                if start > at:
                    if data[start - 1] != _NEWLINE:
                        continue
                    self._parse(data, at, start)
                    yield from self._parsed()
                    at = start
                if not self._cut and not self._parser.has_data():
                    size = int(header[1]) + len(_LINE_END)
                    if after + size > len(data):
                        at = after
                        self._bulk = io.BytesIO(bytes(int(header[1])))
                        self._missing = size
                        break
                    after += size  # hiredis reads it: that takes no longer than a piece of data allows
            else:
                end = self._possible_header(data, at)
                self._parse(data, at, end)
                yield from self._parsed()
                self._held = data[end:]
                break
        self._within = self._cut or self._bulk is not None or bool(self._held or self._bulks)

    def _parse(self, data: bytes, start: int, end: int) -> None:
        if start < end:
            self.feed(data, start, end - start)
            self._cut = data[end - 1] != _NEWLINE

    def _parsed(self) -> Iterator[Any]:
        gets = self.gets
        reply = gets()
        while reply is not INCOMPLETE:
            yield self._completed(reply) if self._bulks else reply
            reply = gets()

    def _completed(self, reply: Any) -> Any:
        """A reply with the large bulk strings in their places, all of which belong to it."""
        if reply is True:
            return self._bulks.popleft()
        if type(reply) is list:
            for index, item in enumerate(reply):
                if item is True or type(item) is list:
                    reply[index] = self._completed(item)
        return reply

    def _possible_header(self, data: bytes, start: int) -> int:
        """Where the beginning of a header ends `data`, or the end of `data`. No complete reply ends so."""
        at = data.rfind(b"$", max(start, len(data) - _MAX_DIGITS - 2))
        if at < 0 or not _BEGUN_HEADER.fullmatch(data, at):
            return len(data)
        follows_line = data[at - 1] == _NEWLINE if at else not self._cut
        return at if follows_line else len(data)

    def _fill(self, data: bytes, at: int) -> int:
        """Take what belongs to the large bulk string; returns where that ends. Its end gives the parser a placeholder.

        As `BytesIO` alone refers to the object that it was made with, it writes there, and `getvalue` returns it.
        """
        bulk = self._bulk
        assert bulk is not None
        content = min(self._missing - len(_LINE_END), len(data) - at)
        if content > 0:
            bulk.write(memoryview(data)[at : at + content])
            self._missing -= content
            at += content
        if self._missing <= len(_LINE_END):
            line_end = min(self._missing, len(data) - at)
            self._missing -= line_end
            at += line_end
        if not self._missing:
            self._bulk = None
            self._bulks.append(bulk.getvalue())
            self.feed(_PLACEHOLDER)
            self._cut = False
        return at
