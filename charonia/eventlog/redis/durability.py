"""Durability levels on Redis and Valkey: what a server can promise, and writes that wait until a level is reached.

WAIT and WAITAOF cover only writes of their own connection. So each level that needs them has its own hot connection,
and writes that arrive while a group is being written leave together with the next group, before one barrier. Under
`appendfsync always` the reply itself is the proof, and the common connection is used.
WAITAOF under `appendfsync everysec` is trusted from Redis 8 on only: Redis 7.4 and all Valkey versions so far answer it
before anything is flushed (docs/adr/0005).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hiredis

from charonia.errors import LogUnavailable, Unsupported
from charonia.eventlog.durability_levels import FSYNC, MEMORY, Level
from charonia.tensors import Buffer

from .server.hot_connection import Connection
from .server.transport import Argument, Refused, lost, pack

_logger = logging.getLogger(__name__)

PATIENCE_MS = 5000
"""Time limit for reaching a level; afterwards the outcome is unknown to the caller."""

_HONEST_WAITAOF = (8, 0)
_EVICTION_ALLOWED = "noeviction"

QUESTIONS: Sequence[Sequence[Argument]] = (
    ("INFO", "server"),
    ("INFO", "persistence"),
    ("INFO", "memory"),
    ("CONFIG", "GET", "appendfsync", "no-appendfsync-on-rewrite"),
)
"""The questions whose answers `Server.of` takes; asked at every connect, as each may lead to another server."""


@dataclass(frozen=True, slots=True)
class Server:
    """The properties of a server. `appendfsync` is "" if the user may not read it.

    `pauses_flushes`: it does not flush while it rewrites its file, whatever `appendfsync` says.
    """

    version: tuple[int, ...]
    valkey: bool
    appendonly: bool
    eviction: str
    appendfsync: str
    pauses_flushes: bool

    @classmethod
    def of(cls, answers: Sequence[Any]) -> Server:
        """From the answers to `QUESTIONS`; a refused one is unknown. Raises `Refused` without a version."""
        about, persistence, memory, configured = answers
        if isinstance(about, hiredis.ReplyError):
            raise Refused(str(about))
        fields = dict(re.findall(rb"^(valkey_version|redis_version):([\d.]+)", about, re.MULTILINE))
        options = dict(zip(configured[::2], configured[1::2], strict=True)) if isinstance(configured, list) else {}
        version = fields.get(b"valkey_version") or fields.get(b"redis_version") or b"0"
        return cls(
            tuple(int(part) for part in version.strip(b".").split(b".")),
            b"valkey_version" in fields,
            info_field(persistence, rb"aof_enabled:(\w+)") == "1",
            info_field(memory, rb"maxmemory_policy:([\w-]+)"),
            options.get(b"appendfsync", b"").decode(),
            options.get(b"no-appendfsync-on-rewrite") == b"yes",
        )

    @property
    def flushes_before_replies(self) -> bool:
        return self.appendfsync == "always"

    @property
    def evicts(self) -> bool:
        """Whether it may evict data when memory is short."""
        return self.eviction not in ("", _EVICTION_ALLOWED)

    def shortfall(self, level: Level) -> str:
        """Why this server cannot promise a level; "" if it can."""
        if level == MEMORY:
            return ""
        if not self.appendonly:
            return "it keeps no append-only file (appendonly no)"
        if self.evicts:
            return f"it may evict what it has taken (maxmemory-policy {self.eviction}); it must be noeviction"
        if level != FSYNC:
            return ""
        if self.pauses_flushes:
            return "it does not flush while it rewrites its file (no-appendfsync-on-rewrite yes)"
        if self.flushes_before_replies:
            return ""
        if self.appendfsync == "everysec" and not self.valkey and self.version >= _HONEST_WAITAOF:
            return ""
        if not self.appendfsync:
            return "it does not tell its appendfsync: the log's user must be allowed to ask (ACL +config|get)"
        return f"it must run with 'appendfsync always', not '{self.appendfsync}'"


def info_field(info: Any, pattern: bytes) -> str:
    """What `pattern` captures in an answer to INFO; "" if it is not there, or the question was refused."""
    found = re.search(pattern, info) if isinstance(info, bytes) else None
    return found[1].decode() if found is not None else ""


class Writes:
    """The writes of one call at a level; this class is for `memory`, which any reply proves."""

    __slots__ = ("_connection", "level")

    def __init__(self, connection: Connection, level: Level) -> None:
        self._connection = connection
        self.level = level

    async def execute_pieces(self, pieces: Sequence[Buffer]) -> Any:
        """As `Connection.execute_pieces`."""
        return await self._connection.execute_pieces(pieces)

    async def execute_all(self, pieces: Sequence[Buffer], count: int) -> list[Any]:
        """As `Connection.execute_all`."""
        return await self._connection.execute_all(pieces, count)

    @property
    def level_at_reply(self) -> Level:
        """The level that a reply proves by itself; `reached` waits for the rest."""
        return self.level

    async def reached(self) -> None:
        """Return once all writes have reached the level. Raises `LogUnavailable`: the outcome is unknown."""

    async def cover_earlier(self, fence: bytes) -> None:
        """As `reached`, also for earlier writes of others. `fence` is a key that may be written."""


class _FlushedWrites(Writes):
    """Writes whose reply proves the level, if it comes from the server whose properties are known."""

    __slots__ = ("_durability", "_server")

    def __init__(self, connection: Connection, durability: Durability, server: Server) -> None:
        super().__init__(connection, FSYNC)
        self._durability = durability
        self._server = server

    async def reached(self) -> None:
        if self._durability.server is not self._server:
            raise LogUnavailable("the event log became another server meanwhile, the outcome is unknown")

    async def cover_earlier(self, fence: bytes) -> None:
        await self.reached()


class _GroupedWrites(Writes):
    """Writes that need a barrier after them."""

    __slots__ = ("_barrier", "_group")

    def __init__(self, group: Group) -> None:
        super().__init__(group.connection, group.level)
        self._group = group
        self._barrier: asyncio.Future[bool] | None = None

    @property
    def level_at_reply(self) -> Level:
        return MEMORY

    async def execute_pieces(self, pieces: Sequence[Buffer]) -> Any:
        (reply,) = await self.execute_all(pieces, 1)
        if isinstance(reply, hiredis.ReplyError):
            raise Refused(str(reply))
        return reply

    async def execute_all(self, pieces: Sequence[Buffer], count: int) -> list[Any]:
        await self._connection.drained()
        replies, self._barrier = self._group.write(pieces, count)
        return await replies

    async def reached(self) -> None:
        if self._barrier is not None and not await asyncio.shield(self._barrier):
            waited = f"within {PATIENCE_MS / 1000:g} s"
            raise LogUnavailable(f"durability '{self.level.text}' was not reached {waited}, the outcome is unknown")

    async def cover_earlier(self, fence: bytes) -> None:
        # a write of our own covers all before it; a barrier alone may find nothing to wait for
        await self.execute_pieces((pack(("SET", fence, "1")),))
        await self.reached()


class Group:
    """A hot connection for one level. Writes that arrive while a group is being written leave with the next one."""

    def __init__(self, connection: Connection, level: Level) -> None:
        self.connection = connection
        self.level = level
        words: tuple[Argument, ...] = ("WAITAOF", 1, 0) if level == FSYNC else ("WAIT", level.replicas)
        self._barrier_command = pack((*words, PATIENCE_MS))
        self._waiting: list[tuple[Sequence[Buffer], int, asyncio.Future[list[Any]]]] = []
        self._next: asyncio.Future[bool] | None = None
        self._under_way = False
        self.barriers = 0

    async def open(self) -> None:
        """Connect once; afterwards the connection reconnects by itself. Raises `LogUnavailable`."""
        try:
            await self.connection.open()
        except OSError as error:
            raise LogUnavailable(
                f"the event log at {self.connection.address.text} cannot be reached: {error}"
            ) from None

    def write(self, pieces: Sequence[Buffer], count: int) -> tuple[asyncio.Future[list[Any]], asyncio.Future[bool]]:
        """The replies to `count` packed commands, and whether the level was reached after them."""
        loop = asyncio.get_running_loop()
        replies: asyncio.Future[list[Any]] = loop.create_future()
        self._waiting.append((pieces, count, replies))
        if self._next is None:
            self._next = loop.create_future()
            self._next.add_done_callback(_consume)
            if not self._under_way:
                loop.call_soon(self._flush)
        return replies, self._next

    def _flush(self) -> None:
        barrier, self._next = self._next, None
        waiting, self._waiting = self._waiting, []
        if barrier is None:
            return
        try:
            for pieces, count, replies in waiting:
                self.connection.batch(pieces, count, _hand_over(replies))
            self.connection.batch((self._barrier_command,), 1, lambda answer: self._answered(barrier, answer))
        except LogUnavailable as error:
            for _, _, replies in waiting:
                if not replies.done():
                    replies.set_exception(LogUnavailable(error.message))
            barrier.set_exception(error)
            return
        self._under_way = True
        self.barriers += 1

    def _answered(self, barrier: asyncio.Future[bool], answer: list[Any] | None) -> None:
        self._under_way = False
        if answer is None:
            barrier.set_exception(lost())
        elif isinstance(answer[0], hiredis.ReplyError):
            barrier.set_exception(Refused(str(answer[0])))
        else:
            count = answer[0][0] if self.level == FSYNC else answer[0]
            barrier.set_result(count >= max(1, self.level.replicas))
        if self._next is not None:
            self._flush()


def _hand_over(future: asyncio.Future[list[Any]]) -> Callable[[list[Any] | None], None]:
    def done(replies: list[Any] | None) -> None:
        if future.done():
            return
        if replies is None:
            future.set_exception(lost())
        else:
            future.set_result(replies)

    return done


def _consume(future: asyncio.Future[bool]) -> None:
    """Ignores a barrier's failure after its writes were refused."""
    if not future.cancelled():
        future.exception()


