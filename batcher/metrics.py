"""The owning batcher's Prometheus metrics: waiting requests per model version, and the owner of each model (M2).

Also counts refused requests that no gateway counts, such as steps of ensembles and calls of models. For ensembles it
exports what an executor exports for other models, because no executor runs them (M1, M3, S56).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from charonia.catalog.catalog import Catalog
from charonia.clock import monotonic_ns
from charonia.metrics.cache_metrics import CacheMetrics
from charonia.metrics.endpoint import log_epoch_changes, render, tagged
from charonia.metrics.exposition import merge
from charonia.metrics.log_memory import LogMemory
from charonia.metrics.triton_counters import DURATION, EXECUTED, FAILURE, SUCCESS
from charonia.options.settings import MetricsSettings

from .ensembles.owned_ensemble import OwnedEnsemble
from .housekeeping.adaptive_report import adaptive_of
from .scheduling.sequences.sequence_scheduler import SequenceScheduler
from .scheduling.stateless.scheduler import ModelScheduler
from .service import BatcherService

_OF_ENSEMBLES = (replace(SUCCESS, sums="unawaited_count"), replace(DURATION, sums="unawaited_ns"), *EXECUTED)


class BatcherMetrics(Collector):
    """Reads the owned models when scraped; adds nothing to the request path."""

    def __init__(
        self, service: BatcherService, catalog: Catalog, settings: MetricsSettings | None = None, *, joint: bool = False
    ) -> None:
        """`joint`: its page is added to others'."""
        self._settings = settings or MetricsSettings()
        self._service = service
        self._joint = joint
        self._cache: CacheMetrics | None = None
        if service.cached is not None:
            self._cache = CacheMetrics(service.cached, self._settings, self._tags)
        self._catalog = catalog
        self.log_epoch_changes: Callable[[], int] | None = None
        """None in an executor's process, which counts them itself."""
        self.log_memory: LogMemory | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The text exposition 0.0.4 of this process."""
        page = render(self._registry) + self._service.latencies.render(monotonic_ns())
        if self._cache is None:
            return page
        return merge([page.decode(), self._cache.render().decode()], last=not self._joint)

    def collect(self) -> Iterable[Metric]:
        return tagged(self._collect(), self._tags)

    def _tags(self, model: str, version: int) -> Mapping[str, str]:
        held = self._catalog.held(model).get(version)
        return held.interface.metric_tags if held is not None else {}

    def _collect(self) -> Iterable[Metric]:
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            labels=["model", "version"],
        )
        running = GaugeMetricFamily(
            "charonia_batcher_running_requests", "Requests given to executors and not settled", labels=["model"]
        )
        live = GaugeMetricFamily(
            "charonia_live_sequences", "Sequences that have a slot or wait for one", labels=["model"]
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
            if isinstance(owned.scheduler, SequenceScheduler):
                live.add_metric([model], owned.scheduler.live_sequences())
        yield from self._of_ensembles()
        yield from self._of_routing()
        yield from self._of_journals()
        yield self._failures()
        if self.log_epoch_changes is not None:
            yield log_epoch_changes(self.log_epoch_changes())
        if self.log_memory is not None:
            yield from self.log_memory.families()
        yield from (family for family in adaptive if family.samples)
        if live.samples:
            yield live
        yield pending
        yield running
        yield GaugeMetricFamily(
            "charonia_batcher_owned_models", "Models this batcher decides for", value=len(self._service.owned)
        )

    def _of_routing(self) -> Iterable[Metric]:
        """Where requests for text went, of models that are routed by prompts."""
        schedulers = [(m, owned.scheduler) for m, owned in self._service.owned.items()]
        routed = [
            (model, str(number), routing)
            for model, scheduler in schedulers
            if isinstance(scheduler, ModelScheduler)
            for number, routing in scheduler.routing().items()
        ]
        if not routed:
            return
        requests = CounterMetricFamily(
            "charonia_routed_requests",
            "Requests for text by where they went: to most of their prompt (warm), elsewhere (shed), or known nowhere",
            labels=["model", "version", "outcome"],
        )
        tokens = CounterMetricFamily(
            "charonia_routed_prompt_tokens",
            "Tokens of their prompts, by whether the executor had been given a prompt with that beginning",
            labels=["model", "version", "known"],
        )
        to_do = GaugeMetricFamily(
            "charonia_routed_tokens_to_do",
            "Tokens that executors have still to read or generate, as estimated",
            labels=["model", "version"],
        )
        for model, number, routing in routed:
            counts = routing.counts
            for outcome in ("warm", "shed", "cold"):
                requests.add_metric([model, number, outcome], getattr(counts, outcome))
            tokens.add_metric([model, number, "true"], counts.warm_tokens)
            tokens.add_metric([model, number, "false"], counts.prompt_tokens - counts.warm_tokens)
            to_do.add_metric([model, number], sum(routing.to_do().values()))
        yield from (requests, tokens, to_do)

    def _of_journals(self) -> Iterable[Metric]:
        sealed = CounterMetricFamily(
            "charonia_journal_sealed_entries", "Entries of the journal that were sealed", labels=["model"]
        )
        failures = CounterMetricFamily(
            "charonia_journal_seal_failures",
            "Seals of the journal that the log refused, or that failed",
            labels=["model"],
        )
        unsealed = GaugeMetricFamily(
            "charonia_journal_unsealed_seconds", "Time since the whole journal was sealed", labels=["model"]
        )
        now_ns = monotonic_ns()
        for model, sealing in self._service.sealings.items():
            sealed.add_metric([model], sealing.sealed_entries)
            failures.add_metric([model], sealing.failures)
            unsealed.add_metric([model], (now_ns - sealing.complete_ns) / 1e9)
        yield from (family for family in (sealed, failures, unsealed) if family.samples)

    def _of_ensembles(self) -> Iterable[Metric]:
        ensembles = [(m, owned) for m, owned in self._service.owned.items() if isinstance(owned, OwnedEnsemble)]
        if not ensembles:
            return
        for counter in _OF_ENSEMBLES:
            if counter.is_timed and not self._settings.counters:
                continue
            family = counter.family()
            for model, owned in ensembles:
                for version in self._catalog.held(model):
                    counts = owned.counted.get(version, {})
                    family.add_metric([model, str(version)], counter.value(counts.get(counter.sums, 0)))
            yield family

    def _failures(self) -> Metric:
        """Counts requests for M1 that no gateway counts: refused ones, and those that failed in an ensemble."""
        family = FAILURE.family()
        for model, owned in self._service.owned.items():
            held = self._catalog.held(model)
            counts = {key: count for key, count in owned.refused_unawaited.items() if key[0] in held}
            if isinstance(owned, OwnedEnsemble):
                for version in held:
                    failed = owned.counted.get(version, {}).get("unawaited_failures", 0)
                    counts[version, "OTHER"] = counts.get((version, "OTHER"), 0) + failed
            for (version, reason), count in counts.items():
                family.add_metric([model, str(version), reason], count)
        return family
