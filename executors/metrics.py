"""What this executor did, for Prometheus: executions, rows, compute times, failures, loads. A registry of its own.

Counted once per batch, in the event loop. Request counts and durations are the gateways' (design page, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from .accounting import Executed

_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LABELS = ("model", "version")


@dataclass(slots=True)
class _Children:
    """The series of one version: looking them up by label costs as much as an execution of a small model."""

    executions: Counter
    rows: Histogram
    input: Counter
    infer: Counter
    output: Counter
    failures: Counter


class ExecutorMetrics:
    """The executor's families. `render` gives the text exposition (H54)."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._children: dict[tuple[str, int], _Children] = {}
        self._executions = Counter("charonia_executor_executions", "Model executions", _LABELS, registry=registry)
        self._rows = Histogram(
            "charonia_executor_batch_rows", "Rows per execution", _LABELS, registry=registry, buckets=_BUCKETS
        )
        self._compute = Counter(
            "charonia_executor_compute_seconds",
            "Time in executions by phase (input, infer, output)",
            (*_LABELS, "phase"),
            registry=registry,
        )
        self._failures = Counter(
            "charonia_executor_request_failures", "Requests answered with an error", _LABELS, registry=registry
        )
        self._returned = Counter(
            "charonia_executor_batches_returned", "Batches given back unexecuted", _LABELS, registry=registry
        )
        self._invalid = Counter(
            "charonia_executor_invalid_entries", "Entries that held no readable batch", registry=registry
        )
        self._loaded = Gauge(
            "charonia_executor_loaded_instances", "Instances of a loaded version", _LABELS, registry=registry
        )
        self._load_seconds = Gauge(
            "nv_model_load_duration_secs", "Model load time in seconds", _LABELS, registry=registry
        )

    def executed(self, model: str, version: int, executed: Executed) -> None:
        """Count one batch."""
        children = self._children.get((model, version))
        if children is None:
            children = self._children[(model, version)] = self._of(model, str(version))
        for execution in executed.executions:
            children.executions.inc()
            children.rows.observe(execution.rows)
            children.input.inc(execution.input_ns / 1e9)
            children.infer.inc(execution.infer_ns / 1e9)
            children.output.inc(execution.output_ns / 1e9)
        if executed.failures:
            children.failures.inc(len(executed.failures))

    def _of(self, model: str, version: str) -> _Children:
        return _Children(
            self._executions.labels(model, version),
            self._rows.labels(model, version),
            self._compute.labels(model, version, "input"),
            self._compute.labels(model, version, "infer"),
            self._compute.labels(model, version, "output"),
            self._failures.labels(model, version),
        )

    def returned(self, model: str, version: int) -> None:
        self._returned.labels(model, str(version)).inc()

    def invalid(self) -> None:
        self._invalid.inc()

    def loaded(self, model: str, version: int, instances: int, load_ns: int) -> None:
        self._loaded.labels(model, str(version)).set(instances)
        self._load_seconds.labels(model, str(version)).set(load_ns / 1e9)

    def unloaded(self, model: str, version: int) -> None:
        """The version's gauges go; its counters stay, as a counter must."""
        labels = (model, str(version))
        for gauge in (self._loaded, self._load_seconds):
            if labels in {tuple(sample.labels.values()) for family in gauge.collect() for sample in family.samples}:
                gauge.remove(*labels)

    def render(self) -> bytes:
        return generate_latest(self.registry)
