"""One executor: starts its parts, passes control facts to them, and stops them in order.

`executors.deployment.lifecycle` decides which models to load, `executors.deployment.deployment` loads them,
`executors.intake` takes the batches and `executors.settling` settles them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

from charonia import keys
from charonia.calls.cache.cached_calls import CachedCalls
from charonia.catalog.catalog import Catalog
from charonia.errors import CharoniaError, InternalError, LogUnavailable, StartupError
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.membership import Membership
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import START, Entry, EventLog
from charonia.facts.events import (
    ExecutorDescribed,
    ExecutorDraining,
    Fact,
    ModelExcluded,
    ModelRequested,
    ModelRequestFinished,
    RepositoryScanned,
    VersionAnnounced,
    VersionLoaded,
    facts_of,
)
from charonia.metrics.cache_metrics import CacheMetrics
from charonia.options.settings import ExecutorSettings, LogSettings
from charonia.tasks import Tasks, periodic

from .announcing import Announcer
from .batches.batch_payloads import BatchPayloads
from .batches.batch_results import Death
from .deployment.deployment import Deployment
from .deployment.lifecycle import EXPLICIT, NO_VERSION, POLL, Lifecycle, LoadModel, Refuse, UnloadModel, load_failure
from .deployment.loads_by_name import LoadsByName
from .deployment.memory_budget import MemoryBudget
from .deployment.on_demand import OnDemand
from .deployment.registered_repositories import RegisteredRepositories
from .intake import DRAINS, Intake
from .loading.loader import Loader
from .loading.placement_rules import Capabilities, PlacementRules
from .metrics import ExecutorMetrics
from .outgoing_calls import ExecutorCalls
from .repository.model_repository import ModelRepository
from .running.limiter_reports import LimiterMetrics, WaitReports
from .running.submitted_batch import SubmittedBatch
from .settling.checkpoints import Checkpoints
from .settling.reply_sockets import ReplySockets

_log = logging.getLogger(__name__)

_POLL_FAILED = "polling the model repository failed"
_NAMES_EVERY_S = 1.0
"""How often the directories of local repositories are checked for new names: a `stat` each."""


class ExecutorService:
    """One executor, made by `executors.app`. Call `start`, then `drain` and `close`, all in one event loop.

    `on_failure` is called when a batch hangs in a thread, or this process has lost its GPU: the process should then be
    stopped and started again. `failed` is true from then on; other batches may still finish.
    """

    def __init__(
        self,
        log: EventLog,
        settings: ExecutorSettings,
        log_settings: LogSettings,
        *,
        repository: ModelRepository,
        loader: Loader,
        capabilities: Capabilities,
        metrics: ExecutorMetrics,
        control: ControlPlane | None = None,
        cache_log: EventLog | None = None,
        link: LocalLink | None = None,
    ) -> None:
        self.failed = False
        self.on_failure: Callable[[], None] | None = None
        self._log = log
        self._loader = loader
        self._settings = settings
        self.metrics = metrics
        self._executor = settings.incarnation
        self._repository = repository
        self._lifecycle = Lifecycle(self._executor, settings.model_control_mode)
        self._directory = PayloadDirectory(settings.shm_dir, self._executor)
        self.membership = self._make_membership(log_settings)
        self._control = log.reader()
        self._catalog: Catalog | None = None
        """What executors hold in this log, for the counters, which follow it once all is read; None where another part
        of this process has a catalog.
        """
        if control is None:
            self.membership.on_new_epoch.append(self._forget_others)
            self.membership.say_again.append(self._read_others)
            self._forget_others()
        else:
            metrics.follow(control.catalog)
        self._announcer = Announcer(log)
        metrics.log_epoch_changes = lambda: self.membership.epoch_changes
        self.membership.say_again.append(self._announcer.announce_again)
        self.membership.on_beat.append(self._see_to_directory)
        interval_ms = log_settings.heartbeat_interval_ms
        make_cache = partial(self._cache, cache_log) if settings.response_cache_size_bytes else None
        loader.calls = self._calls = ExecutorCalls(
            log, self._executor, self._directory, interval_ms, control, make_cache
        )
        self.render_cache: Callable[[], bytes] = lambda: b""
        """Renders the metrics of the response cache that calls of models use."""
        self.membership.on_new_epoch.append(self._calls.begin_anew)
        self.membership.say_again.append(self._calls.renew)
        self._calls.leased = self.membership.is_leased
        self._deployment = self._make_deployment(
            log,
            loader,
            PlacementRules(settings.pool, capabilities, loader.can_find_backend),
            lost_within_s=(log_settings.heartbeat_ttl_ms + 3 * interval_ms) / 1000,  # two checks find no lease
        )
        self.membership.on_new_epoch.append(self._await_others)
        self._wait_reports: WaitReports | None = None
        if loader.resource_grants is not None:
            limiter = loader.resource_grants.limiter
            metrics.registry.register(LimiterMetrics(limiter, self._waiting))
            self._wait_reports = WaitReports(
                log, self._executor, limiter, self._deployment.loaded_versions, self._calls.count_open
            )
        self._loads_by_name = LoadsByName(self._repository, self._lifecycle, self._deployment)
        self._registered = RegisteredRepositories(self._repository, self._loads_by_name, self._deployment)
        self._registered.changed = self._announce_registered
        self._capabilities = capabilities
        self._on_demand = self._make_on_demand()
        payloads = BatchPayloads(log, self._directory)
        self._sockets = ReplySockets(self._directory)
        self._intake = Intake(log, self._executor, self._deployment.serving, metrics, payloads, self._sockets, link)
        if self._on_demand is not None:
            self._intake.on_wanted = self._on_demand.wanted
        self._checkpoints = Checkpoints(log, self._intake.settled_so_far)
        self._deployment.before_leaving = self._checkpoints.write
        self._tasks = Tasks()
        self._orders: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By name: what requests for a model wait for, in turn."""
        self._names: tuple[str, ...] = ()
        self._joined = False

    def _see_to_directory(self, _taken: bool) -> None:
        self._directory.belongs_to(self.membership.epoch)
        self._directory.tidy()

    def _await_others(self) -> None:
        self._tasks.spawn(self._deployment.agreement.await_others(), "executors of a new log")

    def _make_membership(self, log_settings: LogSettings) -> Membership:
        settings = self._settings
        return Membership(
            self._log,
            "executor",
            self._executor,
            pool=settings.pool,
            hosts_batcher=settings.hosts_batcher,
            payloads=self._directory,
            interval_ms=log_settings.heartbeat_interval_ms,
            ttl_ms=log_settings.heartbeat_ttl_ms,
        )

    def _make_deployment(
        self, log: EventLog, loader: Loader, placement: PlacementRules, *, lost_within_s: float
    ) -> Deployment:
        return Deployment(
            log,
            self._executor,
            repository=self._repository,
            lifecycle=self._lifecycle,
            loader=loader,
            announcer=self._announcer,
            metrics=self.metrics,
            placement=placement,
            concurrent_loads=self._settings.model_load_thread_count,
            on_hung=self._hung,
            catalog=self._calls.catalog,
            lost_within_s=lost_within_s,
        )

    def _make_on_demand(self) -> OnDemand | None:
        """None when all models stay loaded."""
        settings = self._settings
        if not settings.model_memory_budget_bytes and not settings.max_loaded_models:
            return None
        return OnDemand(
            self._log,
            self._executor,
            budget=MemoryBudget(budget_bytes=settings.model_memory_budget_bytes, max_models=settings.max_loaded_models),
            deployment=self._deployment,
            lifecycle=self._lifecycle,
            announcer=self._announcer,
            describe=self._describe,
            concurrent_loads=settings.model_load_thread_count,
        )

    def _waiting(self) -> Iterator[tuple[str, int, int]]:
        """Yield (model, version, number of requests that wait for resources) of all loaded versions."""
        for loaded in self._deployment.loaded_versions():
            yield loaded.model, loaded.version, loaded.pool.waiting_requests

    # -- start and end ------------------------------------------------------------------------------------------------

    def _cache(self, cache_log: EventLog | None, catalog: Catalog) -> CachedCalls:
        limit_bytes = self._settings.response_cache_size_bytes
        cache = CachedCalls(self._log, cache_log, limit_bytes, catalog, self.metrics.observe_called)

        def tags(model: str, version: int) -> Mapping[str, str]:
            held = catalog.held(model).get(version)
            return held.interface.metric_tags if held is not None else {}

        self.render_cache = CacheMetrics(cache, self._settings.metrics, tags).render
        return cache

    async def start(self) -> None:
        """Join, load what the control mode selects, and serve. Raises `StartupError` (R29) and undoes all."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        # only newer entries are acted on: older load requests were for other executors
        heard = await self._read_earlier()
        self._control.start(self._on_control)
        self._control.add(keys.CONTROL, heard)
        self._joined = True
        self._directory.open()
        await self.membership.start()
        self._directory.belongs_to(self.membership.epoch)
        self._intake.start()
        if self._wait_reports is not None:
            self._tasks.spawn(self._wait_reports.run(), "turns of batches")
        stamp = self._repository.stamp()
        try:
            found = await asyncio.to_thread(self._repository.scan)
        except CharoniaError as error:
            raise StartupError(error.message) from None
        self._names = tuple(found)
        decisions = self._lifecycle.start(found, self._settings.load_model)
        await self._announce_scan(ready=False)
        load = self._on_demand.announce if self._on_demand is not None else None
        failures, _ = await asyncio.gather(self._deployment.load_all(decisions, load), self._describe())
        if self._on_demand is not None:
            self._on_demand.start()
        _log.info("%s", self._report())
        if failures and self._settings.exit_on_error:
            reasons = "; ".join(f"{model}: {reason}" for model, reason in sorted(failures.items()))
            raise StartupError(f"failed to load all models: {reasons}")
        await self._announce_scan(ready=True)
        if self._settings.model_control_mode == POLL:
            polling = periodic(
                *(self.poll_once, self._settings.repository_poll_secs, _POLL_FAILED),
                on_refusal=lambda error: _log.warning("%s: %s", _POLL_FAILED, error),
            )
            self._tasks.spawn(polling, "repository poll")
        else:
            self._tasks.spawn(self._follow_names(stamp), "names of models")

    async def _read_earlier(self) -> bytes:
        """Fold what others serve, and which overrides of load requests; return the id of the last control fact."""
        last = START
        while entries := await self._log.range(keys.CONTROL, last):
            last = entries[-1].id
            for fact in (fact for entry in entries for fact in facts_of(entry)):
                self._fold(fact)
                if not self._joined and self._settings.model_control_mode == EXPLICIT:
                    self._deployment.agreement.hear(fact)
        if self._catalog is not None and not self._catalog.listeners:
            self.metrics.follow(self._catalog)  # from now on: what came before must not restart a counter
        return last

    def _forget_others(self) -> None:
        self._catalog = Catalog()

    async def _read_others(self) -> None:
        """Fold what a new log has: others may have joined it before this executor knew that it is one."""
        if self._catalog is not None and not self._catalog.listeners:
            await self._read_earlier()

    def _fold(self, fact: Fact) -> None:
        if self._catalog is None:
            return
        try:
            self._catalog.apply(fact)
        except Exception:
            _log.exception("control fact %r could not be folded", type(fact).__name__)

    def _report(self) -> str:
        """Return the tables of what was loaded at start-up (R30)."""
        configs = self._deployment.configs().values()
        used = {agent.name for config in configs for agent in config.model_repository_agents.agents}
        models: list[tuple[str, int | None, str]] = [
            (model, version if version != NO_VERSION else None, f"{state}: {reason}" if reason else state)
            for model, version, state, reason in self._lifecycle.states()
        ]
        known = {(model, version) for model, version, _ in models}
        for model, versions in self._deployment.announced.items():
            models += [(model, version, "on demand") for version in versions if (model, version) not in known]
        return report([(name, "built in") for name in sorted(used)], self._loader.backends(), sorted(models, key=str))

    async def drain(self, timeout_s: float) -> bool:
        """Accept no more batches, return queued ones, finish running ones. False when some outlasted `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._stop_intake()
                await self._deployment.idle()
                await self._intake.settled()
        except TimeoutError:
            _log.error("executor %s still had running batches after %g s", self._executor, timeout_s)
            return False
        return True

    async def _stop_intake(self) -> None:
        await self._stop_tasks()
        if self._on_demand is not None:
            await self._on_demand.stop()
        loaded_versions = self._deployment.loaded_versions()
        # other executors continue the sequences as soon as they hear of the drain
        await asyncio.gather(*map(self._checkpoints.write, loaded_versions))
        # no new batches may be sent here; requests for models that only this executor serves wait for its successor
        draining = ExecutorDraining(self._executor)
        try:
            await self._announcer.announce_once(draining)
        except LogUnavailable:
            self._tasks.spawn(self._announcer.announce(draining))
        with contextlib.suppress(LogUnavailable):
            await self._intake.stop()
        for loaded in loaded_versions:
            self._intake.return_queued(loaded, DRAINS)

    async def report_hung_batches(self) -> None:
        """Report hung batches. Call it after `close`, and after a batcher in this process has closed."""
        with contextlib.suppress(CharoniaError):
            await self._intake.report_hung_batches()

    def _hung(self, batch: SubmittedBatch, death: Death) -> None:
        what = "has lost its GPU" if death.ends_process else "hangs"
        _log.critical("executor %s must end: a batch %s in %s: %s", self._executor, what, death.instance, death.reason)
        self._intake.report_hung(batch, death)
        if not self.failed:
            self.failed = True
            if self.on_failure is not None:
                self.on_failure()

    async def close(self, grace_s: float = 30.0) -> None:
        """Unload everything within `grace_s` seconds and leave. Call `drain` first: what still runs is not answered."""
        await self._stop_tasks()
        if self._on_demand is not None:
            await self._on_demand.stop()
        await self._deployment.close(grace_s)
        await self._loader.close()
        await self._intake.close()
        await self._sockets.close()
        await self._calls.close()
        if self._joined:
            self._joined = False
            await self.membership.leave("drained")
            with contextlib.suppress(LogUnavailable):
                await self._log.delete_stream(keys.batches(self._executor))
        await asyncio.to_thread(self._directory.close)
        await asyncio.to_thread(self._repository.close)

    @property
    def hangs(self) -> bool:
        """Whether a thread still waits for an object store, possibly long after everything else has ended."""
        return self._repository.is_waiting

    async def _stop_tasks(self) -> None:
        self._repository.abandon()
        self._tasks.cancel()
        await self._control.close()  # which starts tasks
        await self._deployment.agreement.close()
        await self._tasks.close()

    # -- control ------------------------------------------------------------------------------------------------------

    def _on_control(self, _stream: bytes, entries: list[Entry]) -> None:
        for entry in entries:
            for fact in facts_of(entry):
                self.membership.hear(fact)
                self._fold(fact)
                if self._settings.model_control_mode == EXPLICIT:
                    for model in self._deployment.agreement.hear(fact):
                        self._tasks.spawn(self._deployment.agreement.agree(model), f"agree on {model}")
                if isinstance(fact, ModelRequested):
                    self._deployment.agreement.requested(fact)
                    self._tasks.spawn(self._answer(fact))
                elif isinstance(fact, ModelExcluded) and fact.executor != self._executor:
                    if self._lifecycle.override(fact.model) is not None:
                        # an executor that was silent since a younger one joined counts as succeeded by that one when
                        # it is lost, and requests would not wait until the younger one has loaded the model
                        self._tasks.spawn(self._describe())
                elif isinstance(fact, VersionLoaded | VersionAnnounced) and fact.executor != self._executor:
                    served = self._deployment.find(fact.model, fact.version)
                    if served is not None and served.content_hash != fact.content_hash:
                        self._tasks.spawn(
                            self._checkpoints.write(served)
                        )  # the other one is newer and gets the sequences

    async def _describe(self) -> None:
        """Announce this executor's labels, and how much of its memory budget is used."""
        fact = ExecutorDescribed(self._executor, await asyncio.to_thread(self._capabilities.labels))
        if self._on_demand is not None:
            budget = self._on_demand.budget
            fact = replace(
                fact,
                used_bytes=budget.used_bytes,
                budget_bytes=budget.budget_bytes,
                loaded_models=budget.models,
                most_models=budget.max_models,
            )
        await self._announcer.announce(fact)

    async def _answer(self, request: ModelRequested) -> None:
        """Carry a request out and answer it: those for one model in the order of the log, as all executors do."""
        if request.alias:  # of a repository, which waits for instances to end
            await self._carry_out(request)
            return
        order = self._orders.setdefault(request.model, asyncio.Lock())
        async with order:
            await self._carry_out(request)

    async def _carry_out(self, request: ModelRequested) -> None:
        decision = self._lifecycle.requested(request)
        error: CharoniaError | None = None
        try:
            match decision:
                case Refuse():
                    error = decision.error
                case UnloadModel() if request.alias:
                    await self._registered.unload(decision.model, request.alias)
                case LoadModel() if request.alias:
                    await self._registered.load(decision.model, request)
                case UnloadModel():
                    await self._loads_by_name.unload(decision.model, dependents=request.unload_dependents)
                case LoadModel():
                    await self._loads_by_name.load(decision.model, request)
        except CharoniaError as failure:
            error = failure
        except Exception as failure:
            _log.exception("model request for %r failed", request.model)
            error = InternalError(f"{type(failure).__name__}: {failure}")
            if isinstance(decision, LoadModel):
                error = load_failure(request.model, {NO_VERSION: error})
        finished = ModelRequestFinished(self._executor, request.request_id)
        if error is not None:
            finished = ModelRequestFinished(self._executor, request.request_id, int(error.code), error.message)
        await self._announcer.announce(finished)

    async def poll_once(self) -> None:
        """Scan the repository and load or unload what changed (R10). An unreadable repository changes nothing."""
        try:
            found = await asyncio.to_thread(self._repository.scan)
        except CharoniaError as error:
            _log.warning("%s", error)
            return
        loads: list[LoadModel] = []
        for decision in self._lifecycle.polled(found):
            if isinstance(decision, UnloadModel):
                await self._deployment.unload(decision.model)
            else:
                loads.append(decision)
        await self._announce_names(tuple(found))
        await self._deployment.load_all(loads)

    async def _follow_names(self, stamp: tuple[int, ...]) -> None:
        """Announce models that appear in local repositories or leave them; none is loaded or unloaded (H40)."""
        while True:
            await asyncio.sleep(_NAMES_EVERY_S)
            before, stamp = stamp, self._repository.stamp()
            if stamp == before:
                continue
            try:
                await self._announce_names(await asyncio.to_thread(self._repository.names))
            except CharoniaError as error:
                _log.warning("%s", error)

    async def _announce_names(self, names: tuple[str, ...]) -> None:
        if names != self._names:
            self._names = names
            await self._announce_scan(ready=True)

    async def _announce_registered(self) -> None:
        self._names = await asyncio.to_thread(self._repository.names)
        await self._announce_scan(ready=True)

    async def _announce_scan(self, *, ready: bool) -> None:
        fact = RepositoryScanned(
            self._executor, self._names, self._settings.model_control_mode, ready, self._registered.keys()
        )
        await self._announcer.announce(fact)


_AGENTS = ("Repository Agent", "Path")
_BACKENDS = ("Backend", "Path", "Config")
_MODELS = ("Model", "Version", "Status")


def report(
    agents: Iterable[tuple[str, str]],
    backends: Iterable[tuple[str, str, str]],
    models: Iterable[tuple[str, int | None, str]],
) -> str:
    """Return the tables of agents, backends and models after the start-up load (R30).

    The version of a model without one to load is None.
    """
    versions = [(name, "" if version is None else str(version), status) for name, version, status in models]
    return "\n" + "\n".join((_table(_AGENTS, agents), _table(_BACKENDS, backends), _table(_MODELS, versions)))


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]  # a reason may have lines
    widths = [max(len(row[i]) for row in (heading, *cells)) for i in range(len(heading))]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"

    def line(row: Sequence[str]) -> str:
        return "|" + "|".join(f" {text.ljust(width)} " for text, width in zip(row, widths, strict=True)) + "|"

    return "\n".join([rule, line(heading), rule, *map(line, cells), rule, ""])
