"""Writes the keys of a state file into an empty log, in batches of commands, with part of the file in memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hiredis

from charonia.errors import InvalidArgument
from charonia.eventlog.redis.server.hot_connection import Connection
from charonia.eventlog.redis.server.transport import Argument, pack_pieces
from charonia.tensors import Buffer

from .exporting import Progress
from .state_file import Summary, frames

_BATCH_BYTES = 2 * 1024 * 1024
_BATCH = 1000
_ARGUMENTS = 2000
"""Max items of a key in one command."""
_ADDING = {"hash": "HSET", "set": "SADD", "list": "RPUSH"}
_NEVER_READ = b"charonia-import"
"""A consumer group that only creates the stream."""


async def import_keys(
    connection: Connection, path: Path, summary: Summary, progress: Progress
) -> tuple[int, dict[str, bytes]]:
    """Write every key of a checked file; returns their number, and the files in it. Raises `InvalidArgument`.

    Expired keys are not written.
    """
    sink, done, written, lasting = _Sink(connection, path), 0, 0, 0
    key: _Key | None = None
    files: dict[str, bytes] = {}
    now_ms = time.time_ns() // 1_000_000
    for frame in frames(path):
        if type(frame) is dict:
            continue
        word = frame[0]
        if word in ("k", "f", "e"):
            if key is not None:
                await sink.add(key.end())
            key = None
        if word == "k":
            done += 1
            if not frame[3] or frame[3] > now_ms:
                key = _Key(frame[1], frame[2], frame[3])
                written += 1
                lasting += not frame[3]
                await sink.add(key.begin(frame[4]))
            progress(done, summary.keys)
        elif word == "f":
            files[frame[1]] = frame[2]
        elif key is not None:
            await sink.add(key.more(frame))
    await sink.flush()
    found = await connection.execute("DBSIZE")
    if not lasting <= found <= written:
        raise InvalidArgument(f"'{path}' cannot be imported: the log has {found} keys, not {written}")
    return written, files


class _Sink:
    """Sends commands in batches, and refuses further ones after an error."""

    def __init__(self, connection: Connection, path: Path) -> None:
        self._connection, self._path = connection, path
        self._pieces: list[Buffer] = []
        self._size = self._count = 0

    async def add(self, commands: Iterable[tuple[Argument, ...]]) -> None:
        for command in commands:
            pieces = pack_pieces(command)
            self._pieces += pieces
            self._size += sum(map(len, pieces))
            self._count += 1
            if self._count >= _BATCH or self._size >= _BATCH_BYTES:
                await self.flush()

    async def flush(self) -> None:
        pieces, count = self._pieces, self._count
        self._pieces, self._size, self._count = [], 0, 0
        if count:
            for reply in await self._connection.execute_all(pieces, count):
                if isinstance(reply, hiredis.ReplyError):
                    raise InvalidArgument(f"'{self._path}' cannot be imported: the log answered {reply}")


class _Key:
    """The commands that write one key."""

    def __init__(self, name: bytes, kind: str, expires_ms: int) -> None:
        self._name, self._kind, self._expires_ms = name, kind, expires_ms
        self._deleted: list[bytes] = []
        self._groups: list[dict[str, Any]] = []
        self._pending: dict[bytes, list[list[Any]]] = {}

    def begin(self, content: Any) -> Iterable[tuple[Argument, ...]]:
        if self._kind == "stream":
            yield ("XGROUP", "CREATE", self._name, _NEVER_READ, "0", "MKSTREAM")
            yield ("XGROUP", "DESTROY", self._name, _NEVER_READ)
        elif self._kind == "string":
            yield ("SET", self._name, content)
            return
        yield from self._content(content)

    def more(self, frame: Any) -> Iterable[tuple[Argument, ...]]:
        match frame:
            case ["m", content]:
                yield from self._content(content)
            case ["p", group, pending]:
                self._pending.setdefault(group, []).append(pending)
            case ["s", end]:
                yield from self._stream_end(end)

    def end(self) -> Iterable[tuple[Argument, ...]]:
        if self._expires_ms:
            yield ("PEXPIREAT", self._name, self._expires_ms)

    def _content(self, content: Any) -> Iterable[tuple[Argument, ...]]:
        if self._kind == "string":
            yield ("APPEND", self._name, content)
        elif self._kind == "stream":
            for entry_id, fields in zip(content[::2], content[1::2], strict=True):
                if not fields:
                    self._deleted.append(entry_id)
                yield ("XADD", self._name, entry_id, *(fields or (b"", b"")))
        elif self._kind == "zset":
            turned = [part for pair in zip(content[1::2], content[::2], strict=True) for part in pair]
            yield from self._many("ZADD", turned)
        else:
            yield from self._many(_ADDING[self._kind], content)

    def _many(self, command: str, content: list[bytes]) -> Iterable[tuple[Argument, ...]]:
        for at in range(0, len(content), _ARGUMENTS):
            yield (command, self._name, *content[at : at + _ARGUMENTS])

    def _stream_end(self, end: dict[str, Any]) -> Iterable[tuple[Argument, ...]]:
        """Restore ids and counts, then the groups, whose last ids must not be behind the stream's."""
        name = self._name
        last: tuple[Argument, ...] = ("XSETID", name, end["last"], "ENTRIESADDED", end["added"])
        yield (*last, "MAXDELETEDID", end["deleted"])
        for group in end["groups"]:
            yield ("XGROUP", "CREATE", name, group["name"], group["last"], *_read(group))
            for consumer in group["consumers"]:
                yield ("XGROUP", "CREATECONSUMER", name, group["name"], consumer)
            for flat in self._pending.get(group["name"], []):
                for entry_id, who, since_ms, times in zip(*[iter(flat)] * 4, strict=True):
                    claim: tuple[Argument, ...] = ("XCLAIM", name, group["name"], who, 0, entry_id)
                    yield (*claim, "TIME", since_ms, "RETRYCOUNT", times, "FORCE", "JUSTID")
        if self._deleted:
            for at in range(0, len(self._deleted), _ARGUMENTS):
                yield ("XDEL", name, *self._deleted[at : at + _ARGUMENTS])
            yield (*last, "MAXDELETEDID", end["deleted"])  # deleting the placeholders has changed these
            for group in end["groups"]:
                yield ("XGROUP", "SETID", name, group["name"], group["last"], *_read(group))


def _read(group: dict[str, Any]) -> tuple[Argument, ...]:
    """The number of entries that a group has read, if known."""
    return () if group["read"] is None else ("ENTRIESREAD", group["read"])
