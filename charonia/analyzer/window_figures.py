"""What was measured in a window: the tallies of workers added up, the server's statistics and metrics. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from .latency_histogram import Durations, LatencyHistogram

_TIMES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
_HISTOGRAMS = ("latency", "service", "first", "gaps")
_MAX_TEXTS = 20
"""Different errors that are told apart; servers put ids and addresses into texts."""
_OTHER = "other failures"
_GAUGES = (
    "nv_gpu_utilization", "nv_gpu_power_usage", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes",
    "nv_cpu_utilization", "nv_inference_pending_request_count",
)  # fmt: skip


class Tally:
    """What a worker has seen since the last cut: times of `perf_counter_ns`, and the process's processor time."""

    def __init__(self, now_ns: int, cpu_ns: int) -> None:
        self.begun_ns, self.cpu_ns = now_ns, cpu_ns
        self.end_ns = self.end_cpu_ns = 0
        self.latencies, self.services, self.first, self.gaps = Durations(), Durations(), Durations(), Durations()
        self.errors: Counter[str] = Counter()
        self.responses = self.due = self.late = self.send_ns = self.receive_ns = 0

    def failed(self, error: str) -> None:
        """Counts a request that failed, by the first line of its error."""
        text = error.partition("\n")[0]
        self.errors[text if text in self.errors or len(self.errors) < _MAX_TEXTS else _OTHER] += 1

    def finish(self, now_ns: int, cpu_ns: int) -> None:
        """Ends the window: at the cut, or before it with the last request of a limited number."""
        if not self.end_ns:
            self.end_ns, self.end_cpu_ns = now_ns, cpu_ns

    def packed(self, *, is_open: bool) -> dict[str, Any]:
        """The figures of the window, which is finished, for `WindowFigures.add_worker`."""
        latency = self.latencies.histogram().packed()
        return {
            "duration": self.end_ns - self.begun_ns, "busy": self.end_cpu_ns - self.cpu_ns,
            "completed": len(self.latencies),
            "responses": self.responses, "due": self.due, "late": self.late, "send": self.send_ns,
            "receive": self.receive_ns,
            "errors": dict(self.errors), "latency": latency,
            "service": self.services.histogram().packed() if is_open else latency,
            "first": self.first.histogram().packed(), "gaps": self.gaps.histogram().packed(),
        }  # fmt: skip


