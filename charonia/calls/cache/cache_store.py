"""Stores cached responses: in the log for all processes, and the hottest in this process as well (K3).

Both are bounded in bytes and evict the least recently used. The log may exceed its bound by the responses that
processes are inserting; local hits are reported to it periodically. A failure here fails no request: it counts as a
miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections import OrderedDict
from itertools import islice

from charonia import keys
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError, InvalidRecord
from charonia.eventlog.port import MOST_TAKEN, Notes
from charonia.tasks import Tasks
from charonia.wire import ResponseRecord, pack_response, unpack_response

_log = logging.getLogger(__name__)

OVERHEAD_BYTES = 512
"""Approximate overhead of a response beyond its record: its key, its place in the index, its objects."""

MAX_HERE_BYTES = 64 * 1024**2
_MAX_ON_THE_WAY_BYTES = 64 * 1024**2
_TELL_USES_S = 1.0
_SWEEP_S = 60.0
_LOOK_S = 0.5
"""A slower look-up counts as a miss, and none is tried for a while: a cache must not be slower than its models."""
_LEFT_ALONE_NS = 5_000_000_000
_NOBODY = bytes(16)

# when it expires, in us since the epoch; before the response record
_EXPIRY = struct.Struct("<Q")


class Cached:
    """One response. `answer` returns a copy for a caller, which may change it."""

    __slots__ = ("expires_us", "record", "size_bytes")

    def __init__(self, record: ResponseRecord, size_bytes: int, expires_us: int) -> None:
        self.record = record
        self.size_bytes = size_bytes
        self.expires_us = expires_us

    def answer(self) -> ResponseRecord:
        record = self.record
        return ResponseRecord(
            record.id, record.model, record.version, list(record.outputs), dict(record.parameters), None
        )

    @staticmethod
    def of(data: bytes) -> Cached:
        """Unpacks the result of `pack`. Raises `InvalidRecord`."""
        try:
            (expires_us,) = _EXPIRY.unpack_from(data)
        except struct.error:
            raise InvalidRecord("a cached response is too short") from None
        record = unpack_response(memoryview(data)[_EXPIRY.size :])
        if record.error is not None:
            raise InvalidRecord("a cached response is a failure")
        return Cached(record, len(data) + OVERHEAD_BYTES, expires_us)


def pack(record: ResponseRecord, expires_us: int) -> bytes:
    packed = pack_response(_NOBODY, record.model, record.version, record.outputs, record.parameters)
    return _EXPIRY.pack(expires_us) + packed


class CacheStore:
    """One process's responses and its access to the shared ones. Keys are the digests of
    `charonia.calls.cache.cache_keys`.
    """

    def __init__(self, log: Notes, limit_bytes: int) -> None:
        self._log = log
        self._limit_bytes = limit_bytes
        self._limit_here_bytes = min(limit_bytes, MAX_HERE_BYTES)
        self._here: OrderedDict[bytes, Cached] = OrderedDict()
        self._uses: dict[bytes, int] = {}
        self._on_the_way_bytes = 0
        self._tasks = Tasks()
        self._left_alone_until_ns = 0
        self._failing = False
        self._too_large: set[str] = set()
        self.size_here_bytes = 0
        self.evictions = 0
        """How many responses this process evicted from the log."""

    def start(self) -> None:
        self._tasks.spawn(self._watch(), "response cache")

    async def close(self) -> None:
        await self._tasks.close()

    def forget(self) -> None:
        """Drop all responses of this process."""
        self._here.clear()
        self._uses.clear()
        self.size_here_bytes = 0

    def __len__(self) -> int:
        return len(self._here)

    # -- looking ------------------------------------------------------------------------------------------------------

    def here(self, key: bytes) -> Cached | None:
        """A response that this process has, without asking the log."""
        cached = self._here.get(key)
        if cached is None:
            return None
        now_us = wall_ns() // 1000
        if cached.expires_us <= now_us:
            self._drop(key)
            return None
        self._here.move_to_end(key)
        self._uses[key] = now_us
        return cached

    async def look(self, key: bytes) -> Cached | None:
        """A response that any process put into the log; None also when the log cannot be reached."""
        if self._left_alone_until_ns > monotonic_ns():
            return None
        try:
            async with asyncio.timeout(_LOOK_S):
                (data,) = await self._log.notes([keys.cached(key)])
        except (CharoniaError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                self._left_alone_until_ns = monotonic_ns() + _LEFT_ALONE_NS
            self._fails(f"no response can be looked up: {str(error) or 'no answer in time'}")
            return None
        self._failing = False
        if data is None:
            return None
        try:
            cached = Cached.of(data)
        except InvalidRecord as error:
            _log.error("a cached response cannot be read: %s", error)
            return None
        now_us = wall_ns() // 1000
        if cached.expires_us <= now_us:  # the log keeps it for longer where it took it late; clocks differ, too
            return None
        self._keep(key, cached)
        self._uses[key] = now_us
        return cached

    # -- inserting ----------------------------------------------------------------------------------------------------

    def put(self, key: bytes, record: ResponseRecord, ttl_s: int) -> asyncio.Future[None] | None:
        """Store a successful response: here at once, in the log soon (the future says when). None: it is not stored."""
        now_us = wall_ns() // 1000
        data = pack(record, now_us + ttl_s * 1_000_000)
        cached = Cached.of(data)
        if cached.size_bytes > self._limit_bytes:
            if record.model not in self._too_large:
                self._too_large.add(record.model)
                _log.warning(
                    "a response of model '%s' is not cached: its %d bytes are more than the cache has (said once)",
                    record.model,
                    cached.size_bytes,
                )
            return None
        self._keep(key, cached)
        if self._on_the_way_bytes + len(data) > _MAX_ON_THE_WAY_BYTES:
            return None
        self._on_the_way_bytes += len(data)
        stored = asyncio.get_running_loop().create_future()
        self._tasks.spawn(self._share(key, data, cached, now_us, ttl_s, stored))
        return stored

    def _keep(self, key: bytes, cached: Cached) -> None:
        self._drop(key)
        if cached.size_bytes > self._limit_here_bytes:
            return
        self._here[key] = cached
        self.size_here_bytes += cached.size_bytes
        while self.size_here_bytes > self._limit_here_bytes:
            _, oldest = self._here.popitem(last=False)
            self.size_here_bytes -= oldest.size_bytes

    def _drop(self, key: bytes) -> None:
        known = self._here.pop(key, None)
        if known is not None:
            self.size_here_bytes -= known.size_bytes

    async def _share(
        self, key: bytes, data: bytes, cached: Cached, now_us: int, ttl_s: int, stored: asyncio.Future[None]
    ) -> None:
        try:
            # the index last: a process that evicts a member finds its response
            await asyncio.gather(
                self._log.put_note(keys.cached(key), data, ttl_s),
                self._log.set_times(keys.CACHE_EXPIRIES, {key: cached.expires_us}),
            )
            await self._use({key: (now_us, cached.size_bytes)})
        except CharoniaError as error:
            self._fails(f"a response is not shared with other processes: {error}")
        finally:
            self._on_the_way_bytes -= len(data)
            if not stored.done():
                stored.set_result(None)

    def _fails(self, what: str) -> None:
        """Logged once, until a look-up succeeds again."""
        if not self._failing:
            self._failing = True
            _log.warning("response cache: %s", what)

    async def _use(self, uses: dict[bytes, tuple[int, int]]) -> None:
        """Report uses to the index, and delete the responses that it evicts."""
        while True:
            taken = await self._log.keep_recent(keys.CACHE_USES, uses, self._limit_bytes)
            self.evictions += len(taken)
            await self._remove(taken)
            if len(taken) < MOST_TAKEN:
                return
            uses = {}

    async def _remove(self, members: list[bytes]) -> None:
        if members:
            await self._log.delete_keys([keys.cached(member) for member in members])
            await self._log.drop_times(keys.CACHE_EXPIRIES, members)

    # -- seeing to it -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Report the uses of local hits, and remove expired responses from the index."""
        until_sweep_s = 0.0
        while True:
            with contextlib.suppress(CharoniaError):  # try again at the next time
                await self.tell_uses()
                if until_sweep_s <= 0:
                    await self.sweep()
                    until_sweep_s = _SWEEP_S
            until_sweep_s -= _TELL_USES_S
            await asyncio.sleep(_TELL_USES_S)

    async def tell_uses(self) -> None:
        """Raises `LogUnavailable`."""
        uses, self._uses = self._uses, {}
        while uses:
            part = {key: (at_us, -1) for key, at_us in islice(uses.items(), MOST_TAKEN)}
            for key in part:
                del uses[key]
            await self._use(part)

    async def sweep(self) -> None:
        """Every process does this; doing it twice is harmless. Raises `LogUnavailable`."""
        while True:
            expired = await self._log.due(keys.CACHE_EXPIRIES, wall_ns() // 1000, MOST_TAKEN)
            if not expired:
                return
            await self._log.keep_recent(keys.CACHE_USES, {}, self._limit_bytes, drop=expired)
            await self._log.drop_times(keys.CACHE_EXPIRIES, expired)
