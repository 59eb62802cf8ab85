"""Live pages while the log does not answer, and names under which pages are opened."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from memory_log.log import MemoryLog

from charonia.composition.console.console_role import read_statistics
from charonia.console.readings import PerSample, Sampler
from charonia.console.viewers import Viewer
from charonia.console.web_app import ConsoleApp, is_own
from charonia.errors import LogUnavailable


class Log(MemoryLog):
    """A log that can be away."""

    away = False

    async def memory_bytes(self) -> tuple[int, int]:
        if self.away:
            raise LogUnavailable("it is away")
        return await super().memory_bytes()


async def no_metrics() -> str:
    return ""


async def test_a_live_page_says_that_the_log_is_away_and_goes_on_when_it_is_back() -> None:
    log = Log()
    sampler = Sampler(log, no_metrics, interval_s=0.01)
    app = ConsoleApp(log, sampler, read_statistics)
    log.away = True
    events = app.live_events("overview", {}, Viewer())
    try:
        kind, data = (await anext(events)).decode().split("\n")[:2]
        assert kind == "event: problem"
        assert "it is away" in json.loads(data.removeprefix("data: "))["text"]
        log.away = False
        async for event in events:
            if event.startswith(b"event: update"):
                assert b'"history"' in event
                break
    finally:
        await cast("Any", events).aclose()
        await sampler.close()


async def test_what_was_read_for_a_sample_is_read_once() -> None:
    log = Log()
    sampler = Sampler(log, no_metrics)
    reads = 0

    async def read() -> dict[str, Any]:
        nonlocal reads
        reads += 1
        return {"reads": reads}

    try:
        sample, kept = await sampler.latest(), PerSample()
        assert [(await kept.get(sample, key, read))["reads"] for key in ("a", "a", "b")] == [1, 1, 2]
    finally:
        await sampler.close()


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1:8002", True),
        ("[::1]:8002", True),
        ("localhost", True),
        ("Box.Example:80", True),
        ("", True),
        ("evil.example:8002", False),
        ("127.0.0.1.evil.example", False),
    ],
)
async def test_a_page_is_opened_by_an_address_or_a_known_name(host: str, own: bool) -> None:
    assert is_own(host, {"box.example"}) is own
    log = MemoryLog()
    sampler = Sampler(log, no_metrics)
    app = ConsoleApp(log, sampler, read_statistics, names={"box.example"})
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "query_string": b"", "root_path": ""}
    headers = [(b"host", host.encode())]
    await app.asgi({**scope, "headers": headers, "http_version": "1.1", "scheme": "http"}, receive, send)
    assert sent[0]["status"] == (308 if own else 421)
    await sampler.close()
