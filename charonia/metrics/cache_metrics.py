"""Prometheus metrics of the response cache in a process that calls models (`cache.cached_calls`; M1, M3, M6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from charonia.calls.cache.cached_calls import CachedCalls, CallerCounts
from charonia.options.settings import MetricsSettings

from .endpoint import render, tagged
from .triton_counters import (
    CACHE_HIT_DURATION,
    CACHE_HITS,
    CACHE_MISS_DURATION,
    CACHE_MISSES,
    DURATION,
    SUCCESS,
    TritonCounter,
)

_COUNTERS: tuple[tuple[TritonCounter, Callable[[CallerCounts], int]], ...] = (
    (SUCCESS, lambda counts: counts.hits),
    (DURATION, lambda counts: counts.hit_ns // 1000),
    (CACHE_HITS, lambda counts: counts.hits),
    (CACHE_MISSES, lambda counts: counts.misses),
    (CACHE_HIT_DURATION, lambda counts: counts.hit_ns // 1000),
    (CACHE_MISS_DURATION, lambda counts: counts.miss_ns // 1000),
)


class CacheMetrics(Collector):
    """Reads the counts when scraped. `tags` returns a model's labels for its series (C13)."""

    def __init__(
        self, calls: CachedCalls, settings: MetricsSettings, tags: Callable[[str, int], Mapping[str, str]]
    ) -> None:
        self._calls = calls
        self._settings = settings
        self._tags = tags
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The metrics in text exposition 0.0.4, to be added to the process's page (`exposition.merge`)."""
        return render(self._registry)

    def collect(self) -> Iterable[Metric]:
        return tagged(self._collect(), self._tags)

    def _collect(self) -> Iterable[Metric]:
        counted = self._calls.counts()
        counters = _COUNTERS if self._settings.counters else _COUNTERS[:1]
        for counter, value in counters:
            family = counter.family()
            for (model, version), counts in counted.items():
                family.add_metric([model, str(version)], value(counts))
            yield family
