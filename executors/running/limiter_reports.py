"""Reports on the rate limiter: to Prometheus, and to batchers, which detect cycles of calls between models.

The report to batchers is a note in the log (`charonia.facts.resource_waits`) on batches that wait long for resources.
It is written only while models of this executor have open calls: otherwise no holder of a resource waits for anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from charonia import keys
from charonia.errors import CharoniaError
from charonia.eventlog.port import Notes
from charonia.facts.resource_waits import TTL_S, TurnsNote
from charonia.tasks import periodic

from .instance_pool import LoadedVersion
from .rate_limiter import GLOBAL, RateLimiter
from .submitted_batch import SubmittedBatch

_log = logging.getLogger(__name__)

_PERIOD_S = 1.0


class LimiterMetrics(Collector):
    """Reads the limiter when scraped. `waiting` yields (model, version, number of requests that wait for resources)."""

    def __init__(self, limiter: RateLimiter, waiting: Callable[[], Iterable[tuple[str, int, int]]]) -> None:
        self._limiter = limiter
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        # adds to the owner's count, which does not include dispatched requests that have not started
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            labels=("model", "version"),
        )
        for model, version, requests in self._waiting():
            pending.add_metric((model, str(version)), requests)
        yield pending
        labels = ("resource", "device")
        there = GaugeMetricFamily("charonia_rate_limit_resources", "How much there is of a resource", labels=labels)
        held = GaugeMetricFamily("charonia_rate_limit_held", "How much of it executions hold", labels=labels)
        used = self._limiter.used()
        for (device, name), count in sorted(self._limiter.counts().items()):
            where = (name, "global" if device == GLOBAL else str(device))
            there.add_metric(where, count)
            held.add_metric(where, used.get((device, name), 0))
        yield there
        yield held


def _warn(error: CharoniaError) -> None:
    _log.warning("a note of turns was not written: %s", error)


class WaitReports:
    """Writes one executor's reports. `open_calls` returns how many calls its models wait for."""

    def __init__(
        self,
        log: Notes,
        executor: str,
        limiter: RateLimiter,
        loaded_versions: Callable[[], Iterable[LoadedVersion]],
        open_calls: Callable[[], int],
    ) -> None:
        self._log = log
        self._key = keys.turns(executor)
        self._limiter = limiter
        self._loaded_versions = loaded_versions
        self._open_calls = open_calls
        self._number = 0
        self._waited: set[SubmittedBatch] = set()

    async def run(self) -> None:
        """Check periodically until cancelled."""
        complaint = "batches that wait for their turn could not be checked"
        await periodic(self.check, _PERIOD_S, complaint, on_refusal=_warn)

    async def check(self) -> None:
        """Write a report when a batch has waited since the last check. Raises what the log raises."""
        pools = [(one, one.pool.limited_queue) for one in self._loaded_versions() if one.pool.limited_queue is not None]
        waiting = {batch for _, queue in pools if queue is not None for batch in queue.waiting}
        before, self._waited = self._waited, waiting
        if waiting.isdisjoint(before) or not self._open_calls():
            return
        snapshots = [queue.snapshot(one.model, one.version) for one, queue in pools if queue is not None]
        self._number += 1
        note = TurnsNote(
            self._number,
            self._limiter.counts(),
            tuple([turn for queue, _ in snapshots for turn in queue]),
            tuple([batch for _, batches in snapshots for batch in batches]),
        )
        await self._log.put_note(self._key, note.pack(), TTL_S)
