"""Triton's counters of a model version (M1, M3, M6): names and help texts, the same in every process that counts, and
how a part of `serve` says that it has begun them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from charonia.models.names import is_namespaced, name_of, namespace_of

from .exposition import RESTARTS


@dataclass(frozen=True, slots=True)
class TritonCounter:
    """One counter. `sums` is the increment of the statistics that it adds up, if there is one."""

    name: str
    text: str
    sums: str = ""
    labels: tuple[str, ...] = ("model", "version")

    @property
    def is_timed(self) -> bool:
        """Whether it is omitted when counters are off (`MetricsSettings.counters`)."""
        return self.sums.endswith("_ns")

    def family(self) -> CounterMetricFamily:
        """Its family, without samples."""
        return CounterMetricFamily(self.name, self.text, labels=self.labels)

    def value(self, summed: int) -> int:
        """Its value for a sum of the statistics, which are in ns."""
        return summed // 1000 if self.is_timed else summed


SUCCESS = TritonCounter("nv_inference_request_success", "Number of successful inference requests, all batch sizes")
FAILURE = TritonCounter(
    "nv_inference_request_failure",
    "Number of failed inference requests, all batch sizes",
    labels=("model", "version", "reason"),
)
DURATION = TritonCounter(
    "nv_inference_request_duration_us",
    "Cumulative inference request duration in microseconds (includes cached requests)",
)

EXECUTED = (
    TritonCounter(
        "nv_inference_count", "Number of inferences performed (does not include cached requests)", "inference_count"
    ),
    TritonCounter(
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        "execution_count",
    ),
    TritonCounter(
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        "queue_ns",
    ),
    TritonCounter(
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        "compute_input_ns",
    ),
    TritonCounter(
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        "compute_infer_ns",
    ),
    TritonCounter(
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        "compute_output_ns",
    ),
)

CACHE_HITS = TritonCounter("nv_cache_num_hits_per_model", "Number of cache hits per model")
CACHE_MISSES = TritonCounter("nv_cache_num_misses_per_model", "Number of cache misses per model")
CACHE_HIT_DURATION = TritonCounter(
    "nv_cache_hit_duration_per_model", "Total cache hit duration per model, in microseconds"
)
CACHE_MISS_DURATION = TritonCounter(
    "nv_cache_miss_duration_per_model", "Total cache miss (insert+lookup) duration per model, in microseconds"
)


def restarts_family(restarts: Mapping[tuple[str, int], int]) -> GaugeMetricFamily:
    """For pages that are joined (`exposition.RESTARTS`): how often counters began again, by model key and version."""
    family = GaugeMetricFamily(RESTARTS, "Times the counters of a version began again at 0")
    for (model, version), count in restarts.items():
        labels = {"model": name_of(model), "version": str(version)}
        if is_namespaced(model):
            labels["namespace"] = namespace_of(model)
        family.add_sample(RESTARTS, labels, count)
    return family
