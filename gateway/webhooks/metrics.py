"""What a webhook sender did, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from charonia.metrics.endpoint import render

from .sender import Sender


class _Sent(Collector):
    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def collect(self) -> Iterable[Metric]:
        deliveries = CounterMetricFamily(
            "charonia_webhook_deliveries", "Calls of webhooks, by how they ended", labels=["outcome"]
        )
        for outcome, count in self._sender.outcomes.items():
            deliveries.add_metric([outcome], count)
        yield deliveries
        yield GaugeMetricFamily(
            "charonia_webhook_pending", "Webhooks of ended jobs still to be delivered", value=self._sender.pending
        )


def render_metrics(sender: Sender) -> bytes:
    """The text exposition 0.0.4 of one sender."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Sent(sender))
    return render(registry)
