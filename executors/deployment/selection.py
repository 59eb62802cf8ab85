"""Selects the versions of a model to serve here: checks placement, fetches files, and announces why not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from charonia.errors import CharoniaError
from charonia.facts.events import ModelExcluded
from executors.announcing import Announcer
from executors.loading.placement_rules import NotPlacedHere, PlacementRules
from executors.repository.model_directory import ModelDirectory

from .directories import Directories
from .lifecycle import NO_VERSION, Lifecycle, load_failure

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Selection:
    """The selection of one executor. `unload_version` stops serving a version."""

    def __init__(
        self,
        executor: str,
        placement: PlacementRules,
        lifecycle: Lifecycle,
        directories: Directories,
        announcer: Announcer,
        unload_version: Callable[[str, int], Awaitable[None]],
    ) -> None:
        self._executor = executor
        self._placing = placement
        self._lifecycle = lifecycle
        self._directories = directories
        self._announcer = announcer
        self._unload_version = unload_version

    async def select(self, directory: ModelDirectory) -> tuple[ModelDirectory, list[int]]:
        """Return the model with its files, and the versions to serve here.

        Raises after announcing the reason when the model cannot be served.
        """
        if directory.config is None:
            await self._directories.refuse(directory)
        selected = await self._checked(directory, self._placing.select)
        # only now: a model that is placed elsewhere is not fetched
        directory = await self._directories.fetch(directory, selected)
        await self._checked(directory, self._placing.check)
        return directory, selected

    async def _checked(self, directory: ModelDirectory, check: Callable[[ModelDirectory], T]) -> T:
        """Return what `check` returns for a model; announce its errors."""
        model = directory.key
        try:
            return await asyncio.to_thread(check, directory)
        except NotPlacedHere as error:
            self._lifecycle.unreadable(directory)
            for version in self._lifecycle.ready_versions(model):
                await self._unload_version(model, version)
            await self._announcer.announce(ModelExcluded(self._executor, model, error.message))
            raise
        except CharoniaError as error:
            self._lifecycle.unreadable(directory)
            _log.error("failed to load %s: %s", model, error)
            if not self._lifecycle.ready_versions(model):
                await self._announcer.announce(self._lifecycle.failed(model, NO_VERSION, error))
            raise load_failure(model, {NO_VERSION: error}) from None
