"""This executor's Prometheus metrics: executions, rows, compute times, failures, loads. It has its own registry.

Batches are counted as plain numbers, which become metric families at a scrape: the client library's locked counters
cost as much as an execution of a small model. Gateways count requests and their durations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import monotonic_ns
from charonia.facts.usage import (
    FAILED_INSTANCE_NS,
    FAILURES,
    INPUT_BYTES,
    INSTANCE_NS,
    OTHERS,
    OUTPUT_BYTES,
    QUEUE_NS,
    REQUESTS,
    TOKENS,
    Amounts,
)
from charonia.metrics.endpoint import log_epoch_changes, render, tagged
from charonia.metrics.latencies import Latencies
from charonia.metrics.triton_counters import DURATION, EXECUTED, FAILURE, SUCCESS, restarts_family
from charonia.models.interface import ModelInterface
from charonia.options.settings import MetricsSettings
from charonia.wire import RequestRecord
from protos.model_config_pb2 import ModelConfig

from .batches.batch_results import Executed, Execution

_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LABELS = ("model", "version")

_SETTLED = tuple(counter.sums for counter in EXECUTED)
_MAX_TENANTS = 256
"""Tenants with series of their own; the others share one."""
_MAX_USAGE = 4096
"""With so many series of tenants, of all versions together, further tenants are the others of their version."""
OTHER_TENANTS = OTHERS
_USAGE = (
    (REQUESTS, "charonia_usage_requests", "Requests that were answered", 1),
    (FAILURES, "charonia_usage_failures", "Requests that ended with an error", 1),
    (INSTANCE_NS, "charonia_usage_instance_seconds", "Shares of the time that instances spent on batches", 1e9),
    (FAILED_INSTANCE_NS, "charonia_usage_failed_instance_seconds", "The same shares of requests that failed", 1e9),
    (QUEUE_NS, "charonia_usage_queue_seconds", "Time from acceptance to the start of the batch", 1e9),
    (INPUT_BYTES, "charonia_usage_input_bytes", "Tensor bytes of requests", 1),
    (OUTPUT_BYTES, "charonia_usage_output_bytes", "Tensor bytes of answers", 1),
    (TOKENS, "charonia_usage_tokens", "Tokens of prompts and answers", 1),
)
"""Amount, name, help, and how many of the amount's units are one of the metric's."""
_MAX_ADDED = 64
"""Increments of this many batches are summed at once: one by one, cold caches double the cost."""


@dataclass(slots=True)
class _Totals:
    """The totals of one model version since the executor's start; times in ns."""

    executions: int = 0
    rows: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    failures: int = 0
    returned: int = 0
    died: int = 0
    fenced: int = 0
    states_lost: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS) + 1))
    unawaited: int = 0
    unawaited_ns: int = 0
    unawaited_failures: dict[str, int] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    """What this executor added to the version's statistics, except for the increments in `added`."""
    added: list[Mapping[str, int]] = field(default_factory=list)

    def add(self, increments: Mapping[str, int]) -> None:
        """Add increments of the statistics."""
        self.added.append(increments)
        if len(self.added) >= _MAX_ADDED:
            self.add_up()

    def add_up(self) -> None:
        added, self.added = self.added, []
        for name in _SETTLED:
            self.settled[name] = self.settled.get(name, 0) + sum([one.get(name, 0) for one in added])


