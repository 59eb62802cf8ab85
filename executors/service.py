"""One executor: loads what its repository and the control stream say, serves batches, drains.

`executors.lifecycle` decides, `executors.loading` loads, `executors.intake` executes; here they are put in order and
the log is told. Loads of one model never overlap; a load never stops heartbeats or running batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from charonia import keys
from charonia.errors import CharoniaError, LogUnavailable, StartupError
from charonia.eventlog.control import facts_of
from charonia.eventlog.membership import Membership
from charonia.eventlog.port import Entry, EventLog
from charonia.events import (
    FIELD_FACT,
    Fact,
    ModelRequested,
    ModelRequestFinished,
    RepositoryScanned,
    VersionLoaded,
    pack_fact,
)
from charonia.models.config import from_json
from charonia.models.errors import StructureError
from charonia.models.repository import DUPLICATE_REASON, ModelDirectory, ModelRepository
from charonia.settings import ExecutorSettings, LogSettings

from . import overrides
from .accounting import increments
from .intake import Intake
from .lifecycle import (
    NO_VERSION,
    POLL,
    Lifecycle,
    LoadModel,
    Override,
    Refuse,
    UnloadModel,
    load_failure,
    poll_failure,
)
from .loading import Incarnation, Loader
from .metrics import ExecutorMetrics

_log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0


class ExecutorService:
    """Made by `executors.app`. `start`, then `drain` and `close`; all in one event loop."""

    def __init__(
        self,
        log: EventLog,
        settings: ExecutorSettings,
        log_settings: LogSettings,
        *,
        loader: Loader,
        metrics: ExecutorMetrics,
    ) -> None:
        self._log = log
        self._settings = settings
        self._loader = loader
        self.metrics = metrics
        self._me = settings.incarnation
        self._repository = ModelRepository(settings.model_repository, config_name=settings.model_config_name or None)
        self._lifecycle = Lifecycle(self._me, settings.model_control_mode)
        self._membership = Membership(
            log,
            "executor",
            self._me,
            pool=settings.pool,
            hosts_batcher=settings.hosts_batcher,
            interval_ms=log_settings.heartbeat_interval_ms,
            ttl_ms=log_settings.heartbeat_ttl_ms,
        )
        self._control = log.reader()
        self._intake = Intake(log, self._me, self._serving_now, metrics, local=settings.hosts_batcher)
        self._serving: dict[tuple[str, int], Incarnation] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._loads = asyncio.Semaphore(max(1, settings.model_load_thread_count))
        self._tasks: set[asyncio.Task[None]] = set()
        self._retiring: set[asyncio.Task[None]] = set()
        self._polling: asyncio.Task[None] | None = None
        self._names: tuple[str, ...] = ()
        self._joined = False

    # -- start and end ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join, load what the control mode says, and serve. Raises `StartupError` (R29), then everything is undone."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        # from here on: older requests were for others
        self._control.start(self._on_control)
        self._control.add(keys.CONTROL, b"$")
        self._joined = True
        await self._membership.start()
        self._intake.start()
        try:
            found = await asyncio.to_thread(self._repository.scan)
        except CharoniaError as error:
            raise StartupError(error.message) from None
        self._names = tuple(found)
        decisions = self._lifecycle.start(found, self._settings.load_model)
        await self._tell_scan(ready=False)
        failures = await self._load_all(decisions)
        if failures and self._settings.exit_on_error:
            reasons = "; ".join(f"{model}: {reason}" for model, reason in sorted(failures.items()))
            raise StartupError(f"failed to load all models: {reasons}")
        await self._tell_scan(ready=True)
        if self._settings.model_control_mode == POLL:
            self._polling = asyncio.create_task(self._poll(), name="repository poll")

    async def drain(self, timeout_s: float) -> bool:
        """Take no more batches, give queued ones back, finish running ones; False when some outlasted `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._stop_intake()
                await asyncio.gather(*(i.pool.idle() for i in self._serving.values()), *self._retiring)
                await self._intake.settled()
        except TimeoutError:
            _log.error("executor %s still had running batches after %g s", self._me, timeout_s)
            return False
        return True

    async def _stop_intake(self) -> None:
        await self._stop_tasks()
        with contextlib.suppress(LogUnavailable):
            for model, version in self._serving:
                await self._append(self._lifecycle.unloading(model, version))
            await self._intake.stop()
        for incarnation in self._serving.values():
            self._intake.give_back_queued(incarnation, "executor drains")

    async def close(self) -> None:
        """Unload everything and leave. Running batches are waited for; `drain` first."""
        await self._stop_tasks()
        incarnations = list(self._serving.values())
        self._serving.clear()
        await asyncio.gather(*(incarnation.pool.close() for incarnation in incarnations), return_exceptions=True)
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await self._intake.close()
        for model in {incarnation.model for incarnation in incarnations}:
            override = self._lifecycle.forget(model)
            if override is not None and override.directory is not None:
                await asyncio.to_thread(overrides.remove, override.directory)
        if self._joined:
            self._joined = False
            await self._membership.leave("drained")
            with contextlib.suppress(LogUnavailable):
                await self._log.delete_stream(self._intake.stream)

    async def _stop_tasks(self) -> None:
        tasks = list(self._tasks)
        if self._polling is not None:
            tasks.append(self._polling)
            self._polling = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._control.close()

    def _serving_now(self, model: str, version: int) -> Incarnation | None:
        return self._serving.get((model, version))

    # -- control ------------------------------------------------------------------------------------------------------

    def _on_control(self, _stream: bytes, entries: list[Entry]) -> None:
        for entry in entries:
            for fact in facts_of(entry):
                if isinstance(fact, ModelRequested):
                    self._spawn(self._answer(fact), self._tasks)

    async def _answer(self, request: ModelRequested) -> None:
        decision = self._lifecycle.requested(request)
        error: CharoniaError | None = None
        try:
            match decision:
                case Refuse():
                    error = decision.error
                case UnloadModel():
                    await self._unload(decision.model)
                case LoadModel():
                    await self._load(decision.model, request)
        except CharoniaError as failure:
            error = failure
        except Exception as failure:
            _log.exception("model request for %r failed", request.model)
            error = load_failure(request.model, {NO_VERSION: CharoniaError(f"{type(failure).__name__}: {failure}")})
        finished = ModelRequestFinished(self._me, request.request_id)
        if error is not None:
            finished = ModelRequestFinished(self._me, request.request_id, int(error.code), error.message)
        await self._tell(finished)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._settings.repository_poll_secs)
            try:
                await self.poll_once()
            except Exception:
                _log.exception("polling the model repository failed")

    async def poll_once(self) -> None:
        """Look at the repository and follow what changed (R10). A repository that cannot be read changes nothing."""
        try:
            found = await asyncio.to_thread(self._repository.scan)
        except CharoniaError as error:
            _log.warning("%s", error)
            return
        loads: list[LoadModel] = []
        for decision in self._lifecycle.polled(found):
            if isinstance(decision, UnloadModel):
                await self._unload(decision.model)
            else:
                loads.append(decision)
        if tuple(found) != self._names:
            self._names = tuple(found)
            await self._tell_scan(ready=True)
        await self._load_all(loads)

    # -- loading ------------------------------------------------------------------------------------------------------

    async def _load_all(self, decisions: list[LoadModel]) -> dict[str, str]:
        """Load several models at once; the reason of each that failed."""
        failures: dict[str, str] = {}

        async def one(model: str) -> None:
            try:
                await self._load(model, None)
            except CharoniaError as error:
                cause = error.__cause__
                failures[model] = f"{error.message} ({cause})" if cause is not None else error.message.rstrip("\n")

        await asyncio.gather(*(one(decision.model) for decision in decisions))
        return failures

    async def _load(self, model: str, request: ModelRequested | None) -> None:
        """Load what is new or changed of a model. Raises the error the caller is told (R20, R21, C62)."""
        lock = self._locks.setdefault(model, asyncio.Lock())
        async with lock, self._loads:
            kept = self._lifecycle.override(model)
            override = await self._override(model, request, kept)
            try:
                directory = await asyncio.to_thread(self._find, model, override)
                loaded = await self._load_versions(directory)
            except BaseException:
                if override is not None and override is not kept and override.directory is not None:
                    await asyncio.to_thread(overrides.remove, override.directory)
                raise
            if override is not None and override is not kept:
                before = self._lifecycle.set_override(model, override)
                if before is not None and before.directory is not None:
                    self._discard_after(before.directory, model)
            if loaded:
                _log.info("loaded %s, versions %s", model, self._lifecycle.ready_versions(model))

    async def _override(self, model: str, request: ModelRequested | None, kept: Override | None) -> Override | None:
        if request is None or not request.config_json:
            return kept
        if not request.files:
            return Override(request.config_json)
        contents = await overrides.fetch(self._log, model, request.files)
        return Override(request.config_json, await asyncio.to_thread(overrides.write, model, contents))

    def _find(self, model: str, override: Override | None) -> ModelDirectory:
        """The model's directory with its override. Raises R20's error. Reads files: not for the event loop."""
        if override is not None and override.directory is not None:
            directory: ModelDirectory | None = self._repository.read(override.directory, name=model)
        else:
            directory = self._repository.find(model)
        if directory is None:
            raise poll_failure(model)
        if override is None:
            return directory
        try:
            return directory.with_config(from_json(override.config_json))
        except CharoniaError as error:
            _log.error("configuration of the load request for %s: %s", model, error)
            raise poll_failure(model) from error

    async def _load_versions(self, directory: ModelDirectory) -> bool:
        """Load what differs from what is served; False when nothing did (R22)."""
        model = directory.name
        if directory.config is None:
            await self._refuse(directory)
        try:
            selected = directory.selected_versions()
        except CharoniaError as error:
            self._lifecycle.unreadable(directory)
            await self._tell(self._lifecycle.failed(model, NO_VERSION, error))
            raise load_failure(model, {NO_VERSION: error}) from None
        plan = self._lifecycle.plan(directory, selected)
        failures: dict[int, CharoniaError] = {}
        if plan.load:
            for version in plan.load:
                await self._tell(self._lifecycle.loading(model, version))
            failures = await self._load_planned(directory, selected, plan.load)
        if failures:
            raise load_failure(model, failures)
        for version in plan.unload:
            await self._unload_version(model, version)
        return bool(plan.load)

    async def _load_planned(
        self, directory: ModelDirectory, selected: list[int], planned: tuple[int, ...]
    ) -> dict[int, CharoniaError]:
        model = directory.name
        failures: dict[int, CharoniaError] = {}
        try:
            config = await self._loader.complete(directory, selected)
        except CharoniaError as error:
            for version in planned:
                failures[version] = error
                await self._tell(self._lifecycle.failed(model, version, error))
            if isinstance(error, StructureError):
                _log.error("configuration of %s: %s", model, error)
                raise poll_failure(model) from error
            return failures
        for version in planned:
            try:
                incarnation = await self._loader.load(directory, version, config)
            except CharoniaError as error:
                failures[version] = error
                _log.error("failed to load %s version %d: %s", model, version, error)
                await self._tell(self._lifecycle.failed(model, version, error))
            else:
                await self._install(incarnation, directory)
        return failures

    async def _refuse(self, directory: ModelDirectory) -> None:
        """Raise for a model whose configuration cannot be used, after telling its reason for the index (C62, R2)."""
        error = directory.error or poll_failure(directory.name)
        self._lifecycle.unreadable(directory)
        version = directory.versions[-1] if directory.versions else NO_VERSION
        _log.error("configuration of %s: %s", directory.name, error)
        await self._tell(self._lifecycle.failed(directory.name, version, error))
        if isinstance(error, StructureError) or error.message == DUPLICATE_REASON:
            raise poll_failure(directory.name) from error
        raise load_failure(directory.name, {version: error})

    async def _install(self, incarnation: Incarnation, directory: ModelDirectory) -> None:
        """Serve a loaded version from now on; its predecessor finishes what it has (R22)."""
        key = (incarnation.model, incarnation.version)
        incarnation.pool.start()
        before = self._serving.get(key)
        self._serving[key] = incarnation
        self.metrics.loaded(*key, incarnation.pool.slots, incarnation.load_ns)
        fact = VersionLoaded(
            self._me,
            incarnation.model,
            incarnation.version,
            incarnation.content_hash,
            incarnation.pool.slots,
            incarnation.source.config.SerializeToString(deterministic=True),
            incarnation.labels,
            incarnation.load_ns,
        )
        statistics = keys.statistics(*key, incarnation.content_hash)
        for records, executed in incarnation.warmed:
            with contextlib.suppress(LogUnavailable):
                await self._log.add_statistics(statistics, increments(records, executed))
        await self._tell(self._lifecycle.loaded(fact, directory.fingerprint))
        if before is not None:
            self._spawn(self._retire(before), self._retiring)

    # -- unloading ----------------------------------------------------------------------------------------------------

    async def _unload(self, model: str) -> None:
        """Stop serving a model; returns once no new work is taken, its instances end by themselves (H42, R27)."""
        lock = self._locks.setdefault(model, asyncio.Lock())
        async with lock:
            for version in self._lifecycle.ready_versions(model):
                await self._unload_version(model, version)
            override = self._lifecycle.forget(model)
            if override is not None and override.directory is not None:
                self._discard_after(override.directory, model)

    async def _unload_version(self, model: str, version: int) -> None:
        await self._tell(self._lifecycle.unloading(model, version))
        incarnation = self._serving.pop((model, version), None)
        if incarnation is not None:
            self._spawn(self._retire(incarnation, tell=True), self._retiring)

    async def _retire(self, incarnation: Incarnation, *, tell: bool = False) -> None:
        """Finish an incarnation's batches, then finalize it."""
        await incarnation.pool.idle()
        await incarnation.pool.close()
        if tell:
            fact = self._lifecycle.unloaded(incarnation.model, incarnation.version)
            if fact is not None:
                self.metrics.unloaded(incarnation.model, incarnation.version)
                await self._tell(fact)

    def _discard_after(self, directory: Path, model: str) -> None:
        """Remove a temporary model directory when nobody loaded from it runs any more."""
        waiting = list(self._retiring)

        async def discard() -> None:
            await asyncio.gather(*waiting, return_exceptions=True)
            await asyncio.to_thread(overrides.remove, directory)

        self._spawn(discard(), self._retiring)

    # -- the log ------------------------------------------------------------------------------------------------------

    async def _tell_scan(self, *, ready: bool) -> None:
        await self._tell(RepositoryScanned(self._me, self._names, self._settings.model_control_mode, ready))

    async def _tell(self, fact: Fact) -> None:
        """Write a control fact, however long the log is away: everybody else's view hangs on it."""
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                await self._append(fact)
                return
            except LogUnavailable as error:
                _log.warning("the log does not take %s, trying again: %s", fact.kind, error)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _LAST_RETRY_S)

    async def _append(self, fact: Fact) -> None:
        await self._log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])

    def _spawn(self, work: Coroutine[Any, Any, None], group: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        group.add(task)
        task.add_done_callback(group.discard)
        task.add_done_callback(_report)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a task of the executor failed", exc_info=error)