class Durability:
    """Creates `Writes` for levels. `connect(name)` makes another connection to the same log, not opened yet."""

    def __init__(self, common: Connection, connect: Callable[[str], Connection], default: Level) -> None:
        self.default = default
        self._common = common
        self._connect = connect
        self.server: Server | None = None
        """The server of the common connection; a new object with each connect."""
        self.replies_prove_default = default == MEMORY
        """Whether a reply on the common connection proves the default level."""
        self._in_memory = Writes(common, MEMORY)
        self._groups: dict[Level, Group] = {}
        self._opening = asyncio.Lock()

    def connected_to(self, server: Server) -> None:
        """The common connection has connected to this server."""
        previous, self.server = self.server, server
        problem = server.shortfall(self.default)
        if self.default == FSYNC:
            self.replies_prove_default = server.flushes_before_replies and not problem
        if server != previous and problem:
            _logger.error("the event log cannot promise durability '%s': %s", self.default.text, problem)
        if server != previous and server.evicts and self.default == MEMORY:
            _logger.warning("the event log may evict what it has taken: maxmemory-policy is %s", server.eviction)

    async def writes(self, level: Level | None) -> Writes:
        """The writes of one call. Raises `Unsupported`; `LogUnavailable` for the default level without a server."""
        wanted = level or self.default
        if wanted == MEMORY:
            return self._in_memory
        server = self.server
        if server is None:
            raise LogUnavailable("the event log has not been reached yet")
        if problem := server.shortfall(wanted):
            text = f"durability '{wanted.text}' cannot be reached by the event log: {problem}"
            raise Unsupported(text) if level is not None and level != self.default else LogUnavailable(text)
        if wanted == FSYNC and server.flushes_before_replies:
            return _FlushedWrites(self._common, self, server)
        return _GroupedWrites(await self._group(wanted))

    async def _group(self, level: Level) -> Group:
        found = self._groups.get(level)
        if found is not None:
            return found
        async with self._opening:
            found = self._groups.get(level)
            if found is None:
                group = Group(self._connect(level.text), level)
                await group.open()
                found = self._groups[level] = group
        return found

    async def close(self) -> None:
        for group in self._groups.values():
            await group.connection.close()
