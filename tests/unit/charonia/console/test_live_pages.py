"""Updates of open pages: how often they are read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

pytest.importorskip("jinja2")

from memory_log.log import MemoryLog

from charonia.composition.console.console_role import read_statistics
from charonia.console import live_pages, log_views
from charonia.console.readings import Sampler
from charonia.console.viewers import Viewer
from charonia.console.web_app import ConsoleApp


async def no_metrics() -> str:
    return ""


async def regions(events: AsyncIterator[bytes]) -> dict[str, Any]:
    kind, data = (await anext(events)).decode().split("\n")[:2]
    assert kind == "event: update"
    found: dict[str, Any] = json.loads(data.removeprefix("data: "))["regions"]
    return found


async def test_a_page_whose_reading_takes_long_is_read_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still, but for a second that each reading takes and half a second for each event."""
    now_ns = 10_000_000_000
    monkeypatch.setattr(live_pages, "monotonic_ns", lambda: now_ns)
    log = MemoryLog()
    plain = log_views.job_list

    async def slow(*asked: Any) -> dict[str, Any]:
        nonlocal now_ns
        now_ns += 1_000_000_000
        return await plain(*asked)

    monkeypatch.setattr(log_views, "job_list", slow)
    sampler = Sampler(log, no_metrics, interval_s=0.001)
    events = ConsoleApp(log, sampler, read_statistics).live_events("jobs", {}, Viewer())
    try:
        assert "jobs_table" in await regions(events)
        for _ in range(18):  # nine seconds: a tenth of the time is what it may take
            now_ns += 499_000_000
            assert await regions(events) == {}
        now_ns += 499_000_000
        assert "jobs_table" in await regions(events)
    finally:
        await cast("Any", events).aclose()
        await sampler.close()


async def test_a_page_that_was_just_opened_shows_no_earlier_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """It often follows an action, and what was read for the page before does not have it."""
    reads = 0
    plain = log_views.job_list

    async def counted(*asked: Any) -> dict[str, Any]:
        nonlocal reads
        reads += 1
        return await plain(*asked)

    monkeypatch.setattr(log_views, "job_list", counted)
    log = MemoryLog()
    sampler = Sampler(log, no_metrics, interval_s=60)  # both pages are of one sample
    app = ConsoleApp(log, sampler, read_statistics)
    pages = [app.live_events("jobs", {}, Viewer()) for _ in range(2)]
    try:
        for number, events in enumerate(pages, 1):
            assert "jobs_table" in await regions(events)
            assert reads == number
    finally:
        for events in pages:
            await cast("Any", events).aclose()
        await sampler.close()
