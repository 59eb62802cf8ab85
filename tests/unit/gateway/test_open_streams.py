"""What a gateway publishes of its open streams, over a log in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.facts.stream_notes import StreamsNote
from gateway.open_streams import OpenStreams


class Log(MemoryLog):
    """Counts notes, and can refuse them."""

    away = False
    written = 0

    async def put_note(self, key: bytes, data: bytes, ttl_s: int) -> None:
        if self.away:
            raise LogUnavailable("it is away")
        await super().put_note(key, data, ttl_s)
        self.written += 1


async def noted(log: Log, streams: int) -> StreamsNote:
    """The note once it has so many streams."""
    async with asyncio.timeout(30):
        while True:
            (data,) = await log.notes([keys.open_streams("g")])
            if data is not None and (note := StreamsNote.unpack(data)).open == streams:
                return note
            await asyncio.sleep(0.001)


@pytest.fixture
async def log() -> Log:
    return Log()


@pytest.fixture
async def streams(log: Log) -> AsyncIterator[OpenStreams]:
    made = OpenStreams(log, "g", interval_s=0.002)
    yield made
    await made.close()


async def test_a_stream_is_published_while_it_is_open(log: Log, streams: OpenStreams) -> None:
    assert not log.written
    first = streams.opened("m", 2, "acme", "mine")
    first.responses, first.last_ns = 3, first.since_ns + 5_000_000
    second = streams.opened("other", 1, "", "")
    row, _ = (await noted(log, 2)).rows
    assert (row.model, row.version, row.tenant, row.client_id, row.responses) == ("m", 2, "acme", "mine", 3)
    assert row.last_us - row.since_us == 5_000
    streams.closed(first)
    assert (await noted(log, 1)).rows[0].model == "other"
    streams.closed(second)
    assert (await noted(log, 0)).rows == ()
    third = streams.opened("m", 2, "", "")
    await noted(log, 1)
    streams.closed(third)


async def test_a_log_that_is_away_costs_no_stream(
    log: Log, streams: OpenStreams, caplog: pytest.LogCaptureFixture
) -> None:
    log.away = True
    stream = streams.opened("m", 1, "", "")
    async with asyncio.timeout(30):
        while "open streams are not published: it is away" not in caplog.text:
            await asyncio.sleep(0.001)
    log.away = False
    await noted(log, 1)
    assert caplog.text.count("are not published") == 1
    streams.closed(stream)
