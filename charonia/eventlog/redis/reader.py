"""`RedisReader`: one blocking XREAD over a changing set of streams, on a connection of its own.

The read never has a time-out: a change of the set ends it with CLIENT UNBLOCK from the command connection. Entries of
consumed streams are deleted by their exact ids: gathered for a moment, on the command connection, in a write that is
made anyway. In a write of their own, or with the next read, they would make the server wake this process for nothing
but their count. XTRIM MINID would cost the server a little less per entry, but it also takes entries the callback never
had (those before `after`, or with a smaller id after a clock went back).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

import hiredis

from charonia.errors import LogUnavailable
from charonia.eventlog.port import START, Entry, OnEntries

from .epoch import stream_order
from .server.address import Address
from .server.hot_connection import Connection
from .server.transport import bulk, pack

_logger = logging.getLogger(__name__)

_COUNT = 64
"""Max entries of each stream in one read: an entry holds up to 64 requests, which is as much as any reader can use."""

_LAST = b"$"
_NO_STREAM = "ERR no such key"
_RECENT = 256
_RETRY_S = 0.001
_RESOLVE_RETRY_S = 0.05
_GATHER_S = 0.25
"""How long deletions wait for others: those of some steps of a stream of tokens go together."""
_MOST_GATHERED = 256
"""So many entries are deleted at once: the server answers no other command meanwhile."""
_DELETE_AGAIN_S = 0.5


class _Following:
    """A followed stream. Removing and adding a stream makes another object, so that a running read cannot confuse them.

    `after` is the id after which it is read, `packed` the same as an argument of a command. `recent` are the ids
    delivered last; `skip` are those of them that a rewind may deliver again.
    """

    __slots__ = ("after", "began", "consume", "packed", "recent", "skip", "stream", "take")

    def __init__(self, stream: bytes, after: bytes, consume: bool, take: OnEntries | None) -> None:
        self.stream = stream
        self.go_on(after)
        self.began = after
        self.consume = consume
        self.take = take
        self.recent: deque[bytes] = deque(maxlen=_RECENT)
        self.skip: frozenset[bytes] = frozenset()

    def go_on(self, after: bytes) -> None:
        """Read on after this id."""
        self.after = after
        self.packed = bulk(after)

    def rewind(self) -> None:
        """Continue after the oldest remembered id, or from the beginning, to find entries that a rewind replaced."""
        self.go_on(self.recent[0] if len(self.recent) == _RECENT else self.began)
        self.skip = frozenset(self.recent)


class RedisReader:
    """`StreamReader` on Redis or Valkey; `commands` is the connection for commands while this one is blocked."""

    def __init__(self, address: Address, commands: Connection) -> None:
        self._commands = commands
        self._connection = Connection(
            address, name="charonia-reader", on_state=self._state, watch=False, primary=commands.primary
        )
        self._streams: dict[bytes, _Following] = {}
        self._names: tuple[bytes, ...] = ()
        """The streams of the last read, and how its command begins: most reads differ in positions alone."""
        self._head = b""
        self._deletions: dict[bytes, list[bytes]] = {}
        self._failed_to_delete = False
        """Whether the last deletions failed: then they are repeated by the timer alone."""
        self._deleting: asyncio.TimerHandle | None = None
        self._on_entries: OnEntries | None = None
        self._on_state: Callable[[bool], None] | None = None
        self._read = 0
        self._reading: dict[bytes, _Following] | None = None
        self._unblocking = 0
        self._scheduled = False
        self._sweeping = False
        self._closed = False
        self.on_refused: Callable[[str], None] = lambda _reply: None
        """Called with the reason when streams could not be read, before a retry."""

    def start(self, on_entries: OnEntries | None = None, on_state: Callable[[bool], None] | None = None) -> None:
        self._on_entries = on_entries
        self._on_state = on_state
        self._connection.start()

    def add(self, stream: bytes, after: bytes = START, *, consume: bool = False, take: OnEntries | None = None) -> None:
        if stream in self._streams:
            return
        following = self._streams[stream] = _Following(stream, after, consume, take)
        if after == _LAST:
            self._resolve(following)
        else:
            self._change()

    def remove(self, stream: bytes) -> None:
        # a running read may still return its entries: they are dropped there
        self._streams.pop(stream, None)

    def hand_over(self, other: RedisReader) -> None:
        """Let another reader, not started yet, continue with the same streams. Close this one afterwards."""
        other._streams = self._streams
        other._deletions = self._deletions
        self._streams, self._deletions = {}, {}
        for following in other._streams.values():
            if following.after == _LAST:
                other._resolve(following)

    async def close(self) -> None:
        self._closed = True
        self._streams.clear()
        self._delete()
        self._on_entries = None
        await self._connection.close()

    # -- the set of streams -------------------------------------------------------------------------------------------

    def _resolve(self, following: _Following) -> None:
        """Read a stream's last id, in order with this process's own writes, so that none of those is missed."""
        if self._closed or self._streams.get(following.stream) is not following:
            return

        def done(replies: list[Any] | None) -> None:
            if replies is None or isinstance(replies[0], hiredis.ReplyError):
                asyncio.get_running_loop().call_later(_RESOLVE_RETRY_S, self._resolve, following)
                return
            following.began = replies[0][0][0] if replies[0] else START
            following.go_on(following.began)
            self._change()

        try:
            self._commands.batch((pack((b"XREVRANGE", following.stream, "+", "-", "COUNT", 1)),), 1, done)
        except LogUnavailable:
            asyncio.get_running_loop().call_later(_RESOLVE_RETRY_S, self._resolve, following)

    def _change(self) -> None:
        """Read the current set of streams, once for all changes of a tick."""
        if not self._scheduled and self._connection.up:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._changed)

    def _changed(self) -> None:
        self._scheduled = False
        if self._closed or self._sweeping or not self._connection.up:
            return
        if self._reading is None:
            self._next()
        elif any(f.after != _LAST and self._reading.get(s) is not f for s, f in self._streams.items()):
            self._unblock(self._read)

    def _unblock(self, read: int) -> None:
        """End the running read. If it has not arrived, or is answered already, this is repeated or ignored."""
        if self._closed or self._read != read or self._reading is None or self._unblocking == read:
            return
        self._unblocking = read

        def done(replies: list[Any] | None) -> None:
            if replies is None or isinstance(replies[0], hiredis.ReplyError):
                if self._read == read:
                    self._connection.drop()  # the set must be read again nevertheless
            elif replies[0] == 0 and self._read == read:
                self._unblocking = 0
                asyncio.get_running_loop().call_later(_RETRY_S, self._unblock, read)

        try:
            self._commands.batch((pack((b"CLIENT", "UNBLOCK", self._connection.client_id)),), 1, done)
        except LogUnavailable:
            self._connection.drop()

    # -- reading ------------------------------------------------------------------------------------------------------

    def _state(self, up: bool) -> None:
        self._reading = None
        self._sweeping = False
        if up:
            self._find_places()
        if self._on_state is not None:
            self._on_state(up)

    def _find_places(self) -> None:
        """A stream that ends before our position has lost entries; new entries may have smaller ids than ours.

        This happens after a failover to a replica whose clock is behind, and in another log at the same address.
        """
        placed = [f for f in self._streams.values() if f.after not in (START, _LAST)]
        if not placed:
            self._sweep()
            return
        self._sweeping = True

        def done(replies: list[Any] | None) -> None:
            if replies is None or self._closed:
                return  # the next connection restarts reading
            unanswered = [r for r in replies if isinstance(r, hiredis.ReplyError) and not str(r).startswith(_NO_STREAM)]
            if self._refused(unanswered):
                return
            for following, info in zip(placed, replies, strict=True):
                last = START if isinstance(info, hiredis.ReplyError) else _last_id(info)
                if stream_order(last) < stream_order(following.after):
                    name = following.stream.decode(errors="replace")
                    _logger.warning("stream %s was rewound from %s to %s", name, following.after, last)
                    following.began = min(following.began, last, key=stream_order)
                    following.rewind()
            self._sweeping = False
            self._sweep()

        pieces = [pack((b"XINFO", b"STREAM", f.stream)) for f in placed]
        self._connection.batch(pieces, len(pieces), done)

    def _sweep(self) -> None:
        """Before reading on, delete consumed entries again: a killed server may forget deletions that it has confirmed.

        Deletes everything between the start of a consumed stream and the current position, and nothing else.
        """
        swept = [f for f in self._streams.values() if f.consume and f.after not in (f.began, _LAST)]
        if not swept:
            self._next()
            return
        self._sweeping = True

        def done(replies: list[Any] | None) -> None:
            if replies is None or self._closed or self._refused(replies):
                return  # the next connection restarts reading
            for following, found in zip(swept, replies, strict=True):
                if found:
                    self._deletions.setdefault(following.stream, []).extend([entry_id for entry_id, _ in found])
            if any(len(found) == _COUNT for found in replies):
                self._delete_and_sweep()
            else:
                self._sweeping = False
                self._next()

        pieces = [pack((b"XRANGE", f.stream, b"(" + f.began, f.after, "COUNT", _COUNT)) for f in swept]
        self._connection.batch(pieces, len(pieces), done)

    def _delete_and_sweep(self) -> None:
        """A full answer may have more entries behind it: delete what it held before the next read."""
        deletions, self._deletions = self._deletions, {}

        def done(replies: list[Any] | None) -> None:
            if replies is None or self._refused(replies):
                self._keep(deletions.items())
            elif not self._closed:
                self._sweep()

        pieces = [pack((b"XDEL", stream, *ids)) for stream, ids in deletions.items()]
        self._connection.batch(pieces, len(pieces), done)

    def _refused(self, replies: list[Any]) -> bool:
        """Whether the server refused one of these commands; then the connection is dropped, and reading restarts."""
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                moved = str(reply).startswith(("MOVED", "ASK"))
                _logger.log(logging.INFO if moved else logging.ERROR, "streams cannot be read: %s", reply)
                self.on_refused(str(reply))
                self._connection.drop()
                return True
        return False

    def _next(self) -> None:
        """Read on, and delete consumed entries soon."""
        if self._deletions and self._deleting is None:
            self._deleting = asyncio.get_running_loop().call_later(_GATHER_S, self._delete)
        reading = {stream: f for stream, f in self._streams.items() if f.after != _LAST}
        if not reading:
            self._reading = None
            return
        names = tuple(reading)
        if names != self._names:
            command = (b"XREAD", b"COUNT", b"%d" % _COUNT, b"BLOCK", b"0", b"STREAMS", *names)
            self._names = names
            self._head = b"*%d\r\n" % (len(command) + len(names)) + b"".join(map(bulk, command))
        self._read += 1
        self._reading = reading

        def done(replies: list[Any] | None) -> None:
            self._done(reading, replies)

        read = b"".join([self._head, *[following.packed for following in reading.values()]])
        try:
            self._connection.batch((read,), 1, done)
        except LogUnavailable:  # the next connection restarts reading
            pass

    def _done(self, reading: dict[bytes, _Following], replies: list[Any] | None) -> None:
        if replies is None or self._refused(replies):
            return
        self._reading = None
        for stream, raw in replies[-1] or ():
            following = reading[stream]
            if self._streams.get(stream) is following:
                self._deliver(following, [Entry(entry_id, fields) for entry_id, fields in raw])
        if not self._closed:
            self._next()

    def _deliver(self, following: _Following, entries: list[Entry]) -> None:
        take = following.take or self._on_entries
        if take is None:
            return
        ids = [entry.id for entry in entries]
        following.after = after = ids[-1]
        following.packed = b"$%d\r\n%b\r\n" % (len(after), after)  # as `go_on`, for each delivery
        following.recent.extend(ids)
        if following.skip:
            entries = [entry for entry in entries if entry.id not in following.skip]
        try:
            if entries:
                take(following.stream, entries)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a stream's callback failed", "exception": error}
            )
        if following.consume:
            gathered = self._deletions.setdefault(following.stream, [])
            gathered += ids
            if len(gathered) >= _MOST_GATHERED and not self._failed_to_delete:
                self._delete()

    def _delete(self) -> None:
        """Deletions that fail are repeated with the next ones, or a little later."""
        if self._deleting is not None:
            self._deleting.cancel()
            self._deleting = None
        gathered, self._deletions = self._deletions, {}
        self._failed_to_delete = False
        if not gathered:
            return
        deletions = [
            (stream, ids[start : start + _MOST_GATHERED])
            for stream, ids in gathered.items()
            for start in range(0, len(ids), _MOST_GATHERED)
        ]

        def done(replies: list[Any] | None) -> None:
            if replies is None:
                self._keep(deletions)
                return
            refused = [isinstance(reply, hiredis.ReplyError) for reply in replies]
            if any(refused):
                self._keep(compress(deletions, refused))

        try:
            pieces = [pack((b"XDEL", stream, *ids)) for stream, ids in deletions]
            self._commands.batch(pieces, len(pieces), done, lazy=True)
        except LogUnavailable:
            self._keep(deletions)

    def _keep(self, deletions: Iterable[tuple[bytes, list[bytes]]]) -> None:
        """Keep deletions that may not have happened; repeating them is harmless."""
        self._failed_to_delete = True
        for stream, ids in deletions:
            self._deletions.setdefault(stream, []).extend(ids)
        if self._deleting is None and not self._closed:
            self._deleting = asyncio.get_running_loop().call_later(_DELETE_AGAIN_S, self._delete)


def _last_id(info: list[Any]) -> bytes:
    last: bytes = dict(zip(info[::2], info[1::2], strict=True))[b"last-generated-id"]
    return last