class ExecutorMetrics(Collector):
    """The executor's metric families. `render` returns the text format. Used in the event loop only."""

    def __init__(self, settings: MetricsSettings | None = None, *, caches: bool = False, joint: bool = False) -> None:
        """`caches` and `joint` as in `Latencies`."""
        self._settings = settings or MetricsSettings()
        self._latencies = Latencies(self._settings, caches=caches, joint=joint)
        self.measures = self._latencies.measures
        """Whether durations of single requests are measured."""
        self._tags: dict[tuple[str, int], Mapping[str, str]] = {}
        self._totals: dict[tuple[str, str], _Totals] = {}
        self._loads: dict[tuple[str, str], tuple[int, int]] = {}
        """Instances and load times in ns of what is loaded here."""
        self._counted: dict[str, set[int]] = {}
        """The versions with Triton's series, by model: a search of all for each of many models would take seconds."""
        self._restarts: Counter[tuple[str, int]] = Counter()
        self._joint = joint
        self._usage: dict[tuple[str, str, str], Amounts] = {}
        """By model, version and tenant, since the executor's start."""
        self._tenants: set[str] = set()
        self._invalid = 0
        self.log_epoch_changes: Callable[[], int] = lambda: 0
        self.before_collecting: Callable[[], None] = lambda: None
        """Called before a scrape, to update totals that are counted elsewhere (`executors.settling.wave_settler`)."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def executed(self, model: str, version: int, executed: Executed) -> None:
        """Count one batch."""
        totals = self._of(model, version)
        for execution in executed.executions:
            if execution.first:
                totals.executions += 1
                totals.rows += execution.rows
                totals.buckets[bisect_left(_BUCKETS, execution.rows)] += 1
            totals.input_ns += execution.input_ns
            totals.infer_ns += execution.infer_ns
            totals.output_ns += execution.output_ns
        totals.failures += len(executed.failures)

    def executed_waves(
        self,
        model: str,
        version: int,
        sizes: Mapping[int, tuple[int, int, int, int]],
        increments: Mapping[str, int],
    ) -> None:
        """Count executions of waves: by rows how many there were, and their input, infer and output times in ns.

        `increments` are those of the statistics, as of `settled`.
        """
        totals = self._of(model, version)
        for rows, (count, input_ns, infer_ns, output_ns) in sizes.items():
            totals.executions += count
            totals.rows += count * rows
            totals.buckets[bisect_left(_BUCKETS, rows)] += count
            totals.input_ns += input_ns
            totals.infer_ns += infer_ns
            totals.output_ns += output_ns
        totals.failures += increments.get("fail_count", 0)
        totals.add(increments)

    def work(self) -> tuple[int, int]:
        """How many batches ran since the executor's start, and how long they took together, in ns."""
        self.before_collecting()
        totals = self._totals.values()
        run_ns = sum(one.input_ns + one.infer_ns + one.output_ns for one in totals)
        return sum(one.executions for one in totals), run_ns

    def settled(self, model: str, version: int, increments: Mapping[str, int]) -> None:
        """Add one batch's increments of the statistics."""
        self._of(model, version).add(increments)

    def used(self, model: str, version: int, tenant: str, amounts: Amounts) -> None:
        """Add what requests of a tenant have used (`charonia.facts.usage`)."""
        if tenant not in self._tenants:
            if len(self._tenants) >= _MAX_TENANTS:
                tenant = OTHER_TENANTS
            self._tenants.add(tenant)
        key = (model, str(version), tenant)
        before = self._usage.get(key)
        if before is None and len(self._usage) >= _MAX_USAGE:
            key = (model, str(version), OTHER_TENANTS)
            before = self._usage.get(key)
        self._usage[key] = list(amounts) if before is None else [a + b for a, b in zip(before, amounts, strict=True)]

    def observe(
        self, model: str, version: int, records: Sequence[RequestRecord], executed: Executed, won: Mapping[int, bool]
    ) -> None:
        """Measure each won request of a batch. The batch's durations count in full for each."""
        latencies = self._latencies.of(model, version)
        if latencies is None:
            return
        now_ns = monotonic_ns()
        for execution in executed.executions:
            for index in execution.indices:
                if won.get(index, False):
                    waited_ns = max(0, execution.start_ns - records[index].accepted_ns)
                    latencies.observe("queue", waited_ns, now_ns)
                    latencies.observe("compute_input", execution.input_ns, now_ns)
                    latencies.observe("compute_infer", execution.infer_ns, now_ns)
                    latencies.observe("compute_output", execution.output_ns, now_ns)

    def observe_wave(self, model: str, version: int, count: int, waited_ns: int, execution: Execution) -> None:
        """Measure the requests of an executed wave."""
        latencies = self._latencies.of(model, version)
        if latencies is None:
            return
        now_ns = monotonic_ns()
        for _ in range(count):
            latencies.observe("queue", waited_ns, now_ns)
            latencies.observe("compute_input", execution.input_ns, now_ns)
            latencies.observe("compute_infer", execution.infer_ns, now_ns)
            latencies.observe("compute_output", execution.output_ns, now_ns)

    def responded(self, model: str, version: int, duration_ns: int) -> None:
        """Measure the time to the first response of a call by a model or an ensemble. Gateways measure their own."""
        if self.measures and (latencies := self._latencies.of(model, version)) is not None:
            latencies.responded(duration_ns)

    def observe_called(self, served: ServedVersion, what: str, duration_ns: int) -> None:
        """Measure a model's call that was looked up in the response cache."""
        if self._latencies.measures:
            latencies = self._latencies.of(served.model, served.version) or self._latencies.add(
                served.version, served.config, model=served.model
            )
            if latencies is not None:
                latencies.observe(what, duration_ns, monotonic_ns())

    def unawaited(self, model: str, version: int, failure: str, duration_ns: int) -> None:
        """Count one request that no gateway counts. `failure` is its failure reason, or empty."""
        totals = self._of(model, version)
        if failure:
            totals.unawaited_failures[failure] = totals.unawaited_failures.get(failure, 0) + 1
        else:
            totals.unawaited += 1
            totals.unawaited_ns += duration_ns
            if self._latencies.measures and (latencies := self._latencies.of(model, version)) is not None:
                latencies.observe("request", duration_ns, monotonic_ns())

    def returned(self, model: str, version: int) -> None:
        """Count one batch that was returned unexecuted."""
        self._of(model, version).returned += 1

    def died(self, model: str, version: int) -> None:
        """Count one batch whose instance died or hung."""
        self._of(model, version).died += 1

    def fenced(self, model: str, version: int, requests: int) -> None:
        """Count requests that were settled elsewhere first."""
        self._of(model, version).fenced += requests

    def states_lost(self, model: str, version: int, requests: int) -> None:
        """Count requests that failed because their sequence's state is lost."""
        self._of(model, version).states_lost += requests

    def invalid(self) -> None:
        """Count one entry that held no batch."""
        self._invalid += 1

    def loaded(
        self, model: str, interface: ModelInterface, version: int, instances: int, load_ns: int, config: ModelConfig
    ) -> None:
        """A version is served with this many instances; its series exist from now on."""
        self._of(model, version)
        self._loads[(model, str(version))] = (instances, load_ns)
        self._counted.setdefault(model, set()).add(version)
        self._tags[(model, version)] = interface.metric_tags
        self._latencies.add(version, config, model=model)

    def unloaded(self, model: str, version: int) -> None:
        """Drop the gauges of an unloaded version. Its counters stay until no executor holds it (`follow`)."""
        self._loads.pop((model, str(version)), None)

    def follow(self, catalog: Catalog) -> None:
        """Drop Triton's series of a version when no executor holds it any more, as Triton does, and as gateways and
        batchers do by the same facts: sums over all parts begin again together. Our own counters stay.

        What makes room for another model is still held (`on_demand`), and so is what another executor serves.
        """

        def changed(model: str) -> None:
            held = catalog.held(model)
            for version in self._counted.get(model, set()) - held.keys():
                self._forget(model, version)

        catalog.listeners.append(changed)

    def _forget(self, model: str, version: int) -> None:
        totals = self._of(model, version)
        totals.settled, totals.unawaited, totals.unawaited_ns, totals.unawaited_failures = {}, 0, 0, {}
        totals.added = []
        self._restarts[(model, version)] += 1
        if (model, str(version)) in self._loads:  # it was loaded again before its unload was read in the log
            self._latencies.begin_anew(model, version)
            return
        self._counted[model].discard(version)
        if not self._counted[model]:
            del self._counted[model]
        self._tags.pop((model, version), None)
        self._latencies.drop(model, version)

    def _counted_versions(self) -> Iterator[tuple[str, int]]:
        return ((model, version) for model, versions in self._counted.items() for version in sorted(versions))

    def render(self) -> bytes:
        return render(self.registry) + self._latencies.render(monotonic_ns())

    def collect(self) -> Iterator[Metric]:
        """Yield the current metric families."""
        return tagged(self._collect(), lambda model, version: self._tags.get((model, version), {}))

    def _collect(self) -> Iterator[Metric]:
        self.before_collecting()
        for totals in self._totals.values():
            totals.add_up()
        for counter in EXECUTED:
            if counter.is_timed and not self._settings.counters:
                continue
            family = counter.family()
            for model, version in self._counted_versions():
                totals = self._of(model, version)
                family.add_metric((model, str(version)), counter.value(totals.settled.get(counter.sums, 0)))
            yield family
        if self._joint:
            yield restarts_family(self._restarts)
        yield from self._unawaited()
        yield self._counter("executions", "Model executions", lambda totals: totals.executions)
        yield self._rows_histogram()
        compute = CounterMetricFamily(
            "charonia_executor_compute_seconds", "Time in executions by phase", labels=(*_LABELS, "phase")
        )
        for labels, totals in self._totals.items():
            compute.add_metric((*labels, "input"), totals.input_ns / 1e9)
            compute.add_metric((*labels, "infer"), totals.infer_ns / 1e9)
            compute.add_metric((*labels, "output"), totals.output_ns / 1e9)
        yield compute
        yield self._counter("request_failures", "Requests answered with an error", lambda totals: totals.failures)
        yield self._counter("batches_returned", "Batches returned unexecuted", lambda totals: totals.returned)
        yield self._counter("batches_died", "Batches whose instance died or hung", lambda totals: totals.died)
        what = "Requests whose sequence's state was gone"
        yield self._counter("sequence_states_lost", what, lambda totals: totals.states_lost)
        fenced = CounterMetricFamily(
            "charonia_fenced",
            "Requests whose settlement came after another attempt, cancel or deadline",
            labels=_LABELS,
        )
        for labels, totals in self._totals.items():
            fenced.add_metric(labels, totals.fenced)
        yield fenced
        yield from self._used()
        yield log_epoch_changes(self.log_epoch_changes())
        yield CounterMetricFamily(
            "charonia_executor_invalid_entries", "Entries that held no readable batch", value=self._invalid
        )
        instances = GaugeMetricFamily(
            "charonia_executor_loaded_instances", "Instances of a loaded version", labels=_LABELS
        )
        seconds = GaugeMetricFamily("nv_model_load_duration_secs", "Model load time in seconds", labels=_LABELS)
        for labels, (count, load_ns) in self._loads.items():
            instances.add_metric(labels, count)
            seconds.add_metric(labels, load_ns / 1e9)
        yield instances
        yield seconds

    def _unawaited(self) -> Iterator[Metric]:
        """Triton's request counters for requests that no gateway counts. Sum them with the gateways' counters."""
        success, failure, duration = SUCCESS.family(), FAILURE.family(), DURATION.family()
        for model, version in self._counted_versions():
            totals, labels = self._of(model, version), (model, str(version))
            success.add_metric(labels, totals.unawaited)
            duration.add_metric(labels, totals.unawaited_ns // 1000)
            for reason, count in sorted(totals.unawaited_failures.items()):
                failure.add_metric((*labels, reason), count)
        yield from (success, failure, duration) if self._settings.counters else (success, failure)

    def _used(self) -> Iterator[Metric]:
        for amount, name, what, unit in _USAGE:
            family = CounterMetricFamily(name, what, labels=(*_LABELS, "tenant"))
            for labels, amounts in self._usage.items():
                family.add_metric(labels, amounts[amount] / unit)
            yield family

    def _of(self, model: str, version: int) -> _Totals:
        key = (model, str(version))
        totals = self._totals.get(key)
        if totals is None:
            totals = self._totals[key] = _Totals()
        return totals

    def _counter(self, name: str, what: str, value: Callable[[_Totals], int]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"charonia_executor_{name}", what, labels=_LABELS)
        for labels, totals in self._totals.items():
            family.add_metric(labels, value(totals))
        return family

    def _rows_histogram(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily("charonia_executor_batch_rows", "Rows per execution", labels=_LABELS)
        for labels, totals in self._totals.items():
            below = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip((*_BUCKETS, "+Inf"), totals.buckets, strict=True):
                below += count
                buckets.append((str(bound), below))
            family.add_metric(labels, buckets, sum_value=totals.rows)
        return family
