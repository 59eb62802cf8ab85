"""What requests of an ensemble add to its statistics (S56, X1-X4, M11): increments by name, as executors write them;
and the receipts of their steps.

Pure. Its compute times are the sums of its steps'. The models of the steps count their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from charonia.calls.unsent_counts import FAILURES_IN_ENSEMBLE
from charonia.facts import counters
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
        input_ns, infer_ns, output_ns = tally.input_ns, tally.infer_ns, tally.output_ns
        values = (
            *(1, max(0, now_ns - accepted_ns), 1, max(0, tally.start_ns - accepted_ns)),
            *(1, input_ns, 1, infer_ns),
            *(1, output_ns, rows, 1),
            *(1, input_ns, infer_ns, output_ns, tally.start_ns // 1_000_000),
        )
        increments = dict(zip(counters.of_execution(rows), values, strict=True))
        counters.add(self.by_key.setdefault(key, {}), increments)

    def failed(self, key: bytes, accepted_ns: int, now_ns: int) -> None:
        """Counts one request that failed in its graph: twice, as Triton counts both its answer and its end."""
        taken_ns = FAILURES_IN_ENSEMBLE * max(0, now_ns - accepted_ns)
        increments = counters.of_failures(FAILURES_IN_ENSEMBLE, taken_ns, "OTHER")
        counters.add(self.by_key.setdefault(key, {}), increments)
