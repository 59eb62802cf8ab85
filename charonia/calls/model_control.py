"""Loading and unloading models through the control facts: ask, then wait for what the executors report (R8-R28)."""

from __future__ import annotations

import asyncio
import contextlib
import os

from charonia import keys
from charonia.catalog.catalog import EXPLICIT, failure_of
from charonia.errors import CharoniaError, InvalidArgument, LogUnavailable, Unavailable
from charonia.eventlog.control import ControlPlane
from charonia.facts.events import FIELD_FACT, ModelRequested, pack_fact
from charonia.models.names import name_of

NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"
_FILE_TTL_S = 24 * 3600
_FORBIDDEN = ("/", "\\", "..")


def check_model_name(name: str) -> None:
    """R11: raises `InvalidArgument` for empty names and names with path parts."""
    if not name.strip():
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if any(part in name for part in _FORBIDDEN) or "\0" in name:
        raise InvalidArgument(f"invalid model name '{name}', model name must not contain path traversal characters")


class ModelControl:
    """Load and unload, as the repository extension means them.

    Executors in other modes, such as those that load on demand, are not asked: what they serve stays as it is.
    """

    def __init__(self, control: ControlPlane, *, max_wait_s: float = 3600.0) -> None:
        self._control = control
        self._max_wait_s = max_wait_s

    async def load(self, name: str, config_json: str | None, files: dict[str, bytes]) -> None:
        """Returns when every live executor in explicit mode has answered and one of them serves the model (H41).

        One on which the model is not placed answers with that as its error, which counts when no executor gives
        another.

        Raises R9's `Unavailable` when none is in explicit mode, `InvalidArgument` for a bad name or a file override
        without a configuration (R25), and the executors' own error (R20, R21) when none could load it.
        """
        self._check_mode()
        check_model_name(name)
        if files and not config_json:
            raise InvalidArgument("Load parameter 'config' must be specified for model file override")
        blobs = {path: os.urandom(16).hex() for path in files}
        request_id = os.urandom(16).hex()
        try:
            for path, content in files.items():
                await self._control.log.put_blob(blobs[path], content, _FILE_TTL_S)
            await self._ask(ModelRequested("load", name, request_id, config_json or "", blobs))
            await self._answers(name, request_id)
        except TimeoutError:
            raise Unavailable(f"no answer to the load of '{name}' within {self._max_wait_s:g} s") from None
        finally:
            # an override with files lives in the executors once they have answered; what is left here expires
            with contextlib.suppress(CharoniaError):
                await self._control.log.delete_keys([keys.blob(blob_id) for blob_id in blobs.values()])

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Returns once the wish is in the log; the unload goes on by itself (H42). Unknown models are no error."""
        self._check_mode()
        check_model_name(name)
        await self._ask(ModelRequested("unload", name, os.urandom(16).hex(), unload_dependents=unload_dependents))

    def _check_mode(self) -> None:
        modes = self._control.catalog.control_modes()
        if not modes:
            raise Unavailable("no executor is connected to load or unload models")
        if EXPLICIT not in modes:
            raise Unavailable(NOT_EXPLICIT)

    async def _ask(self, fact: ModelRequested) -> None:
        await self._control.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])

    async def _answers(self, name: str, request_id: str) -> None:
        catalog = self._control.catalog
        asked = catalog.answering_executors()
        epochs = self._control.epoch_changes
        async with asyncio.timeout(self._max_wait_s):
            while True:
                live = set(catalog.answering_executors())
                open_answers = [e for e in asked if e in live and (request_id, e) not in catalog.finished]
                if not open_answers:
                    break
                await self._control.changed()
                if self._control.epoch_changes != epochs:
                    raise LogUnavailable("the log epoch changed while the model was loaded: the outcome is unknown")
        errors: list[CharoniaError] = []
        for executor in asked:
            finished = catalog.finished.get((request_id, executor))
            if finished is None:
                continue
            error = failure_of(finished)
            if error is None:
                return
            view = catalog.executors.get(executor)
            if view is not None and name in {name_of(model) for model in view.excluded}:
                errors.append(error)
            else:
                errors.insert(0, error)
        if errors:
            raise errors[0]
        raise Unavailable(f"every executor that was asked left before model '{name}' was loaded; ask again")
