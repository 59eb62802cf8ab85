"""`RedisLog`: the port's methods as commands and scripts on the hot connection.

Scripts hold what must be one step (see their headers); everything else is idempotent writes. No command names keys of
two slots. Connecting and matching replies are `connection`'s, following streams is `reader`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import hiredis

from charonia import keys
from charonia.errors import InvalidArgument, LogUnavailable, StartupError
from charonia.eventlog.durability import Level, parse_level
from charonia.eventlog.port import START, Entry, Fields, Limits, Reply, StreamReader
from charonia.eventlog.refusals import not_owner, over_limit
from charonia.events import LaneOpened, pack_fact
from charonia.tensors import Buffer

from . import scripts
from .address import parse_address
from .connection import Connection
from .durability import QUESTIONS, Durability, Server, Writes
from .epoch import Epoch, new_epoch
from .packing import LARGE_BYTES, Argument, pack, pack_pieces
from .reader import RedisReader
from .scripts import Script
from .sentinel import Primary
from .wire import Refused

_logger = logging.getLogger(__name__)

_OLDEST_VERSION = (7, 0)
_LOADING_PATIENCE_S = 60.0
_MOST_FIELDS = 7000
"""Fields and values of one entry: a script can hand on a bounded number of arguments."""


class RedisLog:
    """`EventLog` on Redis or Valkey >= 7.0 at the URL of one server or of its sentinels (see `address`).

    `on_state(up)` is called in the event loop when the connection is lost and found again. `durability` is the level of
    what is accepted without a level of its own. Raises `StartupError` for a URL or a level that cannot be read.
    """

    def __init__(self, url: str, on_state: Callable[[bool], None] | None = None, *, durability: str = "memory") -> None:
        self._address = parse_address(url)
        try:
            level = parse_level(durability)
        except InvalidArgument as error:
            raise StartupError(error.message) from None
        self._prepare = [("SCRIPT", "LOAD", script.source) for script in scripts.ALL]
        self._epoch = Epoch()
        self._server: Server | None = None
        self._connection = Connection(
            self._address,
            name="charonia",
            prepare=self._prepare,
            ask=lambda: [*QUESTIONS, *self._epoch.questions()],
            on_answers=self._connected,
            on_state=on_state,
            primary=Primary(self._address) if self._address.sentinels else None,
        )
        self._durability = Durability(self._connection, self._connect, level)
        self._lane_names: dict[tuple[str, int, int], tuple[bytes, ...]] = {}

    def _connect(self, name: str) -> Connection:
        return Connection(
            self._address, name=f"charonia-{name}", prepare=self._prepare, primary=self._connection.primary
        )

    def _connected(self, answers: list[Any]) -> None:
        self._server = Server.of(answers[: len(QUESTIONS)])
        self._epoch.answered(answers[len(QUESTIONS) :])
        self._durability.connected_to(self._server)

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _LOADING_PATIENCE_S
        where = self._address.text
        while True:
            try:
                await self._connection.open()
                break
            except Refused as error:
                if not error.reply.startswith("LOADING") or loop.time() > deadline_s:
                    raise StartupError(_refusal(where, error.reply)) from None
                await asyncio.sleep(0.05)  # the server reads its own log back; nothing tells when it is done
            except TimeoutError:
                raise StartupError(f"the event log at {where} does not answer") from None
            except OSError as error:
                raise StartupError(f"the event log at {where} cannot be reached: {error}") from None
        try:
            await self._check(where)
        except BaseException:
            await self.close()
            raise

    async def _check(self, where: str) -> None:
        """Raise `StartupError` for a server that cannot keep what is promised."""
        server = self._server
        if server is None or server.version < _OLDEST_VERSION:
            text = ".".join(map(str, server.version if server is not None else (0,)))
            raise StartupError(f"the event log at {where} is a server of version {text}; 7.0 or newer is needed")
        default = self._durability.default
        if problem := server.shortfall(default):
            raise StartupError(f"durability '{default.text}' is more than the event log at {where} promises: {problem}")
        try:
            await self._durability.writes(None)
        except LogUnavailable as error:
            raise StartupError(f"the event log at {where} cannot be used: {error}") from None

    async def close(self) -> None:
        await self._durability.close()
        await self._connection.close()

    async def epoch(self) -> str:
        value = await self._connection.execute("GET", keys.EPOCH)
        while value is None:
            await self._write("SET", keys.EPOCH, new_epoch(), "NX")
            value = await self._connection.execute("GET", keys.EPOCH)
        return self._epoch.name(value)

    # -- streams ------------------------------------------------------------------------------------------------------

    async def append(self, stream: bytes, fields: Fields) -> bytes:
        if not fields or len(fields) % 2:
            raise ValueError("fields of an entry alternate names and values")
        entry_id: bytes
        try:
            entry_id = await self._connection.execute_pieces(_pack_append(stream, fields))
        except Refused as error:
            if not error.out_of_memory:
                raise
            entry_id = await self._write("XADD", stream, "*", *fields)
        if stream == keys.CONTROL:
            self._epoch.wrote(entry_id)
        return entry_id

    async def delete_entries(self, stream: bytes, ids: Sequence[bytes]) -> None:
        if ids:
            await self._connection.execute_lazily("XDEL", stream, *ids)

    async def range(self, stream: bytes, after: bytes = START, count: int = 1000) -> list[Entry]:
        raw = await self._connection.execute("XRANGE", stream, b"(" + after, "+", "COUNT", count)
        return [Entry(entry_id, fields) for entry_id, fields in raw]

    async def delete_stream(self, stream: bytes) -> None:
        await self._connection.execute("UNLINK", stream)

    def reader(self) -> StreamReader:
        return RedisReader(self._address, self._connection)

    # -- accepted work of a model -------------------------------------------------------------------------------------

    async def accept(
        self,
        model: str,
        level: int,
        lane: int,
        requests: Sequence[tuple[bytes, int]],
        fields: Fields,
        limits: Limits,
        *,
        durability: str = "",
    ) -> None:
        if not fields or len(fields) % 2 or len(fields) > _MOST_FIELDS:
            raise ValueError("fields of an entry alternate names and values and are not too many")
        names = self._lane_names.get((model, level, lane))
        if names is None:
            names = (
                keys.queue(model, level, lane),
                keys.unsettled(model),
                keys.counters(model),
                keys.lanes(model),
                keys.facts(model),
                b"%d:%d" % (level, lane),
                pack_fact(LaneOpened(level, lane)),
            )
            self._lane_names[(model, level, lane)] = names
        queue, unsettled, counters, lanes, facts, lane_name, fact = names
        total = 0
        arguments: list[Argument] = []
        for request_id, size_bytes in requests:
            total += size_bytes
            arguments.append(request_id)
            arguments.append(b"0:%d" % size_bytes)
        command = (
            *(b"EVALSHA", scripts.ACCEPT.digest, 5, queue, unsettled, counters, lanes, facts),
            *(limits.requests, limits.size_bytes, total, lane_name, fact, len(requests)),
            *arguments,
            *fields,
        )
        pieces: Sequence[Buffer] = pack_pieces(command) if _large(fields) else (pack(command),)
        writes = await self._durability.writes(_level(durability))
        bound = await self._run(scripts.ACCEPT, pieces, writes)
        if bound:
            raise over_limit(model, bound, limits)
        await writes.reached()

    async def settle(
        self,
        model: str,
        requests: Sequence[tuple[bytes, int]],
        statistics: tuple[bytes, Mapping[str, int]] | None,
        replies: Sequence[Reply],
        facts: Sequence[Reply] = (),
    ) -> list[bool]:
        attempts = [attempt for _, attempt in requests]
        if len(set(attempts)) == 1:
            del attempts[1:]
        names = [keys.unsettled(model), keys.counters(model)]
        sums = 0
        amounts: tuple[Argument, ...] = ()
        if statistics is not None:
            names.append(statistics[0])
            sums, amounts = _amounts(statistics[1])
        command: list[Argument] = [b"EVALSHA", scripts.SETTLE.digest, len(names), *names]
        command += (len(requests), len(attempts), sums)
        command += [request_id for request_id, _ in requests]
        command += attempts
        command += amounts
        script = pack(command)
        if not replies and not facts:
            result = await self._run(scripts.SETTLE, (script,))
            return _won(result, len(requests))
        pieces: list[Buffer] = []
        for reply in replies:
            pieces.extend(_pack_append(reply.stream, reply.fields))
        pieces.append(script)
        for fact in facts:
            pieces.extend(_pack_append(fact.stream, fact.fields))
        appended = await self._connection.execute_all(pieces, len(replies) + 1 + len(facts))
        result = appended.pop(len(replies))
        if isinstance(result, hiredis.ReplyError):
            # Scripts are loaded at every connect: only a SCRIPT FLUSH on a living server leads here. The others are
            # out already, which their readers bear: they know duplicates, and the settle follows at once.
            if not str(result).startswith("NOSCRIPT"):
                raise Refused(str(result))
            result = await self._reload(scripts.SETTLE, (script,))
        for told, entry_id in zip((*replies, *facts), appended, strict=True):
            if isinstance(entry_id, hiredis.ReplyError):
                refusal = Refused(str(entry_id))
                if not refusal.out_of_memory:
                    raise refusal
                await self._write("XADD", told.stream, "*", *told.fields)
        return _won(result, len(requests))

    async def begin_attempt(self, model: str, token: int, ids: Sequence[bytes], attempt: int) -> list[bool]:
        names = (keys.unsettled(model), keys.counters(model))
        mask = await self._script(scripts.BEGIN_ATTEMPT, names, (token, attempt, *ids))
        if mask == 0:
            raise not_owner(model, token)
        return [known == 49 for known in mask]

    async def unsettled(self, model: str, ids: Sequence[bytes]) -> list[int]:
        if not ids:
            return []
        values = await self._connection.execute("HMGET", keys.unsettled(model), *ids)
        return [-1 if value is None else int(value.partition(b":")[0]) for value in values]

    async def pending(self, model: str) -> tuple[int, int]:
        requests, size_bytes = await self._script(scripts.PENDING, (keys.unsettled(model), keys.counters(model)), ())
        return requests, size_bytes

    async def lanes(self, model: str) -> list[tuple[int, int]]:
        members = await self._connection.execute("SMEMBERS", keys.lanes(model))
        return sorted((int(level), int(lane)) for level, _, lane in (member.partition(b":") for member in members))

    # -- ownership and liveness ---------------------------------------------------------------------------------------

    async def owner(self, model: str) -> tuple[str, int]:
        owner, token = await self._connection.execute("HMGET", keys.counters(model), "owner", "token")
        return (owner or b"").decode(), int(token or 0)

    async def take_ownership(self, model: str, owner: str, previous: str) -> int:
        token: int = await self._script(scripts.TAKE_OWNERSHIP, (keys.counters(model),), (owner, previous))
        return token

    async def release_ownership(self, model: str, owner: str, token: int) -> None:
        await self._script(scripts.RELEASE_OWNERSHIP, (keys.counters(model),), (owner, token))

    async def beat(self, role: str, incarnation: str, ttl_ms: int) -> None:
        key = keys.alive(role, incarnation)
        try:
            await self._connection.execute("SET", key, "1", "PX", ttl_ms)
        except Refused as error:
            if not error.out_of_memory:
                raise
            await self._write("SET", key, "1", "PX", ttl_ms)

    async def end_beat(self, role: str, incarnation: str) -> None:
        await self._connection.execute("DEL", keys.alive(role, incarnation))

    async def alive(self, role: str, incarnations: Sequence[str]) -> list[bool]:
        found = await self._each([("EXISTS", keys.alive(role, incarnation)) for incarnation in incarnations])
        return [bool(count) for count in found]

    # -- notes and times ----------------------------------------------------------------------------------------------

    async def put_note(self, key: bytes, data: bytes, ttl_s: int) -> None:
        await self._connection.execute("SET", key, data, "EX", ttl_s)

    async def notes(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._each([("GET", key) for key in keys])

    async def set_times(self, key: bytes, times: Mapping[bytes, int]) -> None:
        if times:
            arguments: list[Argument] = []
            for member, at_us in times.items():
                arguments += (at_us, member)
            await self._connection.execute("ZADD", key, *arguments)

    async def due(self, key: bytes, until_us: int, count: int) -> list[bytes]:
        members: list[bytes] = await self._connection.execute(
            "ZRANGE", key, "-inf", until_us, "BYSCORE", "LIMIT", 0, count
        )
        return members

    async def drop_times(self, key: bytes, members: Sequence[bytes]) -> None:
        if members:
            await self._connection.execute("ZREM", key, *members)

    async def count_times(self, key: bytes) -> int:
        count: int = await self._connection.execute("ZCARD", key)
        return count

    # -- projections and payloads -------------------------------------------------------------------------------------

    async def add_statistics(self, key: bytes, increments: Mapping[str, int]) -> None:
        sums, amounts = _amounts(increments)
        await self._script(scripts.ADD_STATISTICS, (key,), (sums, *amounts))

    async def statistics(self, key: bytes) -> dict[str, int]:
        raw = await self._connection.execute("HGETALL", key)
        return {name.decode(): int(value) for name, value in zip(raw[::2], raw[1::2], strict=True)}

    async def delete_keys(self, keys: Iterable[bytes]) -> None:
        await self._each([("UNLINK", key) for key in keys])

    async def put_blob(self, blob_id: str, data: Buffer, ttl_s: int) -> None:
        await self._connection.execute_pieces(pack_pieces(("SET", keys.blob(blob_id), data, "EX", ttl_s)))

    async def blob(self, blob_id: str) -> bytes | None:
        data: bytes | None = await self._connection.execute("GET", keys.blob(blob_id))
        return data

    # -- commands -----------------------------------------------------------------------------------------------------

    async def _each(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Commands of one key each, in one write: keys of several slots may not share a command."""
        if not commands:
            return []
        replies = await self._connection.execute_all([pack(command) for command in commands], len(commands))
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                raise Refused(str(reply))
        return replies

    async def _write(self, command: Argument, key: bytes, *arguments: Argument) -> Any:
        """A write of one key that the server takes even when it is out of memory."""
        words = (b"EVALSHA", scripts.WRITE.digest, 1, key, command, *arguments)
        return await self._run(scripts.WRITE, pack_pieces(words))

    async def _script(self, script: Script, names: Sequence[bytes], arguments: Sequence[Argument]) -> Any:
        return await self._run(script, (pack((b"EVALSHA", script.digest, len(names), *names, *arguments)),))

    async def _run(self, script: Script, pieces: Sequence[Buffer], through: Connection | Writes | None = None) -> Any:
        connection = through or self._connection
        try:
            return await connection.execute_pieces(pieces)
        except Refused as error:
            if not error.reply.startswith("NOSCRIPT"):
                raise
        return await self._reload(script, pieces, connection)

    async def _reload(
        self, script: Script, pieces: Sequence[Buffer], through: Connection | Writes | None = None
    ) -> Any:
        """Run a script that the server has forgotten; it has not run before, so nothing happens twice."""
        connection = through or self._connection
        _, result = await connection.execute_all([pack(("SCRIPT", "LOAD", script.source)), *pieces], 2)
        if isinstance(result, hiredis.ReplyError):
            raise Refused(str(result))
        return result


