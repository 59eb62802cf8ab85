"""Loads and unloads the versions that an executor serves, one operation per model at a time, and announces them.

`executors.deployment.lifecycle` decides what to change, `executors.loading.loader` makes the instances, and
`executors.deployment.agreement` heeds what other executors serve. On a reload the new instances work before the old
ones stop taking batches, and the old ones finish theirs (R22).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from charonia import keys
from charonia.catalog.catalog import Catalog
from charonia.errors import CharoniaError, LogUnavailable
from charonia.eventlog.port import EventLog
from charonia.facts.events import ModelRequested, VersionHealthChanged, VersionLoaded
from charonia.models.config_errors import CompositionError
from charonia.models.ensemble import Find
from charonia.models.interface import ModelInterface
from charonia.tasks import Tasks
from executors.announcing import Announcer
from executors.loading.composing_models import Composition, is_ensemble, refuse_all
from executors.loading.loader import Loader
from executors.loading.placement_rules import NotPlacedHere, PlacementRules
from executors.metrics import ExecutorMetrics
from executors.repository import overrides
from executors.repository.model_directory import ModelDirectory
from executors.repository.model_repository import ModelRepository
from executors.running.health import HealthWatch
from executors.running.instance_pool import Hung, LoadedVersion
from executors.settling.settlement import increments
from protos.model_config_pb2 import ModelConfig

from .agreement import Agreement
from .directories import Directories, Selection
from .lifecycle import NO_VERSION, Lifecycle, LoadModel, Override, load_failure
from .retirement import Retirement

_log = logging.getLogger(__name__)


class Deployment:
    """One executor's loaded versions. `concurrent_loads` is `--model-load-thread-count`.

    `on_hung` is called for batches that exceed their time limit in a thread of this process. The loss of an executor is
    known within `lost_within_s` seconds.
    """

    def __init__(
        self,
        log: EventLog,
        executor: str,
        *,
        repository: ModelRepository,
        lifecycle: Lifecycle,
        loader: Loader,
        announcer: Announcer,
        metrics: ExecutorMetrics,
        placement: PlacementRules,
        concurrent_loads: int,
        on_hung: Hung,
        catalog: Callable[[], Awaitable[Catalog]],
        lost_within_s: float,
    ) -> None:
        self._log = log
        self._executor = executor
        self._lifecycle = lifecycle
        self._loader = loader
        self._announcer = announcer
        loader.keep_assets = announcer.keep_blob
        self._metrics = metrics
        self._on_hung = on_hung
        self.serving: dict[tuple[str, int], LoadedVersion] = {}
        """What is served now, by model and version."""
        self._health_watches = Tasks()
        """Each is cancelled when its version is unloaded (`Retirement`)."""
        self._locks: dict[str, asyncio.Lock] = {}
        self._loads = asyncio.Semaphore(max(1, concurrent_loads))
        self._retirement = Retirement(log, self.serving, lifecycle, announcer, metrics)
        self._directories = Directories(log, repository, lifecycle, loader, announcer)
        self._selection = Selection(executor, placement, lifecycle, self._directories, announcer, self._unload_version)
        self._repository = repository
        self._on_demand_directories: dict[str, Path] = {}
        """The directories from which models on demand may be loaded at any time, by model."""
        self._composition = Composition(self)
        self._catalog = catalog
        self._starting: dict[str, asyncio.Task[None]] = {}
        """The models of a joint load: an ensemble among them waits for its composing models."""
        self._failed: dict[str, CharoniaError] = {}
        self.before_leaving: Callable[[LoadedVersion], Awaitable[None]] = _do_nothing
        """Awaited before it is announced that a version, or some of its instances, leaves (`checkpoints`)."""
        self.announced: dict[str, dict[int, ModelInterface]] = {}
        """The models that are loaded on demand (`on_demand`), in memory or not."""
        self.agreement = Agreement(
            *(log, executor),
            serving=self.serving,
            lifecycle=lifecycle,
            announcer=announcer,
            composition=self._composition,
            loads=self,
            lost_within_s=lost_within_s,
        )
        self._loading: dict[str, Override | None] = {}
        """The overrides of the models that are loaded now."""

    def lock(self, model: str) -> asyncio.Lock:
        """Held while a model is loaded or unloaded."""
        return self._locks.setdefault(model, asyncio.Lock())

    def find(self, model: str, version: int) -> LoadedVersion | None:
        """Return what serves a version now, or None."""
        return self.serving.get((model, version))

    def loaded_versions(self) -> list[LoadedVersion]:
        return list(self.serving.values())

    async def idle(self) -> None:
        """Wait until no instance has a batch, those of replaced and unloaded versions included."""
        await asyncio.gather(*(loaded.pool.idle() for loaded in self.loaded_versions()))
        await self._retirement.idle()

    async def ended(self, name: str) -> None:
        """Wait until the versions of models of this name that are unloaded by now have no instances."""
        await self._retirement.ended(name)

    async def close(self, grace_s: float) -> None:
        """Unload everything. Instances that do not end within `grace_s` seconds end with the process."""
        await self._composition.close()
        loaded_versions = self.loaded_versions()
        self.serving.clear()
        for loaded in loaded_versions:
            self._retirement.retire(loaded)
        await self._retirement.close(grace_s)
        for directory in self._override_directories({loaded.model for loaded in loaded_versions}):
            await asyncio.to_thread(overrides.remove, directory)

    def _override_directories(self, models: Iterable[str]) -> list[Path]:
        forgotten = [self._lifecycle.forget(model) for model in models]
        return [override.directory for override in forgotten if override is not None and override.directory is not None]

    # -- loading ------------------------------------------------------------------------------------------------------

    async def load_all(
        self, decisions: list[LoadModel], load: Callable[[str], Awaitable[None]] | None = None
    ) -> dict[str, str]:
        """Load several models concurrently, with `load` if given. Returns the reasons of those that failed, by model.

        A model that is placed elsewhere is no failure.
        """
        failures: dict[str, str] = {}

        async def one(model: str) -> None:
            try:
                await (self.load(model, None) if load is None else load(model))
            except NotPlacedHere as error:
                _log.info("%s is not loaded here: %s", model, error)
            except CharoniaError as error:
                cause = error.__cause__
                failures[model] = f"{error.message} ({cause})" if cause is not None else error.message.rstrip("\n")

        for decision in decisions:
            self._composition.chosen(decision.model)
        tasks = {d.model: asyncio.create_task(one(d.model), name=f"load {d.model}") for d in decisions}
        self._starting |= tasks
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for model, task in tasks.items():
                task.cancel()
                if self._starting.get(model) is task:
                    del self._starting[model]
        return failures

    async def load(self, model: str, request: ModelRequested | None, *, to_agree: bool = False) -> None:
        """Load the new and changed versions of a model. Raises the error for the caller (R20, R21, C62).

        `to_agree`: only if it differs from what other executors serve once its turn has come (`Agreement`).
        """
        if request is not None:
            self._composition.chosen(model)
        try:
            loaded = await self._load(model, request, to_agree=to_agree)
        except CharoniaError as error:
            self._failed[model] = error
            self._composition.failed(model)
            self._release_copies(model, wanted=not isinstance(error, NotPlacedHere))
            await self.agreement.end_outlived(model)
            raise
        if loaded is None:
            return
        self._release_copies(model, wanted=True)
        self._failed.pop(model, None)
        self._composition.forget(model)
        if loaded:
            _log.info("loaded %s, versions %s", model, self._lifecycle.ready_versions(model))
            await self._composition.loaded(model)
        await self.agreement.agree(model)  # others may have changed meanwhile

    async def _load(self, model: str, request: ModelRequested | None, *, to_agree: bool) -> bool | None:
        """Whether a version was loaded; None where there was nothing to agree on."""
        async with self.lock(model):
            if to_agree and not self.agreement.differs(model):
                return None  # an unload came first
            kept = self._lifecycle.override(model)
            override = await self._directories.override(model, request, kept)
            if override is None:
                override = await self.agreement.override(model, request)
            self._loading[model] = override
            try:
                directory = await asyncio.to_thread(self._directories.find, model, override)
                # before this load takes a permit: the loads of an ensemble's composing models need permits
                find = await self._composition.prepare(directory)
                async with self._loads:
                    loaded = await self._load_versions(directory, find)
            except BaseException as error:
                if override is not None and override is not kept and override.directory is not None:
                    await asyncio.to_thread(overrides.remove, override.directory)
                brought = kept is not None and kept.directory is not None
                if brought and override is None and isinstance(error, CharoniaError):
                    self.agreement.outlived(model)
                raise
            finally:
                del self._loading[model]
            self.agreement.loaded(model, ends_files=request is not None and override is None)
            if override is not kept:
                self._lifecycle.set_override(model, override)
                if kept is not None and kept.directory is not None:
                    self._retirement.discard_after(model, kept.directory)
        return loaded

    # -- for ensembles (`composition`) --------------------------------------------------------------------------------

    def configs(self) -> dict[str, ModelConfig]:
        """The configurations of the served models."""
        return {model: loaded.source.config for (model, _), loaded in self.serving.items()}

    def interfaces(self, model: str) -> dict[int, ModelInterface]:
        """The versions of a model that are ready, or can be loaded on demand."""
        if model in self.announced:
            return self.announced[model]
        ready = self._lifecycle.ready_versions(model)
        return {v: self.serving[(model, v)].interface for v in ready if (model, v) in self.serving}

    async def catalog(self) -> Catalog:
        """The catalog of what all executors serve."""
        return await self._catalog()

    def find_directory(self, model: str) -> ModelDirectory | None:
        """A model's directory with its override; None for an unknown model. Reads files."""
        try:
            return self._directories.find(model, self._lifecycle.override(model))
        except CharoniaError:
            return None

    def failure(self, model: str) -> CharoniaError | None:
        """The error of a model's last load, None when it succeeded."""
        return self._failed.get(model)

    def is_underway(self, model: str) -> bool:
        """Whether a joint load of this model is in progress."""
        return model in self._starting

    def is_loading(self, model: str) -> bool:
        """Whether a load or unload of this model is in progress."""
        return self.lock(model).locked()

    async def load_ended(self, model: str) -> None:
        """Wait until no load or unload of this model is in progress."""
        async with self.lock(model):
            pass

    async def load_underway(self, model: str) -> bool:
        """Wait for a joint load of a model; False when there is none."""
        starting = self._starting.get(model)
        if starting is None or starting is asyncio.current_task():
            return False
        await asyncio.wait({starting})
        return True

    async def reload(self, model: str) -> None:
        """Load a model again although its files are unchanged."""
        self._lifecycle.invalidate(model)
        await self.load(model, None)

    # -- loading of versions ------------------------------------------------------------------------------------------

    async def _load_versions(self, directory: ModelDirectory, find: Find) -> bool:
        """Load the versions that differ from the served ones, all or none; False when none did (R21, R22)."""
        model = directory.key
        directory, selected = await self._selection.select(directory)
        plan = self._lifecycle.plan(directory, selected)
        failures: dict[int, CharoniaError] = {}
        if plan.load:
            for version in plan.load:
                await self._announcer.announce(self._lifecycle.loading(model, version))
            try:
                failures = await self._load_planned(directory, selected, plan.load, find)
            finally:
                await self._loader.release(model)  # it was resized, or no load came so far
        if failures:
            raise load_failure(model, failures)
        for version in plan.unload:
            await self._unload_version(model, version)
        for fact in self._lifecycle.drop_failed(model, selected):
            await self._announcer.announce(fact)
        return bool(plan.load)

    async def _load_planned(
        self, directory: ModelDirectory, selected: list[int], planned: tuple[int, ...], find: Find
    ) -> dict[int, CharoniaError]:
        model = directory.key
        failures: dict[int, CharoniaError] = {}
        config = await self._directories.complete(directory, selected, planned, find)
        if isinstance(config, CompositionError):
            return {NO_VERSION: config}
        if isinstance(config, CharoniaError):
            return dict.fromkeys(planned, config)
        made: list[LoadedVersion] = []
        try:
            for version in planned:
                try:
                    if not await self._resize(directory, version, config):
                        made.append(await self._loader.load(directory, version, config))
                except CharoniaError as error:
                    failures[version] = error
                    _log.error("failed to load %s version %d: %s", model, version, error)
                    await self._announcer.announce(self._lifecycle.failed(model, version, error))
            while made and not failures:
                loaded = made[0]
                if (before := self.serving.get((model, loaded.version))) is not None:
                    await self.before_leaving(before)
                del made[0]  # from here on it is served, not given up
                await self._announce_loaded(loaded, await self.install(loaded), directory)
        finally:
            for ended in await asyncio.gather(*map(self._abandon, made), return_exceptions=True):
                if isinstance(ended, Exception):
                    _log.error("a version of %s that is given up could not be closed", model, exc_info=ended)
        return failures

    async def _abandon(self, loaded: LoadedVersion) -> None:
        """Give up a loaded version because another one of its load failed (R21)."""
        await loaded.pool.close()
        if fact := self._lifecycle.abandoned(loaded.model, loaded.version):
            await self._announcer.announce(fact)

    async def prepare(self, model: str) -> tuple[ModelDirectory, ModelConfig, list[int]] | None:
        """Return directory, final configuration and versions of a model without making instances; None for an ensemble.

        Raises what `load` raises.
        """
        try:
            async with self.lock(model), self._loads:
                directory = await asyncio.to_thread(self._directories.find, model, None)
                if is_ensemble(directory.config):
                    return None
                directory, selected = await self._selection.select(directory)
                self._on_demand_directories[model] = directory.path
                try:
                    config = await self._directories.complete(directory, selected, selected, refuse_all)
                finally:
                    await self._loader.release(directory.key)  # it is loaded when it is asked for
                if isinstance(config, CharoniaError):
                    raise load_failure(model, dict.fromkeys(selected, config))
                self.announced[model] = dict.fromkeys(selected, ModelInterface.of(config))
        except CharoniaError as error:
            self._failed[model] = error
            self._release_copies(model, wanted=not isinstance(error, NotPlacedHere))
            raise
        self._release_copies(model, wanted=True)
        return directory, config, selected

    async def _resize(self, directory: ModelDirectory, version: int, config: ModelConfig) -> bool:
        """Add or remove instances in place, if nothing else changed (R23). Returns False when a load is needed.

        A version that drains needs one: it stays in `serving` until its requests have run, and then ends. So does one
        whose files a request brings or brought: its instances would stay with files that are removed (R25).
        """
        loaded = self.serving.get((directory.key, version))
        is_ready = version in self._lifecycle.ready_versions(directory.key)
        if loaded is None or not is_ready or directory.key in self.announced:
            return False
        override = self._lifecycle.override(directory.key)
        brought = not directory.repository or (override is not None and override.directory is not None)
        if brought and loaded.source.directory != directory.path:
            return False
        change = await self._loader.resize(loaded, directory, version, config)
        if change < 0:
            await self.before_leaving(loaded)
        if change:
            await self._count(loaded)
            await self._announcer.announce(self._lifecycle.loaded(self._loaded(loaded), directory.fingerprint))
        if change < 0:
            self._retirement.shrink(loaded)
        return change != 0

    async def make(self, directory: ModelDirectory, version: int, config: ModelConfig) -> LoadedVersion:
        """Load a version without serving it. Raises a `CharoniaError`."""
        return await self._loader.load(directory, version, config)

    async def install(self, loaded: LoadedVersion) -> LoadedVersion | None:
        """Serve a loaded version from now on; return the one that it replaces, or None."""
        key = (loaded.model, loaded.version)
        loaded.pool.on_hung = self._on_hung
        loaded.pool.start()
        before = self.serving.get(key)
        self.serving[key] = loaded
        await self._count(loaded)
        return before

    async def _count(self, loaded: LoadedVersion) -> None:
        """Count its instances and the results of its warm-up (I12)."""
        key = (loaded.model, loaded.version)
        self._metrics.loaded(
            loaded.model, loaded.interface, loaded.version, loaded.pool.slots, loaded.load_ns, loaded.source.config
        )
        statistics = keys.statistics(*key, loaded.content_hash)
        for records, executed in loaded.warmed:
            with contextlib.suppress(LogUnavailable):
                await self._log.add_statistics(statistics, increments(records, executed))

    async def _announce_loaded(
        self, loaded: LoadedVersion, before: LoadedVersion | None, directory: ModelDirectory
    ) -> None:
        """Announce a served version and retire its predecessor, which finishes its batches (R22)."""
        await self._announcer.announce(self._lifecycle.loaded(self._loaded(loaded), directory.fingerprint))
        self.watch_health(loaded)
        if before is not None:
            self._retirement.retire(before, forget=True)

    def _loaded(self, loaded: LoadedVersion) -> VersionLoaded:
        override = self._loading.get(loaded.model) or Override("")
        return VersionLoaded(
            self._executor,
            loaded.model,
            loaded.version,
            loaded.content_hash,
            loaded.pool.slots,
            loaded.source.config.SerializeToString(deterministic=True),
            loaded.labels,
            loaded.load_ns,
            loaded.takes_waves,
            loaded.memory,
            override.request_id,
            override.config_json if override.directory is None else "",
        )

    def withdraw(self, loaded: LoadedVersion) -> None:
        """Stop serving an idle version."""
        key = (loaded.model, loaded.version)
        if self.serving.get(key) is loaded:
            del self.serving[key]
            self._metrics.unloaded(*key)

    async def retire(self, loaded: LoadedVersion) -> None:
        """Unload a withdrawn version. It may be loaded again, so its statistics stay."""
        await asyncio.wait([self._retirement.retire(loaded)])

    def watch_health(self, loaded: LoadedVersion) -> None:
        """Check the health of an announced version from now on (P6)."""
        pool, key = loaded.pool, (loaded.model, loaded.version)
        if not pool.checking_instances():
            return

        async def report(healthy: bool) -> None:
            if self.serving.get(key) is loaded:
                await self._announcer.announce(VersionHealthChanged(self._executor, *key, healthy))

        name = f"{loaded.model} version {loaded.version}"
        watch = HealthWatch(
            *(name, pool.checking_instances, report, loaded.health_interval_s),
            replace=pool.replace_dead,
            all_down=lambda: pool.instance_count > 0 and pool.all_down(),
            exists=lambda instance: any(spec.name == instance for spec in pool.specs),
        )
        loaded.health = self._health_watches.spawn(watch.run(), f"health of {name}")

    # -- unloading ----------------------------------------------------------------------------------------------------

    async def unload(self, model: str, *, dependents: bool = False) -> None:
        """Stop serving a model; returns when it takes no new work. Its instances end later (R27).

        Ensembles that contain it are unloaded first; they come back when it does. `dependents`: unload an ensemble's
        composing models too, unless other ensembles contain them or they were asked for by name (R26).
        """
        for ensemble in self._composition.dependents(model):
            was_served = bool(self._lifecycle.ready_versions(ensemble))
            await self.unload(ensemble)
            if was_served:
                self._composition.failed(ensemble)
        parts = self._composition.parts(model) if dependents else []
        await self._unload(model)
        for part in parts:
            await self.unload(part, dependents=True)

    async def _unload(self, model: str) -> None:
        async with self.lock(model):
            self._composition.unloaded(model)  # a load that came before has ended, and may have failed
            await self.drop(model)
            self.agreement.unloaded(model)
        self._release_copies(model, wanted=False)

    async def drop(self, model: str) -> None:
        """Unload all versions of a model, and forget what a load request brought. Call it with the model's lock."""
        for version in self._lifecycle.ready_versions(model):
            await self._unload_version(model, version)
        for fact in self._lifecycle.drop_failed(model):
            await self._announcer.announce(fact)
        override = self._lifecycle.forget(model)
        if override is not None and override.directory is not None:
            self._retirement.discard_after(model, override.directory)

    def _release_copies(self, model: str, *, wanted: bool) -> None:
        """Remove the unused local copies of a remote model (R7) once its old versions have ended.

        The latest copy of a model that is `wanted` stays, whether it could be loaded or not.
        """

        async def release() -> None:
            async with self.lock(model):
                versions = [loaded for (name, _), loaded in self.serving.items() if name == model]
                # after resizing (R23), its instances may use several copies
                used = {spec.source.directory for one in versions for spec in one.pool.specs}
                used |= {loaded.source.directory for loaded in versions}
                if (directory := self._on_demand_directories.get(model)) is not None:
                    used.add(directory)
                await asyncio.to_thread(self._repository.release, model, used, latest=wanted)

        if self._repository.has_copies:
            self._retirement.afterwards(model, release)

    async def _unload_version(self, model: str, version: int) -> None:
        loaded = self.serving.get((model, version))
        if loaded is not None:
            await self.before_leaving(loaded)
        await self._announcer.announce(self._lifecycle.unloading(model, version))
        if loaded is not None:
            self._retirement.drain(loaded, self._composition.dependents(model))


async def _do_nothing(_incarnation: LoadedVersion) -> None:
    """Do nothing: the default of `before_leaving`."""