@dataclass(slots=True)
class ServerFigures:
    """The difference of a model's statistics over a window; `counts` and `times_ns` by their names in the interface."""

    inferences: int = 0
    executions: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    times_ns: dict[str, int] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Self:
        """The sum over a model's versions. A version that came meanwhile counts from zero."""
        known = {str(version.get("version", "")): version for version in before}
        made = cls()
        for version in after:
            old = known.get(str(version.get("version", "")), {})
            made.inferences += int(version.get("inference_count", 0)) - int(old.get("inference_count", 0))
            made.executions += int(version.get("execution_count", 0)) - int(old.get("execution_count", 0))
            spent, spent_before = version.get("inference_stats", {}), old.get("inference_stats", {})
            for name in _TIMES:
                new, past = spent.get(name, {}), spent_before.get(name, {})
                count, ns = (int(new.get(part, 0)) - int(past.get(part, 0)) for part in ("count", "ns"))
                made.counts[name] = made.counts.get(name, 0) + count
                made.times_ns[name] = made.times_ns.get(name, 0) + ns
        return made

    def add(self, other: ServerFigures) -> None:
        self.inferences += other.inferences
        self.executions += other.executions
        for name in _TIMES:
            self.counts[name] = self.counts.get(name, 0) + other.counts.get(name, 0)
            self.times_ns[name] = self.times_ns.get(name, 0) + other.times_ns.get(name, 0)

    def mean_us(self, name: str) -> float:
        """Microseconds of a successful request spent in a part: that of `queue`, `compute_infer`, ..."""
        requests = self.counts.get("success", 0)
        return self.times_ns.get(name, 0) / requests / 1000 if requests else 0.0

    @property
    def overhead_us(self) -> float:
        """Of the request's time at the server, what is in none of its parts."""
        parts = ("queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
        return max(0.0, self.mean_us("success") - sum(map(self.mean_us, parts)))


@dataclass(slots=True)
class WindowFigures:
    """One window, or several one after the other.

    `latency` is from the intended time of sending, `service` from the real one; in a closed loop they are the same.
    `first` and `gaps` are of streams: time to the first response, and between responses. `send_ns` and `receive_ns`
    are sums; `due` counts requests whose time came in an open loop, `late` those that left more than 1 ms after it.
    `busy_ns` is the processor time of the generator, `busiest` the share of a core of its busiest process.
    """

    duration_ns: int = 0
    batch: int = 1
    completed: int = 0
    responses: int = 0
    due: int = 0
    late: int = 0
    send_ns: int = 0
    receive_ns: int = 0
    busy_ns: int = 0
    busiest: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    service: LatencyHistogram = field(default_factory=LatencyHistogram)
    first: LatencyHistogram = field(default_factory=LatencyHistogram)
    gaps: LatencyHistogram = field(default_factory=LatencyHistogram)
    server: dict[str, ServerFigures] = field(default_factory=dict)
    metrics: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Inferences a second: requests times the batch size."""
        return self.completed * self.batch * 1e9 / self.duration_ns if self.duration_ns else 0.0

    @property
    def response_rate(self) -> float:
        return self.responses * 1e9 / self.duration_ns if self.duration_ns else 0.0

    @property
    def generator_share(self) -> float:
        """Cores that the generator was busy with."""
        return self.busy_ns / self.duration_ns if self.duration_ns else 0.0

    def judged_ns(self, percentile: int | None) -> float:
        """The latency that stability and limits are about: the mean without a percentile."""
        return self.latency.mean_ns if percentile is None else self.latency.percentile_ns(percentile)

    def add_worker(self, tally: Mapping[str, Any]) -> None:
        """Add what one worker counted in this window."""
        self.duration_ns = max(self.duration_ns, tally["duration"])
        self.completed += tally["completed"]
        self.responses += tally["responses"]
        self.due += tally["due"]
        self.late += tally["late"]
        self.send_ns += tally["send"]
        self.receive_ns += tally["receive"]
        self.busy_ns += tally["busy"]
        self.busiest = max(self.busiest, tally["busy"] / max(1, tally["duration"]))
        self.errors.update(tally["errors"])
        for name in _HISTOGRAMS:
            getattr(self, name).add(LatencyHistogram.unpacked(tally[name]))

    def add_window(self, other: WindowFigures) -> None:
        """Add the window that followed."""
        for name in ("duration_ns", "completed", "responses", "due", "late", "send_ns", "receive_ns", "busy_ns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.batch, self.busiest = other.batch, max(self.busiest, other.busiest)
        self.errors.update(other.errors)
        for name in _HISTOGRAMS:
            getattr(self, name).add(getattr(other, name))
        for model, figures in other.server.items():
            self.server.setdefault(model, ServerFigures()).add(figures)
        for metric, by_label in other.metrics.items():
            for label, values in by_label.items():
                self.metrics.setdefault(metric, {}).setdefault(label, []).extend(values)


def joined(windows: Sequence[WindowFigures]) -> WindowFigures:
    """Windows one after the other as one."""
    made = WindowFigures()
    for window in windows:
        made.add_window(window)
    return made


def gauges(text: str, model: str) -> Iterator[tuple[str, str, float]]:
    """Those of a page of metrics that are reported: name, GPU or other label, value. Of models, only of this one."""
    for line in text.splitlines():
        name, mark, rest = line.partition("{")
        if not mark:
            name, _, rest = line.partition(" ")
        if name not in _GAUGES:
            continue
        labels, _, number = rest.rpartition("} ") if mark else ("", "", rest)
        found = dict(part.split("=", 1) for part in labels.split(",") if "=" in part)
        shown = {key: value.strip('"') for key, value in found.items()}
        if shown.get("model", model) != model:
            continue
        try:
            yield name, shown.get("gpu_uuid", ""), float(number.split()[0])
        except (ValueError, IndexError):
            continue
