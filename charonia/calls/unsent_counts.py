"""Counts requests that a gateway or a caller ended by itself: those it refused (X4), and hits of its cache (X2).

Writes the counts to the log a few times a second, so that a flood of requests costs few commands. What the log refused,
because a bound is full, is counted in the gateway's metrics alone (`RequestCounts` in `gateway.metrics`).

`failure_reason` and `FAILURES_IN_ENSEMBLE` hold for all failed requests that gateways, batchers and callers count.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from charonia import keys
from charonia.catalog.catalog import ServedVersion
from charonia.errors import CharoniaError, ErrorCode
from charonia.eventlog.port import Statistics
from charonia.facts import counters
from charonia.tasks import Tasks

_FLUSH_S = 0.2
FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Why a request failed, as statistics and metrics call it (X4, M1)."""
FAILURES_IN_ENSEMBLE = 2
"""How often a request that failed in its ensemble is counted: as answered and as ended, as in Triton (M11)."""
_REJECTED_CODES = {ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.DEADLINE_EXCEEDED}


def failure_reason(error: CharoniaError, *, executed: bool, ensemble: bool = False) -> str:
    """M1's reason label of a failed request; what fails in an ensemble has its own where it failed (M11)."""
    if error.code is ErrorCode.CANCELLED:
        return "CANCELED"
    if ensemble and executed:
        return "OTHER"
    if error.code in _REJECTED_CODES:
        return "REJECTED"
    return "BACKEND" if executed else "OTHER"


class UnsentCounts:
    """What was counted since the last flush, by statistics key."""

    def __init__(self, log: Statistics) -> None:
        self._log = log
        self._counts: dict[bytes, dict[str, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks()

    def count(self, served: ServedVersion, duration_ns: int, reason: str) -> None:
        """Count one more failed request of a resolved model; `reason` is M1's."""
        self.add(served, counters.of_failures(1, duration_ns, reason))

    def add(self, served: ServedVersion, amounts: Mapping[str, int]) -> None:
        """Add these statistics; `last_*` are maxima, the others sums."""
        key = keys.statistics(served.model, served.version, served.content_hash)
        counters.add(self._counts.setdefault(key, {}), amounts)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush_soon)

    def _flush_soon(self) -> None:
        async def flush() -> None:
            with contextlib.suppress(CharoniaError):
                await self.flush()

        self._tasks.spawn(flush())

    async def flush(self) -> None:
        """Write the counts; they are kept when the log cannot be reached, which raises `LogUnavailable`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        counts, self._counts = self._counts, {}
        while counts:
            key, increments = counts.popitem()
            try:
                await self._log.add_statistics(key, increments)
            except CharoniaError:
                for kept, amounts in [(key, increments), *counts.items()]:
                    counters.add(self._counts.setdefault(kept, {}), amounts)
                raise
