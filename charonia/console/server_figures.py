"""Figures of a server and its models from two readings of its metrics: rates, means, and how full batches are. Pure.

Rates are of the time between both readings. A counter that went back belongs to a server that was started again: then
what it has now is what it counted since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .metric_samples import Scrape, Version

SUCCESS, FAILURE = "nv_inference_request_success", "nv_inference_request_failure"
PENDING = "nv_inference_pending_request_count"
_RUNNING = "charonia_batcher_running_requests"
_SUMMARY = "nv_inference_request_summary_us"
_DURATION, _ROWS, _EXECUTIONS = "nv_inference_request_duration_us", "nv_inference_count", "nv_inference_exec_count"
LOAD = "nv_model_load_duration_secs"
PHASES = ("queue", "compute_input", "compute_infer", "compute_output")
"""Where the time of a request goes, in order, as Triton's statistics name it."""
_OF_PHASES = {phase: f"nv_inference_{phase}_duration_us" for phase in PHASES}
FAMILIES = frozenset({SUCCESS, FAILURE, PENDING, _RUNNING, _SUMMARY, _DURATION, _ROWS, _EXECUTIONS, LOAD}) | frozenset(
    _OF_PHASES.values()
)
"""What the figures are made of: of a reading no more is kept."""


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """One model version, or all of them together. Times in ms, rates per second; None: nothing to divide by."""

    model: str
    version: str
    rate: float
    error_rate: float
    latency_ms: float | None
    phases_ms: Mapping[str, float | None]
    rows_per_execution: float | None
    execution_rate: float
    pending: int
    running: int

    @property
    def error_share(self) -> float:
        """Failed requests of all, 0 to 1."""
        every = self.rate + self.error_rate
        return self.error_rate / every if every else 0.0


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """The whole server, and each of its versions."""

    whole: ModelFigures
    models: tuple[ModelFigures, ...]


def figures(before: Scrape, after: Scrape) -> ServerFigures:
    """What happened between two readings."""
    versions = tuple(_figures(before, after, model, version) for model, version in after.versions())
    return ServerFigures(_figures(before, after, "", ""), versions)


def model_figures(before: Scrape, after: Scrape, model: str) -> ModelFigures:
    """One model, all its versions together; "" for the whole server."""
    return _figures(before, after, model, "")


def _figures(before: Scrape, after: Scrape, model: str, version: str) -> ModelFigures:
    seconds = max(1e-9, after.time_s - before.time_s)

    def value(scrape: Scrape, family: str) -> float:
        return scrape.of_model(family, model, version) if model else scrape.total(family)

    def grown(family: str) -> float:
        return growth(value(before, family), value(after, family))

    answered, failed = grown(SUCCESS), grown(FAILURE)
    executions = grown(_EXECUTIONS)

    def mean_ms(family: str) -> float | None:
        return grown(family) / answered / 1000 if answered else None

    return ModelFigures(
        model,
        version,
        answered / seconds,
        failed / seconds,
        mean_ms(_DURATION),
        {phase: mean_ms(family) for phase, family in _OF_PHASES.items()},
        grown(_ROWS) / executions if executions else None,
        executions / seconds,
        int(value(after, PENDING)),
        int(after.of_model(_RUNNING, model) if model else after.total(_RUNNING)),
    )


def batch_fill(versions: Iterable[ModelFigures], most: Mapping[Version, int]) -> float | None:
    """How full batches were: the rows of executions as a share of those that the same executions could have had, of the
    versions that batch. `most` are their `max_batch_size`s, 0 for none; None without such an execution.
    """
    rows = capacity = 0.0
    for one in versions:
        largest = most.get((one.model, one.version), 0)
        if largest and one.rows_per_execution is not None:
            rows += one.execution_rate * one.rows_per_execution
            capacity += one.execution_rate * largest
    return rows / capacity if capacity else None


def growth(before: float, after: float) -> float:
    """How far a counter came."""
    return after - before if after >= before else after


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a histogram: `label` says which values, `share` is of the highest bar, 0 to 1."""

    label: str
    count: int
    share: float


def bars(counts: Sequence[tuple[str, int]]) -> list[Bar]:
    """Counts by label as bars."""
    highest = max((count for _, count in counts), default=0)
    return [Bar(label, count, count / highest if highest else 0.0) for label, count in counts]


def quantiles_ms(scrape: Scrape, model: str) -> dict[str, float]:
    """Quantiles of a model's latency in the last minute, of the version that is slowest; empty unless the server
    measures them (`--metrics-config summary_latencies=true`).
    """
    found: dict[str, float] = {}
    for labels, value in scrape.series_of(_SUMMARY, model):
        quantile = labels.get("quantile")
        if quantile is not None and value == value:
            found[quantile] = max(found.get(quantile, 0.0), value / 1000)
    return dict(sorted(found.items()))
