"""Loads models when the first request waits for them, and evicts idle ones only when another needs their memory.

Every version is announced at the start: its configuration is completed and its files are read, but no instance is made.
The owner of a model with waiting requests asks one executor to load it (`VersionWanted`). The least recently used idle
version is evicted, never one with batches here or requests in the log. A failed load is announced (`VersionFailed`),
which fails the waiting requests when no other executor announces the version; it is announced again after a while.
`executors.deployment.memory_budget` keeps the sizes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, InternalError, LogUnavailable, ResourceExhausted
from charonia.eventlog.port import Work
from charonia.facts.events import VersionAnnounced, VersionHeld
from charonia.tasks import Tasks
from executors.announcing import Announcer
from executors.host.memory import release_free_memory, tree_bytes
from executors.repository.files import walk
from executors.repository.model_directory import ModelDirectory, content_hash, load_labels
from executors.running.instance_pool import LoadedVersion
from executors.settling.checkpoints import end_leaving
from protos.model_config_pb2 import ModelConfig

from .deployment import Deployment
from .lifecycle import Lifecycle, retry_delay_s
from .memory_budget import MemoryBudget, VersionKey

_log = logging.getLogger(__name__)

_DESCRIBE_S = 0.5
_FIRST_PAUSE_S = 0.01
_LAST_PAUSE_S = 0.2


@dataclass(slots=True)
class AnnouncedVersion:
    """A version that may be loaded: everything except its instances."""

    directory: ModelDirectory
    config: ModelConfig
    fact: VersionAnnounced
    files_bytes: int
    min_idle_ns: int
    failures: int = 0


class OnDemand:
    """Loads and evicts the models of one executor with a memory budget.

    `describe()` announces how much of the budget is used. With a budget in bytes, models are loaded one at a time, so
    that the growth of memory is that of one model; otherwise up to `concurrent_loads` at once.
    """

    def __init__(
        self,
        log: Work,
        executor: str,
        *,
        budget: MemoryBudget,
        deployment: Deployment,
        lifecycle: Lifecycle,
        announcer: Announcer,
        describe: Callable[[], Awaitable[None]],
        concurrent_loads: int,
    ) -> None:
        self.budget = budget
        self._log = log
        self._executor = executor
        self._deployment = deployment
        self._lifecycle = lifecycle
        self._announcer = announcer
        self._describe = describe
        self._workers = 1 if budget.budget_bytes else max(1, concurrent_loads)
        self._announced: dict[VersionKey, AnnouncedVersion] = {}
        self._wanted: asyncio.Queue[VersionKey] = asyncio.Queue()
        self._asked: set[VersionKey] = set()
        self._evicting = asyncio.Lock()
        self._tasks = Tasks()
        self._describing: asyncio.Task[None] | None = None

    # -- announcing ---------------------------------------------------------------------------------------------------

    async def announce(self, model: str) -> None:
        """Announce a model. Raises the error that keeps it from being loaded, after announcing that."""
        prepared = await self._deployment.prepare(model)
        if prepared is None:  # an ensemble has no instances: load it now
            await self._deployment.load(model, None)
            return
        directory, config, versions = prepared
        for version in versions:
            announced = await asyncio.to_thread(self._announcement, directory, config, version)
            self._announced[(model, version)] = announced
            await self._announcer.announce(announced.fact)

    def _announcement(self, directory: ModelDirectory, config: ModelConfig, version: int) -> AnnouncedVersion:
        digest = content_hash(directory.path, version, config)
        labels = {name: list(lines) for name, lines in load_labels(directory.path, config).items()}
        serialised = config.SerializeToString(deterministic=True)
        fact = VersionAnnounced(self._executor, directory.key, version, digest, serialised, labels)
        files_bytes = sum(entry.size_bytes for entry in walk(directory.path / str(version)))
        min_idle_us = (
            config.sequence_batching.max_sequence_idle_microseconds if config.HasField("sequence_batching") else 0
        )
        return AnnouncedVersion(directory, config, fact, files_bytes, 2000 * min_idle_us)

    # -- loading ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load the wanted models."""
        if self.budget.budget_bytes:  # reading the models' files has left much free memory
            self._tasks.spawn(asyncio.to_thread(release_free_memory))
        for _ in range(self._workers):
            self._tasks.spawn(self._load_wanted())

    async def stop(self) -> None:
        """Load nothing more; cancel loads in progress."""
        await self._tasks.close()

    def wanted(self, model: str, version: int) -> None:
        """Load a version for which requests wait. Further calls do nothing."""
        key = (model, version)
        if key in self._announced and key not in self._asked and self._deployment.find(*key) is None:
            self._asked.add(key)
            self._wanted.put_nowait(key)

    async def _load_wanted(self) -> None:
        while True:
            key = await self._wanted.get()
            try:
                await self._load(key, self._announced[key])
            except CharoniaError as error:
                await self._failed(key, error)
            except Exception as error:
                _log.exception("loading %s version %d on demand failed", *key)
                await self._failed(key, InternalError(f"{type(error).__name__}: {error}"))
            finally:
                self._asked.discard(key)
            if self._describing is None or self._describing.done():
                self._describing = self._tasks.spawn(self._describe_soon())

    async def _describe_soon(self) -> None:
        """Announce the used memory once for several loads."""
        await asyncio.sleep(_DESCRIBE_S)
        await self._describe()

    async def _load(self, key: VersionKey, announced: AnnouncedVersion) -> None:
        size = self.budget.guess_bytes(key, announced.files_bytes, announced.config.backend)
        async with self._evicting:
            await self._free_capacity(key, size)
            self.budget.reserve(key, size, monotonic_ns(), min_idle_ns=announced.min_idle_ns)
        loaded: LoadedVersion | None = None
        try:
            before = await self._measure()
            loaded = await self._deployment.make(announced.directory, key[1], announced.config)
            grown = await self._measure() - before
            if loaded.content_hash != announced.fact.content_hash:
                raise InternalError("its files have changed since it was announced")
            self.budget.set_size(key, grown, announced.files_bytes, monotonic_ns())
            self.budget.learn(announced.config.backend, announced.files_bytes, grown)
            if self.budget.over_budget():
                await self._shrink(key)
        except BaseException:
            if loaded is not None:
                await loaded.pool.close()
            self.budget.release(key)
            raise
        announced.failures = 0
        await self._deployment.install(loaded)
        held = VersionHeld(self._executor, *key, loaded.pool.slots, loaded.load_ns)
        await self._announcer.announce(held)
        self._deployment.watch_health(loaded)

    async def _shrink(self, key: VersionKey) -> None:
        """Evict others for a model that took more than estimated. Raises `ResourceExhausted` when it can never fit."""
        size = self.budget.guess_bytes(key, 0)
        if self.budget.never_fits(size):
            raise self._too_large(size)
        while self.budget.over_budget() and await self._evict_one():
            pass
        if self.budget.over_budget():
            _log.warning("%s version %d took more memory than was left: %d bytes", *key, size)

    def _too_large(self, size_bytes: int) -> ResourceExhausted:
        return ResourceExhausted(f"it needs {size_bytes} bytes, the memory budget is {self.budget.budget_bytes} bytes")

    async def _measure(self) -> int:
        return await asyncio.to_thread(_trimmed_tree_bytes) if self.budget.budget_bytes else 0

    # -- eviction -----------------------------------------------------------------------------------------------------

    async def _free_capacity(self, key: VersionKey, size_bytes: int) -> None:
        """Wait until a model of this size fits. Raises `ResourceExhausted` when it never can."""
        if self.budget.never_fits(size_bytes):
            raise self._too_large(size_bytes)
        pause_s = _FIRST_PAUSE_S
        while not self.budget.fits(size_bytes):
            if await self._evict_one():
                pause_s = _FIRST_PAUSE_S
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _evict_one(self) -> bool:
        """Evict the least recently used idle version; return whether there was one."""
        for key in self._announced:
            loaded = self._deployment.find(*key)
            if loaded is not None:
                self.budget.mark_used(key, loaded.pool.used_ns)
        for key in self.budget.candidates(monotonic_ns()):
            loaded = self._deployment.find(*key)
            if loaded is None or not await self._is_idle(loaded):
                continue
            await self._deployment.before_leaving(loaded)
            if loaded.pool.unfinished:  # a batch has arrived meanwhile
                end_leaving(loaded)
                continue
            await self._evict(key, loaded)
            return True
        return False

    async def _is_idle(self, loaded: LoadedVersion) -> bool:
        if loaded.pool.unfinished:
            return False
        with contextlib.suppress(LogUnavailable):
            # queued waves are not counted: their owner bursts them and asks for the model again
            return (await self._log.pending(loaded.model))[0] == 0 and not loaded.pool.unfinished
        return False

    async def _evict(self, key: VersionKey, loaded: LoadedVersion) -> None:
        """Unload a version. Batches that its owner sends before it hears of this are returned."""
        # before the announcement: an owner that has read it may ask for the version again at once (`wanted`)
        self._deployment.withdraw(loaded)
        try:
            await self._announcer.announce(VersionHeld(self._executor, *key, 0))
        finally:
            await self._deployment.retire(loaded)
        self.budget.release(key)
        _log.info("%s version %d made room for another model", *key)

    # -- failed loads -------------------------------------------------------------------------------------------------

    async def _failed(self, key: VersionKey, error: CharoniaError) -> None:
        announced = self._announced[key]
        announced.failures += 1
        _log.error("failed to load %s version %d on demand: %s", *key, error)
        await self._announcer.announce(self._lifecycle.failed(*key, error))
        self._tasks.spawn(self._announce_again(announced, retry_delay_s(announced.failures)))

    async def _announce_again(self, announced: AnnouncedVersion, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await self._announcer.announce(announced.fact)


def _trimmed_tree_bytes() -> int:
    """Memory of the process tree, after returning what a load has freed to the system."""
    release_free_memory()
    return tree_bytes()
