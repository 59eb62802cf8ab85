"""Finds models' directories with their overrides, selects the versions to serve here, and fetches their files.

A model that cannot be served is rejected, after its reason was announced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from charonia.errors import CharoniaError, NotFound, Unavailable
from charonia.eventlog.port import Blobs
from charonia.facts.events import ModelExcluded, ModelRequested
from charonia.models.config_errors import CompositionError, StructureError
from charonia.models.ensemble import Find
from charonia.models.names import name_of
from executors.announcing import Announcer
from executors.configuration.config import from_json
from executors.loading.loader import Loader
from executors.loading.placement_rules import NotPlacedHere, PlacementRules
from executors.repository import overrides
from executors.repository.model_directory import Fingerprint, ModelDirectory
from executors.repository.model_repository import DUPLICATE_REASON, ModelRepository
from protos.model_config_pb2 import ModelConfig

from .lifecycle import NO_VERSION, Lifecycle, Override, load_failure, poll_failure

_log = logging.getLogger(__name__)

_NOT_FETCHED = Fingerprint("not fetched", "")


class Directories:
    """Reads the model directories of one executor's repositories."""

    def __init__(
        self, log: Blobs, repository: ModelRepository, lifecycle: Lifecycle, loader: Loader, announcer: Announcer
    ) -> None:
        self._log = log
        self._repository = repository
        self._lifecycle = lifecycle
        self._loader = loader
        self._announcer = announcer
        # its own threads: a fetch may take minutes, and served models need the default ones
        self._fetching = ThreadPoolExecutor(thread_name_prefix="fetching")

    async def override(self, model: str, request: ModelRequested | None, kept: Override | None) -> Override | None:
        """The override that a load request brings. Raises R20's error for bad files.

        When it brings none, an overridden configuration is kept (R24), and files of an earlier request give way to the
        repository's (R25). A load that no client requested keeps both.
        """
        if request is None:
            return kept
        if not request.config_json:
            return kept if kept is not None and kept.directory is None else None
        if not request.files:
            return Override(request.config_json, request_id=request.request_id)
        contents = await overrides.fetch(self._log, model, request.files)
        try:
            directory = await asyncio.to_thread(overrides.write, model, contents)
        except (OSError, ValueError) as error:
            # names the file system does not take, a file where a directory has to be, no space
            _log.error("files of the load request for %s: %s", model, error)
            raise poll_failure(model) from error
        return Override(request.config_json, directory, request.request_id)

    def find(self, model: str, override: Override | None) -> ModelDirectory:
        """Return the model's directory with its override. Raises R20's error. Reads files: call it in a thread."""
        if override is not None and override.directory is not None:
            directory: ModelDirectory | None = self._repository.read(override.directory, name=name_of(model))
        else:
            try:
                directory = self._repository.find(model)
            except Unavailable as error:
                _log.error("failed to load %s: %s", model, error)
                raise poll_failure(model) from error
        if directory is None:
            raise poll_failure(model) from NotFound(
                f"failed to poll model '{name_of(model)}': model not found in any model repository"
            )
        if override is None:
            return directory
        try:
            return self._repository.with_composing_models(directory.with_config(from_json(override.config_json)))
        except CharoniaError as error:
            _log.error("configuration of the load request for %s: %s", model, error)
            raise poll_failure(model) from error

    async def complete(
        self, directory: ModelDirectory, selected: list[int], planned: Sequence[int], find: Find
    ) -> ModelConfig | CharoniaError:
        """Return the final configuration, or its error, which is announced for the `planned` versions."""
        model = directory.key
        try:
            return await self._loader.complete(directory, selected, find)
        except CharoniaError as error:
            # the index gets the error too; after a failed reload the old version is still served
            _log.error("failed to load %s: %s", model, error)
            unpolled = isinstance(error, StructureError | CompositionError)
            for version in planned:
                await self._announcer.announce(self._lifecycle.failed(model, version, error, unpolled=unpolled))
            if isinstance(error, StructureError):
                raise poll_failure(model) from error
            return error

    async def fetch(self, directory: ModelDirectory, selected: Sequence[int]) -> ModelDirectory:
        """Fetch the files of a remote model (R7). Raises after announcing the reason when that fails."""
        if directory.fetch is None:
            return directory
        model = directory.key
        try:
            loop = asyncio.get_running_loop()
            directory = await loop.run_in_executor(self._fetching, directory.with_files, selected)
        except Unavailable as error:
            # the store's fault, not the model's: polling must try again although nothing has changed
            self._lifecycle.unreadable(replace(directory, fingerprint=_NOT_FETCHED))
            _log.error("failed to fetch %s: %s", model, error)
            if not self._lifecycle.ready_versions(model):
                await self._announcer.announce(self._lifecycle.failed(model, NO_VERSION, error))
            raise load_failure(model, {NO_VERSION: error}) from None
        if directory.config is None:
            await self.refuse(directory)
        return directory

    async def refuse(self, directory: ModelDirectory) -> None:
        """Raise the error of an unusable configuration, after announcing its reason for the index (C62, R2)."""
        model = directory.key
        error = directory.error or poll_failure(model)
        self._lifecycle.unreadable(directory)
        version = directory.versions[-1] if directory.versions else NO_VERSION
        _log.error("configuration of %s: %s", model, error)
        unpolled = isinstance(error, StructureError) or error.message == DUPLICATE_REASON
        await self._announcer.announce(self._lifecycle.failed(model, version, error, unpolled=unpolled))
        if unpolled:
            raise poll_failure(model) from error
        raise load_failure(model, {version: error})


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
