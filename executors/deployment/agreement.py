"""Keeps what one executor serves in agreement with other executors: no two may serve different files as one model.

`overrides_elsewhere` knows the overrides of load requests that others serve (R24, R25); `deployment` loads and unloads.
A load that fails is tried again after a while (`lifecycle.retry_delay_s`), for as long as it is wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping
from typing import Protocol

from charonia.errors import CharoniaError, LogUnavailable, as_error
from charonia.eventlog.port import Leases
from charonia.facts.events import Fact, ModelExcluded, ModelRequested
from charonia.models.names import name_of
from charonia.tasks import Tasks, insist
from executors.announcing import Announcer
from executors.loading.composing_models import Composition
from executors.loading.placement_rules import NotPlacedHere
from executors.running.instance_pool import LoadedVersion

from .lifecycle import Lifecycle, Override, retry_delay_s
from .overrides_elsewhere import OverridesElsewhere

_log = logging.getLogger(__name__)


class ModelLoads(Protocol):
    """Loads and unloads models. Implemented by `executors.deployment.deployment.Deployment`."""

    async def load(self, model: str, request: None, *, to_agree: bool) -> None:
        """Load a model if it still `differs` once its turn has come. Raises a `CharoniaError`."""

    async def drop(self, model: str) -> None:
        """Unload all versions of a model, and forget its override. Call it with the model's lock."""

    def lock(self, model: str) -> asyncio.Lock:
        """Held while a model is loaded or unloaded."""


