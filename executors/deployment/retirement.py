"""Retires versions that are no longer served: lets their batches finish, then unloads their instances."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path

from charonia import keys
from charonia.errors import CharoniaError, LogUnavailable
from charonia.eventlog.port import WaveLog
from charonia.models.names import name_of
from charonia.tasks import Tasks
from executors.announcing import Announcer
from executors.metrics import ExecutorMetrics
from executors.repository import overrides
from executors.running.instance_pool import LoadedVersion
from executors.settling.checkpoints import end_leaving

from .lifecycle import Lifecycle

_log = logging.getLogger(__name__)

_CHECK_PERIOD_S = 0.02
_MAX_IDLE_CHECKS = 50


class Retirement:
    """Drains and unloads versions. `serving` are the served versions by model and version; drained ones are removed."""

    def __init__(
        self,
        log: WaveLog,
        serving: dict[tuple[str, int], LoadedVersion],
        lifecycle: Lifecycle,
        announcer: Announcer,
        metrics: ExecutorMetrics,
    ) -> None:
        self._log = log
        self._serving = serving
        self._lifecycle = lifecycle
        self._announcer = announcer
        self._metrics = metrics
        self._tasks = Tasks(lambda error: _log.error("unloading a model failed", exc_info=error))
        """Named after their models."""
        self._draining: dict[str, set[asyncio.Task[None]]] = {}
        """By model: the tasks that drain its versions."""

    async def idle(self) -> None:
        """Wait until all retiring versions have ended."""
        if self._tasks:
            await asyncio.wait([*self._tasks])

    async def ended(self, name: str) -> None:
        """As `idle`, of the models of a name."""
        waiting = [task for task in self._tasks if name_of(task.get_name()) == name]
        if waiting:
            await asyncio.wait(waiting)

    async def close(self, grace_s: float) -> None:
        """Wait at most `grace_s` seconds for all retiring versions. Those that hang end with the process."""
        if not self._tasks:
            return
        _, hanging = await asyncio.wait([*self._tasks], timeout=grace_s)
        for task in hanging:
            task.cancel()
        if hanging:
            _log.error("%d model versions did not unload within %g s", len(hanging), grace_s)
            await asyncio.wait(hanging)

    def drain(self, loaded: LoadedVersion, dependents: Iterable[str]) -> None:
        """Serve until the requests that were accepted before the unload have run, then retire (R27).

        The ensembles in `dependents` drain first.
        """
        users = [task for name in dependents for task in self._draining.get(name, ())]
        draining = self._draining.setdefault(loaded.model, set())
        task = self._tasks.spawn(self._drain(loaded, users), loaded.model)
        draining.add(task)
        task.add_done_callback(draining.discard)

    def retire(self, loaded: LoadedVersion, *, forget: bool = False) -> asyncio.Task[None]:
        """Finish the batches of a version, then unload it. `forget`: delete its statistics too."""
        return self._tasks.spawn(self._retire(loaded, forget=forget), loaded.model)

    def shrink(self, loaded: LoadedVersion) -> None:
        """Remove surplus instances after their batches (R23)."""
        self._tasks.spawn(self._shrink(loaded), loaded.model)

    def discard_after(self, model: str, directory: Path) -> None:
        """Remove a model's temporary directory when the versions loaded from it have ended."""
        self.afterwards(model, lambda: asyncio.to_thread(overrides.remove, directory))

    def afterwards(self, model: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` when all versions of a model that retire now have ended."""
        waiting = [task for task in self._tasks if task.get_name() == model]

        async def last() -> None:
            if waiting:
                await asyncio.wait(waiting)
            await work()

        self._tasks.spawn(last(), model)

    async def _shrink(self, loaded: LoadedVersion) -> None:
        await loaded.pool.shrink()
        end_leaving(loaded)

    async def _drain(self, loaded: LoadedVersion, users: Collection[asyncio.Task[None]]) -> None:
        # Only the owner sees its queue. Here it counts as empty when the model has no unsettled request and no queued
        # wave. When other versions are served, unsettled requests may be theirs: then it is enough that the owner has
        # sent nothing for a while. Checks are counted, not time, because an owner in this process stalls with it. Where
        # the version is loaded again meanwhile, the new one replaces and retires it.
        key = (loaded.model, loaded.version)
        if users:
            await asyncio.wait(users)
        checks, last = 0, (-1, -1)
        while checks < _MAX_IDLE_CHECKS and self._serving.get(key) is loaded:
            checks += 1
            if loaded.pool.unfinished:
                await loaded.pool.idle()
                checks = 0
            with contextlib.suppress(LogUnavailable):
                waiting = ((await self._log.pending(key[0]))[0], await self._log.waves.queue_entries(key[0]))
                if waiting == (0, 0):
                    break
                alone = not any(model == key[0] and version != key[1] for model, version in self._serving)
                if alone and waiting != last:
                    checks = 0
                last = waiting
            await asyncio.sleep(_CHECK_PERIOD_S)
        if self._serving.get(key) is loaded:
            del self._serving[key]
            await self._retire(loaded, announce=True, forget=True)

    async def _retire(self, loaded: LoadedVersion, *, announce: bool = False, forget: bool = False) -> None:
        if loaded.health is not None:
            loaded.health.cancel()
        await loaded.pool.idle()
        await loaded.pool.close()
        if forget:
            await self._forget_statistics(loaded)
        if announce:
            fact = self._lifecycle.unloaded(loaded.model, loaded.version)
            if fact is not None:
                self._metrics.unloaded(loaded.model, loaded.version)
                await self._announcer.announce(fact)

    async def _forget_statistics(self, loaded: LoadedVersion) -> None:
        """Delete a version's statistics, unless the same content is served again: then they continue."""
        key = (loaded.model, loaded.version)
        serving = self._serving.get(key)
        if serving is None or serving.content_hash != loaded.content_hash:
            with contextlib.suppress(CharoniaError):
                await self._log.delete_keys([keys.statistics(*key, loaded.content_hash)])
