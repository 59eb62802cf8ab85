"""Asks executors for versions that nobody has in memory while requests wait for them (models on demand).

One executor is asked at a time, and again another one when it leaves or cannot load the version. An executor that is
asked twice, by a new owner perhaps, loads once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from charonia.models.catalog import Catalog, ServedVersion

from .dispatching import Dispatcher


class Demand:
    """Of one model. `choose(model, executors)` says who is asked."""

    def __init__(
        self,
        model: str,
        dispatcher: Dispatcher,
        choose: Callable[[str, Collection[str]], str],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._model = model
        self._dispatcher = dispatcher
        self._choose = choose
        self._spawn = spawn
        self._unloaded: dict[int, frozenset[str]] = {}
        """Versions nobody has in memory, and who would load them."""
        self._asked: dict[int, str] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to ask for at all."""
        return bool(self._unloaded)

    def on_served(self, versions: Mapping[int, ServedVersion]) -> None:
        """The catalog's newest word about this model."""
        self._unloaded = {number: found.on_demand for number, found in versions.items() if found.is_unloaded}
        for number in self._asked.keys() - self._unloaded.keys():
            del self._asked[number]

    def look(self, waiting: Mapping[int, int]) -> None:
        """Ask for the versions for which requests wait; `waiting` counts them by version."""
        for number, executors in self._unloaded.items():
            if waiting.get(number) and self._asked.get(number) not in executors:
                executor = self._asked[number] = self._choose(self._model, executors)
                self._spawn(self._ask(executor, number))

    async def _ask(self, executor: str, version: int) -> None:
        if not await self._dispatcher.tell_wanted(executor, version):
            self._asked.pop(version, None)

    def again(self) -> None:
        """What was asked may be forgotten: ask again when something waits still."""
        self._asked.clear()


def most_room(catalog: Catalog, model: str, executors: Collection[str]) -> str:
    """Who loads a model: of those that have room for one more the emptiest, else always the same one of them.

    The same one, so that models which take turns find their place where they were before.
    """

    def place(executor: str) -> tuple[float, bytes]:
        view = catalog.executors.get(executor)
        told = view.described if view is not None else None
        share = 1.0
        if told is not None:
            shares = [1.0] if not (told.budget_bytes or told.most_models) else []
            if told.budget_bytes:
                shares.append(told.used_bytes / told.budget_bytes)
            if told.most_models:
                shares.append(told.loaded_models / told.most_models)
            share = max(shares)
        # nearly full is full: what there is left is seldom enough, and who asks knows no sizes
        digest = hashlib.blake2b(f"{model}\0{executor}".encode(), digest_size=8).digest()
        return (share if share < _NEARLY_FULL else 1.0, digest)

    return min(executors, key=place)


_NEARLY_FULL = 0.9
