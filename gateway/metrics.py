"""Counts this gateway's requests and open streams, and publishes both: plain counters on the request path.

Metrics for Prometheus (M1, M3-M6) are made of the counters when they are scraped. A stream is a request whose responses
are sent one by one, from its admission to its last response, on any protocol. What is open is a note in the log, which
the console reads (`charonia.facts.stream_notes`, ADR 0059). While none is open nothing is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from charonia import keys
from charonia.calls.cache.cache_store import CacheStore
from charonia.calls.unsent_counts import FAILURE_REASONS, FAILURES_IN_ENSEMBLE, failure_reason
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import Notes
from charonia.facts.stream_notes import MOST, TTL_S, StreamRow, StreamsNote
from charonia.metrics.endpoint import log_epoch_changes, render, tagged
from charonia.metrics.latencies import Latencies, ModelLatencies
from charonia.metrics.triton_counters import (
    CACHE_HIT_DURATION,
    CACHE_HITS,
    CACHE_MISS_DURATION,
    CACHE_MISSES,
    DURATION,
    FAILURE,
    SUCCESS,
    restarts_family,
)
from charonia.offload.pool import Offload
from charonia.options.settings import MetricsSettings
from charonia.tasks import Tasks

from .dataplane import DataPlane
from .tracing.tracer import Tracer

INTERVAL_S = 2.0
"""At which open streams are published: that of the console's readings."""

_log = logging.getLogger(__name__)


class RequestCounts:
    """Counts of one model version: successes with their duration in ns, failures by reason, cache hits and misses.

    `latencies` is None where single durations are not measured.
    """

    __slots__ = (
        "cache_hit_ns",
        "cache_hits",
        "cache_miss_ns",
        "cache_misses",
        "duration_ns",
        "failures",
        "latencies",
        "success",
    )

    def __init__(self) -> None:
        self.success = 0
        self.duration_ns = 0
        self.cache_hits = self.cache_hit_ns = 0
        self.cache_misses = self.cache_miss_ns = 0
        self.failures = dict.fromkeys(FAILURE_REASONS, 0)
        self.latencies: ModelLatencies | None = None

    def succeeded(self, duration_ns: int) -> None:
        """Count one answered request."""
        self.success += 1
        self.duration_ns += duration_ns
        if self.latencies is not None:
            self.latencies.observe("request", duration_ns, monotonic_ns())

    def succeeded_together(self, count: int, duration_ns: int) -> None:
        """Count requests answered together by one response, each after `duration_ns`."""
        self.success += count
        self.duration_ns += count * duration_ns
        if self.latencies is not None:
            now_ns = monotonic_ns()
            for _ in range(count):
                self.latencies.observe("request", duration_ns, now_ns)
                self.latencies.responded(duration_ns)

    def failed(self, error: CharoniaError, *, ensemble: bool) -> None:
        """Count one request answered with an error from behind the log."""
        reason = failure_reason(error, executed=True, ensemble=ensemble)
        self.failures[reason] += FAILURES_IN_ENSEMBLE if ensemble and reason == "OTHER" else 1

    def hit(self, duration_ns: int) -> None:
        """Count one request answered from the cache; it did not wait in a queue (X2)."""
        self.cache_hits += 1
        self.cache_hit_ns += duration_ns
        if self.latencies is not None:
            now_ns = monotonic_ns()
            self.latencies.observe("queue", 0, now_ns)
            self.latencies.observe("cache_hit", duration_ns, now_ns)

    def missed(self, duration_ns: int) -> None:
        """Count one request that was not in the cache."""
        self.cache_misses += 1
        self.cache_miss_ns += duration_ns
        if self.latencies is not None:
            self.latencies.observe("cache_miss", duration_ns, monotonic_ns())


@dataclass(slots=True)
class JobCounts:
    """Counts of jobs at this gateway, by model."""

    accepted: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)
    rechecks: int = 0
    """Answers read from a job's record because the reply did not arrive."""


