"""The only place where services read time: wall time between processes, monotonic time for durations.

All processes of a log agree on wall time: it is the machine's own clock while that is near the log's clock, otherwise
the log's. It does not step when the machine's clock is set: it continues until the next heartbeat has compared the two
(`agree`).
"""

from __future__ import annotations

import time

monotonic_ns = time.monotonic_ns
"""Nanoseconds of a clock that never steps; the clock of durations and schedulers (X8)."""

NEAR_NS = 2_000_000_000
"""Clocks nearer than this count as equal: comparing them is only as exact as the round trip to the log."""

_system_ns = time.time_ns
_ahead_of_monotonic_ns = _system_ns() - monotonic_ns()


def wall_ns() -> int:
    """Nanoseconds since the epoch; the clock of everything that is written to the log."""
    return monotonic_ns() + _ahead_of_monotonic_ns


def agree(log_ns: int, within_ns: int) -> int:
    """Use the machine's clock if it is near the log's, otherwise the log's. Returns how far it is ahead then, otherwise
    0. `log_ns` is the log's clock, exact to `within_ns`.
    """
    global _ahead_of_monotonic_ns
    near_ns = NEAR_NS + within_ns
    now_ns, system_ns = monotonic_ns(), _system_ns()
    ahead_ns = system_ns - log_ns
    if abs(ahead_ns) <= near_ns:
        _ahead_of_monotonic_ns = system_ns - now_ns
        return 0
    if abs(now_ns + _ahead_of_monotonic_ns - log_ns) > near_ns:
        _ahead_of_monotonic_ns = log_ns - now_ns
    return ahead_ns
