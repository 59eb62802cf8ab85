"""One transport to the server: commands of an event loop tick leave in one write, replies are matched in order.

It lives as long as its socket; `hot_connection` authenticates and reconnects. Large arguments are passed on without
copying, so that only the transport copies them. Large bulk strings of replies are read without a copy that grows
(`ReplyReader`).
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import hiredis
from msgspec import Struct, field

from charonia.errors import LogRefused, LogUnavailable
from charonia.eventlog import port
from charonia.eventlog.refusal_texts import string_too_large
from charonia.tensors import Buffer

_logger = logging.getLogger(__name__)

_WRITE_HIGH_WATER_BYTES = 4 * 1024 * 1024

_LAZY_S = 0.02

Done = Callable[[list[Any] | None], None]
"""Called with all replies of a batch (`hiredis.ReplyError` among them), or None if they are lost."""


_REASONS = {
    "OOM": "is full, nothing new is taken until some work is done",
    "MISCONF": "cannot write to its disk",
    "READONLY": "is a replica now",
    "NOREPLICAS": "has too few replicas",
}


_PASSING = (*_REASONS, "LOADING", "BUSY", "NOSCRIPT", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MOVED", "ASK")


class Refused(LogRefused):
    """The server answered a command with an error, so nothing was done; `reply` is its text."""

    def __init__(self, reply: str) -> None:
        why = next((words for prefix, words in _REASONS.items() if reply.startswith(prefix)), "refused a command")
        super().__init__(f"the event log {why}: {reply}")
        self.reply = reply
        self.passes = reply.startswith(_PASSING)
        self.denied = reply.startswith("NOPERM")

    @property
    def out_of_memory(self) -> bool:
        return self.reply.startswith("OOM")


class _Batch(Struct, eq=False):
    """Several commands whose replies are collected together."""

    count: int
    done: Done
    replies: list[Any] = field(default_factory=list)


class Wire(asyncio.Protocol):
    """The protocol of one transport. `where` is for messages; `on_lost` is called when it has ended."""

    def __init__(self, where: str, on_lost: Callable[[Wire, Exception | None], None]) -> None:
        self._where = where
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._replies = ReplyReader()
        self._waiters: deque[asyncio.Future[Any] | _Batch] = deque()
        self._out: list[Buffer] = []
        self._large = False
        self._flushing = False
        self._lazy_timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None
        self.received = False
        self.closed: asyncio.Future[None] = self._loop.create_future()

    # -- sending ------------------------------------------------------------------------------------------------------

    def call(self, pieces: Sequence[Buffer], *, lazy: bool = False) -> asyncio.Future[Any]:
        """Send one command. A lazy one leaves with the next write, within 20 ms: each write wakes two processes."""
        self._write(pieces, lazy)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiters.append(future)
        return future

    def batch(self, pieces: Sequence[Buffer], count: int, done: Done, *, lazy: bool = False) -> None:
        self._write(pieces, lazy)
        self._waiters.extend([_Batch(count, done)] * count)

    def batch_now(self, pieces: Sequence[Buffer], count: int, done: Done) -> None:
        """As `batch`, without waiting for the end of the tick, together with what waits for it."""
        self._write(pieces, scheduled=True)
        self._waiters.extend([_Batch(count, done)] * count)
        self._flush()

    def _write(self, pieces: Sequence[Buffer], lazy: bool = False, *, scheduled: bool = False) -> None:
        if self.closed.done():
            raise lost()  # no reply would ever come
        if not self._flushing and not scheduled:
            if not lazy:
                self._flushing = True
                self._loop.call_soon(self._flush)
            elif self._lazy_timer is None:
                self._lazy_timer = self._loop.call_later(_LAZY_S, self._flush)
        self._out.extend(pieces)
        if len(pieces) > 1 and not self._large:
            self._large = max(map(len, pieces)) >= UNCOPIED_BYTES

    def _flush(self) -> None:
        out, self._out = self._out, []
        self._flushing = False
        if self._lazy_timer is not None:
            self._lazy_timer.cancel()
            self._lazy_timer = None
        if not out or self.closed.done() or self._transport is None:
            return
        if self._large:
            self._large = False
            self._transport.writelines(out)
        else:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    @property
    def paused(self) -> bool:
        return self._drained is not None

    async def drained(self) -> None:
        """Wait until the server has accepted what was written."""
        while self._drained is not None:
            await asyncio.shield(self._drained)

    def waits(self) -> bool:
        return bool(self._waiters)

    def close(self) -> None:
        if self._out:
            self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER_BYTES)
        _tune(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self.received = True
        waiters = self._waiters
        replies = self._replies
        try:
            if replies.is_small(data):
                replies.feed(data)
                gets = replies.gets
            else:
                gets = partial(next, replies.replies(data), INCOMPLETE)
            reply = gets()
            while reply is not INCOMPLETE:
                waiter = waiters.popleft()
                if type(waiter) is _Batch:
                    collected = waiter.replies
                    collected.append(reply)
                    if len(collected) == waiter.count:
                        _finish(waiter, collected)
                elif not waiter.done():  # type: ignore[call-arg, misc]
                    if type(reply) is hiredis.ReplyError:
                        waiter.set_exception(self.refused(reply))  # type: ignore[union-attr]
                    else:
                        waiter.set_result(reply)  # type: ignore[union-attr]
                reply = gets()
        except (hiredis.ProtocolError, IndexError) as error:
            _logger.error("the event log at %s does not speak the protocol: %r", self._where, error)
            self.abort()

    def refused(self, reply: Exception) -> Refused:
        """The error of an error reply. A server that became a replica is left, to find the new primary."""
        text = str(reply)
        if text.startswith("READONLY"):
            self.abort()
        return Refused(text)

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None:
            drained.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)
        self.resume_writing()
        waiters, self._waiters = self._waiters, deque()
        failed: _Batch | None = None
        for waiter in waiters:
            if isinstance(waiter, _Batch):
                if waiter is not failed:
                    failed = waiter
                    _finish(waiter, None)
            elif not waiter.done():
                waiter.set_exception(lost())
        self._on_lost(self, exc)


def _finish(batch: _Batch, replies: list[Any] | None) -> None:
    """Hand a batch its replies. An error of its callback ends neither the connection nor other commands."""
    try:
        batch.done(replies)
    except Exception:
        _logger.exception("the replies to a batch of commands could not be handled")


def lost() -> LogUnavailable:
    return LogUnavailable("the connection to the event log was lost, the outcome is unknown")


def _tune(sock: Any) -> None:
    if sock is None or sock.family == getattr(socket, "AF_UNIX", None):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # a peer that vanished silently is noticed within seconds, also during a blocking read
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


Argument = Buffer | str | int

UNCOPIED_BYTES = 32_768
"""Arguments of at least this size are written as separate pieces; smaller ones are cheaper to join."""


def pack(command: Sequence[Argument]) -> bytes:
    """One packed command with small arguments. Raises as `pack_pieces`."""
    try:
        packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]
    except TypeError:  # a bytearray
        return b"".join(pack_pieces(command))
    return packed if len(packed) <= port.MAX_STRING_BYTES else b"".join(pack_pieces(command))


def bulk(argument: bytes) -> bytes:
    """One argument as it stands in a packed command."""
    return b"$%d\r\n%b\r\n" % (len(argument), argument)


def pack_pieces(command: Sequence[Argument]) -> list[Buffer]:
    """One command as pieces to be written in order; arguments of at least `UNCOPIED_BYTES` are not copied.

    Raises `InvalidArgument` for one with which the server would end the connection.
    """
    pieces: list[Buffer] = []
    head = bytearray(b"*%d\r\n" % len(command))
    for argument in command:
        if isinstance(argument, memoryview):
            body: Buffer = argument.cast("B") if argument.nbytes else b""
        elif isinstance(argument, (bytes, bytearray)):
            body = argument
        else:
            body = str(argument).encode()
        head += b"$%d\r\n" % len(body)
        if len(body) >= UNCOPIED_BYTES:
            if len(body) > port.MAX_STRING_BYTES:
                raise string_too_large(len(body))
            pieces.append(bytes(head))
            pieces.append(body)
            head = bytearray()
        else:
            head += body
        head += b"\r\n"
    pieces.append(bytes(head))
    return pieces


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
    """The replies of one connection to a server that speaks RESP2, read without a copy that grows with a bulk string.

    hiredis gathers a bulk string in its own memory and copies it into a `bytes` object once the last piece is there:
    30 ms of processor time for 60 MB, during which the event loop stands still. Here a large bulk string is kept from
    hiredis. Its pieces are copied as they arrive, each into its place in an object that is allocated at the announced
    length, so that the system provides the memory's pages piece by piece too. hiredis gets a boolean in its stead, a
    type that no reply has under version 2 of the protocol (RESP2), and the finished reply gets the `bytes` object where
    the boolean is. Where a bulk string begins is found without a second parser: whatever looks like a large one's
    header is one if hiredis, given all the bytes before it, is between two items.

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
