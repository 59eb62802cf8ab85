"""The hot connection: all commands of one event loop tick in one write, replies matched in order.

It signs in by itself, fails fast while the server is away and comes back by itself. What commands mean is `log`'s, what
a blocked read is, `reader`'s. A command whose reply was lost is never sent again: its outcome is unknown to the caller.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

from charonia.errors import LogUnavailable
from charonia.tensors import Buffer

from .address import Address
from .packing import LARGE_BYTES, Argument, pack

_logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_STALL_TIMEOUT_S = 15.0
_FIRST_DELAY_S = 0.02
_LONGEST_DELAY_S = 1.0
_WRITE_HIGH_WATER_BYTES = 4 * 1024 * 1024

_NOTHING = object()

Done = Callable[[list[Any] | None], None]
"""Gets all replies of a batch (`hiredis.ReplyError` among them), or None when those are lost."""


class Refused(LogUnavailable):
    """The server answered a command with an error; `reply` is its text."""

    def __init__(self, reply: str) -> None:
        super().__init__(f"the event log refused a command: {reply}")
        self.reply = reply


class _Batch:
    """Several commands whose replies are wanted together."""

    __slots__ = ("count", "done", "replies")

    def __init__(self, count: int, done: Done) -> None:
        self.count = count
        self.done = done
        self.replies: list[Any] = []


class _Wire(asyncio.Protocol):
    """One transport's life."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._waiters: deque[asyncio.Future[Any] | _Batch] = deque()
        self._out: list[Buffer] = []
        self._large = False
        self._drained: asyncio.Future[None] | None = None
        self.received = False
        self.closed: asyncio.Future[None] = self._loop.create_future()

    # -- sending ------------------------------------------------------------------------------------------------------

    def call(self, pieces: Sequence[Buffer]) -> asyncio.Future[Any]:
        self._write(pieces)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiters.append(future)
        return future

    def batch(self, pieces: Sequence[Buffer], count: int, done: Done) -> None:
        self._write(pieces)
        self._waiters.extend([_Batch(count, done)] * count)

    def _write(self, pieces: Sequence[Buffer]) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.extend(pieces)
        if len(pieces) > 1 and not self._large:
            self._large = any(len(piece) >= LARGE_BYTES for piece in pieces)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self.closed.done() or self._transport is None:
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
        """Wait until the server has taken what was written."""
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
        try:
            self._reader.feed(data)
            reply = self._reader.gets()
            while reply is not _NOTHING:
                waiter = waiters.popleft()
                if type(waiter) is _Batch:
                    replies = waiter.replies
                    replies.append(reply)
                    if len(replies) == waiter.count:
                        waiter.done(replies)
                elif not waiter.done():  # type: ignore[call-arg]
                    if type(reply) is hiredis.ReplyError:
                        waiter.set_exception(self.refused(reply))  # type: ignore[union-attr]
                    else:
                        waiter.set_result(reply)  # type: ignore[union-attr]
                reply = self._reader.gets()
        except (hiredis.ProtocolError, IndexError) as error:
            _logger.error("the event log at %s does not speak the protocol: %r", self._connection.address.text, error)
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
                    waiter.done(None)
            elif not waiter.done():
                waiter.set_exception(lost())
        self._connection.on_lost(self, exc)


