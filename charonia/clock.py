"""The only places where services read time: wall time for what crosses processes, monotonic time for durations."""

from __future__ import annotations

import time

wall_ns = time.time_ns
"""Nanoseconds since the epoch; the clock of everything that is written to the log."""

monotonic_ns = time.monotonic_ns
"""Nanoseconds of a clock that never steps; the clock of durations and schedulers (X8)."""
