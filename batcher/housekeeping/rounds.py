"""What one batcher looks after now and then, for all models it decides for: batches, deadlines, old streams.

How a single look goes is `upkeep`'s, `late_deadlines`', `deadlock_looks`' and `tidying`'s; here is when. What fails for
one model keeps no other from being looked at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from batcher.deadlock.deadlock_looks import DeadlockLooks
from batcher.entries.carriers import RETRY_S
from batcher.owner.demand import has_room
from batcher.owner.owned import OwnedModel
from batcher.takeover import ownership
from charonia.catalog.catalog import Catalog
from charonia.errors import CharoniaError
from charonia.eventlog.port import Streams
from charonia.tasks import Tasks, insist

from .departed import Departed
from .late_deadlines import LOOK_S, expire_behind_window
from .tidying import ControlTidying
from .upkeep import Upkeep, verify

_log = logging.getLogger(__name__)

_VERIFY_S = 1.0
_VERIFY_AGE_NS = 5_000_000_000
_TIDY_S = 300.0


class Rounds:
    """Of the batcher `incarnation`; `owned` and `upkeep` are those of its models, and change with them."""

    def __init__(
        self,
        log: Streams,
        catalog: Catalog,
        incarnation: str,
        owned: Mapping[str, OwnedModel],
        upkeep: Mapping[str, Upkeep],
        departed: Departed,
        deadlocks: DeadlockLooks,
    ) -> None:
        self._catalog = catalog
        self._incarnation = incarnation
        self._owned = owned
        self._upkeep = upkeep
        self._departed = departed
        self._deadlocks = deadlocks
        self._tidying = ControlTidying(log)
        self._tidy_at_s = asyncio.get_running_loop().time() + _TIDY_S
        self._forgotten = False
        """The log was away: it may have forgotten what it had taken."""
        self._behind = asyncio.Event()
        self._tasks = Tasks()

    def look_behind(self) -> None:
        """Some stream may be read no further for a while."""
        self._behind.set()

    def start(self) -> None:
        self._tasks.spawn(self._recall(), "those that left unheard")
        self._tasks.spawn(self._verify(), "verification of batches")
        self._tasks.spawn(self._expire(), "deadlines behind windows")

    async def close(self) -> None:
        await self._tasks.close()

    def log_came_back(self) -> None:
        """All batches are to be looked after, however young."""
        self._forgotten = True

    async def _recall(self) -> None:
        complaint = "those that left unheard cannot be read"
        await insist(self._departed.recall, complaint, first_s=RETRY_S, last_s=RETRY_S)

    async def _verify(self) -> None:
        """Check batches that no process reports any more: old ones now and then, all of them when the log was away."""
        while True:
            await asyncio.sleep(_VERIFY_S)
            min_age_ns = 0 if self._forgotten else _VERIFY_AGE_NS
            self._forgotten = False
            for owned in list(self._owned.values()):
                await self._looked(partial(self._verify_one, owned, min_age_ns))
            for upkeep in list(self._upkeep.values()):
                await self._looked(upkeep.look)
            await self._looked(self._deadlocks.look)
            await self._looked(self._tidy)

    async def _looked(self, look: Callable[[], Awaitable[None]]) -> None:
        try:
            await look()
        except CharoniaError:
            self._forgotten = True
        except Exception:
            _log.exception("something could not be looked after")

    async def _verify_one(self, owned: OwnedModel, min_age_ns: int) -> None:
        await verify(owned, min_age_ns)
        await owned.look_after()
        if owned.demand.is_for_this_model:
            owned.demand.tend(owned.scheduler.queued_by_version(), partial(has_room, self._catalog))

    async def _expire(self) -> None:
        """Keep the deadlines of what no window has room for."""
        while True:
            await self._behind.wait()
            await asyncio.sleep(LOOK_S)
            behind = [owned for owned in self._owned.values() if not owned.windows.all_read]
            if not behind:
                self._behind.clear()
            for owned in behind:
                try:
                    await expire_behind_window(owned)
                except CharoniaError:
                    pass  # looked at again soon
                except Exception:
                    _log.exception("deadlines of '%s' could not be looked at", owned.model)

    async def _tidy(self) -> None:
        """One batcher is enough to shorten the control stream; several would only do it twice."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._tidy_at_s:
            return
        self._tidy_at_s = now_s + _TIDY_S
        if min(ownership.live_batchers(self._catalog), default="") == self._incarnation:
            await self._tidying.look()
            await self._departed.sweep_remembered()
