"""Waves in one process's memory (`charonia.eventlog.port.Waves`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from charonia import keys
from charonia.eventlog.port import Counted, Ended, EndedWave, Fields, Limits, Reply, Sent
from charonia.facts.counters import without
from charonia.tensors import Buffer
from charonia.wire import FIELD_WAVE

from .streams import MemoryStreams
from .work import ModelWork


class MemoryWaves:
    """`Waves` over streams in memory; `of` gives the work of a model."""

    def __init__(
        self,
        streams: MemoryStreams,
        of: Callable[[str], ModelWork],
        add_statistics: Callable[[bytes, Mapping[str, int]], None],
    ) -> None:
        self._streams = streams
        self._of = of
        self._add_statistics = add_statistics

    def send(self, stream: bytes, record: Sequence[Buffer], done: Sent) -> bool:
        entry_id = self._streams.append_here(stream, [FIELD_WAVE, b"".join(record)])
        asyncio.get_running_loop().call_soon(done, entry_id)
        return True

    def flush(self) -> None:
        pass

    def end(
        self,
        waves: Sequence[EndedWave],
        statistics: tuple[bytes, Mapping[str, int]],
        replies: Sequence[Reply],
        done: Ended,
    ) -> bool:
        for reply in replies:
            self._streams.append_here(reply.stream, reply.fields)
        there = [self._streams.take_entry(wave.stream, wave.entry_id) for wave in waves]
        key, increments = statistics
        if gone := [wave for wave, is_there in zip(waves, there, strict=True) if not is_there]:
            requests, rows = sum([wave.succeeded for wave in gone]), sum([wave.rows for wave in gone])
            increments = without(increments, requests, rows) if any(there) else {}
        self._add_statistics(key, increments)
        asyncio.get_running_loop().call_soon(done, there)
        return True

    def count(self, key: bytes, increments: Mapping[str, int], done: Counted) -> bool:
        self._add_statistics(key, increments)
        asyncio.get_running_loop().call_soon(done, None)
        return True

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
        if not self._streams.take_entry(stream, entry_id):
            return b""
        self._of(model).add(requests, tenant)
        return self._streams.append_here(stream, fields)

    async def waiting(self, stream: bytes, entry_ids: Sequence[bytes]) -> list[bool]:
        return [self._streams.has_entry(stream, entry_id) for entry_id in entry_ids]

    async def queue_entries(self, model: str) -> int:
        queues = [keys.queue(model, level, lane) for level, lane in self._of(model).lanes]
        return sum([self._streams.length(queue) for queue in queues])

    async def lease(self, model: str, holder: str, requests: int, size_bytes: int, limits: Limits) -> bool:
        return self._of(model).lease(holder, requests, size_bytes, limits)

    async def leases(self, model: str) -> list[str]:
        return list(self._of(model).leases)
