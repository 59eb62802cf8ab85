"""Reads every key of a log into frames of a state file, with a bounded part of the log in memory.

No other process may write meanwhile: keys are read one by one. Heartbeats are not part of the state.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import hiredis

from charonia.errors import InvalidArgument
from charonia.eventlog.redis.server.hot_connection import Connection
from charonia.eventlog.redis.server.transport import Argument, Refused, pack

from .state_file import TYPES, StateWriter

Progress = Callable[[int, int], None]
"""Called with the number of finished keys, and of all keys."""

PIECE_BYTES = 1024 * 1024
"""Approximate size of the pieces in which a large key is read."""
_SMALL_BYTES = 32 * 1024
_PAGE = 500
"""Keys at a time; at most 16 MB of a log are in memory."""
_FIRST_COUNT = 16
_MAX_COUNT = 5000
_ALIVE = b"alive:"
_LISTS = b"tk:"
"""How the names of all lists of a log begin."""
_DELETED: list[bytes] = []


async def export_keys(
    connection: Connection, writer: StateWriter, left_out: Callable[[bytes], bool], progress: Progress
) -> None:
    """Write every key but those `left_out`. Raises `InvalidArgument` for a key type that a log does not have."""
    total, done = await connection.execute("DBSIZE"), 0
    cursor, once = b"0", set[bytes]()
    while True:
        cursor, names = await connection.execute("SCAN", cursor, "COUNT", _PAGE)
        wanted = [name for name in dict.fromkeys(names) if not name.startswith(_ALIVE) and not left_out(name)]
        await _page(wanted, connection, writer, once)
        done += len(names)
        progress(done, max(done, total))
        if cursor == b"0":
            return


async def program(connection: Connection) -> str:
    """The server's name and version."""
    about = await connection.execute("INFO", "server")
    fields = dict(re.findall(rb"^(valkey|redis)_version:([\d.]+)", about, re.MULTILINE))
    name = b"valkey" if b"valkey" in fields else b"redis"
    return f"{name.decode().capitalize()} {fields.get(name, b'?').decode()}"


async def living(connection: Connection) -> list[str]:
    """The processes whose heartbeats are in the log."""
    found: list[bytes] = []
    cursor = b"0"
    while True:
        cursor, names = await connection.execute("SCAN", cursor, "MATCH", _ALIVE + b"*", "COUNT", 10_000)
        found += names
        if cursor == b"0":
            return sorted({name.decode(errors="replace").rpartition(":")[2] for name in found})


async def _page(names: Sequence[bytes], connection: Connection, writer: StateWriter, once: set[bytes]) -> None:
    """Keys that SCAN returned together. It may return a key again: only streams and lists must not be written twice."""
    about = await _all(
        connection,
        [command for name in names for command in (("TYPE", name), ("PEXPIRETIME", name), ("MEMORY", "USAGE", name))],
    )
    small: list[tuple[bytes, str, int]] = []
    for name, kind, expires_ms, size in zip(names, about[::3], about[1::3], about[2::3], strict=True):
        word = kind.decode()
        if word == "none":
            continue  # it has expired
        if word not in TYPES or (word == "list" and not name.startswith(_LISTS)):
            raise InvalidArgument(f"the key '{name.decode(errors='replace')}' is a {word}: no log of charonia has such")
        expires_ms = max(0, expires_ms)
        key = (name, word, expires_ms)
        if name in once:
            continue
        if word in ("stream", "list"):
            once.add(name)
        if word == "stream" or (size or 0) > _SMALL_BYTES:
            try:
                await _LARGE[word](connection, writer, key)
            except Refused:  # an import leaves out what has been written of it, as its time to live is over
                if not expires_ms or await connection.execute("EXISTS", name):
                    raise
        else:
            small.append(key)
    contents = await _all(connection, [_WHOLE[kind](name) for name, kind, _ in small])
    for (name, kind, expires_ms), content in zip(small, contents, strict=True):
        if content not in (None, []):
            writer.add(["k", name, kind, expires_ms, content])


async def _all(connection: Connection, commands: Sequence[Sequence[Argument]]) -> list[Any]:
    """The replies to commands, sent together. Raises `InvalidArgument` if one is refused."""
    if not commands:
        return []
    replies = await connection.execute_all([pack(command) for command in commands], len(commands))
    for command, reply in zip(commands, replies, strict=True):
        if isinstance(reply, hiredis.ReplyError):
            raise InvalidArgument(f"the log refuses {command[0]!s}, which an export needs: {reply}")
    return replies


_WHOLE: dict[str, Callable[[bytes], tuple[Argument, ...]]] = {
    "string": lambda name: ("GET", name),
    "hash": lambda name: ("HGETALL", name),
    "set": lambda name: ("SMEMBERS", name),
    "zset": lambda name: ("ZRANGE", name, 0, -1, "WITHSCORES"),
    "list": lambda name: ("LRANGE", name, 0, -1),
}


