"""The event log in one process's memory: the whole port, nothing durable.

For tests, for `local:` streams (`charonia.eventlog.colocated`) and as the plain statement of what the port means.
Buffers are kept as they are given, so a caller must not change one after handing it over. One log may be shared by
several services of a process: `open` and `close` do nothing, the data lives as long as the object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from charonia import keys
from charonia.clock import monotonic_ns
from charonia.events import FIELD_FACT, LaneOpened, pack_fact
from charonia.tensors import Buffer

from .port import START, Entry, Fields, Limits, OnEntries, Reply, StreamReader
from .refusals import BOUND_BYTES, BOUND_REQUESTS, not_owner, over_limit

_LAST = b"$"


class _Work:
    """Accepted, unsettled requests of one model, and who owns it."""

    __slots__ = ("lanes", "owner", "requests", "size_bytes", "token")

    def __init__(self) -> None:
        self.requests: dict[bytes, tuple[int, int]] = {}
        self.size_bytes = 0
        self.lanes: set[tuple[int, int]] = set()
        self.owner = ""
        self.token = 0


class MemoryLog:
    """`EventLog` in memory. Entry ids count up through the life of the log, whatever the stream."""

    def __init__(self) -> None:
        self._streams: dict[bytes, dict[int, Entry]] = {}
        self._followers: dict[bytes, list[_Following]] = {}
        self._last = 0
        self._work: dict[str, _Work] = {}
        self._leases: dict[bytes, int] = {}
        self._statistics: dict[bytes, dict[str, int]] = {}
        self._blobs: dict[bytes, tuple[bytes, int]] = {}

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    # -- streams ------------------------------------------------------------------------------------------------------

    async def append(self, stream: bytes, fields: Fields) -> bytes:
        return self._append(stream, fields)

    def _append(self, stream: bytes, fields: Fields) -> bytes:
        if not fields or len(fields) % 2:
            raise ValueError("fields of an entry alternate names and values")
        self._last += 1
        entry = Entry(b"%d-0" % self._last, list(fields))
        self._streams.setdefault(stream, {})[self._last] = entry
        for following in self._followers.get(stream, ()):
            following.offer(entry)
        return entry.id

    async def delete_entries(self, stream: bytes, ids: Sequence[bytes]) -> None:
        self._delete(stream, ids)

    def _delete(self, stream: bytes, ids: Iterable[bytes]) -> None:
        entries = self._streams.get(stream)
        if entries is None:
            return
        for entry_id in ids:
            entries.pop(_number(entry_id), None)

    async def range(self, stream: bytes, after: bytes = START, count: int = 1000) -> list[Entry]:
        return list(islice(self._after(stream, after), count))

    def _after(self, stream: bytes, after: bytes) -> Iterator[Entry]:
        number = _number(after)
        return (entry for at, entry in self._streams.get(stream, {}).items() if at > number)

    async def delete_stream(self, stream: bytes) -> None:
        self._streams.pop(stream, None)

    def holds(self, stream: bytes, entry: Entry) -> bool:
        """Whether an entry has not been deleted."""
        return _number(entry.id) in self._streams.get(stream, ())

    def reader(self) -> StreamReader:
        return MemoryReader(self)

    # -- accepted work of a model -------------------------------------------------------------------------------------

    def _of(self, model: str) -> _Work:
        return self._work.setdefault(model, _Work())

    async def accept(
        self, model: str, level: int, lane: int, requests: Sequence[tuple[bytes, int]], fields: Fields, limits: Limits
    ) -> None:
        work = self._of(model)
        size_bytes = sum(size for _, size in requests)
        if limits.requests and len(work.requests) + len(requests) > limits.requests:
            raise over_limit(model, BOUND_REQUESTS, limits)
        if limits.size_bytes and work.size_bytes + size_bytes > limits.size_bytes:
            raise over_limit(model, BOUND_BYTES, limits)
        self._append(keys.queue(model, level, lane), fields)
        work.size_bytes += size_bytes
        for request_id, size in requests:
            work.requests[bytes(request_id)] = (0, size)
        if (level, lane) not in work.lanes:
            work.lanes.add((level, lane))
            self._append(keys.facts(model), [FIELD_FACT, pack_fact(LaneOpened(level, lane))])

    async def settle(
        self,
        model: str,
        requests: Sequence[tuple[bytes, int]],
        statistics: tuple[bytes, Mapping[str, int]] | None,
        replies: Sequence[Reply],
        facts: Sequence[Reply] = (),
    ) -> list[bool]:
        work = self._of(model)
        for reply in replies:
            self._append(reply.stream, reply.fields)
        won = []
        for request_id, attempt in requests:
            known = work.requests.get(request_id)
            wins = known is not None and known[0] <= attempt
            if wins:
                work.size_bytes -= work.requests.pop(request_id)[1]
            won.append(wins)
        if statistics is not None and all(won):
            await self.add_statistics(*statistics)
        for fact in facts:
            self._append(fact.stream, fact.fields)
        return won

    async def begin_attempt(self, model: str, token: int, ids: Sequence[bytes], attempt: int) -> list[bool]:
        work = self._of(model)
        if not work.owner or work.token != token:
            raise not_owner(model, token)
        known = []
        for request_id in ids:
            request = work.requests.get(request_id)
            if request is not None and request[0] < attempt:
                work.requests[request_id] = (attempt, request[1])
            known.append(request is not None)
        return known

    async def unsettled(self, model: str, ids: Sequence[bytes]) -> list[int]:
        requests = self._of(model).requests
        return [requests[request_id][0] if request_id in requests else -1 for request_id in ids]

    async def pending(self, model: str) -> tuple[int, int]:
        work = self._of(model)
        return len(work.requests), work.size_bytes

    async def lanes(self, model: str) -> list[tuple[int, int]]:
        return sorted(self._of(model).lanes)

    # -- ownership and liveness ---------------------------------------------------------------------------------------

    async def owner(self, model: str) -> tuple[str, int]:
        work = self._of(model)
        return work.owner, work.token

    async def take_ownership(self, model: str, owner: str, previous: str) -> int:
        work = self._of(model)
        if work.owner != previous:
            return 0
        work.owner = owner
        work.token += 1
        return work.token

    async def release_ownership(self, model: str, owner: str, token: int) -> None:
        work = self._of(model)
        if (work.owner, work.token) == (owner, token):
            work.owner = ""

    async def beat(self, role: str, incarnation: str, ttl_ms: int) -> None:
        self._leases[keys.alive(role, incarnation)] = monotonic_ns() + ttl_ms * 1_000_000

    async def end_beat(self, role: str, incarnation: str) -> None:
        self._leases.pop(keys.alive(role, incarnation), None)

    async def alive(self, role: str, incarnations: Sequence[str]) -> list[bool]:
        now = monotonic_ns()
        return [self._leases.get(keys.alive(role, incarnation), 0) > now for incarnation in incarnations]

    # -- projections and payloads -------------------------------------------------------------------------------------

    async def add_statistics(self, key: bytes, increments: Mapping[str, int]) -> None:
        totals = self._statistics.setdefault(key, {})
        for name, value in increments.items():
            if name.startswith("last_"):
                totals[name] = max(totals.get(name, 0), value)
            else:
                totals[name] = totals.get(name, 0) + value

    async def statistics(self, key: bytes) -> dict[str, int]:
        return dict(self._statistics.get(key, {}))

    async def delete_keys(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._streams.pop(key, None)
            self._leases.pop(key, None)
            self._statistics.pop(key, None)
            self._blobs.pop(key, None)

    async def put_blob(self, blob_id: str, data: Buffer, ttl_s: int) -> None:
        now = monotonic_ns()
        for key in [key for key, (_, until) in self._blobs.items() if until <= now]:
            del self._blobs[key]
        self._blobs[keys.blob(blob_id)] = (bytes(data), now + ttl_s * 1_000_000_000)

    async def blob(self, blob_id: str) -> bytes | None:
        data, until = self._blobs.get(keys.blob(blob_id), (None, 0))
        return data if until > monotonic_ns() else None

    # -- for readers --------------------------------------------------------------------------------------------------

    def follow(self, following: _Following, after: bytes) -> None:
        """Hand all entries after an id, and all that come, to a reader."""
        if after != _LAST:
            for entry in self._after(following.stream, after):
                following.offer(entry)
        self._followers.setdefault(following.stream, []).append(following)

    def unfollow(self, following: _Following) -> None:
        followers = self._followers[following.stream]
        followers.remove(following)
        if not followers:
            del self._followers[following.stream]

    def consumed(self, stream: bytes, entries: Iterable[Entry]) -> None:
        self._delete(stream, [entry.id for entry in entries])


class _Following:
    """One stream of one reader: the entries it has not been given yet."""

    __slots__ = ("consume", "reader", "stream", "waiting")

    def __init__(self, reader: MemoryReader, stream: bytes, consume: bool) -> None:
        self.reader = reader
        self.stream = stream
        self.consume = consume
        self.waiting: list[Entry] = []

    def offer(self, entry: Entry) -> None:
        if not self.waiting:
            self.reader.wake(self)
        self.waiting.append(entry)


class MemoryReader:
    """`StreamReader` of a `MemoryLog`: all entries of one event loop tick are delivered in the next."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._streams: dict[bytes, _Following] = {}
        self._ready: list[_Following] = []
        self._on_entries: OnEntries | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False

    def start(self, on_entries: OnEntries, on_state: Callable[[bool], None] | None = None) -> None:
        self._on_entries = on_entries
        self._loop = asyncio.get_running_loop()
        if on_state is not None:
            self._loop.call_soon(on_state, True)
        if self._ready:
            self._schedule()

    def add(self, stream: bytes, after: bytes = START, *, consume: bool = False) -> None:
        if stream not in self._streams:
            following = self._streams[stream] = _Following(self, stream, consume)
            self._log.follow(following, after)

    def remove(self, stream: bytes) -> None:
        following = self._streams.pop(stream, None)
        if following is not None:
            self._log.unfollow(following)

    async def close(self) -> None:
        for stream in list(self._streams):
            self.remove(stream)
        self._on_entries = None

    def wake(self, following: _Following) -> None:
        """Deliver what a stream has waiting, soon."""
        self._ready.append(following)
        self._schedule()

    def _schedule(self) -> None:
        if self._loop is not None and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        ready, self._ready = self._ready, []
        for following in ready:
            stream = following.stream
            entries, following.waiting = following.waiting, []
            if self._on_entries is None or self._streams.get(stream) is not following:
                continue
            entries = [entry for entry in entries if self._log.holds(stream, entry)]
            if not entries:
                continue
            try:
                self._on_entries(stream, entries)
            except Exception as error:
                assert self._loop is not None
                self._loop.call_exception_handler({"message": "a stream's callback failed", "exception": error})
            if following.consume:
                self._log.consumed(stream, entries)


def _number(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])


__all__ = ["MemoryLog", "MemoryReader"]