class GatewayMetrics(Collector):
    """Counts by (model, version) and renders them; the families of a model exist from its load on."""

    def __init__(
        self,
        catalog: Catalog,
        dataplane: DataPlane,
        jobs: JobCounts,
        settings: MetricsSettings | None = None,
        *,
        caches: bool = False,
        joint: bool = False,
    ) -> None:
        """`caches` and `joint` as in `Latencies`."""
        self._settings = settings or MetricsSettings()
        self._latencies = Latencies(self._settings, caches=caches, joint=joint)
        self._catalog = catalog
        catalog.listeners.append(self._changed)
        self._dataplane = dataplane
        self._jobs = jobs
        self._counts: dict[str, dict[int, RequestCounts]] = {}
        """By model and version: a search of all versions for each of many models would take seconds."""
        self._restarts: Counter[tuple[str, int]] = Counter()
        self._joint = joint
        self.log_epoch_changes: Callable[[], int] = lambda: 0
        self.lane_requests: Callable[[], int] = lambda: 0
        self.lane_pending: Callable[[], int] = lambda: 0
        self.cache: CacheStore | None = None
        """Set if responses are cached."""
        self.tracer: Tracer | None = None
        self.offload: Offload | None = None
        self.more: list[Callable[[], Iterable[Metric]]] = []
        """Make the families of parts that only some gateways have."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def counts(self, model: str, version: int) -> RequestCounts:
        of_model = self._counts.setdefault(model, {})
        found = of_model.get(version)
        if found is None:
            found = of_model[version] = RequestCounts()
        return found

    def _changed(self, model: str) -> None:
        """Forget the counts of a model's unloaded versions, as Triton does: loaded again, they begin at 0, whether or
        not the page was read in between.
        """
        counts = self._counts.get(model, {})
        for version in counts.keys() - self._catalog.held(model).keys():
            del counts[version]
            self._restarts[(model, version)] += 1
            self._latencies.drop(model, version)
        if not counts:
            self._counts.pop(model, None)

    def configure(self, served: ServedVersion) -> None:
        """Measure what this version's configuration enables."""
        if self._latencies.measures:
            counts = self.counts(served.model, served.version)
            counts.latencies = self._latencies.add(served.version, served.config, model=served.model)

    def render(self) -> bytes:
        """The metrics of this process in text exposition format 0.0.4."""
        page = render(self._registry)  # first: it reads which versions are served
        return page + self._latencies.render(monotonic_ns())

    def collect(self) -> Iterable[Metric]:
        return tagged(self._collect(), self._tags)

    def _tags(self, model: str, version: int) -> Mapping[str, str]:
        served = self._catalog.held(model).get(version)
        return served.interface.metric_tags if served is not None else {}

    def _collect(self) -> Iterable[Metric]:
        success, failure, duration = SUCCESS.family(), FAILURE.family(), DURATION.family()
        served = [(m, v) for m in self._catalog.served_models() for v in self._catalog.held(m)]
        for model in list(self._counts):
            self._changed(model)  # a new log has others
        for model, version in served:
            counts = self.counts(model, version)
            if counts.latencies is None:
                self.configure(self._catalog.held(model)[version])
            labels = [model, str(version)]
            success.add_metric(labels, counts.success)
            duration.add_metric(labels, counts.duration_ns // 1000)
            for reason, count in counts.failures.items():
                failure.add_metric([*labels, reason], count)
        yield success
        yield failure
        if self._settings.counters:
            yield duration
        if self._joint:
            yield restarts_family(self._restarts)
        if self.cache is not None:
            yield from self._of_cache(self.cache, served)
        appended = self._dataplane.counts
        yield CounterMetricFamily(
            "charonia_log_requests_appended", "Requests this gateway wrote to the log", value=appended.requests
        )
        yield CounterMetricFamily(
            "charonia_log_entries_appended", "Log entries that carried them", value=appended.entries
        )
        yield CounterMetricFamily(
            "charonia_gateway_lane_requests",
            "Requests this gateway sent in waves",
            value=self.lane_requests(),
        )
        yield CounterMetricFamily(
            "charonia_duplicate_replies",
            "Replies to requests that had their outcome already",
            value=self._dataplane.duplicates,
        )
        yield log_epoch_changes(self.log_epoch_changes())
        yield GaugeMetricFamily(
            "charonia_gateway_pending_requests",
            "Requests of this gateway that wait for their reply",
            value=self._dataplane.pending_requests + self.lane_pending(),
        )
        if self.offload is not None:
            yield CounterMetricFamily(
                "charonia_gateway_conversions", "Large messages converted beside the event loop", self.offload.done
            )
            yield CounterMetricFamily(
                "charonia_gateway_conversions_refused",
                "Large messages refused because too many waited for their conversion",
                self.offload.refused,
            )
            yield GaugeMetricFamily(
                "charonia_gateway_conversion_size_bytes",
                "Bytes of large messages that wait for their conversion or are in it",
                self.offload.size_bytes,
            )
        if self.tracer is not None:
            yield CounterMetricFamily(
                "charonia_traces_written", "Traces this gateway wrote to its file or export", value=self.tracer.written
            )
            yield CounterMetricFamily(
                "charonia_traces_dropped",
                "Traces and spans that were lost: too many, or nobody took them",
                value=self.tracer.dropped,
            )
        yield from self._of_jobs()
        for families in self.more:
            yield from families()

    def _of_cache(self, cache: CacheStore, served: list[tuple[str, int]]) -> Iterable[Metric]:
        """Metrics of the cache (M6), for models that use it."""
        families = CACHE_HITS, CACHE_MISSES, CACHE_HIT_DURATION, CACHE_MISS_DURATION
        hits, misses, hit_us, miss_us = (counter.family() for counter in families)
        for model, version in served:
            if self._catalog.held(model)[version].config.response_cache.enable:
                counts, labels = self.counts(model, version), [model, str(version)]
                hits.add_metric(labels, counts.cache_hits)
                misses.add_metric(labels, counts.cache_misses)
                hit_us.add_metric(labels, counts.cache_hit_ns // 1000)
                miss_us.add_metric(labels, counts.cache_miss_ns // 1000)
        if self._settings.counters:
            yield from (hits, misses, hit_us, miss_us)
        yield CounterMetricFamily(
            "charonia_cache_evictions", "Responses this gateway took out of the cache to make room", cache.evictions
        )
        yield GaugeMetricFamily("charonia_cache_here_entries", "Cached responses in this process", len(cache))
        yield GaugeMetricFamily(
            "charonia_cache_here_size_bytes", "Bytes of cached responses in this process", cache.size_here_bytes
        )

    def _of_jobs(self) -> Iterable[Metric]:
        jobs = self._jobs
        yield _by_model("charonia_jobs_accepted", "Jobs this gateway recorded", jobs.accepted)
        yield _by_model("charonia_jobs_cancelled", "Jobs this gateway cancelled", jobs.cancelled)
        yield _by_model(
            "charonia_idempotent_replays", "Requests that got the job of an earlier one with their key", jobs.replays
        )
        yield CounterMetricFamily(
            "charonia_requests_expired",
            "Requests this gateway ended at their deadline",
            value=self._dataplane.deadlines.expired,
        )
        yield CounterMetricFamily(
            "charonia_rechecks",
            "Answers read from a job's record because the reply was lost",
            value=self._jobs.rechecks,
        )


def _by_model(name: str, text: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["model"])
    for model, count in counts.items():
        family.add_metric([model], count)
    return family


class OpenStream:
    """One stream. `responses` and `last_ns` are set by the loop that sends it."""

    __slots__ = ("client_id", "last_ns", "model", "responses", "since_ns", "tenant", "version")

    def __init__(self, model: str, version: int, tenant: str, client_id: str) -> None:
        self.model, self.version, self.tenant, self.client_id = model, version, tenant, client_id
        self.since_ns = wall_ns()
        self.last_ns = 0
        self.responses = 0


class OpenStreams:
    """The streams of one gateway, those that are open the longest first."""

    def __init__(self, log: Notes, incarnation: str, *, interval_s: float = INTERVAL_S) -> None:
        self._log = log
        self._key = keys.open_streams(incarnation)
        self._interval_s = interval_s
        self._open: dict[OpenStream, None] = {}
        self._publishing = False
        self._published = False
        self._complained = False
        self._tasks = Tasks()

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, model: str, version: int, tenant: str, client_id: str) -> OpenStream:
        """Count a stream from now; `closed` has to follow."""
        stream = OpenStream(model, version, tenant, client_id)
        self._open[stream] = None
        if not self._publishing:
            self._publishing = True
            self._tasks.spawn(self._publish(), "open streams")
        return stream

    def closed(self, stream: OpenStream) -> None:
        """The stream has ended."""
        del self._open[stream]

    def note(self) -> StreamsNote:
        """What is open now."""
        rows = tuple(
            StreamRow(
                one.model,
                one.version,
                one.tenant,
                one.client_id,
                one.since_ns // 1000,
                one.last_ns // 1000,
                one.responses,
            )
            for one in islice(self._open, MOST)
        )
        return StreamsNote(len(self._open), wall_ns() // 1000, rows)

    async def close(self) -> None:
        """Publish nothing more; the last note expires."""
        await self._tasks.close()

    async def _publish(self) -> None:
        """Write the note as long as streams are open, and once more when none is: then it is empty."""
        while self._open or self._published:
            await asyncio.sleep(self._interval_s)
            if self._open or self._published:
                await self._write()
        self._publishing = False

    async def _write(self) -> None:
        note = self.note()
        try:
            await self._log.put_note(self._key, note.pack(), TTL_S)
        except CharoniaError as error:
            if not self._complained:  # the streams themselves need no note
                self._complained = True
                _log.warning("open streams are not published: %s", error)
            self._published = False
        else:
            self._complained = False
            self._published = bool(note.rows)
