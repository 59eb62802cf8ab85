"""Triton's counters of a model version (M1, M3, M6): names and help texts, the same in every process that counts."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily


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
