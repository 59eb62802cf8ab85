"""Readings go on whatever one of them raises, and keep little."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, cast

import pytest
from memory_log.log import MemoryLog

from charonia.console import metric_samples, readings, server_figures
from charonia.console.readings import Sample, Sampler, plot_rows

PAGE = """# TYPE nv_inference_request_success counter
nv_inference_request_success{{model="a",version="1"}} {n}
nv_inference_request_success{{model="a",version="2"}} {n}
# TYPE nv_inference_request_duration_us counter
nv_inference_request_duration_us{{model="a",version="1"}} {n}000
"""


class Log(MemoryLog):
    """A log that fails as a test wants it."""

    failure: Exception | None = None
    hangs = False

    async def memory_bytes(self) -> tuple[int, int]:
        if self.hangs:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        return await super().memory_bytes()


async def no_metrics() -> str:
    return ""


async def test_a_log_that_hangs_or_breaks_is_a_sample_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    sampler = Sampler(log, no_metrics, interval_s=0.001)
    try:
        log.failure = RuntimeError("a secret of the log")
        assert (await sampler.latest()).error == "The log does not answer: RuntimeError"
        log.failure, log.hangs = None, True
        monkeypatch.setattr(readings, "READ_S", 0.05)
        async with asyncio.timeout(30), aclosing(cast("Any", sampler.follow())) as followed:
            async for sample in followed:
                if "within 0.05 s" in sample.error:
                    log.hangs = False
                if not sample.error:
                    break
    finally:
        await sampler.close()


async def test_metrics_that_cannot_be_read_are_told() -> None:
    async def broken() -> str:
        raise ValueError("no page")

    sampler = Sampler(Log(), broken, interval_s=0.001)
    try:
        sample = await sampler.latest()
        assert (sample.error, sample.log is not None) == ("The metrics cannot be read: ValueError", True)
    finally:
        await sampler.close()


async def test_who_follows_gets_readings_again_after_they_ended() -> None:
    sampler = Sampler(Log(), no_metrics, interval_s=0.001)
    try:
        async with asyncio.timeout(30), aclosing(cast("Any", sampler.follow())) as followed:
            await anext(followed)
            sampler._tasks.cancel()
            for _ in range(3):
                await anext(followed)
    finally:
        await sampler.close()


async def test_few_readings_are_kept_whole_and_figures_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    async def page() -> str:
        nonlocal count
        count += 1
        return PAGE.format(n=count)

    calls = list[int]()

    def counted(before: metric_samples.Scrape, after: metric_samples.Scrape) -> Any:
        calls.append(1)
        return server_figures.figures(before, after)

    monkeypatch.setattr(readings, "figures", counted)
    sampler = Sampler(Log(), page, interval_s=0.0)
    for _ in range(40):
        await sampler._read()
    assert len(sampler._samples) == 6
    times, rates, errors, latencies, _ = sampler.history("a")
    assert len(times) == 40
    assert rates[0] is None
    assert rates[-1]
    assert (errors[-1], latencies[-1]) == (0.0, 0.5)
    assert sampler.point("a") == [column[-1] for column in sampler.history("a")]
    assert sampler.server() is sampler.server()
    assert len(calls) == 1
    await sampler._read()
    assert sampler.server().whole.rate > 0
    assert len(calls) == 2


def sample(time_s: float, text: str, log: Mapping[str, Any] | None) -> Sample:
    return Sample(time_s, metric_samples.read_page(text, time_s), dict(log) if log is not None else None)


def test_rows_of_plots() -> None:
    log = {"queued": 7, "models": [{"model": "b", "requests": 7}]}
    before, after = sample(0.0, PAGE.format(n=10), log), sample(10.0, PAGE.format(n=20), log)
    assert plot_rows(before, after) == {
        "": (2.0, 0.0, 0.5, 7.0), "a": (2.0, 0.0, 0.5, 0.0), "b": (0.0, 0.0, None, 7.0),
    }  # fmt: skip
    assert plot_rows(before, before)["a"] == (None, None, None, 0.0)
    assert plot_rows(before, sample(10.0, "", None)) == {"": (None, None, None, None)}
