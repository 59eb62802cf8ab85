"""Loads and unloads by name: all models with that name, one in each repository that has it (R2).

Without `--model-namespacing` there is only one, and calls are passed on.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from charonia.errors import CharoniaError, InvalidArgument, Unavailable
from charonia.facts.events import ModelRequested
from executors.loading.placement_rules import NotPlacedHere
from executors.repository.model_repository import ModelRepository

from .lifecycle import Lifecycle, poll_failure

_log = logging.getLogger(__name__)


class ModelLoads(Protocol):
    """Loads and unloads models by key. Implemented by `executors.deployment.deployment.Deployment`."""

    async def load(self, model: str, request: ModelRequested | None) -> None: ...

    async def unload(self, model: str, *, dependents: bool = False) -> None: ...


class LoadsByName:
    """Loads and unloads one executor's models by name."""

    def __init__(self, repository: ModelRepository, lifecycle: Lifecycle, loads: ModelLoads) -> None:
        self._repository = repository
        self._lifecycle = lifecycle
        self._loads = loads

    async def load(self, name: str, request: ModelRequested) -> None:
        """Load every model with this name; the request's override holds for each of them.

        A request with files makes a model that needs no repository (R25). Raises R20's error when there is no such
        model or one cannot be polled, else R21's with a part for each model that failed.
        """
        try:
            keys = [name] if request.files else await asyncio.to_thread(self._repository.keys, name)
        except Unavailable as unavailable:
            _log.error("failed to load %s: %s", name, unavailable)
            raise poll_failure(name) from unavailable
        if not keys:
            raise poll_failure(name)
        if len(keys) == 1:
            await self._loads.load(keys[0], request)
            return
        errors = await asyncio.gather(*(self._attempt(key, request) for key in keys))
        failures = [error for error in errors if error is not None and not isinstance(error, NotPlacedHere)]
        if all(error is not None for error in errors) and not failures:
            raise next(error for error in errors if error is not None)
        for error in failures:
            if not isinstance(error, InvalidArgument):
                raise error
        if failures:
            raise InvalidArgument("".join(error.message for error in failures))

    async def _attempt(self, key: str, request: ModelRequested) -> CharoniaError | None:
        try:
            await self._loads.load(key, request)
        except CharoniaError as error:
            return error
        return None

    async def unload(self, name: str, *, dependents: bool) -> None:
        """Unload every model with this name."""
        for key in self._lifecycle.keys(name) or [name]:
            await self._loads.unload(key, dependents=dependents)
