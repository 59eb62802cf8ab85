"""Removes local copies of remote models (R7) that are no longer used. `executors.repository.remote` fetches them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from executors.repository.model_repository import ModelRepository
from executors.running.loaded_version import LoadedVersion

from .retirement import Retirement


class CopiesInUse:
    """Knows which directories the served versions use. `lock(model)` is held while a model is loaded."""

    def __init__(
        self,
        repository: ModelRepository,
        serving: Mapping[tuple[str, int], LoadedVersion],
        lock: Callable[[str], asyncio.Lock],
        retirement: Retirement,
    ) -> None:
        self._repository = repository
        self._serving = serving
        self._lock = lock
        self._retirement = retirement
        self._kept: dict[str, Path] = {}

    def keep(self, model: str, directory: Path) -> None:
        """Keep a directory from which a model may be loaded at any time (`on_demand`)."""
        self._kept[model] = directory

    def release_unused(self, model: str, *, wanted: bool) -> None:
        """Remove the unused copies of a model once its old versions have ended.

        The latest copy of a model that is `wanted` stays, whether it could be loaded or not.
        """
        if self._repository.has_copies:
            self._retirement.afterwards(model, partial(self._release_unused, model, wanted))

    async def _release_unused(self, model: str, wanted: bool) -> None:
        async with self._lock(model):
            versions = [loaded for (name, _), loaded in self._serving.items() if name == model]
            # after resizing (R23), its instances may use several copies
            used = {spec.source.directory for one in versions for spec in one.pool.specs}
            used |= {loaded.source.directory for loaded in versions}
            if model in self._kept:
                used.add(self._kept[model])
            await asyncio.to_thread(self._repository.release, model, used, latest=wanted)
