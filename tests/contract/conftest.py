"""A log behind each adapter of the port, for the suites that all of them have to pass."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from log_adapters import ADAPTERS, Collector, Subject, opened

from charonia.eventlog.port import StreamReader


@pytest.fixture(params=ADAPTERS)
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    async with opened(request) as subject:
        yield subject


@pytest.fixture
async def reader(subject: Subject) -> AsyncIterator[tuple[StreamReader, Collector]]:
    collector = Collector()
    reader = subject.log.reader()
    reader.start(collector)
    yield reader, collector
    await reader.close()
