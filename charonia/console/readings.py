"""Collects the figures of live pages every two seconds while a page is open, and keeps a quarter of an hour of them.

One sampler serves all viewers, so that ten open pages ask the log as often as one. Metrics come from the addresses that
`read_metrics` knows; without any, pages have what the log says.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any

from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import EventLog
from charonia.tasks import Tasks

from .log_views import overview
from .metric_samples import Scrape, read_page
from .server_figures import FAMILIES, ServerFigures, figures, model_figures

INTERVAL_S = 2.0
_KEPT = 450
"""Readings in memory: a quarter of an hour."""
_IDLE_S = 60.0
"""For so long after the last page readings go on: who comes back finds plots without a gap."""
_RATE_SPAN = 5
"""Rates are over so many readings, ten seconds: single ones jump."""

ReadMetrics = Callable[[], Awaitable[str]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading: the metrics, and what the log said; None while it does not answer."""

    wall_s: float
    scrape: Scrape
    log: dict[str, Any] | None
    error: str = ""


class Sampler:
    """The readings of one server."""

    def __init__(self, log: EventLog, read_metrics: ReadMetrics, *, interval_s: float = INTERVAL_S) -> None:
        self._event_log = log
        self._read_metrics = read_metrics
        self._interval_s = interval_s
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._wanted_s = float("-inf")
        self._changed = asyncio.Condition()
        self._reading = asyncio.Lock()
        self._idle = False
        self._tasks = Tasks()

    async def latest(self) -> Sample:
        """The last reading; a new one if that is too old. Readings go on from now for a while."""
        self._wanted_s = asyncio.get_running_loop().time()
        if not len(self._tasks):
            self._tasks.spawn(self._run(), "console sampler")
        if not self._samples or monotonic_ns() / 1e9 - self._samples[-1].scrape.time_s > 2 * self._interval_s:
            await self._read()
        return self._samples[-1]

    async def follow(self) -> AsyncIterator[Sample]:
        """The last reading, then each new one."""
        sample = await self.latest()
        while True:
            yield sample
            async with self._changed:
                await self._changed.wait_for(lambda seen=sample: self._samples[-1] is not seen)  # type: ignore[misc]
            sample = await self.latest()

    def server(self) -> ServerFigures:
        """Figures of the last seconds."""
        return figures(self._before().scrape, self._samples[-1].scrape)

    def history(self, model: str = "") -> list[list[float | None]]:
        """Columns for plots, one value for each reading: time (s), answers/s, errors/s, latency (ms), pending."""
        samples = list(self._samples)
        columns: list[list[float | None]] = [[], [], [], [], []]
        for at, sample in enumerate(samples):
            values = self._point(samples[max(0, at - _RATE_SPAN)], sample, model)
            for column, value in zip(columns, values, strict=True):
                column.append(value)
        return columns

    def point(self, model: str = "") -> list[float | None]:
        """The last row of `history`."""
        return self._point(self._before(), self._samples[-1], model)

    def _before(self) -> Sample:
        return self._samples[max(0, len(self._samples) - 1 - _RATE_SPAN)]

    def _point(self, before: Sample, after: Sample, model: str) -> list[float | None]:
        if not after.scrape.families or before is after or not before.scrape.families:
            return [after.wall_s, None, None, None, _queued(after, model)]
        found = model_figures(before.scrape, after.scrape, model)
        latency = None if found.latency_ms is None else round(found.latency_ms, 3)
        return [after.wall_s, round(found.rate, 3), round(found.error_rate, 3), latency, _queued(after, model)]

    async def close(self) -> None:
        """Read nothing more."""
        await self._tasks.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() - self._wanted_s < _IDLE_S:
            await asyncio.sleep(self._interval_s)
            try:
                await self._read()
            except Exception:  # one that fails must not end them all
                _log.exception("the console could not take a reading")
        while len(self._samples) > 1:
            self._samples.popleft()
        self._idle = True

    async def _read(self) -> None:
        """One reading. Callers that come meanwhile wait for it."""
        async with self._reading:
            last = self._samples[-1] if self._samples else None
            if last is not None and monotonic_ns() / 1e9 - last.scrape.time_s < self._interval_s / 2:
                return
            page, error, view = await self._read_metrics(), "", None
            scrape = read_page(page, monotonic_ns() / 1e9, FAMILIES)
            try:
                view = await overview(self._event_log)
            except CharoniaError as failure:
                error = failure.message
                _log.debug("the log could not be read for the console: %s", error)
            if self._idle:  # the first look after a pause: the plots show what follows
                self._samples.clear()
                self._idle = False
            self._samples.append(Sample(wall_ns() / 1e9, scrape, view, error))
        async with self._changed:
            self._changed.notify_all()


class PerSample:
    """Keeps what was read for the current sample, so that ten viewers of one page read the log as often as one."""

    def __init__(self) -> None:
        self._sample: Sample | None = None
        self._found: dict[Hashable, dict[str, Any]] = {}
        self._locks: defaultdict[Hashable, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, sample: Sample, key: Hashable, read: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """What `read` returns, once for each key and sample."""
        if sample is not self._sample:
            self._sample, self._found, self._locks = sample, {}, defaultdict(asyncio.Lock)
        kept = self._found
        async with self._locks[key]:
            if key not in kept:
                kept[key] = await read()
            return kept[key]


def _queued(sample: Sample, model: str) -> float | None:
    if sample.log is None:
        return None
    if not model:
        return float(sample.log["queued"])
    return float(sum(row["requests"] for row in sample.log["models"] if row["model"] == model))
