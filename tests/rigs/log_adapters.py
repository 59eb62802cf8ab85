"""The adapters of the log port as the contract's suites put them to the test, and what they read and write with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from memory_log.log import MemoryLog

from charonia.eventlog.port import Entry, EventLog, Limits
from charonia.eventlog.redis import open_log

NO_LIMITS = Limits()
PATIENCE_S = 30.0
ADAPTERS = ("memory", "redis", "cluster")


@dataclass
class Subject:
    """A log under test, and a second handle on the same data as another process would have it."""

    log: EventLog
    peer: EventLog


@asynccontextmanager
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """The adapter that `request.param` names, one of `ADAPTERS`, over an empty log."""
    if request.param == "memory":
        log = MemoryLog()
        yield Subject(log, log)
        return
    url = request.getfixturevalue("fresh_cluster_url" if request.param == "cluster" else "fresh_log_url")
    pair: list[EventLog] = [open_log(url), open_log(url)]
    for log in pair:
        await log.open()
    yield Subject(*pair)
    for log in pair:
        await log.close()


class Collector:
    """Entries as a reader's callback gets them, with a way to wait for them."""

    def __init__(self) -> None:
        self.entries: dict[bytes, list[Entry]] = {}
        self._changed = asyncio.Event()

    def __call__(self, stream: bytes, entries: list[Entry]) -> None:
        assert entries
        self.entries.setdefault(stream, []).extend(entries)
        self._changed.set()

    def values(self, stream: bytes) -> list[bytes]:
        return [bytes(entry.fields[1]) for entry in self.entries.get(stream, [])]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def count(self, stream: bytes, count: int) -> list[bytes]:
        await self.until(lambda: len(self.values(stream)) >= count)
        return self.values(stream)


async def put(log: EventLog, stream: bytes, *values: bytes) -> list[bytes]:
    return [await log.append(stream, [b"r", value]) for value in values]


def values(entries: list[Entry]) -> list[bytes]:
    return [bytes(entry.fields[1]) for entry in entries]


async def accept(log: EventLog, model: str, *ids: bytes, size_bytes: int = 10, limits: Limits = NO_LIMITS) -> None:
    fields = [part for request_id in ids for part in (b"r", request_id)]
    await log.accept(model, 0, 0, [(request_id, size_bytes) for request_id in ids], fields, limits)