class Agreement:
    """The agreement of one executor with the others. `serving` are its served versions by model and version.

    The loss of an executor is known within `lost_within_s` seconds.
    """

    def __init__(
        self,
        log: Leases,
        executor: str,
        *,
        serving: Mapping[tuple[str, int], LoadedVersion],
        lifecycle: Lifecycle,
        announcer: Announcer,
        composition: Composition,
        loads: ModelLoads,
        lost_within_s: float,
    ) -> None:
        self._log = log
        self._executor = executor
        self._serving = serving
        self._lifecycle = lifecycle
        self._announcer = announcer
        self._composition = composition
        self._loads = loads
        self._lost_within_s = lost_within_s
        self._elsewhere = OverridesElsewhere(executor)
        self._elsewhere_changed = asyncio.Event()
        self._left_to_others: set[str] = set()
        """Models that others serve from files of a load request which this executor was not there for."""
        self._outlived: set[str] = set()
        """Models served from files of a load request although a later load, which ended these files, failed here."""
        self._retries: dict[str, tuple[int, asyncio.TimerHandle]] = {}
        """By model that could not be loaded to agree: how many times it failed, and the timer of the next load."""
        self._tasks = Tasks()
        self._closed = False

    async def close(self) -> None:
        """Try no failed load again; cancel those in progress."""
        self._closed = True
        for model in list(self._retries):
            self._end_retries(model)
        await self._tasks.close()

    # -- what happened ------------------------------------------------------------------------------------------------

    def requested(self, request: ModelRequested) -> None:
        """Notes a request that this executor carries out, before it is carried out."""
        self._elsewhere.requested(request)

    def hear(self, fact: Fact) -> Collection[str]:
        """Folds a control fact; returns the models to `agree` on."""
        changed = self._elsewhere.apply(fact)
        if changed:
            self._elsewhere_changed.set()
            self._elsewhere_changed = asyncio.Event()
        return changed

    def loaded(self, model: str, *, ends_files: bool) -> None:
        """Notes a load that succeeded. `ends_files`: a client requested it, and it brought nothing."""
        self._forget(model)
        if ends_files:
            self._elsewhere.end_files(model)

    def unloaded(self, model: str) -> None:
        """Notes that a model was unloaded as a whole."""
        if model in self._retries:
            _log.info("%s is unloaded: its load is not tried again", model)
        self._forget(model)

    def _forget(self, model: str) -> None:
        self._left_to_others.discard(model)
        self._outlived.discard(model)
        self._end_retries(model)

    def outlived(self, model: str) -> None:
        """Notes that a load which ended a request's files failed: they are served until another executor serves the
        repository's.
        """
        self._outlived.add(model)

    async def await_others(self) -> None:
        """Called when the log is a new one: no process reports as lost an executor that does not come back in it."""
        await asyncio.sleep(self._lost_within_s)

        async def look() -> None:
            for executor in self._elsewhere.executors():
                await self._is_alive(executor)

        await insist(look, "the leases of executors cannot be read")
        for model in list(self._left_to_others):
            await self.agree(model)

    # -- loads --------------------------------------------------------------------------------------------------------

    async def override(self, model: str, request: ModelRequested | None) -> Override | None:
        """The override to load a model with that other executors serve with one which is not known here.

        A configuration is taken over. Files cannot be had any more: a load that no client requested is left to those
        executors, and raises `NotPlacedHere`; one that a client requested ends these files there, too. Call it with the
        model's lock.
        """
        left = model in self._left_to_others  # `agree` is called when an executor with its files is lost
        if request is None and not left and self._elsewhere.of(model) is not None:
            await self._outwait_lost(model)
        other = self._elsewhere.of(model)
        if other is None:
            return None
        if other.override_config:
            return Override(other.override_config, request_id=other.override_id)
        if request is not None:
            return None
        reason = f"executor {other.executor} serves files of a load request that came before this executor started"
        if not left:
            self._left_to_others.add(model)
            await self._leave(model, reason)
        raise NotPlacedHere(f"{reason}; load '{name_of(model)}' again to serve it here")

    async def _outwait_lost(self, model: str) -> None:
        """Wait until the executors with an override are known to live: one that is lost, as the predecessor of this one
        may be, has taken its overrides along. Where all processes were lost, those that report it may start later.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._lost_within_s):
                while self._elsewhere.of(model) is not None:
                    await self._elsewhere_changed.wait()
        with contextlib.suppress(LogUnavailable):
            while (other := self._elsewhere.of(model)) is not None and not await self._is_alive(other.executor):
                pass

    async def _is_alive(self, executor: str) -> bool:
        """Whether another executor has a lease. If not, what it serves no longer counts. Raises `LogUnavailable`."""
        (is_alive,) = await self._log.alive("executor", [executor])
        if not is_alive:
            self._elsewhere.presume_lost(executor)
        return is_alive

    # -- agreeing -----------------------------------------------------------------------------------------------------

    async def agree(self, model: str) -> None:
        """Serve what other executors serve, after one of them changed. A load that fails is tried again later."""
        if model in self._outlived:
            await self.end_outlived(model)
        elif self.differs(model):
            await self._load_as_others(model)
        elif model in self._retries:
            _log.info("%s agrees with other executors again: its load is not tried again", model)
            self._end_retries(model)

    def differs(self, model: str) -> bool:
        """Whether a load would bring a model closer to what other executors serve."""
        if model in self._left_to_others:  # also to executors that serve what a later load brought, if it failed here
            return not self._elsewhere.has_override(model)
        if self._elsewhere.of(model) is None:
            return False
        return bool(self._lifecycle.ready_versions(model)) and self._lifecycle.override(model) is None

    async def _load_as_others(self, model: str) -> None:
        failures, _ = self._retries.get(model, (0, None))  # the loads of several changes at once count as one
        try:
            await self._loads.load(model, None, to_agree=True)
        except NotPlacedHere as error:
            self._end_retries(model)
            _log.warning("%s is not served here any more: %s", model, error)
            await self._composition.loaded(model)
        except Exception as error:
            self._retry(model, failures + 1, error)

    def _retry(self, model: str, failures: int, error: Exception) -> None:
        """Load a model again after a while: the reason may pass, as a lack of memory does, and no change may follow."""
        if self._closed:
            _log.error("failed to load %s: %s", model, as_error(error))
            return
        self._end_retries(model)
        delay_s = retry_delay_s(failures)
        unexpected = None if isinstance(error, CharoniaError) else error
        text = "failed to load %s, trying again in %g s: %s"
        _log.error(text, model, delay_s, as_error(error), exc_info=unexpected)
        timer = asyncio.get_running_loop().call_later(delay_s, self._load_again, model)
        self._retries[model] = failures, timer

    def _load_again(self, model: str) -> None:
        self._tasks.spawn(self.agree(model), f"load {model} again")

    def _end_retries(self, model: str) -> None:
        if model in self._retries:
            self._retries.pop(model)[1].cancel()

    async def end_outlived(self, model: str) -> None:
        """Unload files of a load request that were `outlived` once another executor serves the repository's instead."""
        if model not in self._outlived:
            return
        async with self._loads.lock(model):
            mine = [loaded.content_hash for (name, _), loaded in self._serving.items() if name == model]
            if model not in self._outlived or not self._elsewhere.is_of_repository(model, mine):
                return
            self._outlived.discard(model)
            reason = "a load request ended the files that were served here, and the repository's cannot be loaded here"
            _log.warning("%s is not served here any more: %s", model, reason)
            await self._leave(model, reason)
        await self._composition.loaded(model)

    async def _leave(self, model: str, reason: str) -> None:
        """Unload all versions of a model that other executors go on with. Call it with the model's lock."""
        await self._loads.drop(model)
        await self._announcer.announce(ModelExcluded(self._executor, model, reason))