class _Frames:
    """The frames of one key: the first names it, the others continue it."""

    def __init__(self, writer: StateWriter, key: tuple[bytes, str, int]) -> None:
        self._writer, self._key, self._begun = writer, key, False

    def add(self, content: Any) -> None:
        self._writer.add(["m", content] if self._begun else ["k", *self._key, content])
        self._begun = True


async def _string(connection: Connection, writer: StateWriter, key: tuple[bytes, str, int]) -> None:
    length = await connection.execute("STRLEN", key[0])
    frames = _Frames(writer, key)
    for at in range(0, length, PIECE_BYTES):
        frames.add(await connection.execute("GETRANGE", key[0], at, at + PIECE_BYTES - 1))


async def _collection(connection: Connection, writer: StateWriter, key: tuple[bytes, str, int]) -> None:
    command = {"hash": "HSCAN", "set": "SSCAN", "zset": "ZSCAN"}[key[1]]
    frames, count, cursor = _Frames(writer, key), _FIRST_COUNT, b"0"
    while True:
        cursor, content = await connection.execute(command, key[0], cursor, "COUNT", count)
        if content:
            frames.add(content)
            count = _next_count(count, sum(map(len, content)))
        if cursor == b"0":
            return


async def _list(connection: Connection, writer: StateWriter, key: tuple[bytes, str, int]) -> None:
    frames, count, at = _Frames(writer, key), _FIRST_COUNT, 0
    while content := await connection.execute("LRANGE", key[0], at, at + count - 1):
        frames.add(content)
        at += len(content)
        count = _next_count(count, sum(map(len, content)))


def _next_count(count: int, size_bytes: int) -> int:
    """Number of items to ask for next, so that they amount to about one piece."""
    return max(1, min(_MAX_COUNT, count * 2, count * PIECE_BYTES // max(1, size_bytes)))


# -- streams -----------------------------------------------------------------------------------------------------------


async def _stream(connection: Connection, writer: StateWriter, key: tuple[bytes, str, int]) -> None:
    name = key[0]
    about = _fields(await connection.execute("XINFO", "STREAM", name))
    groups = [_fields(group) for group in await connection.execute("XINFO", "GROUPS", name)] if about["groups"] else []
    deleted = sorted(await _deleted_but_pending(connection, name, groups), key=_order)
    frames = _Frames(writer, key)
    frames.add([])
    count, after = _FIRST_COUNT, b"-"
    while True:
        entries = await connection.execute("XRANGE", name, after, "+", "COUNT", count)
        last = len(entries) < count
        content: list[Any] = []
        for entry_id, fields in entries:
            while deleted and _order(deleted[0]) < _order(entry_id):
                content += [deleted.pop(0), _DELETED]
            content += [entry_id, fields]
        if last:
            for entry_id in deleted:
                content += [entry_id, _DELETED]
        if content:
            frames.add(content)
        if last:
            break
        after = b"(" + entries[-1][0]
        count = _next_count(count, sum(len(field) for _, fields in entries for field in fields))
    ended = {
        "last": about["last-generated-id"],
        "deleted": about.get("max-deleted-entry-id", b"0-0"),
        "added": about.get("entries-added", 0),
        "groups": [await _group(connection, name, group) for group in groups],
    }
    for group in groups:
        async for pending in _pending(connection, name, group["name"]):
            now_ms = time.time_ns() // 1_000_000
            flat = [part for entry, who, idle_ms, times in pending for part in (entry, who, now_ms - idle_ms, times)]
            writer.add(["p", group["name"], flat])
    writer.add(["s", ended])


async def _group(connection: Connection, name: bytes, group: dict[str, Any]) -> dict[str, Any]:
    consumers = await connection.execute("XINFO", "CONSUMERS", name, group["name"])
    return {
        "name": group["name"],
        "last": group["last-delivered-id"],
        "read": group.get("entries-read"),
        "consumers": [_fields(consumer)["name"] for consumer in consumers],
    }


async def _pending(connection: Connection, name: bytes, group: bytes) -> Any:
    after = b"-"
    while entries := await connection.execute("XPENDING", name, group, after, "+", _MAX_COUNT):
        yield entries
        after = b"(" + entries[-1][0]


async def _deleted_but_pending(connection: Connection, name: bytes, groups: Sequence[dict[str, Any]]) -> set[bytes]:
    """Ids of deleted entries that are still pending for consumers."""
    found: set[bytes] = set()
    for group in groups:
        async for pending in _pending(connection, name, group["name"]):
            ids = [entry[0] for entry in pending]
            there = await _all(connection, [("XRANGE", name, each, each) for each in ids])
            found.update(entry_id for entry_id, entries in zip(ids, there, strict=True) if not entries)
    return found


def _fields(flat: Sequence[Any]) -> dict[str, Any]:
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def _order(entry_id: bytes) -> tuple[int, int]:
    time_ms, _, number = entry_id.partition(b"-")
    return int(time_ms), int(number)


_LARGE = {
    "string": _string,
    "hash": _collection,
    "set": _collection,
    "zset": _collection,
    "list": _list,
    "stream": _stream,
}
