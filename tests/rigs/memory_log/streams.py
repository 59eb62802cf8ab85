"""Streams in one process's memory, and who reads them: what `memory_log.log` is built on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from charonia.clock import wall_ns
from charonia.eventlog.port import START, Entry, Fields, OnEntries, StreamReader
from charonia.tensors import Buffer

_LAST = b"$"
_JOURNALS = b"j:"
SEQUENCE_BITS = 20
_LAST_SEQUENCE = (1 << SEQUENCE_BITS) - 1


class MemoryStreams:
    """Entry ids count up, whatever the stream; those of journals are times."""

    def __init__(self) -> None:
        self._streams: dict[bytes, dict[int, Entry]] = {}
        self._followers: dict[bytes, list[_Following]] = {}
        self._last = 0
        self._last_journalled = 0

    # -- streams ------------------------------------------------------------------------------------------------------

    async def append(self, stream: bytes, fields: Fields) -> bytes:
        return self._append(stream, fields)

    def append_here(self, stream: bytes, fields: Fields) -> bytes:
        """The same without waiting: all of it is here."""
        return self._append(stream, fields)

    def _append(self, stream: bytes, fields: Fields) -> bytes:
        if not fields or len(fields) % 2:
            raise ValueError("fields of an entry alternate names and values")
        if stream.startswith(_JOURNALS):
            self._last_journalled = max(self._last_journalled + 1, (wall_ns() // 1_000_000) << SEQUENCE_BITS)
            return self._append_at(stream, self._last_journalled, list(fields))
        self._last += 1
        return self._append_at(stream, self._last << SEQUENCE_BITS, list(fields))

    def _append_at(self, stream: bytes, number: int, fields: list[Buffer]) -> bytes:
        entry = Entry(b"%d-%d" % (number >> SEQUENCE_BITS, number & _LAST_SEQUENCE), fields)
        self._streams.setdefault(stream, {})[number] = entry
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
            entries.pop(entry_number(entry_id), None)

    async def range(self, stream: bytes, after: bytes = START, count: int = 1000) -> list[Entry]:
        return list(islice(self._after(stream, after), count))

    def _after(self, stream: bytes, after: bytes) -> Iterator[Entry]:
        number = entry_number(after)
        return (entry for at, entry in self._streams.get(stream, {}).items() if at > number)

    async def delete_stream(self, stream: bytes) -> None:
        self._streams.pop(stream, None)

    def length(self, stream: bytes) -> int:
        return len(self._streams.get(stream, ()))

    def has_entry(self, stream: bytes, entry_id: bytes) -> bool:
        return entry_number(entry_id) in self._streams.get(stream, ())

    def take_entry(self, stream: bytes, entry_id: bytes) -> bool:
        """Delete an entry; whether it was there."""
        return self._streams.get(stream, {}).pop(entry_number(entry_id), None) is not None

    def holds(self, stream: bytes, entry: Entry) -> bool:
        """Whether an entry has not been deleted."""
        return entry_number(entry.id) in self._streams.get(stream, ())

    def reader(self) -> StreamReader:
        return MemoryReader(self)

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

    __slots__ = ("consume", "reader", "stream", "take", "waiting")

    def __init__(self, reader: MemoryReader, stream: bytes, consume: bool, take: OnEntries | None) -> None:
        self.reader = reader
        self.stream = stream
        self.consume = consume
        self.take = take
        self.waiting: list[Entry] = []

    def offer(self, entry: Entry) -> None:
        if not self.waiting:
            self.reader.wake(self)
        self.waiting.append(entry)


class MemoryReader:
    """`StreamReader` of `MemoryStreams`: all entries of one event loop tick are delivered in the next."""

    def __init__(self, log: MemoryStreams) -> None:
        self._log = log
        self._streams: dict[bytes, _Following] = {}
        self._ready: list[_Following] = []
        self._on_entries: OnEntries | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False

    def start(self, on_entries: OnEntries | None = None, on_state: Callable[[bool], None] | None = None) -> None:
        self._on_entries = on_entries
        self._loop = asyncio.get_running_loop()
        if on_state is not None:
            self._loop.call_soon(on_state, True)
        if self._ready:
            self._schedule()

    def add(self, stream: bytes, after: bytes = START, *, consume: bool = False, take: OnEntries | None = None) -> None:
        if stream not in self._streams:
            following = self._streams[stream] = _Following(self, stream, consume, take)
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
            take = following.take or self._on_entries
            if take is None or self._streams.get(stream) is not following:
                continue
            entries = [entry for entry in entries if self._log.holds(stream, entry)]
            if not entries:
                continue
            try:
                take(stream, entries)
            except Exception as error:
                assert self._loop is not None
                self._loop.call_exception_handler({"message": "a stream's callback failed", "exception": error})
            if following.consume:
                self._log.consumed(stream, entries)


def entry_number(entry_id: bytes) -> int:
    """Where an entry stands in its stream."""
    first, _, second = entry_id.partition(b"-")
    return int(first) << SEQUENCE_BITS | min(int(second or 0), _LAST_SEQUENCE)
