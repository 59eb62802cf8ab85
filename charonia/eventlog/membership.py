"""Membership of a process: it joins, renews its heartbeat, leaves, and joins again when the log has a new epoch.

The facts (`ProcessJoined`, `ProcessLeft`) are in the control stream; the heartbeat is a lease out of band. An observer
that misses the heartbeat writes `ProcessLeft` in the process's name; observers do that, not this module. A process that
was only slow reads this fact about itself and joins again: its heartbeat may have come back before the fact was
written, and then no other process sees that it lives. While the event loop is busy a `LeaseKeeper` prolongs the lease
(docs/adr/0024). It never renews an ended lease: only the loop makes a new one, and then joins again.

With each beat the process checks whether the log is still the one it joined. In another one (flushed, exchanged,
rewound) no process knows this one: it drops its state, joins again and reports again. `preferred_owner` is how members
share models without communication.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from charonia import keys
from charonia.clock import agree, monotonic_ns
from charonia.errors import LogUnavailable
from charonia.facts.events import FIELD_FACT, Fact, ProcessJoined, ProcessLeft, pack_fact
from charonia.tasks import Tasks

from .neighbours import pid_space, started_ticks
from .payloads import PayloadDirectory
from .port import ControlLog

_logger = logging.getLogger(__name__)


class LeaseKeeper(Protocol):
    """Prolongs leases of this process while its event loop is busy, and reports them lost when the process ends."""

    def keep(self, role: str, incarnation: str, ttl_ms: int) -> None: ...

    def drop(self, role: str, incarnation: str) -> None: ...


class Membership:
    """One process's membership; `incarnation` is unique for each start of it.

    After a change of the log's epoch, `on_new_epoch` listeners run first (to drop state), then it joins, then each
    `say_again` is awaited. All of it may run again when the log becomes unreachable in the meantime.
    """

    def __init__(
        self,
        log: ControlLog,
        role: str,
        incarnation: str,
        *,
        pool: str = "default",
        hosts_batcher: bool = False,
        payloads: PayloadDirectory | None = None,
        interval_ms: int = 400,
        ttl_ms: int = 2000,
    ) -> None:
        self._log = log
        self._role = role
        self._incarnation = incarnation
        self._pool = pool
        self._hosts_batcher = hosts_batcher
        self._payloads = payloads
        self._interval_s = interval_ms / 1000
        self._ttl_ms = ttl_ms
        self._tasks = Tasks()
        self.keeper: LeaseKeeper | None = None
        """Set before `start`, if there is one."""
        self._epoch = ""
        self._left_epoch = ""
        self._held_for_lost = False
        self._lapsed = False
        self._leased_until_s = 0.0
        self._clock_is_off = False
        self.epoch_changes = 0
        self.on_new_epoch: list[Callable[[], None]] = []
        self.say_again: list[Callable[[], Awaitable[None]]] = []
        self.on_beat: list[Callable[[bool], None]] = []
        """Called after each beat with whether the log took it."""

    async def start(self) -> None:
        """Join. The lease comes first: no process ever sees a member without one. Raises `LogUnavailable`."""
        loop = asyncio.get_running_loop()
        self._epoch = await self._log.epoch()
        began_s = loop.time()
        await self._beat()
        if self.keeper is not None:
            self.keeper.keep(self._role, self._incarnation, self._ttl_ms)
        await self._agree()
        await self._join()
        self._leased_until_s = began_s + self._ttl_ms / 1000
        self._tasks.spawn(self._keep_beating(), f"heartbeat of {self._role}")

    @property
    def epoch(self) -> str:
        """The epoch of the log that this process is a member of; "" before it has joined."""
        return self._epoch

    def is_leased(self) -> bool:
        """Whether no process can presume this one dead: its lease has not ended since it last joined."""
        return asyncio.get_running_loop().time() < self._leased_until_s

    def hear(self, fact: Fact) -> None:
        """Called with every control fact: one may report this process as lost."""
        if isinstance(fact, ProcessLeft) and fact.incarnation == self._incarnation and fact.reason == "lost":
            self._held_for_lost = True

    async def _join(self) -> None:
        fact = ProcessJoined(
            self._role,
            self._incarnation,
            pool=self._pool,
            host=socket.gethostname(),
            pid=os.getpid(),
            hosts_batcher=self._hosts_batcher,
            payload_token=self._payloads.token if self._payloads is not None else "",
            reads_waves=self._role == "batcher" or self._hosts_batcher,
            pid_space=pid_space(),
            started_ticks=started_ticks(os.getpid()),
            reads_wave_slots=self._role in ("batcher", "executor"),
        )
        await self._tell(fact)

    async def leave(self, reason: str = "drained") -> None:
        """Leave. Without the log this is silent: the lease ends by itself."""
        await self._tasks.close()
        if self.keeper is not None:
            self.keeper.drop(self._role, self._incarnation)
        try:
            await self._tell(ProcessLeft(self._role, self._incarnation, reason))
            await self._log.end_beat(self._role, self._incarnation)
        except LogUnavailable as error:
            _logger.warning("%s %s leaves without a word: %s", self._role, self._incarnation, error)

    async def _tell(self, fact: Fact) -> None:
        await self._log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])

    async def _beat(self) -> bool:
        return await self._log.beat(self._role, self._incarnation, self._ttl_ms)

    async def _agree(self) -> None:
        """Compare the machine's clock with the log's, to choose the one that deadlines use."""
        asked_ns = monotonic_ns()
        log_ns = await self._log.clock_ns()
        way_ns = monotonic_ns() - asked_ns
        ahead_ns = agree(log_ns + way_ns // 2, way_ns)
        if (ahead_ns == 0) == self._clock_is_off:
            self._clock_is_off = not self._clock_is_off
            if self._clock_is_off:
                text = "the clock of this machine is %+.1f s from the log's: %s %s goes by the log's"
                _logger.warning(text, ahead_ns / 1e9, self._role, self._incarnation)
            else:
                _logger.info("the clock of this machine shows the log's time again")

    async def _keep_beating(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        missed = False
        while True:
            # by the clock and not after each answer, so that a slow log does not stretch the interval
            due_s = max(due_s + self._interval_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            began_s = loop.time()
            try:
                # in one write: each answer by itself would wake this process and the log's
                had_lease, _, epoch = await asyncio.gather(self._beat(), self._agree(), self._log.epoch())
                self._lapsed |= not had_lease
                if epoch != self._epoch:
                    await self._begin_anew(epoch)
                elif self._held_for_lost or self._lapsed:
                    # the lease had ended (a stall, a lost log): others presume this process dead, or may, and its facts
                    # may be gone from the stream
                    await self._join_again()
                self._lapsed = False
                self._leased_until_s = began_s + self._ttl_ms / 1000
            except LogUnavailable as error:
                if not missed:
                    _logger.warning("%s %s cannot beat: %s", self._role, self._incarnation, error)
                missed = True
            else:
                missed = False
            for listener in self.on_beat:
                listener(not missed)

    async def _begin_anew(self, epoch: str) -> None:
        """Raises `LogUnavailable`; the next beat tries again then."""
        if self._left_epoch != epoch:
            self._left_epoch = epoch
            self.epoch_changes += 1
            _logger.error(
                "%s %s: the event log is another one now (epoch %s, it was %s): what it had taken is lost to us",
                *(self._role, self._incarnation, epoch, self._epoch),
            )
        for forget in self.on_new_epoch:
            forget()
        await self._beat()
        await self._join_again()
        self._epoch = epoch

    async def _join_again(self) -> None:
        """Raises `LogUnavailable`; facts received so far stay known."""
        heard, self._held_for_lost = self._held_for_lost, False
        try:
            await self._join()
            for again in self.say_again:
                await again()
        except BaseException:
            self._held_for_lost |= heard
            raise


def preferred_owner(model: str, members: Iterable[str]) -> str:
    """The preferred owner of a model: highest random weight, so that a change of members moves few models. Source:
    Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998). "" without members.
    """
    return max(
        sorted(members),
        key=lambda name: hashlib.blake2b(f"{name}\0{model}".encode(), digest_size=8).digest(),
        default="",
    )
