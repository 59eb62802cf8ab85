"""When a batcher looks for calls that wait for themselves, and what batchers tell one another of them
(`deadlock_watch`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from batcher.owner.owned import OwnedModel
from charonia import keys
from charonia.clock import monotonic_ns
from charonia.errors import InvalidRecord
from charonia.eventlog.port import Notes
from charonia.facts.resource_waits import TurnsNote

from .deadlock_watch import DeadlockWatch
from .waiting import TTL_S, Waiting

_Note = TypeVar("_Note")


class DeadlockLooks:
    """Of the batcher `incarnation`; `models` are those it decides for, `others` the other batchers there are, and
    `executors` all of those.
    """

    def __init__(
        self,
        log: Notes,
        incarnation: str,
        models: Callable[[], Collection[OwnedModel]],
        others: Callable[[], set[str]],
        executors: Callable[[], Collection[str]],
    ) -> None:
        self._log = log
        self._incarnation = incarnation
        self._models = models
        self._others = others
        self._executors = executors
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
        if not mine.situation.calls:
            self._watch.look(self._models(), mine)
            return
        others = sorted(self._others() - {self._incarnation})
        if others:
            await self._log.put_note(keys.waiting(self._incarnation), mine.pack(), TTL_S)
        told = await self._told({name: keys.waiting(name) for name in others}, Waiting.unpack)
        turns = await self._told({name: keys.turns(name) for name in self._executors()}, TurnsNote.unpack)
        self._watch.look(self._models(), mine, told, turns)

    async def _told(self, names: Mapping[str, bytes], unpack: Callable[[bytes], _Note]) -> dict[str, _Note]:
        """What those of these who have something to tell tell."""
        found: dict[str, _Note] = {}
        notes = await self._log.notes([*names.values()]) if names else []
        for name, note in zip(names, notes, strict=True):
            with contextlib.suppress(InvalidRecord):  # of another release
                if note is not None:
                    found[name] = unpack(note)
        return found
