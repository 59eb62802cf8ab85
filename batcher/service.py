"""One batcher: takes ownership of models and keeps one `OwnedModel` for each. `periodic_checks` checks all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from charonia.calls.cache.cached_calls import CachedCalls
from charonia.catalog.catalog import ServedVersion
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, InternalError, LogUnavailable
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.port import EventLog
from charonia.facts.events import Fact, ProcessJoined, ProcessLeft, RepositoryScanned
from charonia.metrics.latencies import Latencies
from charonia.models.ensemble import ENSEMBLE_SCHEDULING
from charonia.models.interface import ModelInterface
from charonia.options.settings import BatcherSettings
from charonia.tasks import Tasks

from .deadlock.deadlock_watch import DeadlockChecks
from .ensembles.owned_ensemble import OwnedEnsemble
from .entries.carriers import RETRY_S
from .housekeeping.departed_endpoints import DepartedEndpoints, streams_of
from .housekeeping.journal_sealing import JournalSealing
from .housekeeping.model_checks import ModelChecks
from .housekeeping.periodic_checks import PeriodicChecks
from .owner.owned import BatcherContext, OwnedModel
from .owner.quarantine import Quarantine
from .scheduling.sequences.sequence_dispatch import NO_DELAYS, Delays
from .takeover import ownership
from .takeover.pauses import Pauses
from .takeover.recovery import ask_for_streams, newcomers, recover

_log = logging.getLogger(__name__)
_News = TypeVar("_News")


class BatcherService:
    """`link` leads to the executor in this process; None in a batcher of its own."""

    def __init__(
        self,
        log: EventLog,
        control: ControlPlane,
        settings: BatcherSettings,
        *,
        link: LocalLink | None = None,
        delays: Delays = NO_DELAYS,
        cache_log: EventLog | None = None,
    ) -> None:
        self._log = log
        self._control = control
        self._catalog = control.catalog
        self._settings = settings
        self._link = link
        self._reader = log.reader()
        self._owned: dict[str, OwnedModel] = {}
        self._taking: dict[str, asyncio.Task[None]] = {}
        self._dropped: set[str] = set()
        """Models that this batcher has given up while it lives: while the log names it as the owner, no other one takes
        them, also one that is preferred by now.
        """
        self._tasks = Tasks()
        self._pauses = Pauses()
        self._departed = DepartedEndpoints(log, control.catalog)
        self._checks: dict[str, ModelChecks] = {}
        others = partial(ownership.live_batchers, self._catalog)
        self._deadlocks = DeadlockChecks(
            log, settings.incarnation, self._owned.values, others, self._catalog.live_executors
        )
        caches = bool(settings.response_cache_size_bytes)
        self.latencies = Latencies(settings.metrics, caches=caches, joint=settings.joint_metrics)
        """Metrics of ensembles, which no executor runs."""
        self.cached: CachedCalls | None = None
        """The response cache for steps of ensembles, if there is one (K4)."""
        if caches:
            limit_bytes = settings.response_cache_size_bytes
            self.cached = CachedCalls(log, cache_log, limit_bytes, self._catalog, self._observe)
        self._periodic_checks = PeriodicChecks(
            *(log, control.catalog, settings.incarnation, self._owned, self._checks, self._departed, self._deadlocks)
        )
        self._context = BatcherContext(
            log=log,
            reader=self._reader,
            catalog=control.catalog,
            settings=settings,
            link=link,
            delays=delays,
            departed=self._departed,
            quarantine=Quarantine(),
            lost_ownership=self._drop_if_owned,
            on_blocking=self._deadlocks.soon,
            on_behind=self._periodic_checks.look_behind,
        )
        self._closing = False

    async def start(self) -> None:
        self._reader.start(on_state=self._on_log_state)
        self._catalog.listeners.append(self._on_model)
        self._catalog.process_listeners.append(self._on_process)
        self._consider_all()
        self._periodic_checks.start()

    async def drain(self) -> None:
        """Stop deciding and release every model: queued requests stay in the log, running ones settle by themselves."""
        self._closing = True
        self._deadlocks.close()
        await asyncio.gather(*self._stop_taking(), return_exceptions=True)
        for model in list(self._owned):
            owned = self._drop(model)
            with contextlib.suppress(CharoniaError):
                await owned.suspect_note.erase()
                await self._log.release_ownership(model, self._settings.incarnation, owned.token)

    async def close(self) -> None:
        if not self._closing:
            await self.drain()
        self._catalog.listeners.remove(self._on_model)
        self._catalog.process_listeners.remove(self._on_process)
        await self._departed.close()
        if self.cached is not None:
            with contextlib.suppress(CharoniaError):
                await self.cached.close()
        await self._periodic_checks.close()
        await self._reader.close()

    def begin_anew(self) -> None:
        """The log has a new epoch, in which no model is owned yet: models are acquired again as they are reported."""
        self._step_down()
        self._dropped.clear()
        self._departed.clear()
        if self.cached is not None:
            self.cached.begin_anew()

    @property
    def owned(self) -> dict[str, OwnedModel]:
        """The models that this batcher owns."""
        return self._owned

    @property
    def sealings(self) -> dict[str, JournalSealing]:
        """Who seals the journal of an owned model; without models whose journals are not sealed."""
        return {model: checks.sealing for model, checks in self._checks.items() if checks.sealing is not None}

    @property
    def taking(self) -> frozenset[str]:
        """The models whose ownership it is acquiring now."""
        return frozenset(self._taking)

    # -- ownership ----------------------------------------------------------------------------------------------------

    def _consider_all(self) -> None:
        # also models that no executor serves any more: an owner must refuse their queued requests
        for model in {row.model for row in self._catalog.index()} | {*self._catalog.served_models()}:
            self._on_model(model)

    def _on_model(self, model: str) -> None:
        if self._closing:
            return
        held = self._catalog.held(model)
        owned = self._owned.get(model)
        if owned is not None:
            if held and is_ensemble(held) is not isinstance(owned, OwnedEnsemble):
                # another kind of model has its name now: its ownership starts again
                self._drop_if_owned(model)
                return
            self._tell(owned, owned.on_served, held)
            self._tell_related(model)
            return
        self._tell_related(model)
        if model in self._taking or (not held and self._catalog.may_come(model)):
            return
        if self._settings.incarnation not in self._catalog.processes:
            return  # while this process is presumed dead, others acquire it; once it has joined again it tries again
        batchers = ownership.live_batchers(self._catalog) | {self._settings.incarnation}
        is_preferred = ownership.preferred_owner(model, batchers) == self._settings.incarnation
        if not is_preferred and model not in self._dropped:
            return
        self._taking[model] = self._tasks.spawn(self._take(model), f"take {model}")

    def _tell_related(self, model: str) -> None:
        for other in list(self._owned.values()):
            if isinstance(other, OwnedEnsemble):
                self._tell(other, other.on_related, model)

    async def _take(self, model: str) -> None:
        try:
            while not self._closing:
                try:
                    if not self._catalog.held(model) and not await ownership.is_waited_for(self._log, model):
                        return
                    token = await ownership.take(self._log, self._catalog, model, self._settings.incarnation)
                    if token:
                        await self._restore(model, token)
                    self._dropped.discard(model)
                    return
                except LogUnavailable as error:
                    _log.warning("ownership of model '%s' not taken yet: %s", model, error)
                    await asyncio.sleep(RETRY_S)
                except Exception:
                    # no other batcher will: this process is alive and the log says that it is the owner
                    _log.exception("model '%s' could not be recovered", model)
                    await asyncio.sleep(self._pauses.next_s(model, monotonic_ns()))
        finally:
            if self._taking.get(model) is asyncio.current_task():
                del self._taking[model]

    async def _restore(self, model: str, token: int) -> None:
        news = await newcomers(self._control)
        owned = self._owner(model, token)
        here = self._link.executor if self._link is not None else ""
        known = [e for e in self._catalog.live_executors() if e != here]
        try:
            found = await recover(self._log, owned, {*known, *news})
            await owned.prepare()
            if any(version.interface.decoupled for version in self._catalog.held(model).values()):
                await ask_for_streams(self._log, owned)
            if owned.closed:
                raise InternalError("it failed on what the log holds")
        except BaseException:
            owned.close()
            raise
        # only now does the owner learn of capacity: until here an executor may already have a request
        self._owned[model] = owned
        # and only now are new entries read: an entry that is read before an owner takes it is lost
        owned.windows.follow()
        self._periodic_checks.look_behind()
        settings = self._settings
        self._checks[model] = ModelChecks(owned, settings.dead_letter_retention_size_bytes, settings.journal_seal_s)
        for gone in set(known) - set(self._catalog.live_executors()):
            owned.on_executor_lost(gone, drained=False)
        self._tell(owned, owned.on_served, self._catalog.held(model))
        if self._departed.endpoints:  # perhaps since its requests were read
            self._tell(owned, owned.drop_of_gone, owned.unwatched())
            self._tell(owned, owned.end_other_leases, self._departed.endpoints)
        _log.info("owns model '%s' with token %d, %d unsettled requests", model, token, found)

    def _owner(self, model: str, token: int) -> OwnedModel:
        make: Callable[..., OwnedModel] = OwnedModel
        if is_ensemble(self._catalog.held(model)):
            make = partial(
                OwnedEnsemble,
                catalog=self._catalog,
                shm_dir=self._settings.shm_dir,
                latencies=self.latencies,
                calls=self.cached,
            )
        return make(self._context, model, token, self._interface(model))

    def _interface(self, model: str) -> ModelInterface | None:
        held = self._catalog.held(model)
        return held[max(held)].interface if held else None

    def _step_down(self) -> None:
        """Drop all ownerships, including those being acquired: other batchers take over, with tokens of their own."""
        self._dropped |= self._owned.keys() | self._taking.keys()  # others may find this process alive again
        self._stop_taking()
        for model in list(self._owned):
            self._drop(model)

    def _stop_taking(self) -> list[asyncio.Task[None]]:
        taking = list(self._taking.values())
        self._taking.clear()
        for task in taking:
            task.cancel()
        return taking

    def _drop_if_owned(self, model: str) -> None:
        if model in self._owned:
            owned = self._drop(model)
            self._dropped.add(model)
            # a log that was rewound may have forgotten this ownership: no other batcher would take over then
            pause_s = self._pauses.next_s(model, monotonic_ns()) if owned.has_failed else RETRY_S
            asyncio.get_running_loop().call_later(pause_s, self._on_model, model)

    def _drop(self, model: str) -> OwnedModel:
        owned = self._owned.pop(model)
        del self._checks[model]
        owned.close()
        return owned

    # -- what the log says --------------------------------------------------------------------------------------------

    def _on_process(self, fact: Fact) -> None:
        if self._closing:
            return
        if isinstance(fact, ProcessJoined):
            self._departed.joined(fact.incarnation, streams_of(fact))
            if fact.role == "executor":
                for owned in list(self._owned.values()):
                    self._tell(owned, owned.on_executor_joined, fact.incarnation)
            if fact.incarnation == self._settings.incarnation:
                self._consider_all()
        elif isinstance(fact, RepositoryScanned):
            if fact.ready:
                self._consider_all()  # requests that its start-up load did not bring will not come any more
        elif isinstance(fact, ProcessLeft):
            self._on_left(fact)

    def _on_left(self, fact: ProcessLeft) -> None:
        if fact.role == "executor":
            for owned in list(self._owned.values()):
                self._tell(owned, partial(owned.on_executor_lost, drained=fact.reason == "drained"), fact.incarnation)
            for checks in self._checks.values():
                checks.look_for_waves()
        elif fact.incarnation == self._settings.incarnation:
            _log.warning("taken for lost: stepping down from %d models", len(self._owned))
            self._step_down()
            return
        if streams := streams_of(fact):
            self._departed.left(fact.incarnation, streams)
            for owned in list(self._owned.values()):
                self._tell(owned, owned.drop_of_gone, owned.unwatched())
        if fact.role == "gateway":
            for owned in list(self._owned.values()):
                self._tell(owned, owned.end_lease, fact.incarnation)
        if fact.role == "batcher":
            self._consider_all()

    @staticmethod
    def _tell(owned: OwnedModel, tell: Callable[[_News], None], news: _News) -> None:
        """Notify one model; an error in it must not keep others from being notified."""
        try:
            tell(news)
        except Exception as error:
            owned.failed(error)

    def _on_log_state(self, up: bool) -> None:
        if up:
            self._consider_all()
            self._periodic_checks.log_came_back()

    def _observe(self, served: ServedVersion, what: str, duration_ns: int) -> None:
        if self.latencies.measures:
            latencies = self.latencies.of(served.model, served.version) or self.latencies.add(
                served.version, served.config, model=served.model
            )
            if latencies is not None:
                latencies.observe(what, duration_ns, monotonic_ns())


def is_ensemble(held: Mapping[int, ServedVersion]) -> bool:
    """Whether the model that executors hold is an ensemble."""
    return bool(held) and held[max(held)].interface.scheduling == ENSEMBLE_SCHEDULING
