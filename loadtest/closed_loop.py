"""The closed loop without its transport: when a lane may send again, and what of its answers counts.

A lane has one request in flight; the next leaves when the answer is in. Drivers (`http_driver`, `grpc_driver`) own
sockets and threads; this module owns the rules that make their figures comparable.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .measurement import Tally

_NEVER_NS = 1 << 62
RECONNECT_DELAY_S = 0.05


@dataclass(frozen=True)
class Plan:
    """How many lanes, and for how long: either `duration_s` or `requests` is set. Warm-up comes before it."""

    concurrency: int
    duration_s: float | None
    requests: int | None
    warmup_s: float = 0.0
    timeout_s: float = 60.0
    connections: int | None = None


class Gate:
    """Decides whether another request leaves and whether an answer is measured; shared by all lanes and threads.

    With a duration, answers that arrive inside the window count (so the rate has no edge bias); with a number of
    requests, those sent after the warm-up, exactly that many.
    """

    def __init__(self, plan: Plan) -> None:
        self._requests = plan.requests
        self._duration_ns = None if plan.duration_s is None else round(plan.duration_s * 1e9)
        self._warmup_ns = round(plan.warmup_s * 1e9)
        self._sent = itertools.count()
        self._by_start = plan.requests is not None
        self._warm_ns = self._stop_ns = 0

    def open(self, now_ns: int) -> None:
        """The run starts now."""
        self._warm_ns = now_ns + self._warmup_ns
        self._stop_ns = _NEVER_NS if self._duration_ns is None else self._warm_ns + self._duration_ns

    def shut(self) -> None:
        """No further request leaves (the user interrupted)."""
        self._requests, self._stop_ns = 0, 0

    def may_send(self, now_ns: int) -> bool:
        if self._requests is None:
            return now_ns < self._stop_ns
        # next() on a count is atomic, so threads never share a number.
        return (now_ns < self._warm_ns and self._requests > 0) or next(self._sent) < self._requests

    def measures(self, start_ns: int, end_ns: int) -> bool:
        return self._warm_ns <= (start_ns if self._by_start else end_ns) <= self._stop_ns

    def window_ns(self, last_end_ns: int) -> int:
        """Length of the measured window, given when the last measured answer came."""
        return max(0, last_end_ns - self._warm_ns) if self._duration_ns is None else self._duration_ns


class Recorder:
    """Counts for the lanes of one thread."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.tally = Tally()
        self._last_end_ns = 0

    def right(self, start_ns: int, end_ns: int) -> None:
        tally = self.tally
        tally.completed_total += 1
        if self.gate.measures(start_ns, end_ns):
            tally.latencies_ns.append(end_ns - start_ns)
            self._last_end_ns = end_ns

    def wrong(self, text: str) -> None:
        self.tally.errors[text] += 1

    def finish(self) -> Tally:
        self.tally.window_ns = self.gate.window_ns(self._last_end_ns)
        return self.tally


class Driver(Protocol):
    """Connects, then runs a plan to its end. `connect` raises LoadTestError when the server cannot be reached."""

    def connect(self) -> None: ...

    def run(self, progress: Callable[[int, int], None] | None) -> Tally: ...

    def close(self) -> None: ...


class Progress:
    """Prints one line a second to stderr: called with right answers and errors so far."""

    def __init__(self) -> None:
        self._seconds = 0
        self._before = 0

    def __call__(self, completed: int, errors: int) -> None:
        self._seconds += 1
        print(
            f"{self._seconds:4d} s  {completed} answers, {completed - self._before}/s, {errors} errors",
            file=sys.stderr,
            flush=True,
        )
        self._before = completed
