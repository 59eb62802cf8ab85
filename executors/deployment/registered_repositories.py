"""Repositories that load requests bring: each has a model with a name of the request's, and its parts (H55).

SageMaker unpacks the models of a multi-model endpoint into directories of their own while the server runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from charonia.errors import AlreadyExists, CharoniaError, InvalidArgument
from charonia.facts.events import ModelRequested
from charonia.models.names import check_model_name, model_key, namespace_of
from executors.configuration.platforms import ENSEMBLE
from executors.loading.composing_models import is_ensemble
from executors.repository import model_directory
from executors.repository.files import is_hidden
from executors.repository.model_repository import ModelRepository

from .loads_by_name import LoadsByName

_log = logging.getLogger(__name__)

_UNLOAD_TIMEOUT_S = 350
"""SageMaker waits for 360 s."""


class Retiring(Protocol):
    """Waits for instances to end. Implemented by `executors.deployment.deployment.Deployment`."""

    async def ended(self, model: str) -> None: ...


class RegisteredRepositories:
    """Those of one executor. `changed` is awaited whenever one came or went, before the request is answered."""

    def __init__(self, repository: ModelRepository, loads: LoadsByName, retiring: Retiring) -> None:
        self._repository = repository
        self._loads = loads
        self._retiring = retiring
        self._keys: dict[str, str] = {}
        self.changed: Callable[[], Awaitable[None]]

    def keys(self) -> dict[str, str]:
        """The key of each registered model, its repository being the namespace, by alias."""
        return dict(self._keys)

    async def load(self, name: str, request: ModelRequested) -> None:
        """Register the repository and load its model as `name`; nothing is left of it when that fails.

        Raises `InvalidArgument` for a directory without such a model, and as `ModelRepository.register`, `LoadsByName`.
        """
        check_model_name(name)
        if request.alias in self._keys:
            raise AlreadyExists(f"model '{request.alias}' has already been loaded")
        path, directory = await asyncio.to_thread(find_model, Path(request.directory))
        self._repository.register(path, name, directory)
        try:
            await self._loads.load(name, request)
        except BaseException:
            self._repository.unregister(path)
            raise
        self._keys[request.alias] = model_key(str(path), name)
        _log.info("registered the model repository %s for %s", path, name)
        await self.changed()

    async def unload(self, name: str, alias: str) -> None:
        """Unload the model and what it is made of, wait for the end of its instances, and forget the repository."""
        key = self._keys.get(alias)
        await self._loads.unload(name, dependents=True)
        try:
            async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
                await self._retiring.ended(name)
        except TimeoutError:
            _log.error("model '%s' still had running requests %d s after it was unloaded", name, _UNLOAD_TIMEOUT_S)
        if key is None:
            return
        self._repository.unregister(Path(namespace_of(key)))
        self._keys.pop(alias, None)
        await self.changed()


def find_model(directory: Path) -> tuple[Path, str]:
    """The repository that a directory is or is in, and the directory of its model there: the only one, or the ensemble.

    Raises `InvalidArgument` when there is none, or several.
    """
    if (directory / model_directory.CONFIG_FILE).is_file():
        return directory.parent, directory.name
    try:
        found = sorted(path.name for path in directory.iterdir() if path.is_dir() and not is_hidden(path.name))
    except OSError:
        raise InvalidArgument(f"failed to register '{directory}', repository not found") from None
    models = [name for name in found if _is_ensemble(directory / name)] if len(found) > 1 else found
    if len(models) != 1:
        raise InvalidArgument(
            f"failed to register '{directory}': expected one model, or several of which one is an ensemble, got "
            f"{', '.join(models or found) or 'no directory'}"
        )
    return directory, models[0]


def _is_ensemble(path: Path) -> bool:
    """Whether it is to be one: one that is not right is refused when it is loaded."""
    try:
        config = model_directory.written_config(path / model_directory.CONFIG_FILE)
    except CharoniaError:
        return False
    return config.platform == ENSEMBLE or is_ensemble(config)
