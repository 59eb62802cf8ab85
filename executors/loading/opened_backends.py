"""The backends that models have used: opened before the first of them, closed with the executor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from charonia.backend import Backend, ModelSource
from charonia.errors import CharoniaError, InternalError
from executors.backends.given_objects import code_of_models
from executors.backends.registry import BackendRegistry

_log = logging.getLogger(__name__)

T = TypeVar("T")


class OpenedBackend:
    """A backend that is open. `run` calls it or one of its models, one at a time where the backend wants that."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._one = asyncio.Lock()
        self._is_parallel = getattr(backend, "parallel_loading", Backend.parallel_loading)

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return what the call does."""
        if self._is_parallel:
            return await call()
        async with self._one:
            return await call()


class OpenedBackends:
    """The open backends of one executor, by name. `settings` is backend -> key -> value, those of "" for all."""

    def __init__(self, registry: BackendRegistry, settings: Mapping[str, Mapping[str, str]]) -> None:
        self._registry = registry
        self._settings = settings
        self._opened: dict[int, OpenedBackend] = {}
        """By the identity of the backend."""
        self._opening = asyncio.Lock()

    async def of(self, source: ModelSource) -> OpenedBackend:
        """The backend of a model, which is opened when it is the first. Raises a `CharoniaError` with the reason."""
        backend = await asyncio.to_thread(self._registry.of, source)
        async with self._opening:
            found = self._opened.get(id(backend))
            if found is None:
                await self._open(backend)
                found = self._opened[id(backend)] = OpenedBackend(backend)
        return found

    async def _open(self, backend: Backend) -> None:
        begin = getattr(backend, "open", None)
        if not callable(begin):
            return
        try:
            await begin({**self._settings.get("", {}), **self._settings.get(backend.name, {})})
        except CharoniaError:
            raise
        except Exception as error:
            _log.exception("backend %s cannot be opened", backend.name)
            raise InternalError(
                f"backend '{backend.name}' cannot be opened: {type(error).__name__}: {error}"
            ) from error

    async def close(self) -> None:
        """Close all, once nothing uses them. Errors are logged."""
        while self._opened:
            backend = self._opened.popitem()[1].backend
            try:
                end = getattr(backend, "close", None)
                if callable(end):
                    with code_of_models():
                        await end()
            except Exception:
                _log.exception("backend %s failed to close", backend.name)
