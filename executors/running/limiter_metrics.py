"""Prometheus metrics of the rate limiter: resources, and requests that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .rate_limiter import GLOBAL, RateLimiter


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
