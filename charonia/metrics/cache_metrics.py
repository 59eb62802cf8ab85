"""What a process that asks models found in the response cache (`cache.cached_calls`), for Prometheus (M1, M3, M6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from charonia.calls.cache.cached_calls import CachedCalls, CallerCounts
from charonia.options.settings import MetricsSettings

from .endpoint import render, tagged

_FAMILIES: tuple[tuple[str, str, Callable[[CallerCounts], int]], ...] = (
    (
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda counts: counts.hits,
    ),
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds",
        lambda counts: counts.hit_ns // 1000,
    ),
    ("nv_cache_num_hits_per_model", "Number of cache hits per model", lambda counts: counts.hits),
    ("nv_cache_num_misses_per_model", "Number of cache misses per model", lambda counts: counts.misses),
    (
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda counts: counts.hit_ns // 1000,
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Total cache miss duration per model, in microseconds",
        lambda counts: counts.miss_ns // 1000,
    ),
)


class CacheMetrics(Collector):
    """Reads the counts when scraped. `tags` gives the labels a model wants on its series (C13)."""

    def __init__(
        self, calls: CachedCalls, settings: MetricsSettings, tags: Callable[[str, int], Mapping[str, str]]
    ) -> None:
        self._calls = calls
        self._settings = settings
        self._tags = tags
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The text exposition 0.0.4, to be added to the process's page (`exposition.merge`)."""
        return render(self._registry)

    def collect(self) -> Iterable[Metric]:
        return tagged(self._collect(), self._tags)

    def _collect(self) -> Iterable[Metric]:
        counted = self._calls.counts()
        families = _FAMILIES if self._settings.counters else _FAMILIES[:1]
        for name, text, value in families:
            family = CounterMetricFamily(name, text, labels=["model", "version"])
            for (model, version), counts in counted.items():
                family.add_metric([model, str(version)], value(counts))
            yield family
