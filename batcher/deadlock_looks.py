"""When a batcher looks for calls that wait for themselves, and what batchers tell one another of them (`deadlocks`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection

from charonia import keys
from charonia.clock import monotonic_ns
from charonia.errors import InvalidRecord
from charonia.eventlog.port import EventLog

from .deadlocks import DeadlockWatch
from .owned import OwnedModel
from .waiting import TTL_S, Waiting


class DeadlockLooks:
    """Of the batcher `incarnation`; `models` are those it decides for, `others` the other batchers there are."""

    def __init__(
        self,
        log: EventLog,
        incarnation: str,
        models: Callable[[], Collection[OwnedModel]],
        others: Callable[[], set[str]],
    ) -> None:
        self._log = log
        self._incarnation = incarnation
        self._models = models
        self._others = others
        self._watch = DeadlockWatch()
        self._soon: asyncio.TimerHandle | None = None
        self._closed = False

    def close(self) -> None:
        self._closed = True
        if self._soon is not None:
            self._soon.cancel()

    def soon(self) -> None:
        """Calls came whose callers do nothing else: they must not wait for long for what cannot be."""
        if self._soon is None and not self._closed:
            pause_s = self._watch.pause_ns / 1e9
            self._soon = asyncio.get_running_loop().call_later(pause_s, self._at_once)

    def _at_once(self) -> None:
        self._soon = None
        self._watch.look_at_once(self._models())

    async def look(self) -> None:
        """Now and then, at those that have waited. Raises what the log raises."""
        mine = self._watch.waiting(self._models(), monotonic_ns())
        told: dict[str, Waiting] = {}
        others = sorted(self._others() - {self._incarnation}) if mine.calls else []
        if others:
            await self._log.put_note(keys.waiting(self._incarnation), mine.pack(), TTL_S)
            notes = await self._log.notes([keys.waiting(name) for name in others])
            for name, note in zip(others, notes, strict=True):
                with contextlib.suppress(InvalidRecord):  # of another release
                    if note is not None:
                        told[name] = Waiting.unpack(note)
        self._watch.look(self._models(), mine, told)
