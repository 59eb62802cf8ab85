"""Follows `ctl` into a `Catalog` and watches the heartbeats of the processes it names.

Any process that runs a `ControlPlane` may be the one to notice a death; it then writes `ProcessLeft(lost)`. Several may
write it: folding it twice changes nothing. Tools that look once fold it with `folded_control`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import cast

from charonia import keys
from charonia.catalog.catalog import Catalog
from charonia.errors import CharoniaError
from charonia.facts.events import FIELD_FACT, Fact, ProcessJoined, ProcessLeft, facts_of, pack_fact
from charonia.tasks import Tasks, periodic

from .neighbours import Neighbours, is_ending
from .port import START, ControlLog, Entry, Streams

_log = logging.getLogger(__name__)

STALL_LIMIT_S = 30.0
"""A process that lives and is silent for this long is stuck."""
_PATIENCE_S = 2.5
"""Grace period after the log was unreachable: reconnecting takes at most a second, the first beat one interval more."""
_KEEPER_FIRST_S = 0.1
"""How long the report of a neighbour's end waits: usually the neighbour's own heartbeat process writes it meanwhile."""
_PAGE = 500
_POLL_S = 0.02
"""Between two readings of a command that waits for an answer."""


class ControlPlane:
    """One per process that follows `ctl`. `catalog` is current once `start` has returned."""

    def __init__(
        self, log: ControlLog, *, check_interval_ms: int, incarnation: str, stall_limit_s: float = STALL_LIMIT_S
    ) -> None:
        self.log = log
        self.catalog = Catalog()
        self.log_up = True
        """False while the log is lost: it closed the connections, has left commands unanswered for too long, or writes
        nothing (a full disk, too few replicas).
        """
        self._is_started = False
        self._following = True
        self._writing = True
        self._answering = True
        self.epoch_changes = 0
        """How often the log changed its epoch: jobs of former epochs are unknown then."""
        self.on_log_state: list[Callable[[bool], None]] = []
        self._incarnation = incarnation
        self._interval_s = check_interval_ms / 1000
        self._reader = log.reader()
        self._suspects: dict[str, int] = {}
        self._stall_limit_s = stall_limit_s
        self._overdue_since_s: dict[str, float] = {}
        self._neighbours = Neighbours(self._neighbour_ended)
        self._tasks = Tasks()
        self._patient_until_s = 0.0
        self._changed = asyncio.Event()
        self._folded = START

    async def start(self) -> None:
        """Fold everything written so far, then follow."""
        while entries := await self.log.range(keys.CONTROL, self._folded):
            self._fold(entries)
        self._is_started = True
        for process in self.catalog.processes.values():
            self._watch_neighbour(process)
        self._reader.start(self._on_entries, self._on_state)
        self._reader.add(keys.CONTROL, self._folded)
        watching = periodic(self._look, self._interval_s, "the leases of processes could not be checked")
        self._tasks.spawn(watching, "liveness watch")

    def begin_anew(self) -> None:
        """The log has a new epoch: all its processes report again, and until then the catalog has only routes."""
        self.epoch_changes += 1
        self._suspects.clear()
        self._neighbours.close()
        self._patient_until_s = asyncio.get_running_loop().time() + _PATIENCE_S
        self.catalog.clear()
        self._folded = START
        self._reader.remove(keys.CONTROL)
        self._reader.add(keys.CONTROL)
        self._tell_changed()

    async def close(self) -> None:
        await self._reader.close()
        self._neighbours.close()
        await self._tasks.close()

    def departures(self) -> list[ProcessLeft]:
        """For a log that only this machine uses: report every process that has ended, even if its lease has not. After
        a `kill -9` of all processes the leases outlive them, and their models would look ready.
        """
        return [
            ProcessLeft(process.role, process.incarnation, "lost")
            for process in self.catalog.processes.values()
            if process.incarnation != self._incarnation and not _exists(process.pid)
        ]

    async def unheard(self) -> list[Fact]:
        """The facts written by now and not folded yet. Raises what the log raises."""
        found: list[Fact] = []
        after = self._folded
        while entries := await self.log.range(keys.CONTROL, after):
            after = entries[-1].id
            found += [fact for entry in entries for fact in facts_of(entry)]
        return found

    async def announce(self, fact: Fact) -> None:
        """Write one control fact."""
        await self.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])

    async def changed(self) -> None:
        """Wait until the next control fact has been folded."""
        await self._changed.wait()

    def _on_entries(self, _stream: bytes, entries: list[Entry]) -> None:
        self._fold(entries)
        self._tell_changed()

    def _tell_changed(self) -> None:
        waiting, self._changed = self._changed, asyncio.Event()
        waiting.set()

    def _fold(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._folded = entry.id
            for fact in facts_of(entry):
                try:
                    self.catalog.apply(fact)
                except Exception:
                    _log.exception("control fact %r could not be folded", type(fact).__name__)
                if isinstance(fact, ProcessLeft):
                    self._neighbours.forget(fact.incarnation)
                elif self._is_started and isinstance(fact, ProcessJoined):
                    self._watch_neighbour(fact)

    def _watch_neighbour(self, process: ProcessJoined) -> None:
        if process.incarnation != self._incarnation and process.pid != os.getpid():
            self._neighbours.watch(process)

    def _neighbour_ended(self, incarnation: str) -> None:
        self._tasks.spawn(self._report_end(incarnation))

    async def _report_end(self, incarnation: str) -> None:
        """A process of this machine has ended; another process may have reported it already, or it did so itself."""
        await asyncio.sleep(_KEEPER_FIRST_S)
        process = self.catalog.processes.get(incarnation)
        if process is not None:
            _log.warning("%s %s is lost: its process has ended", process.role, incarnation)
            with contextlib.suppress(CharoniaError):  # the log is unreachable: the lease has ended when it is back
                await self.announce(ProcessLeft(process.role, incarnation, "lost"))

    def _on_state(self, up: bool) -> None:
        self._following = up
        self._judge()

    def on_beat(self, taken: bool) -> None:
        """Whether the log took this process's last heartbeat: it may answer reads and refuse writes."""
        self._writing = taken
        self._judge()

    def _judge(self) -> None:
        """A server that hangs closes no connection: only commands that time out show it."""
        up = self._following and self._answering and self._writing
        if up == self.log_up:
            return
        self.log_up = up
        self._suspects.clear()
        # leases ended while the log was unreachable: give all processes the time to come back and beat
        self._patient_until_s = asyncio.get_running_loop().time() + _PATIENCE_S
        for listener in self.on_log_state:
            listener(up)

    async def _look(self) -> None:
        """A process is lost after two missed checks in a row: one may be a stall of this process or of the log."""
        by_role: dict[str, list[str]] = {}
        for process in self.catalog.processes.values():
            if process.incarnation != self._incarnation:
                by_role.setdefault(process.role, []).append(process.incarnation)
        asked = [self.log.alive(role, some) for role, some in by_role.items()]
        # in one write: each answer by itself would wake this process and the log's
        answers = await asyncio.gather(self.log.epoch(), *asked, return_exceptions=True)
        self._answering = not isinstance(answers[0], BaseException)
        self._judge()
        if asyncio.get_running_loop().time() < self._patient_until_s:
            return
        try:
            await self._check(by_role, cast(list[list[bool] | BaseException], answers[1:]))
        except CharoniaError:
            self._suspects.clear()
        except Exception:
            _log.exception("liveness check failed")

    async def _check(self, by_role: dict[str, list[str]], answers: Sequence[list[bool] | BaseException]) -> None:
        """Report lost processes by the log's answers, in the order of the roles. Raises what the log raised."""
        for (role, incarnations), alive in zip(by_role.items(), answers, strict=True):
            if isinstance(alive, BaseException):
                raise alive
            for incarnation, is_alive in zip(incarnations, alive, strict=True):
                if is_alive:
                    self._suspects.pop(incarnation, None)
                    self._overdue_since_s.pop(incarnation, None)
                    continue
                if self._is_only_slow(incarnation):
                    continue
                seen = self._suspects[incarnation] = self._suspects.get(incarnation, 0) + 1
                if seen >= 2:
                    del self._suspects[incarnation]
                    self._overdue_since_s.pop(incarnation, None)
                    _log.warning("%s %s is lost: its heartbeat ended", role, incarnation)
                    await self.announce(ProcessLeft(role, incarnation, "lost"))

    def _is_only_slow(self, incarnation: str) -> bool:
        """Whether a process without a lease is of this machine and lives: it only gets no CPU time."""
        if not self._neighbours.is_busy(incarnation):
            return False
        now_s = asyncio.get_running_loop().time()
        return now_s - self._overdue_since_s.setdefault(incarnation, now_s) < self._stall_limit_s


