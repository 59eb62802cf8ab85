"""Sums up what executed waves add to their model's statistics. Pure.

The increments are those of `executors.batches.accounting`; a wave counts as its requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from charonia.wire import Wave
from executors.batches.accounting import Execution, Failure


class WaveCounts:
    """The counts of one loaded version since the last `take`. Times in ns."""

    __slots__ = (
        "_count",
        "_executions",
        "_failures",
        "_infer_ns",
        "_input_ns",
        "_last_ms",
        "_output_ns",
        "_queued_ns",
        "_rows",
        "_sizes",
        "_whole_ns",
    )

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._count = self._rows = self._queued_ns = self._whole_ns = self._executions = self._last_ms = 0
        self._input_ns = self._infer_ns = self._output_ns = 0
        self._sizes: dict[int, tuple[int, int, int, int]] = {}
        self._failures: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._executions or self._failures)

    def executed(
        self, execution: Execution, waves: Sequence[Wave], failed: dict[int, int], share: dict[int, int] | None = None
    ) -> None:
        """Count one execution of waves, or with `share` (`ExecutedWaves.shares`) of some of their requests.

        `failed` is the number of failed requests by wave.
        """
        start, end = execution.start_ns, execution.end_ns
        total = 0
        for index in execution.indices:
            wave = waves[index]
            if share is not None:
                count = share[index]
            else:
                count = wave.count - failed.get(index, 0) if failed else wave.count
            total += count
            self._rows += count * wave.rows
            accepted = wave.accepted_ns
            if accepted < start:  # clocks of two machines may differ
                self._queued_ns += count * (start - accepted)
            if accepted < end:
                self._whole_ns += count * (end - accepted)
        self._count += total
        input_ns, infer_ns, output_ns = execution.input_ns, execution.infer_ns, execution.output_ns
        self._input_ns += total * input_ns
        self._infer_ns += total * infer_ns
        self._output_ns += total * output_ns
        self._executions += 1
        runs, inputs, infers, outputs = self._sizes.get(execution.rows, (0, 0, 0, 0))
        self._sizes[execution.rows] = (runs + 1, inputs + input_ns, infers + infer_ns, outputs + output_ns)
        self._last_ms = max(self._last_ms, start // 1_000_000)

    def failed(self, failures: Sequence[Failure], waves: Sequence[Wave]) -> None:
        """Count failed requests. A failure's index is that of its wave."""
        counts = self._failures
        for failure in failures:
            waited_ns = max(0, failure.end_ns - waves[failure.index].accepted_ns)
            for name, amount in (("fail_count", 1), ("fail_ns", waited_ns), (failure.reason, 1)):
                counts[name] = counts.get(name, 0) + amount

    def take(self) -> dict[str, int]:
        """Return the increments so far, and start again from zero."""
        taken = dict(self._failures)
        if self._executions:
            count = self._count
            taken |= {
                "success_count": count,
                "success_ns": self._whole_ns,
                "queue_count": count,
                "queue_ns": self._queued_ns,
                "compute_input_count": count,
                "compute_input_ns": self._input_ns,
                "compute_infer_count": count,
                "compute_infer_ns": self._infer_ns,
                "compute_output_count": count,
                "compute_output_ns": self._output_ns,
                "inference_count": self._rows,
                "execution_count": self._executions,
                "last_inference_ms": self._last_ms,
            }
            for rows, (runs, input_ns, infer_ns, output_ns) in self._sizes.items():
                taken[f"b{rows}_count"] = runs
                taken[f"b{rows}_input_ns"] = input_ns
                taken[f"b{rows}_infer_ns"] = infer_ns
                taken[f"b{rows}_output_ns"] = output_ns
        self._clear()
        return taken


def merge(totals: dict[str, int], increments: dict[str, int]) -> None:
    """Add increments to totals; of `last_*`, keep the maximum."""
    for name, amount in increments.items():
        known = totals.get(name, 0)
        totals[name] = max(known, amount) if name.startswith("last_") else known + amount
