"""What the owning batcher knows for Prometheus: waiting requests per model version and who owns what (M2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from charonia.models.catalog import Catalog
from charonia.telemetry import log_epoch_changes, render

from .adaptive_report import adaptive_of
from .service import BatcherService


class BatcherMetrics(Collector):
    """Reads the owned models when scraped; nothing on the request path."""

    def __init__(self, service: BatcherService, catalog: Catalog) -> None:
        self._service = service
        self._catalog = catalog
        self.log_epoch_changes: Callable[[], int] | None = None
        """None in an executor's process: that counts them itself."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The text exposition 0.0.4 of this process."""
        return render(self._registry)

    def collect(self) -> Iterable[Metric]:
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            labels=["model", "version"],
        )
        running = GaugeMetricFamily(
            "charonia_batcher_running_requests", "Requests given to executors and not settled", labels=["model"]
        )
        adaptive = [
            GaugeMetricFamily(name, what, labels=["model", "version"])
            for name, what in (
                ("charonia_adaptive_batch_size", "Rows from which on a batch is sent at once, to meet the target"),
                ("charonia_adaptive_delay_us", "Longest time a request waits for others, to meet the target"),
                ("charonia_adaptive_in_reach", "Whether the target can be met as far as is known"),
            )
        ]
        for model, owned in self._service.owned.items():
            for number, batching in adaptive_of(owned.scheduler).items():
                choice = batching.choice
                values = (choice.size, choice.delay_ns // 1000, choice.state == "in reach")
                for family, value in zip(adaptive, values, strict=True):
                    family.add_metric([model, str(number)], value)
            waiting = owned.scheduler.queued_by_version()
            for version in self._catalog.held(model):
                pending.add_metric([model, str(version)], waiting.get(version, 0))
            running.add_metric([model], owned.scheduler.outstanding_requests())
        if self.log_epoch_changes is not None:
            yield log_epoch_changes(self.log_epoch_changes())
        yield from (family for family in adaptive if family.samples)
        yield pending
        yield running
        yield GaugeMetricFamily(
            "charonia_batcher_owned_models", "Models this batcher decides for", value=len(self._service.owned)
        )