def _exists(pid: int) -> bool:
    """Whether a process of this machine runs; False for one that has ended and was not reaped yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return not is_ending(pid)


class FollowedControl:
    """The control facts of a log as a command follows them: read when it waits, without heartbeats or watching others.

    `charonia.calls` changes models and routes through it as through a `ControlPlane`.
    """

    def __init__(self, log: ControlLog, *, poll_s: float = _POLL_S) -> None:
        self.log = log
        self.catalog = Catalog()
        self.epoch_changes = 0
        self._epoch: str | None = None
        self._after = START
        self._poll_s = poll_s

    async def read(self) -> bool:
        """Fold what is new; returns whether there was anything. Raises what the log raises."""
        epoch, changed = await self.log.epoch(), False
        if self._epoch is not None and epoch != self._epoch:
            self.epoch_changes += 1
            self.catalog.clear()
            self._after, changed = START, True
        self._epoch = epoch
        while entries := await self.log.range(keys.CONTROL, self._after, _PAGE):
            self._after, changed = entries[-1].id, True
            for entry in entries:
                for fact in facts_of(entry):
                    self.catalog.apply(fact)
        return changed

    async def announce(self, fact: Fact) -> None:
        """Write one control fact."""
        await self.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])

    async def changed(self) -> None:
        """Wait until something was folded. Raises what the log raises."""
        while not await self.read():  # noqa: ASYNC110  (the log is another process's)
            await asyncio.sleep(self._poll_s)


async def folded_control(log: Streams) -> Catalog:
    """A catalog folded from all control facts."""
    catalog = Catalog()
    after = START
    while entries := await log.range(keys.CONTROL, after, _PAGE):
        after = entries[-1].id
        for entry in entries:
            for fact in facts_of(entry):
                catalog.apply(fact)
    return catalog
