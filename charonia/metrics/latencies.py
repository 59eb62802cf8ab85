"""Summaries and histograms of latencies under Triton's names (M4, M5): measured where `--metrics-config` asks for them.

A summary's quantiles are of the last minute, its count and sum of all time. Quantiles of several processes cannot be
added, so a part of `serve` also shows how often each range of values came (`_within`), from which the joint page makes
quantiles of them all (`quantiles`). Pure; what is measured and when is the callers'.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from charonia.models.metric_control import FIRST_RESPONSE, first_response_buckets, tag_labels
from charonia.models.names import is_namespaced, name_of, namespace_of
from charonia.options.settings import MetricsSettings
from protos.model_config_pb2 import ModelConfig

from .quantiles import WITHIN, quantile, range_of

WINDOW_NS = 60_000_000_000
_SLICES = 5
_SLICE_NS = WINDOW_NS // _SLICES

_SUMMARIES = {
    "request": (
        "nv_inference_request_summary_us",
        "Summary of inference request duration in microseconds (includes cached requests)",
    ),
    "queue": (
        "nv_inference_queue_summary_us",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
    ),
    "compute_input": (
        "nv_inference_compute_input_summary_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
    ),
    "compute_infer": (
        "nv_inference_compute_infer_summary_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
    ),
    "compute_output": (
        "nv_inference_compute_output_summary_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
    ),
    "cache_hit": (
        "nv_cache_hit_summary_per_model",
        "Summary of cache hit counts/durations per model, in microseconds.",
    ),
    "cache_miss": (
        "nv_cache_miss_summary_per_model",
        "Summary of cache miss counts/durations per model, in microseconds.",
    ),
}
"""Names and texts are Triton's."""
_OF_THE_CACHE = {"cache_hit", "cache_miss"}


class Summary:
    """The values of one series, in microseconds."""

    __slots__ = ("_slices", "count", "sum_us")

    def __init__(self) -> None:
        self.count = 0
        self.sum_us = 0
        self._slices: deque[tuple[int, dict[int, int]]] = deque(maxlen=_SLICES)

    def observe(self, duration_ns: int, now_ns: int) -> None:
        """Add one duration; `now_ns` is monotonic."""
        value = duration_ns // 1000
        self.count += 1
        self.sum_us += value
        at = now_ns // _SLICE_NS
        if not self._slices or self._slices[-1][0] != at:
            self._slices.append((at, {}))
        within, number = self._slices[-1][1], range_of(value)
        within[number] = within.get(number, 0) + 1

    def within(self, now_ns: int) -> dict[int, int]:
        """Number of values in each range in the last minute."""
        oldest = now_ns // _SLICE_NS - _SLICES
        total: dict[int, int] = {}
        for at, within in self._slices:
            if at > oldest:
                for number, count in within.items():
                    total[number] = total.get(number, 0) + count
        return total


class Histogram:
    """The values of one series, in whole milliseconds, by their upper bounds."""

    __slots__ = ("bounds", "counts", "sum_ms")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum_ms = 0

    def observe(self, duration_ns: int) -> None:
        value = duration_ns // 1_000_000
        self.sum_ms += value
        self.counts[bisect_left(self.bounds, value)] += 1


@dataclass(slots=True)
class ModelLatencies:
    """The latencies of one model version; None in place of those that are not measured."""

    labels: str
    summaries: dict[str, Summary]
    first_response: Histogram | None

    def observe(self, what: str, duration_ns: int, now_ns: int) -> None:
        """Add a duration to summary `what`, a name of `_SUMMARIES`, if it is measured for this model."""
        summary = self.summaries.get(what)
        if summary is not None:
            summary.observe(duration_ns, now_ns)

    def responded(self, duration_ns: int) -> None:
        """A request has its first response."""
        if self.first_response is not None:
            self.first_response.observe(duration_ns)


