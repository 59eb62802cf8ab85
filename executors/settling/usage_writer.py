"""Writes what requests have used (`usage_counts`) to the log, in parts, and forgets its oldest days (ADR 0055).

A part is written again only if the log has certainly not taken it: after a connection that was lost meanwhile that is
unknown, and a bill must rather miss a second than have it twice. A log that does not allow the write gets none until
the next hour; what it refuses for good for another reason is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, LogAway, LogRefused, LogUnavailable
from charonia.eventlog.port import WaveLog
from charonia.facts.usage import KEPT_DAYS, hour_of, in_parts
from charonia.tasks import Tasks

from .usage_counts import UsageCounts

_log = logging.getLogger(__name__)

_FORGOTTEN_DAYS = 31
"""So many days are deleted at once: those on which this model's executors may not have run."""
_MOST_UNWRITTEN = 100_000
"""Names that are kept, about 20 MB, while the log takes nothing."""


class UsageWriter:
    """Writes one executor's usage. `on_kept` is called when something has to be written later."""

    def __init__(self, log: WaveLog, usage: UsageCounts, tasks: Tasks, on_kept: Callable[[], None]) -> None:
        self._log = log
        self._usage = usage
        self._tasks = tasks
        self._on_kept = on_kept
        self._days: dict[str, int] = {}
        """By model: the last day whose usage was written."""
        self._unwritten: dict[bytes, dict[str, int]] = {}
        """By key: the increments that are certainly not in the log."""
        self._refused: tuple[int, int] | None = None
        """The day and hour in which the log has refused it for good."""
        self.writing: set[asyncio.Future[None]] = set()
        """The pending writes."""

    def write(self, now_ns: int) -> None:
        """Write what was counted since the last time; with a model's first of a day, forget its oldest days."""
        taken = self._usage.take(now_ns)
        if self._refused is not None:
            if self._refused == hour_of(now_ns):
                return
            self._refused = None
        for model, day, key, increments in taken:
            self._add(key, increments)
            if self._days.get(model) != day:
                self._days[model] = day
                self._tasks.spawn(self._new_day(model, day))
        unwritten, self._unwritten = self._unwritten, {}
        for key, increments in unwritten.items():
            for part in in_parts(increments):
                self._write(key, part)

    def _write(self, key: bytes, part: dict[str, int]) -> None:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: CharoniaError | None) -> None:
            self.writing.discard(written)
            if error is None:
                pass
            elif isinstance(error, LogAway) or (isinstance(error, LogRefused) and error.passes):
                self._keep(key, part, error)
            elif isinstance(error, LogRefused) and error.denied:
                self._give_up(error)
            elif isinstance(error, LogRefused):
                _log.warning("the usage of about a second in '%s' is lost: %s", key.decode(), error)
            else:
                _log.warning("the usage of about a second may be lost: %s", error)
            if not written.done():
                written.set_result(None)

        if self._log.waves.count(key, part, done):
            self.writing.add(written)
        else:
            self._keep(key, part, LogUnavailable("the event log takes nothing now"))

    def _keep(self, key: bytes, part: dict[str, int], error: CharoniaError) -> None:
        if not self._unwritten:
            _log.warning("usage cannot be written, trying again: %s", error)
        self._add(key, part)
        while sum(map(len, self._unwritten.values())) > _MOST_UNWRITTEN:
            oldest = next(iter(self._unwritten))
            _log.warning("the usage in '%s' is lost: too much of it waits to be written", oldest.decode())
            del self._unwritten[oldest]
        self._on_kept()

    def _add(self, key: bytes, increments: dict[str, int]) -> None:
        totals = self._unwritten.setdefault(key, {})
        for name, amount in increments.items():
            totals[name] = totals.get(name, 0) + amount

    def _give_up(self, error: CharoniaError) -> None:
        """Drop the usage of this hour: a log that does not allow one write allows none."""
        self._unwritten.clear()
        if self._refused is None:
            _log.warning(
                "usage is not counted until the next hour: the user of the log needs the keys ~us:* ~usm, see "
                "docs/howto/upgrades.md: %s",
                error,
            )
        self._refused = hour_of(wall_ns())

    async def _new_day(self, model: str, day: int) -> None:
        last = day - KEPT_DAYS
        try:
            await self._log.set_times(keys.USED_MODELS, {model.encode(): wall_ns() // 1000})
            await self._log.delete_keys([keys.usage(model, last - before) for before in range(_FORGOTTEN_DAYS)])
        except CharoniaError as error:
            if isinstance(error, LogRefused) and not error.passes:
                if error.denied:
                    self._days.pop(model, None)
                    self._give_up(error)
                else:
                    _log.warning("the usage of '%s' cannot be listed until tomorrow: %s", model, error)
                return
            self._days.pop(model, None)
            _log.warning("the usage of '%s' cannot be listed, trying again: %s", model, error)
