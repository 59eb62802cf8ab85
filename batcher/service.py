"""One batcher: takes ownership of models, keeps one `OwnedModel` for each and routes the log's entries to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from charonia.errors import CharoniaError
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.port import Entry, EventLog
from charonia.events import Fact, ProcessLeft
from charonia.settings import BatcherSettings

from . import ownership
from .owned import OwnedModel
from .recovery import recover

_log = logging.getLogger(__name__)
_RETRY_S = 0.2


class BatcherService:
    """`local_executor` is the incarnation of an executor in this process, "" in a batcher of its own."""

    def __init__(
        self, log: EventLog, control: ControlPlane, settings: BatcherSettings, *, local_executor: str = ""
    ) -> None:
        self._log = log
        self._control = control
        self._catalog = control.catalog
        self._settings = settings
        self._local_executor = local_executor
        self._reader = log.reader()
        self._owned: dict[str, OwnedModel] = {}
        self._routes: dict[bytes, OwnedModel] = {}
        self._taking: dict[str, asyncio.Task[None]] = {}
        self._closing = False

    async def start(self) -> None:
        self._reader.start(self._on_entries, self._on_log_state)
        self._catalog.listeners.append(self._on_model)
        self._catalog.process_listeners.append(self._on_process)
        self._consider_all()

    async def drain(self) -> None:
        """Stop deciding and hand every model over: what is queued stays in the log, what runs settles by itself."""
        self._closing = True
        for task in self._taking.values():
            task.cancel()
        for model in list(self._owned):
            owned = self._drop(model)
            with contextlib.suppress(CharoniaError):
                await self._log.release_ownership(model, self._settings.incarnation, owned.token)

    async def close(self) -> None:
        if not self._closing:
            await self.drain()
        await self._reader.close()

    @property
    def owned(self) -> dict[str, OwnedModel]:
        """The models this batcher decides for."""
        return self._owned

    # -- ownership ----------------------------------------------------------------------------------------------------

    def _consider_all(self) -> None:
        for model in self._catalog.served_models():
            self._on_model(model)

    def _on_model(self, model: str) -> None:
        if self._closing:
            return
        held = self._catalog.held(model)
        owned = self._owned.get(model)
        if owned is not None:
            owned.on_served(held)
            return
        if not held or model in self._taking:
            return
        batchers = ownership.live_batchers(self._catalog)
        if ownership.preferred_owner(model, batchers | {self._settings.incarnation}) != self._settings.incarnation:
            return
        self._taking[model] = asyncio.get_running_loop().create_task(self._take(model), name=f"take {model}")

    async def _take(self, model: str) -> None:
        try:
            while not self._closing:
                try:
                    token = await ownership.take(self._log, self._catalog, model, self._settings.incarnation)
                    if not token:
                        return
                    await self._restore(model, token)
                    return
                except CharoniaError as error:
                    _log.warning("ownership of model '%s' not taken yet: %s", model, error)
                    await asyncio.sleep(_RETRY_S)
        except asyncio.CancelledError:
            raise
        except Exception:
            _log.exception("model '%s' could not be recovered", model)
            self._drop_if_owned(model)
        finally:
            self._taking.pop(model, None)

    async def _restore(self, model: str, token: int) -> None:
        owned = OwnedModel(
            self._log,
            self._reader,
            model,
            token,
            self._settings.incarnation,
            local_executor=self._local_executor,
            prefetch=self._settings.prefetch,
            window_requests=self._settings.window_requests,
            lost_ownership=self._drop_if_owned,
        )
        self._owned[model] = owned
        for stream in owned.fact_streams:
            self._routes[stream] = owned
        remote = [e for e in self._catalog.live_executors() if e != self._local_executor]
        found = await recover(self._log, owned, remote)
        owned.on_served(self._catalog.held(model))
        _log.info("owns model '%s' with token %d, %d unsettled requests", model, token, found)

    def _drop_if_owned(self, model: str) -> None:
        if model in self._owned:
            self._drop(model)

    def _drop(self, model: str) -> OwnedModel:
        owned = self._owned.pop(model)
        owned.close()
        for stream in owned.fact_streams:
            self._routes.pop(stream, None)
        return owned

    # -- what the log says --------------------------------------------------------------------------------------------

    def _on_entries(self, stream: bytes, entries: list[Entry]) -> None:
        owned = self._routes.get(stream)
        if owned is None:
            owned = next((o for o in self._owned.values() if o.follows(stream)), None)
            if owned is None:
                return
            self._routes[stream] = owned
        if owned.closed:
            self._routes.pop(stream, None)
            return
        owned.on_entries(stream, entries)

    def _on_process(self, fact: Fact) -> None:
        if not isinstance(fact, ProcessLeft) or self._closing:
            return
        if fact.role == "executor":
            for owned in self._owned.values():
                owned.on_executor_lost(fact.incarnation)
        elif fact.incarnation == self._settings.incarnation:
            _log.warning("taken for lost: stepping down from %d models", len(self._owned))
            for model in list(self._owned):
                self._drop(model)
        else:
            self._consider_all()

    def _on_log_state(self, up: bool) -> None:
        if up:
            self._consider_all()
