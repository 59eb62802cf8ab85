"""The only places where services read time: wall time for what crosses processes, monotonic time for durations.

Wall time is that on which all processes of a log agree: the machine's own while that is near the log's,
else the log's. It does not step when the machine's clock is set: it goes on from where it was until the next
heartbeat has compared the two (`agree`).
"""

from __future__ import annotations

import time

monotonic_ns = time.monotonic_ns
"""Nanoseconds of a clock that never steps; the clock of durations and schedulers (X8)."""

NEAR_NS = 2_000_000_000
"""Clocks nearer than this are taken for one: comparing them is no more exact than the way to the log and back."""

_system_ns = time.time_ns
_ahead_of_monotonic_ns = _system_ns() - monotonic_ns()


def wall_ns() -> int:
    """Nanoseconds since the epoch; the clock of everything that is written to the log."""
    return monotonic_ns() + _ahead_of_monotonic_ns


def agree(log_ns: int, within_ns: int) -> int:
    """Go by the machine's clock when it is near the log's, else by the log's. Returns how far it is ahead then, else 0.

    `log_ns` is what the log's clock shows, known to be right `within_ns`.
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