def _level(text: str) -> Level | None:
    return parse_level(text) if text else None


def _pack_append(stream: bytes, fields: Fields) -> Sequence[Buffer]:
    command = (b"XADD", stream, b"*", *fields)
    return pack_pieces(command) if _large(fields) else (pack(command),)


def _large(fields: Fields) -> bool:
    return sum(map(len, fields)) >= LARGE_BYTES


def _amounts(increments: Mapping[str, int]) -> tuple[int, tuple[Argument, ...]]:
    """The number of sums, and all fields and values with the sums first."""
    sums: list[Argument] = []
    maxima: list[Argument] = []
    for name, value in increments.items():
        if name.startswith("last_"):
            maxima += (name, value)
        elif value:
            sums += (name, value)
    return len(sums) // 2, (*sums, *maxima)


def _won(result: Any, count: int) -> list[bool]:
    if result == 1:
        return [True] * count
    return [won == 49 for won in result]


def _refusal(where: str, reply: str) -> str:
    if reply.startswith(("WRONGPASS", "NOAUTH", "NOPERM")) or "AUTH" in reply:
        return f"the event log at {where} refused the user name or password: {reply}"
    if "unknown command" in reply or "flags" in reply:
        return f"the event log at {where} is a server older than 7.0: {reply}"
    return f"the event log at {where} cannot be used: {reply}"
