"""Waves on Redis: one XADD accepts, one XDEL in a script settles (`charonia.eventlog.port.Waves`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import hiredis

from charonia import keys
from charonia.errors import CharoniaError
from charonia.eventlog.port import Counted, Ended, EndedWave, Fields, Limits, Reply, Sent
from charonia.tasks import Tasks
from charonia.tensors import Buffer
from charonia.wire import FIELD_WAVE

from . import scripts
from .commands import Commands, call_of
from .durability import Durability
from .server.hot_connection import Connection
from .server.transport import UNCOPIED_BYTES, Argument, Refused, bulk, lost, pack, pack_pieces
from .stored_records import amounts_of, value_of

_log = logging.getLogger(__name__)

_LEASE = b"lease:"
_THERE = ord("1")
_MULTI, _EXEC = pack((b"MULTI",)), pack((b"EXEC",))


class RedisWaves:
    """`charonia.eventlog.port.Waves` on one server; waves are written to its connection without waiting."""

    def __init__(self, commands: Commands, connection: Connection, durability: Durability) -> None:
        self._commands = commands
        self._connection = connection
        self._durability = durability
        self._tasks = Tasks()
        self._unsent: list[tuple[Sequence[Buffer], Sent]] = []

    def send(self, stream: bytes, record: Sequence[Buffer], done: Sent) -> bool:
        pieces = _append(stream, record)
        if not self._durability.replies_prove_default:
            self._tasks.spawn(self._send_and_wait(pieces, done))
            return True
        if not self._unsent:
            if not self._connection.takes_writes:
                return False
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent.append((pieces, done))
        return True

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not unsent:
            return
        dones = [done for _, done in unsent]
        pieces: list[Buffer] = [piece for wave, _ in unsent for piece in wave]
        if len(unsent) > 1:  # as one transaction: readers wake once, and get all of them
            pieces = [_MULTI, *pieces, _EXEC]

        def answered(replies: list[Any] | None) -> None:
            results = _results(replies, len(dones))
            for done, result in zip(dones, results, strict=True):
                try:
                    done(result)
                except Exception:  # the other waves of this write get their results
                    _log.exception("the log's answer to a wave could not be handled")

        if not self._connection.batch_now(pieces, len(dones) + 2 * (len(dones) > 1), answered):
            answered(None)

    async def append(self, stream: bytes, record: Sequence[Buffer]) -> bytes:
        """As `send`, awaited."""
        writes = await self._commands.writes("")
        entry_id = await writes.execute_pieces(_append(stream, record))
        await writes.reached()
        return bytes(entry_id)

    async def _send_and_wait(self, pieces: Sequence[Buffer], done: Sent) -> None:
        """Append at a level that needs a barrier."""
        try:
            writes = await self._commands.writes("")
            entry_id = await writes.execute_pieces(pieces)
            await writes.reached()
        except CharoniaError as error:
            done(error)
        else:
            done(bytes(entry_id))

    def end(
        self,
        waves: Sequence[EndedWave],
        statistics: tuple[bytes, Mapping[str, int]],
        replies: Sequence[Reply],
        done: Ended,
    ) -> bool:
        places, call = _end_call(waves, statistics)

        def answered(result: Any) -> None:
            done(result if isinstance(result, CharoniaError) else _still_there(result, places))

        return self._commands.settle_now(scripts.END_WAVES, [call], replies, (), answered, soon=True)

    async def delete(self, waves: Sequence[EndedWave], statistics: tuple[bytes, Mapping[str, int]]) -> Sequence[bool]:
        """As `end` without replies, awaited."""
        places, call = _end_call(waves, statistics)
        return _still_there(await self._commands.run(scripts.END_WAVES, [call]), places)

    def count(self, key: bytes, increments: Mapping[str, int], done: Counted) -> bool:
        sums, amounts = amounts_of(increments)
        call = call_of(scripts.ADD_STATISTICS, (key,), (sums, *amounts))

        def answered(answers: list[Any] | None) -> None:
            result = _result(answers, 0)
            done(result if isinstance(result, CharoniaError) else None)

        return self._connection.batch_soon([call], 1, answered)

    async def burst(
        self,
        model: str,
        stream: bytes,
        entry_id: bytes,
        requests: Sequence[tuple[bytes, int]],
        fields: Fields,
        *,
        tenant: str = "",
    ) -> bytes:
        sizes = [size for _, size in requests]
        lasts = bytes([request_id[-1] for request_id, _ in requests])
        quoted = quote(tenant, safe="-_.~ ").encode() if tenant else b""
        names = [stream, keys.unsettled(model), keys.counters(model)]
        if tenant:
            names.append(keys.tenant(model, tenant))
        group = (requests[0][0][:-1], value_of(lasts, sizes, quoted))
        command: list[Argument] = [b"EVALSHA", scripts.BURST.digest, len(names), *names]
        command += (entry_id, len(requests), sum(sizes), *group, *fields)
        return bytes(await self._commands.run(scripts.BURST, pack_pieces(command)))

    async def waiting(self, stream: bytes, entry_ids: Sequence[bytes]) -> list[bool]:
        found = await self._commands.each([("XRANGE", stream, one, one) for one in entry_ids])
        return [bool(entries) for entries in found]

    async def queue_entries(self, model: str) -> int:
        queues = [keys.queue(model, level, lane) for level, lane in await self._commands.lanes(model)]
        return sum(await self._commands.each([("XLEN", queue) for queue in queues]))

    async def lease(self, model: str, holder: str, requests: int, size_bytes: int, limits: Limits) -> bool:
        arguments = (holder, requests, size_bytes, limits.requests, limits.size_bytes)
        return bool(await self._commands.script(scripts.LEASE, [keys.counters(model)], arguments))

    async def leases(self, model: str) -> list[str]:
        counters = await self._commands.execute("HGETALL", keys.counters(model))
        return [name[len(_LEASE) :].decode() for name in map(bytes, counters[::2]) if name.startswith(_LEASE)]


def _end_call(waves: Sequence[EndedWave], statistics: tuple[bytes, Mapping[str, int]]) -> tuple[list[int], bytes]:
    """The packed call of the script, and the places of the waves in the order in which it has them."""
    key, increments = statistics
    streams: dict[bytes, list[int]] = {}
    for place, wave in enumerate(waves):
        streams.setdefault(wave.stream, []).append(place)
    places = [place for members in streams.values() for place in members]
    amounts = ",".join([f"{waves[place].succeeded},{waves[place].rows}" for place in places])
    arguments: list[Argument] = [len(streams), amounts]
    for stream, members in streams.items():
        arguments += (stream, len(members), *[waves[place].entry_id for place in members])
    sums, added = amounts_of(increments)
    return places, call_of(scripts.END_WAVES, (key,), (*arguments, sums, *added))


def _still_there(answer: Any, places: Sequence[int]) -> Sequence[bool]:
    there = [True] * len(places)
    if answer != 1:
        for place, mark in zip(places, bytes(answer), strict=True):
            there[place] = mark == _THERE
    return there


def _append(stream: bytes, record: Sequence[Buffer]) -> Sequence[Buffer]:
    size = sum(map(len, record))
    if size < UNCOPIED_BYTES:
        return (b"".join((_append_head(stream), b"%d\r\n" % size, *record, b"\r\n")),)
    return pack_pieces((b"XADD", stream, b"*", FIELD_WAVE, b"".join(record)))


@lru_cache(maxsize=1024)
def _append_head(stream: bytes) -> bytes:
    """An append to a stream as it is packed, up to the size of the record."""
    return b"*5\r\n" + b"".join(map(bulk, (b"XADD", stream, b"*", FIELD_WAVE))) + b"$"


def _results(replies: list[Any] | None, count: int) -> Sequence[Any]:
    """The result of each of `count` commands, which were a transaction if there are several."""
    if replies is None or count == 1:
        return [_result(replies, 0) for _ in range(count)]
    found = replies[-1]
    if type(replies[0]) is hiredis.ReplyError:  # the user may not use transactions: each command was executed by itself
        return [_result(replies, at + 1) for at in range(count)]
    if type(found) is hiredis.ReplyError:  # none was executed: the first refusal gives the reason
        return [_result([next((one for one in replies if type(one) is hiredis.ReplyError), found)], 0)] * count
    if found is not None and hiredis.ReplyError not in map(type, found):
        return list(found)
    return [_result(found, at) for at in range(count)]


def _result(replies: list[Any] | None, at: int) -> Any:
    """One of the replies, or the error in its place."""
    if replies is None:
        return lost()
    reply = replies[at]
    return Refused(str(reply)) if type(reply) is hiredis.ReplyError else reply
