"""What requests of an ensemble add to its statistics (S56, X1-X4, M11): increments by name, as executors write them;
and the receipts of their steps.

Pure. Its compute times are the sums of its steps'. The models of the steps count their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from charonia.calls.unsent_counts import FAILURES_IN_ENSEMBLE
from charonia.facts.usage import Steps


@dataclass(slots=True)
class Tally:
    """Times of one request, wall clock and durations in ns. `start_ns` is 0 if it never began."""

    start_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    steps: Steps = field(default_factory=Steps)
    """What its steps say that they have used, where the request asks for a receipt."""

    def add(self, times: tuple[int, int, int]) -> None:
        """Adds the compute times of one step."""
        self.input_ns += times[0]
        self.infer_ns += times[1]
        self.output_ns += times[2]


@dataclass(slots=True)
class Totals:
    """The increments of several requests, by statistics key."""

    by_key: dict[bytes, dict[str, int]] = field(default_factory=dict)

    def succeeded(self, key: bytes, rows: int, accepted_ns: int, tally: Tally, now_ns: int) -> None:
        """Counts one request as answered."""
        size = f"b{rows}"
        self._add(
            key,
            {
                "success_count": 1,
                "success_ns": max(0, now_ns - accepted_ns),
                "queue_count": 1,
                "queue_ns": max(0, tally.start_ns - accepted_ns),
                "compute_input_count": 1,
                "compute_input_ns": tally.input_ns,
                "compute_infer_count": 1,
                "compute_infer_ns": tally.infer_ns,
                "compute_output_count": 1,
                "compute_output_ns": tally.output_ns,
                "inference_count": rows,
                "execution_count": 1,
                size + "_count": 1,
                size + "_input_ns": tally.input_ns,
                size + "_infer_ns": tally.infer_ns,
                size + "_output_ns": tally.output_ns,
            },
        )
        counts = self.by_key[key]
        counts["last_inference_ms"] = max(counts.get("last_inference_ms", 0), tally.start_ns // 1_000_000)

    def failed(self, key: bytes, accepted_ns: int, now_ns: int) -> None:
        """Counts one request that failed in its graph: twice, as Triton counts both its answer and its end."""
        taken_ns = FAILURES_IN_ENSEMBLE * max(0, now_ns - accepted_ns)
        self._add(key, {"fail_count": FAILURES_IN_ENSEMBLE, "fail_ns": taken_ns, "fail_OTHER": FAILURES_IN_ENSEMBLE})

    def _add(self, key: bytes, increments: Mapping[str, int]) -> None:
        counts = self.by_key.setdefault(key, {})
        for name, amount in increments.items():
            counts[name] = counts.get(name, 0) + amount
