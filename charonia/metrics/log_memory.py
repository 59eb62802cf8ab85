"""The memory of the log server as families: what it uses, and what it may use. Asked for at a scrape, told at the next.

A scrape must not wait for the log. What no scrape asks for costs no command. Batchers report it; as each of them sees
the same server, joint pages have the largest value (`exposition`), and queries take `max`.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from charonia.errors import CharoniaError
from charonia.eventlog.port import Capacity
from charonia.tasks import Tasks


class LogMemory:
    """The last known figures of one log."""

    def __init__(self, log: Capacity) -> None:
        self._log = log
        self._known: tuple[int, int] | None = None
        self._tasks = Tasks()

    def families(self) -> Iterable[Metric]:
        """None before the first answer, and while the log does not answer."""
        if not len(self._tasks):
            self._tasks.spawn(self._ask(), "memory of the log")
        if self._known is None:
            return
        used, most = self._known
        yield GaugeMetricFamily("charonia_log_memory_used_bytes", "Bytes that the log server uses", used)
        yield GaugeMetricFamily(
            "charonia_log_memory_max_bytes", "Bytes that the log server may use, 0 without a bound", most
        )

    async def close(self) -> None:
        await self._tasks.close()

    async def _ask(self) -> None:
        try:
            self._known = await self._log.memory_bytes()
        except CharoniaError:
            self._known = None
