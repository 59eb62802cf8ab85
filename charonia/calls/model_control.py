"""Loading and unloading models through the control facts: ask, then wait for what the executors report (R8-R28)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from typing import Protocol

from charonia import keys
from charonia.catalog.catalog import EXPLICIT, Catalog, failure_of
from charonia.errors import CharoniaError, InternalError, InvalidArgument, LogUnavailable, Unavailable, Unsupported
from charonia.eventlog.port import RequestedModels
from charonia.facts.events import FIELD_FACT, ModelRequested, ModelRequestFinished, pack_fact
from charonia.models.names import check_model_name, name_of
from charonia.tensors import Buffer

NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"
_FILE_TTL_S = 24 * 3600


class Control(Protocol):
    """Follows the control facts (`charonia.eventlog.control`). `epoch_changes`: how often another log came."""

    catalog: Catalog
    epoch_changes: int

    async def changed(self) -> None: ...


class ModelControl:
    """Load and unload, as the repository extension means them.

    Executors in other modes, such as those that load on demand, are not asked: what they serve stays as it is.
    """

    def __init__(self, control: Control, log: RequestedModels, *, max_wait_s: float = 3600.0) -> None:
        self._control = control
        self._log = log
        self._max_wait_s = max_wait_s

    async def load(self, name: str, config_json: str | None, files: Mapping[str, Buffer]) -> None:
        """Returns when every live executor in explicit mode has answered and one of them serves the model (H41).

        One on which the model is not placed answers with that as its error, which counts when no executor gives
        another.

        Raises R9's `Unavailable` when none is in explicit mode, `InvalidArgument` for a bad name or a file override
        without a configuration (R25), and the executors' own error (R20, R21) when none could load it.
        """
        self.check_mode()
        _check_text("the name of a model", name)
        check_model_name(name)
        if config_json is not None:
            _check_text("the configuration of a model", config_json)
        if config_json == "":
            raise InternalError(f"failed to load '{name}', failed to poll from model repository")
        if files and not config_json:
            raise InvalidArgument("Load parameter 'config' must be specified for model file override")
        blobs = {path: os.urandom(16).hex() for path in files}
        request_id = os.urandom(16).hex()
        try:
            for path, content in files.items():
                await self._log.put_blob(blobs[path], content, _FILE_TTL_S)
            await self._ask(ModelRequested("load", name, request_id, config_json or "", blobs))
            async with asyncio.timeout(self._max_wait_s):
                answers = await self._answers(request_id, "the model was loaded")
        except TimeoutError:
            raise Unavailable(f"no answer to the load of '{name}' within {self._max_wait_s:g} s") from None
        finally:
            # an override with files lives in the executors once they have answered; what is left here expires
            with contextlib.suppress(CharoniaError):
                await self._log.delete_keys([keys.blob(blob_id) for blob_id in blobs.values()])
        self._check_loaded(name, answers)

    async def unload(self, name: str, *, unload_dependents: bool, alias: str = "") -> None:
        """Returns when no executor that was asked takes new work for the model; its instances end later (H42, R27).

        With an `alias` it returns when these have ended, and the repository of that alias is registered no more (H55).

        The caller's own catalog shows it as not ready from then on. Unknown models are no error, whatever
        their name. Raises an executor's own error, and `InternalError` for a model that is still served when the time
        to wait is over.
        """
        self.check_mode()
        _check_text("the name of a model", name)
        request_id = os.urandom(16).hex()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await self._ask(
                    ModelRequested("unload", name, request_id, unload_dependents=unload_dependents, alias=alias)
                )
                answers = await self._answers(request_id, "the model was unloaded")
        except TimeoutError:
            served = ",".join(map(str, self._control.catalog.served(name)))
            text = f"versions that are still available: {served}" if served else "no answer"
            raise InternalError(f"failed to unload '{name}', {text}") from None
        for error in map(failure_of, answers.values()):
            if error is not None:
                raise error

    async def register(self, alias: str, name: str, directory: str) -> None:
        """Have the executors register the repository that a directory of theirs is or is in, and load its model (H55).

        Raises as `load`, `AlreadyExists` for an alias, a model or a repository that is there already.
        """
        if EXPLICIT not in self._control.catalog.control_modes():
            raise Unsupported("repository registration is not allowed if model control mode is not EXPLICIT")
        request_id = os.urandom(16).hex()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await self._ask(ModelRequested("load", name, request_id, alias=alias, directory=directory))
                answers = await self._answers(request_id, "the model was loaded")
        except TimeoutError:
            raise Unavailable(f"no answer to the load of '{name}' within {self._max_wait_s:g} s") from None
        self._check_loaded(name, answers)

    @property
    def is_allowed(self) -> bool:
        """Whether an executor is in explicit mode."""
        return EXPLICIT in self._control.catalog.control_modes()

    def check_connected(self) -> None:
        """Raises `Unavailable` when no executor is connected, so that the mode is not known."""
        if not self._control.catalog.control_modes():
            raise Unavailable("no executor is connected to load or unload models")

    def check_mode(self) -> None:
        """Raises R9's `Unavailable` when no executor is in explicit mode."""
        self.check_connected()
        if not self.is_allowed:
            raise Unavailable(NOT_EXPLICIT)

    async def _ask(self, fact: ModelRequested) -> None:
        await self._log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])

    async def _answers(self, request_id: str, what: str) -> dict[str, ModelRequestFinished]:
        """Waits for every executor that was asked and is still there; returns the answers, by executor.

        `what` is the change that was asked for. Raises `LogUnavailable` when its outcome can no longer be known.
        """
        catalog = self._control.catalog
        asked = catalog.answering_executors()
        epochs = self._control.epoch_changes
        while True:
            live = set(catalog.answering_executors())
            if not [e for e in asked if e in live and (request_id, e) not in catalog.finished]:
                answers = ((e, catalog.finished.get((request_id, e))) for e in asked)
                return {executor: finished for executor, finished in answers if finished is not None}
            await self._control.changed()
            if self._control.epoch_changes != epochs:
                raise LogUnavailable(f"the log epoch changed while {what}: the outcome is unknown")

    def _check_loaded(self, name: str, answers: Mapping[str, ModelRequestFinished]) -> None:
        """Raises when no executor has loaded the model: the error of one on which it is placed before others."""
        errors: list[CharoniaError] = []
        for executor, finished in answers.items():
            error = failure_of(finished)
            if error is None:
                return
            view = self._control.catalog.executors.get(executor)
            if view is not None and name in {name_of(model) for model in view.excluded}:
                errors.append(error)
            else:
                errors.insert(0, error)
        if errors:
            raise errors[0]
        raise Unavailable(f"every executor that was asked left before model '{name}' was loaded; ask again")


def _check_text(what: str, value: object) -> None:
    """Raises `InvalidArgument` for a value of another type, whose fact no executor could read and thus answer."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} must be a string, not {type(value).__name__}")
