"""Deletes the streams of endpoints that left: their answers have no reader.

Running and queued work may still write to such a stream hours later, and each write creates it again. So the streams
are deleted every few seconds at first, and the log remembers them for days for a rare check (`sweep_remembered`) by any
batcher.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from charonia import keys
from charonia.catalog.catalog import Catalog
from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import START, EventLog
from charonia.facts.events import ProcessJoined, ProcessLeft, facts_of
from charonia.tasks import Tasks

SWEEP_S = 5.0
_OFTEN = 120
"""Number of sweeps before only the rare check remains."""
_REMEMBERED_US = 7 * 86_400 * 1_000_000
_AT_ONCE = 5000
_PAGE = 500


def streams_of(fact: ProcessJoined | ProcessLeft) -> list[bytes]:
    """The streams that only this process reads: replies to its own and its models' requests, and its batches."""
    answers = keys.replies(fact.incarnation)
    if fact.role == "executor":
        return [keys.batches(fact.incarnation), answers]
    return [answers] if fact.role in ("gateway", "batcher") else []


class DepartedEndpoints:
    """Tracks departed endpoints for one batcher; other parts share the set `endpoints` and see it change."""

    def __init__(self, log: EventLog, catalog: Catalog) -> None:
        self._log = log
        self._catalog = catalog
        self.endpoints: set[str] = set()
        self._streams: dict[bytes, int] = {}
        self._tasks = Tasks()

    def clear(self) -> None:
        """The log has a new epoch."""
        self._streams.clear()
        self.endpoints.clear()

    async def close(self) -> None:
        await self._tasks.close()

    def joined(self, incarnation: str, streams: Iterable[bytes]) -> None:
        """The endpoint was presumed dead and is alive."""
        for stream in streams:
            self._streams.pop(stream, None)
        self.endpoints.discard(incarnation)

    def left(self, incarnation: str, streams: Iterable[bytes]) -> None:
        self.endpoints.add(incarnation)
        self._sweep_soon(streams)

    async def recall(self) -> None:
        """Add endpoints that were lost while no batcher ran, such as one that failed together with its batcher: the
        control stream still has them. Raises what the log raises.
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
        """Add callers that queued requests name and that left before this batcher could learn of it."""
        unheard = sorted(endpoints - self.endpoints - self._catalog.processes.keys())
        by_role: dict[str, list[str]] = {}
        for endpoint in unheard:
            if keys.is_standing(endpoint):
                continue
            prefix = endpoint.partition("-")[0]  # a process incarnation begins with its role
            by_role.setdefault(prefix if prefix in ("executor", "batcher") else "gateway", []).append(endpoint)
        for role, of_role in by_role.items():
            alive = await self._log.alive(role, of_role)
            gone = [endpoint for endpoint, lives in zip(of_role, alive, strict=True) if not lives]
            self.endpoints.update(gone)
            self._sweep_soon([keys.replies(endpoint) for endpoint in gone])

    def _sweep_soon(self, streams: Iterable[bytes]) -> None:
        self._streams |= dict.fromkeys(streams, _OFTEN)
        if self._streams and not len(self._tasks):
            self._tasks.spawn(self._sweep(), "sweep of departed streams")

    async def _sweep(self) -> None:
        """Delete streams that only a departed process read, repeatedly: running work still writes them."""
        while self._streams:
            with contextlib.suppress(CharoniaError):
                new = [stream for stream, left in self._streams.items() if left == _OFTEN]
                if new:
                    await self._log.set_times(keys.DEPARTED, dict.fromkeys(new, wall_ns() // 1000))
            for stream in list(self._streams):
                if (left := self._streams.get(stream)) is None:
                    continue  # its reader was seen alive in the meantime
                with contextlib.suppress(CharoniaError):
                    await self._log.delete_stream(stream)
                    if left > 1 and stream in self._streams:
                        self._streams[stream] = left - 1
                    else:
                        self._streams.pop(stream, None)
                        self.endpoints -= {e for e in self.endpoints if keys.replies(e) == stream}
            await asyncio.sleep(SWEEP_S)

    async def sweep_remembered(self) -> int:
        """Delete the streams that the log remembers, and forget the oldest; returns how many. Raises what the log
        raises.
        """
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
