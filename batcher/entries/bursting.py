"""Bursts waves: replaces a wave in the log by its requests, so that each can be handled alone.

The new entry goes to the end of the queue, from where the owner reads it like any other; the requests keep the times at
which they were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from batcher.scheduling.decisions import BurstWave
from batcher.scheduling.observations import BatchDied, BatchLost, RequestQueued
from charonia import failpoints
from charonia.errors import CharoniaError
from charonia.eventlog.port import Work
from charonia.wire import PREFIX_BYTES, Wave, record_fields

from .carriers import carried_of


async def burst_wave(log: Work, model: str, stream: bytes, entry_id: bytes, wave: Wave) -> bytes:
    """Replace one wave in the log; returns the id of the entry with its requests, b"" when it was settled or burst
    before. Raises what the log raises.
    """
    sizes = zip(wave.ids(), wave.request_bytes(), strict=True)
    fields = record_fields([request.record for request in wave.requests()])
    new_id = await log.waves.burst(model, stream, entry_id, list(sizes), fields)
    failpoints.hit("batcher.bursting")
    return new_id


class Bursting:
    """The bursts of one owner, and which of the resulting requests are possible poison requests."""

    def __init__(self, log: Work, model: str, has_read: Callable[[bytes, bytes], bool]) -> None:
        """`has_read` is `Windows.has_read`."""
        self._log = log
        self._model = model
        self._has_read = has_read
        self.suspects: dict[bytes, BatchDied | str] = {}
        """Maps the prefix of their ids to the failure of their batch, or to the executor that was lost with them."""
        self._entries: dict[bytes, tuple[bytes, bytes]] = {}
        """Maps the same prefix to the stream and id of the entry that will bring them."""
        self._unsure: set[bytes] = set()
        """The prefixes of waves that the log may have burst without an answer that was read."""

    def died(self, death: BatchDied, members: Sequence[RequestQueued]) -> None:
        """A batch of waves ended its instance; those without an outcome will be burst."""
        if death.blameless:
            return
        waves = [record for request in members if request.id in death.ids and (record := wave_of(request))]
        ids = frozenset(request_id for wave in waves for request_id in wave.ids())
        for wave in waves:
            self.suspects[wave.prefix] = replace(death, ids=ids)

    async def burst(self, decision: BurstWave) -> None:
        """Carry out a decision. Raises what the log raises, then it may be tried again."""
        wave = wave_of(decision.request)
        assert wave is not None
        if decision.suspect and wave.prefix not in self._unsure:  # before they can be read; once, as they may be by now
            self.suspects.setdefault(wave.prefix, decision.executor)
        entry = carried_of(decision.request).entry
        try:
            new_id = await burst_wave(self._log, self._model, entry.stream, entry.entry_id, wave)
            # they may still come from the entry of an attempt whose answer was lost
            may_come = bool(new_id) or (wave.prefix in self._unsure and await self._any_unsettled(wave))
        except CharoniaError:
            self._unsure.add(wave.prefix)
            raise
        self._unsure.discard(wave.prefix)
        if not may_come:
            self.suspects.pop(wave.prefix, None)
        elif new_id and wave.prefix in self.suspects:  # they were not read before the log's answer
            self._entries[wave.prefix] = (entry.stream, new_id)

    async def _any_unsettled(self, wave: Wave) -> bool:
        """Whether the wave was burst rather than settled: only then the log knows its requests."""
        return any(attempt >= 0 for attempt in await self._log.unsettled(self._model, wave.ids()))

    def suspected(self, queued: Sequence[RequestQueued]) -> list[BatchLost | BatchDied]:
        """The suspicions that belong to requests being queued: which of them were in the same batch when it failed."""
        if not self.suspects:
            return []
        found: dict[bytes, list[RequestQueued]] = {}
        for request in queued:
            prefix = request.id[:PREFIX_BYTES]
            if not request.wave and prefix in self.suspects:
                found.setdefault(prefix, []).append(request)
        said: list[BatchLost | BatchDied] = []
        for prefix, requests in found.items():
            ended = self.suspects.pop(prefix)
            self._entries.pop(prefix, None)
            if isinstance(ended, str):
                said.append(BatchLost(ended, requests, len(requests), "", False))
            elif ended not in said:  # of several waves in one batch
                said.append(ended)
        return said

    def forget_read(self) -> None:
        """Forget suspicions of requests that will not come: their entry was read without them, or is gone. Call this
        when `suspected` was asked about all requests that were read.
        """
        for prefix in [prefix for prefix, entry in self._entries.items() if self._has_read(*entry)]:
            del self.suspects[prefix], self._entries[prefix]


def wave_of(request: RequestQueued) -> Wave | None:
    record: object = carried_of(request).record
    return record if isinstance(record, Wave) else None