class Connection:
    """A connection that stays: `open` once, then it is there again by itself whenever it is lost.

    `prepare` are commands sent right after signing in, in the same write. `on_state(up)` is called in the event loop.
    `watch`: a server that leaves commands unanswered for 15 s counts as lost (not for connections that block).
    """

    def __init__(
        self,
        address: Address,
        *,
        name: str,
        prepare: Sequence[Sequence[Argument]] = (),
        on_state: Callable[[bool], None] | None = None,
        watch: bool = True,
    ) -> None:
        self.address = address
        self.client_id = 0
        self._name = name
        self._prepare = prepare
        self._on_state = on_state
        self._watch = watch
        self._wire: _Wire | None = None
        self._closed = False
        self._delay_s = 0.0
        self._up_since_s = 0.0
        self._coming_back: asyncio.Task[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None

    @property
    def up(self) -> bool:
        return self._wire is not None

    async def open(self) -> None:
        """Connect once. Raises OSError, TimeoutError or `Refused`."""
        wire = await self._connect()
        self._up(wire)

    def start(self) -> None:
        """Connect as soon as it can be done, without waiting for it."""
        if self._coming_back is None and self._wire is None:
            self._coming_back = asyncio.get_running_loop().create_task(self._come_back())

    async def close(self) -> None:
        """End the connection; what was written before still goes out."""
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._coming_back is not None:
            self._coming_back.cancel()
            await asyncio.gather(self._coming_back, return_exceptions=True)
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
            await asyncio.wait([wire.closed], timeout=1.0)
            wire.abort()

    def drop(self) -> None:
        """Give the transport up and connect anew."""
        if self._wire is not None:
            self._wire.abort()

    # -- commands -----------------------------------------------------------------------------------------------------

    def call(self, pieces: Sequence[Buffer]) -> asyncio.Future[Any]:
        """One packed command; the future has its reply. Raises `LogUnavailable` at once while the server is away."""
        wire = self._wire
        if wire is None:
            raise self._away()
        return wire.call(pieces)

    def batch(self, pieces: Sequence[Buffer], count: int, done: Done) -> None:
        """`count` packed commands; `done` is called with their replies. Raises `LogUnavailable` like `call`."""
        wire = self._wire
        if wire is None:
            raise self._away()
        wire.batch(pieces, count, done)

    async def execute(self, *command: Argument) -> Any:
        """One small command and its reply, waiting while the server takes no more."""
        if self._wire is not None and self._wire.paused:
            await self._wire.drained()
        return await self.call((pack(command),))

    async def execute_pieces(self, pieces: Sequence[Buffer]) -> Any:
        if self._wire is not None and self._wire.paused:
            await self._wire.drained()
        return await self.call(pieces)

    async def execute_all(self, pieces: Sequence[Buffer], count: int) -> list[Any]:
        """`count` packed commands and their replies, errors among them as `hiredis.ReplyError`."""
        if self._wire is not None and self._wire.paused:
            await self._wire.drained()
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

        def done(replies: list[Any] | None) -> None:
            if future.done():
                return
            if replies is None:
                future.set_exception(lost())
            else:
                future.set_result(replies)

        self.batch(pieces, count, done)
        return await future

    def _away(self) -> LogUnavailable:
        if self._closed:
            return LogUnavailable("the event log has been closed")
        return LogUnavailable(f"the event log at {self.address.text} cannot be reached")

    # -- coming and going ---------------------------------------------------------------------------------------------

    async def _connect(self) -> _Wire:
        address = self.address
        loop = asyncio.get_running_loop()
        wire = _Wire(self)
        commands: list[Sequence[Argument]] = [self._hello()]
        if address.database:
            commands.append(("SELECT", address.database))
        commands.extend(self._prepare)
        answered: asyncio.Future[list[Any] | None] = loop.create_future()

        def done(replies: list[Any] | None) -> None:
            if not answered.done():
                answered.set_result(replies)

        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                if address.path:
                    await loop.create_unix_connection(lambda: wire, address.path)
                else:
                    await loop.create_connection(lambda: wire, address.host, address.port, ssl=address.tls)
                wire.batch([pack(command) for command in commands], len(commands), done)
                replies = await answered
            if replies is None:
                raise ConnectionResetError("the server closed the connection")
            for reply in replies:
                if isinstance(reply, hiredis.ReplyError):
                    raise Refused(str(reply))
        except BaseException:
            wire.abort()
            raise
        hello = replies[0]
        self.client_id = dict(zip(hello[::2], hello[1::2], strict=True))[b"id"]
        return wire

    def _hello(self) -> Sequence[Argument]:
        address = self.address
        sign_in: tuple[Argument, ...] = ()
        if address.username or address.password:
            sign_in = ("AUTH", address.username or "default", address.password)
        return ("HELLO", 2, *sign_in, "SETNAME", self._name)

    def _up(self, wire: _Wire) -> None:
        if wire.closed.done():
            self.start()
            return
        self._wire = wire
        self._up_since_s = asyncio.get_running_loop().time()
        if self._watch:
            self._watchdog = asyncio.get_running_loop().call_later(_STALL_TIMEOUT_S, self._look, wire, False)
        if self._on_state is not None:
            self._on_state(True)

    def on_lost(self, wire: _Wire, error: Exception | None) -> None:
        """For `_Wire` alone: its transport is gone."""
        if wire is not self._wire:
            return
        self._wire = None
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._closed:
            return
        _logger.warning("lost the event log at %s: %s", self.address.text, error or "closed by the server")
        if asyncio.get_running_loop().time() - self._up_since_s > _LONGEST_DELAY_S:
            self._delay_s = 0.0  # else it is up and down again and again: go on slowing down
        self._slow_down()
        self._coming_back = None
        self.start()
        if self._on_state is not None:
            self._on_state(False)

    def _slow_down(self) -> None:
        self._delay_s = min(max(self._delay_s * 2, _FIRST_DELAY_S), _LONGEST_DELAY_S)

    async def _come_back(self) -> None:
        failures = 0
        while True:
            # jitter over the whole delay: processes that lost the server together must not return together
            await asyncio.sleep(random.uniform(0, self._delay_s))
            try:
                wire = await self._connect()
                break
            except (OSError, LogUnavailable) as error:  # TimeoutError is an OSError
                failures += 1
                if failures == 1:
                    _logger.warning("the event log at %s cannot be reached: %s", self.address.text, error)
            self._slow_down()
        self._coming_back = None
        _logger.info("connected to the event log at %s", self.address.text)
        self._up(wire)

    def _look(self, wire: _Wire, waited: bool) -> None:
        """Once per stall time-out: commands that waited through a whole one without any reply are given up."""
        waits = wire.waits()
        if waits and waited and not wire.received:
            _logger.error("the event log at %s does not answer", self.address.text)
            wire.abort()
            return
        wire.received = False
        self._watchdog = asyncio.get_running_loop().call_later(_STALL_TIMEOUT_S, self._look, wire, waits)


def lost() -> LogUnavailable:
    return LogUnavailable("the connection to the event log was lost, the outcome is unknown")


def _tune(sock: Any) -> None:
    if sock is None or sock.family == getattr(socket, "AF_UNIX", None):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # a peer that vanished without a word is noticed within seconds, also under a blocked read
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
