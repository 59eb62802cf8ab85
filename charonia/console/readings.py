"""Collects the figures of live pages every two seconds while a page is open, and keeps a quarter of an hour of them.

One sampler serves all viewers, so that ten open pages ask the log as often as one. Metrics come from the addresses that
`read_metrics` knows; without any, pages have what the log says.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import EventLog
from charonia.tasks import Tasks

from .log_views import overview
from .metric_samples import Scrape, read_page
from .plot_history import PlotHistory, Row
from .server_figures import FAMILIES, ServerFigures, figures, model_figures

INTERVAL_S = 2.0
_KEPT = 450
"""Readings that plots show: a quarter of an hour."""
READ_S = 5.0
"""After so long a reading is given up: pages say that the log does not answer, and the next one is tried."""
_IDLE_S = 60.0
"""For so long after the last page readings go on: who comes back finds plots without a gap."""
_RATE_SPAN = 5
"""Rates are over so many readings, ten seconds: single ones jump."""

ReadMetrics = Callable[[], Awaitable[str]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading: the metrics, and what the log said; None while it does not answer: then `error` is a sentence."""

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
        self._samples: deque[Sample] = deque(maxlen=_RATE_SPAN + 1)
        self._plots = PlotHistory(_KEPT)
        self._figures: tuple[Sample, ServerFigures] | None = None
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
            seen = sample
            while sample is seen:
                # `latest` says that readings are wanted and starts them if they ended: no one may wait for ever
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(1.0, 2 * self._interval_s)), self._changed:
                        await self._changed.wait_for(lambda seen=seen: self._samples[-1] is not seen)  # type: ignore[misc]
                sample = await self.latest()

    def server(self) -> ServerFigures:
        """Figures of the last seconds, computed once for each reading."""
        last = self._samples[-1]
        if self._figures is None or self._figures[0] is not last:
            self._figures = last, figures(self._samples[0].scrape, last.scrape)
        return self._figures[1]

    def history(self, model: str = "") -> list[list[float | None]]:
        """Columns for plots, one value for each reading: time (s), answers/s, errors/s, latency (ms), pending."""
        return self._plots.columns(model)

    def point(self, model: str = "") -> list[float | None]:
        """The last row of `history`."""
        return self._plots.last(model)

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
        self._plots.keep(1)
        self._idle = True

    async def _read(self) -> None:
        """One reading. Callers that come meanwhile wait for it."""
        async with self._reading:
            last = self._samples[-1] if self._samples else None
            if last is not None and monotonic_ns() / 1e9 - last.scrape.time_s < self._interval_s / 2:
                return
            sample = await self._sample()
            if self._idle:  # the first look after a pause: the plots show what follows
                self._samples.clear()
                self._plots.keep(0)
                self._idle = False
            self._samples.append(sample)
            self._plots.add(sample.wall_s, plot_rows(self._samples[0], sample))
        async with self._changed:
            self._changed.notify_all()

    async def _sample(self) -> Sample:
        """What is read now, whatever goes wrong: a page that hears nothing looks as if all were well."""
        page, error, view = "", "", None
        try:
            async with asyncio.timeout(READ_S):
                page = await self._read_metrics()
        except Exception as failure:
            error = _told(failure, "The metrics cannot be read")
        time_s = monotonic_ns() / 1e9
        try:
            async with asyncio.timeout(READ_S):
                view = await overview(self._event_log)
        except Exception as failure:
            error = _told(failure, "The log does not answer")
        return Sample(wall_ns() / 1e9, read_page(page, time_s, FAMILIES), view, error)


def _told(failure: Exception, what: str) -> str:
    if isinstance(failure, CharoniaError):
        _log.debug("console: %s: %s", what, failure.message)
        return f"{what}: {failure.message}"
    if isinstance(failure, TimeoutError):
        return f"{what} within {READ_S:g} s"
    _log.error("console: %s", what, exc_info=failure)
    return f"{what}: {type(failure).__name__}"


def plot_rows(before: Sample, after: Sample) -> dict[str, Row]:
    """What plots show of a reading: of the server ("") and of each model that metrics or log know."""
    queued: dict[str, float] = {}
    for row in after.log["models"] if after.log is not None else ():
        queued[row["model"]] = queued.get(row["model"], 0.0) + row["requests"]
    names = {model for model, _ in after.scrape.versions()} | queued.keys()
    has_rates = bool(before is not after and after.scrape.families and before.scrape.families)
    rows: dict[str, Row] = {}
    for name in ("", *sorted(names)):
        pending = None
        if after.log is not None:
            pending = queued.get(name, 0.0) if name else float(after.log["queued"])
        rows[name] = (None, None, None, pending)
        if has_rates:
            found = model_figures(before.scrape, after.scrape, name)
            latency = None if found.latency_ms is None else round(found.latency_ms, 3)
            rows[name] = (round(found.rate, 3), round(found.error_rate, 3), latency, pending)
    return rows


class PerSample:
    """Keeps what was read for the current sample, so that ten viewers of one page read the log as often as one."""

    def __init__(self) -> None:
        self._sample: Sample | None = None
        self._found: dict[Hashable, dict[str, Any]] = {}
        self._locks: defaultdict[Hashable, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(
        self, sample: Sample, key: Hashable, read: Callable[[], Awaitable[dict[str, Any]]], *, again: bool = False
    ) -> dict[str, Any]:
        """What `read` returns, once for each key and sample, and `again` if that is asked for."""
        if sample is not self._sample:
            self._sample, self._found, self._locks = sample, {}, defaultdict(asyncio.Lock)
        kept = self._found
        async with self._locks[key]:
            if again or key not in kept:
                kept[key] = await read()
            return kept[key]
