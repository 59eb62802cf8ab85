"""Endpoints that left: their answers have no reader, and their streams are to be deleted.

Work under way may write to such a stream long after, and what is queued for hours later still; each write would create
it again. So the streams are deleted every few seconds at first, and the log remembers them for days for the rare look
(`sweep_remembered`), whichever batcher takes it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from charonia import keys
from charonia.catalog.catalog import Catalog
from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.control import facts_of
from charonia.eventlog.port import START, EventLog
from charonia.facts.events import ProcessJoined, ProcessLeft

SWEEP_S = 5.0
_OFTEN = 120
"""Sweeps until only the rare look is left."""
_REMEMBERED_US = 7 * 86_400 * 1_000_000
_AT_ONCE = 5000
_PAGE = 500


def streams_of(fact: ProcessJoined | ProcessLeft) -> list[bytes]:
    """The streams whose one reader is this process: answers to what it or its models asked, and its batches."""
    answers = keys.replies(fact.incarnation)
    if fact.role == "executor":
        return [keys.batches(fact.incarnation), answers]
    return [answers] if fact.role in ("gateway", "batcher") else []


class Departed:
    """What one batcher knows of them; `endpoints` may be kept by others, who see it change."""

    def __init__(self, log: EventLog, catalog: Catalog) -> None:
        self._log = log
        self._catalog = catalog
        self.endpoints: set[str] = set()
        self._streams: dict[bytes, int] = {}
        self._sweeping: asyncio.Task[None] | None = None

    def clear(self) -> None:
        """The log is another one."""
        self._streams.clear()
        self.endpoints.clear()

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    def joined(self, incarnation: str, streams: Iterable[bytes]) -> None:
        """It was taken for lost and is not."""
        for stream in streams:
            self._streams.pop(stream, None)
        self.endpoints.discard(incarnation)

    def left(self, incarnation: str, streams: Iterable[bytes]) -> None:
        self.endpoints.add(incarnation)
        self._sweep_soon(streams)

    async def recall(self) -> None:
        """Those that were lost while no batcher was there to hear it, as one that took its batcher along: the control
        stream still says so. Raises what the log raises.
        """
        lost: dict[str, list[bytes]] = {}
        after = START
        while entries := await self._log.range(keys.CONTROL, after, _PAGE):
            after = entries[-1].id
            for fact in (fact for entry in entries for fact in facts_of(entry)):
                if isinstance(fact, ProcessLeft) and fact.reason == "lost":
                    lost[fact.incarnation] = streams_of(fact)
                elif isinstance(fact, ProcessJoined):
                    lost.pop(fact.incarnation, None)
        for incarnation, streams in lost.items():
            if streams and incarnation not in self._catalog.processes:
                self.left(incarnation, streams)

    async def find(self, endpoints: set[str]) -> None:
        """Callers that queued requests name and that left before this batcher could hear of it."""
        unheard = sorted(endpoints - self.endpoints - self._catalog.processes.keys())
        by_role: dict[str, list[str]] = {}
        for endpoint in unheard:
            if keys.is_standing(endpoint):
                continue
            prefix = endpoint.partition("-")[0]  # an incarnation begins with its role
            by_role.setdefault(prefix if prefix in ("executor", "batcher") else "gateway", []).append(endpoint)
        for role, of_role in by_role.items():
            alive = await self._log.alive(role, of_role)
            gone = [endpoint for endpoint, lives in zip(of_role, alive, strict=True) if not lives]
            self.endpoints.update(gone)
            self._sweep_soon([keys.replies(endpoint) for endpoint in gone])

    def _sweep_soon(self, streams: Iterable[bytes]) -> None:
        self._streams |= dict.fromkeys(streams, _OFTEN)
        if self._streams and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep(), name="sweep of departed streams")

    async def _sweep(self) -> None:
        """Delete the streams only a process that left would read, again and again: work under way still writes them."""
        while self._streams:
            with contextlib.suppress(CharoniaError):
                new = [stream for stream, left in self._streams.items() if left == _OFTEN]
                if new:
                    await self._log.set_times(keys.DEPARTED, dict.fromkeys(new, wall_ns() // 1000))
            for stream in list(self._streams):
                if (left := self._streams.get(stream)) is None:
                    continue  # its reader has been heard of meanwhile
                with contextlib.suppress(CharoniaError):
                    await self._log.delete_stream(stream)
                    if left > 1 and stream in self._streams:
                        self._streams[stream] = left - 1
                    else:
                        self._streams.pop(stream, None)
                        self.endpoints -= {e for e in self.endpoints if keys.replies(e) == stream}
            await asyncio.sleep(SWEEP_S)

    async def sweep_remembered(self) -> int:
        """Delete the streams the log remembers, and forget the oldest; how many. Raises what the log raises."""
        now_us = wall_ns() // 1000
        present = {stream for name in self._catalog.processes for stream in (keys.replies(name), keys.batches(name))}
        old = set(await self._log.due(keys.DEPARTED, now_us - _REMEMBERED_US, _AT_ONCE))
        streams = await self._log.due(keys.DEPARTED, now_us, _AT_ONCE)
        for stream in streams:
            if stream not in present:
                await self._log.delete_stream(stream)
        back = [stream for stream in streams if stream in old or stream in present]
        if back:
            await self._log.drop_times(keys.DEPARTED, back)
        return len(streams)
