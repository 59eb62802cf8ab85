"""`RedisLog`: implements the port with commands and scripts on the hot connection.

Scripts hold operations that must be atomic (see their headers); all other writes are idempotent. No command names keys
of two slots. `work` handles accepted work, `jobs` jobs and journal, `hot_connection` the connection, `reader` streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from charonia import keys
from charonia.errors import InvalidArgument, LogUnavailable, StartupError
from charonia.eventlog.durability_levels import Level, parse_level
from charonia.eventlog.port import MOST_TAKEN, START, Entry, Fields
from charonia.keys import sizes
from charonia.tensors import Buffer

from . import scripts
from .blob_server import BlobServer, is_passing
from .commands import Commands, pack_append
from .durability import QUESTIONS, Durability, Server, info_field
from .epoch import Epoch, new_epoch
from .jobs import Jobs
from .progress import Progress
from .reader import RedisReader
from .server.address import Address, parse_address
from .server.hot_connection import Connection
from .server.sentinel import Primary
from .server.transport import Argument, Refused, pack_pieces
from .stored_records import amounts_of, statistics_of
from .waves import RedisWaves
from .work import Work

_OLDEST_VERSION = (7, 0)
_LOADING_PATIENCE_S = 60.0


class RedisLog(Work, Progress, Jobs):
    """`EventLog` on Redis or Valkey >= 7.0 at the URL of one server or of its sentinels (see `address`).

    `on_state(up)` is called in the event loop when the connection is lost and found again. `durability` is the default
    level. Raises `StartupError` for an invalid URL or level.
    """

    def __init__(
        self,
        url: str | Address,
        on_state: Callable[[bool], None] | None = None,
        *,
        durability: str = "memory",
        epoch: Epoch | None = None,
    ) -> None:
        self.blobs: BlobServer | None = None
        """Holds the payloads of work at the level `memory`, if set."""
        self._address = parse_address(url) if isinstance(url, str) else url
        level = level_of(durability)
        self._prepare = [("SCRIPT", "LOAD", script.source) for script in scripts.ALL]
        self._epoch = epoch or Epoch()
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
        commands = Commands(self._connection, self._durability)
        Work.__init__(self, commands)
        Progress.__init__(self, commands)
        Jobs.__init__(self, commands)
        self.waves = RedisWaves(commands, self._connection, self._durability)

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
                await asyncio.sleep(0.05)  # the server loads its log, and does not notify when it is done
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
        """Raises `StartupError` for a server that cannot keep the promised durability."""
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

    async def clock_ns(self) -> int:
        seconds, micros = await self._connection.execute("TIME")
        return int(seconds) * 1_000_000_000 + int(micros) * 1000

    async def memory_bytes(self) -> tuple[int, int]:
        about = await self._connection.execute("INFO", "memory")
        return int(info_field(about, rb"\bused_memory:(\d+)") or 0), int(info_field(about, rb"\bmaxmemory:(\d+)") or 0)

    async def epoch(self) -> str:
        value = await self._connection.execute("GET", keys.EPOCH)
        while value is None:
            await self._commands.write("SET", keys.EPOCH, new_epoch(), "NX")
            value = await self._connection.execute("GET", keys.EPOCH)
        return self._epoch.name(value)

    # -- streams ------------------------------------------------------------------------------------------------------

    async def append(self, stream: bytes, fields: Fields) -> bytes:
        if not fields or len(fields) % 2:
            raise ValueError("fields of an entry alternate names and values")
        entry_id: bytes
        try:
            entry_id = await self._connection.execute_pieces(pack_append(stream, fields))
        except Refused as error:
            if not error.out_of_memory:
                raise
            entry_id = await self._commands.write("XADD", stream, "*", *fields)
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

    @property
    def connection(self) -> Connection:
        """Reads or writes the log as a whole (`portable`)."""
        return self._connection

    @property
    def up(self) -> bool:
        """Whether its server is connected."""
        return self._connection.up

    def start(self) -> None:
        """Connect in the background, to a server that is known to exist."""
        self._connection.start()

    def reader(self) -> RedisReader:
        return RedisReader(self._address, self._connection)

    # -- ownership and liveness ---------------------------------------------------------------------------------------

    async def owner(self, model: str) -> tuple[str, int]:
        owner, token = await self._connection.execute("HMGET", keys.counters(model), "owner", "token")
        return (owner or b"").decode(), int(token or 0)

    async def take_ownership(self, model: str, owner: str, previous: str) -> int:
        token: int = await self._commands.script(scripts.TAKE_OWNERSHIP, (keys.counters(model),), (owner, previous))
        return token

    async def release_ownership(self, model: str, owner: str, token: int) -> None:
        await self._commands.script(scripts.RELEASE_OWNERSHIP, (keys.counters(model),), (owner, token))

    async def append_fenced(self, stream: bytes, fence: bytes, token: int, fields: Fields, ttl_s: int) -> bool:
        return bool(await self._commands.script(scripts.APPEND_FENCED, (stream, fence), (token, ttl_s, *fields)))

    async def beat(self, role: str, incarnation: str, ttl_ms: int) -> bool:
        return await self._set_lease(role, incarnation, ttl_ms, "GET") is not None

    async def prolong(self, role: str, incarnation: str, ttl_ms: int) -> bool:
        return await self._set_lease(role, incarnation, ttl_ms, "XX") is not None

    async def _set_lease(self, role: str, incarnation: str, ttl_ms: int, how: str) -> bytes | None:
        key = keys.alive(role, incarnation)
        reply: bytes | None
        try:
            reply = await self._connection.execute("SET", key, ttl_ms, "PX", ttl_ms, how)
        except Refused as error:
            if not error.out_of_memory:
                raise
            reply = await self._commands.write("SET", key, ttl_ms, "PX", ttl_ms, how) or None  # a script's nil is False
        return reply

    async def end_beat(self, role: str, incarnation: str) -> None:
        await self._connection.execute("DEL", keys.alive(role, incarnation))

    async def alive(self, role: str, incarnations: Sequence[str]) -> list[bool]:
        found = await self._commands.each([("EXISTS", keys.alive(role, incarnation)) for incarnation in incarnations])
        return [bool(count) for count in found]

    async def last_beat_ms(self, role: str, incarnations: Sequence[str]) -> list[int]:
        names = [keys.alive(role, incarnation) for incarnation in incarnations]
        found = await self._commands.each([one for name in names for one in (("GET", name), ("PTTL", name))])
        # the lease was as long as the key says
        pairs = zip(found[::2], found[1::2], strict=True)
        return [-1 if ttl_ms is None or left_ms < 0 else max(0, int(ttl_ms) - left_ms) for ttl_ms, left_ms in pairs]

    # -- notes and times ----------------------------------------------------------------------------------------------

    async def put_note(self, key: bytes, data: bytes, ttl_s: int) -> None:
        await self._connection.execute("SET", key, data, "EX", ttl_s)

    async def notes(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._commands.each([("GET", key) for key in keys])

    async def add_to_count(self, key: bytes, amount: int) -> int:
        return int(await self._connection.execute("HINCRBY", key, "n", amount))

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

    async def keep_until(self, key: bytes, until_us: int) -> None:
        # only a set with a hash tag may have sizes; in a cluster those of another key are of another primary
        names = (key, sizes(key)) if b"{" in key else (key,)
        # for GT, a key without a time stays longer than any other
        await self._commands.each([("PEXPIREAT", n, until_us // 1000, which) for n in names for which in ("NX", "GT")])

    async def keep_recent(
        self, key: bytes, uses: Mapping[bytes, tuple[int, int]], limit_bytes: int, drop: Sequence[bytes] = ()
    ) -> list[bytes]:
        arguments: list[Argument] = [limit_bytes, MOST_TAKEN, len(uses)]
        for member, (at_us, size_bytes) in uses.items():
            arguments += (member, at_us, size_bytes)
        taken: list[bytes] = await self._commands.script(scripts.KEEP_RECENT, (key, sizes(key)), (*arguments, *drop))
        return taken

    # -- projections and payloads -------------------------------------------------------------------------------------

    async def add_statistics(self, key: bytes, increments: Mapping[str, int]) -> None:
        sums, amounts = amounts_of(increments)
        await self._commands.script(scripts.ADD_STATISTICS, (key,), (sums, *amounts))

    async def statistics(self, key: bytes) -> dict[str, int]:
        raw = await self._connection.execute("HGETALL", key)
        return statistics_of(raw)

    async def delete_keys(self, keys: Iterable[bytes]) -> None:
        names = keys if self.blobs is None else await self.blobs.delete_its_own(keys)
        await self._commands.each([("UNLINK", name) for name in names])

    async def put_blob(self, blob_id: str, data: Buffer, ttl_s: int) -> None:
        if self.blobs is not None and is_passing(blob_id):
            await self.blobs.put(blob_id, data, ttl_s)
            return
        await self._connection.execute_pieces(pack_pieces(("SET", keys.blob(blob_id), data, "EX", ttl_s)))

    async def blob(self, blob_id: str) -> bytes | None:
        if self.blobs is not None and is_passing(blob_id):
            return await self.blobs.get(blob_id)
        data: bytes | None = await self._connection.execute("GET", keys.blob(blob_id))
        return data


def level_of(durability: str) -> Level:
    """The log at a URL. Raises `StartupError` for an invalid durability level."""
    try:
        return parse_level(durability)
    except InvalidArgument as error:
        raise StartupError(error.message) from None


def _refusal(where: str, reply: str) -> str:
    if reply.startswith(("WRONGPASS", "NOAUTH", "NOPERM")) or "AUTH" in reply:
        return f"the event log at {where} refused the user name or password: {reply}"
    if "unknown command" in reply or "flags" in reply:
        return f"the event log at {where} is a server older than 7.0: {reply}"
    return f"the event log at {where} cannot be used: {reply}"