class Latencies:
    """The latencies of one process. `caches`: the server has a response cache. `joint`: the page is added to others."""

    def __init__(self, settings: MetricsSettings, *, caches: bool = False, joint: bool = False) -> None:
        self._settings = settings
        self._caches = caches
        self._joint = joint
        self._models: dict[tuple[str, int], ModelLatencies] = {}
        self.measures = settings.summaries or settings.histograms
        """Whether anything is measured at all."""

    def of(self, model: str, version: int) -> ModelLatencies | None:
        """The latencies of a version that was added."""
        return self._models.get((model, version))

    def add(self, version: int, config: ModelConfig, *, model: str = "") -> ModelLatencies | None:
        """Begin to measure a version; of one measured before, the same series continue. None if nothing is measured.

        `model` is its key, by default the configuration's name.
        """
        if not self.measures:
            return None
        key = (model or config.name, version)
        known = self._models.get(key)
        summaries = {what: Summary() for what in self._summaries_of(config)}
        histogram = Histogram(first_response_buckets(config)) if self._settings.histograms else None
        if known is not None:
            summaries |= {what: summary for what, summary in known.summaries.items() if what in summaries}
            before = known.first_response
            if histogram is not None and before is not None and before.bounds == histogram.bounds:
                histogram = before
            known.labels, known.summaries, known.first_response = _labels(key[0], version, config), summaries, histogram
            return known
        self._models[key] = ModelLatencies(_labels(key[0], version, config), summaries, histogram)
        return self._models[key]

    def begin_anew(self, model: str, version: int) -> None:
        """Begin the series of a version at 0."""
        known = self._models.get((model, version))
        if known is not None:
            known.summaries = {what: Summary() for what in known.summaries}
            known.first_response = known.first_response and Histogram(known.first_response.bounds)

    def drop(self, model: str, version: int) -> None:
        """The version is no longer served."""
        self._models.pop((model, version), None)

    def _summaries_of(self, config: ModelConfig) -> list[str]:
        if not self._settings.summaries:
            return []
        cached = self._caches and config.response_cache.enable
        unwanted = {"request"} if cached else _OF_THE_CACHE  # M5: of a model with the cache on it would mislead
        return [what for what in _SUMMARIES if what not in unwanted]

    def render(self, now_ns: int) -> bytes:
        """The families in text exposition; `le` and `quantile` are the last labels, as Triton's clients expect."""
        lines: list[str] = []
        if self._settings.histograms:
            lines += self._histogram_lines()
        if self._settings.summaries:
            for what, (name, text) in _SUMMARIES.items():
                found = [(m.labels, m.summaries[what]) for m in self._models.values() if what in m.summaries]
                if found:
                    lines += [f"# HELP {name} {text}", f"# TYPE {name} summary"]
                    for labels, summary in found:
                        lines += self._summary_lines(name, labels, summary, now_ns)
        return "".join(f"{line}\n" for line in lines).encode()

    def _summary_lines(self, name: str, labels: str, summary: Summary, now_ns: int) -> Iterator[str]:
        within = summary.within(now_ns)
        yield f"{name}_count{{{labels}}} {summary.count}"
        yield f"{name}_sum{{{labels}}} {summary.sum_us}"
        for wanted in self._settings.quantiles:
            yield f'{name}{{{labels},quantile="{_number(wanted)}"}} {_number(quantile(within, wanted))}'
        if self._joint:
            for number, count in within.items():
                yield f'{name}{WITHIN}{{{labels},range="{number}"}} {count}'

    def _histogram_lines(self) -> Iterator[str]:
        found = [(m.labels, m.first_response) for m in self._models.values() if m.first_response is not None]
        if found:
            yield f"# HELP {FIRST_RESPONSE} Duration from request to first response in milliseconds"
            yield f"# TYPE {FIRST_RESPONSE} histogram"
        for labels, histogram in found:
            yield f"{FIRST_RESPONSE}_count{{{labels}}} {sum(histogram.counts)}"
            yield f"{FIRST_RESPONSE}_sum{{{labels}}} {histogram.sum_ms}"
            below = 0
            for bound, count in zip((*histogram.bounds, inf), histogram.counts, strict=True):
                below += count
                yield f'{FIRST_RESPONSE}_bucket{{{labels},le="{_number(bound)}"}} {below}'


def _labels(model: str, version: int, config: ModelConfig) -> str:
    labels = {**tag_labels(config), "model": name_of(model), "version": str(version)}
    if is_namespaced(model):
        labels["namespace"] = namespace_of(model)
    return ",".join(f'{name}="{_escaped(labels[name])}"' for name in sorted(labels))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value == inf:
        return "+Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))
