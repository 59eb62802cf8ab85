"""Asks executors to load on-demand versions while requests wait for them and no executor has them in memory.

One executor is asked at a time, and another one when it leaves or cannot load the version. An executor that is asked
twice, perhaps by a new owner, loads once. If a backlog lasts for seconds, another executor with free capacity is asked
too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

from charonia.catalog.catalog import Catalog, ServedVersion

_NEARLY_FULL = 0.9
_ASK_AGAIN_LOOKS = 5
_BACKLOG_LOOKS = 3
_BACKLOG_BATCHES = 4
"""Waiting requests per instance beyond which more instances are wanted."""


class Demand:
    """The demand for one model. `choose(model, executors)` picks the executor to ask. `ask_to_load(executor, version)`
    asks it and returns whether the log took the request.
    """

    def __init__(
        self,
        model: str,
        ask_to_load: Callable[[str, int], Awaitable[bool]],
        choose: Callable[[str, Collection[str]], str],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._model = model
        self._ask_to_load = ask_to_load
        self._choose = choose
        self._spawn = spawn
        self.unloaded: dict[int, frozenset[str]] = {}
        """Versions that no executor has in memory, and the executors that would load them."""
        self._shared: dict[int, ServedVersion] = {}
        """Versions that some executors have in memory, and the others that would load them."""
        self._asked: dict[int, str] = {}
        self._looks: dict[int, int] = {}
        """Counts calls of `tend`. For a version in `_asked`: those that found requests waiting for it. For one in
        `_shared`: those in a row that found a backlog."""

    @property
    def has_on_demand_versions(self) -> bool:
        """Whether any version is loaded on demand anywhere."""
        return bool(self.unloaded or self._shared)

    def on_served(self, versions: Mapping[int, ServedVersion]) -> None:
        """The catalog's latest state of this model."""
        self.unloaded = {number: found.on_demand for number, found in versions.items() if found.is_unloaded}
        self._shared = {n: found for n, found in versions.items() if found.on_demand and not found.is_unloaded}
        for number in self._asked.keys() - self.unloaded.keys():
            del self._asked[number]
        for number in self._looks.keys() - self._asked.keys() - self._shared.keys():
            del self._looks[number]

    def look(self, waiting: Mapping[int, int]) -> None:
        """Ask for the versions for which requests wait; `waiting` counts them by version."""
        for number, executors in self.unloaded.items():
            if waiting.get(number) and self._asked.get(number) not in executors:
                executor = self._asked[number] = self._choose(self._model, executors)
                self._spawn(self._ask(executor, number))

    def tend(self, waiting: Mapping[int, int], has_room: Callable[[str], bool]) -> None:
        """Called about once a second: repeat unanswered requests to load, and ask for more instances of a version with
        a backlog. `has_room(executor)` says whether an executor could load one more without unloading another.
        """
        for number, executor in self._asked.items():
            if waiting.get(number):
                looks = self._looks[number] = self._looks.get(number, 0) + 1
                if looks % _ASK_AGAIN_LOOKS == 0:  # the log may have lost the request
                    self._spawn(self._ask(executor, number))
        for number, found in self._shared.items():
            backlog = waiting.get(number, 0) > _BACKLOG_BATCHES * sum(found.slots.values())
            looks = self._looks[number] = self._looks.get(number, 0) + 1 if backlog else 0
            if looks >= _BACKLOG_LOOKS and (spare := [e for e in found.on_demand if has_room(e)]):
                self._looks[number] = 0
                self._spawn(self._ask(self._choose(self._model, spare), number))

    async def _ask(self, executor: str, version: int) -> None:
        if not await self._ask_to_load(executor, version):
            self._asked.pop(version, None)


def has_room(catalog: Catalog, executor: str) -> bool:
    """Whether an executor could probably load one more model without unloading another."""
    return _share(catalog, executor) < _NEARLY_FULL


def most_room(catalog: Catalog, model: str, executors: Collection[str]) -> str:
    """Chooses who loads a model: of the executors with free capacity the emptiest, otherwise always the same one.
    Always the same, so that models which alternate are loaded where they were before.
    """

    def place(executor: str) -> tuple[float, bytes]:
        share = _share(catalog, executor)
        # nearly full counts as full: the rest is seldom enough, and the batcher does not know the model's size
        digest = hashlib.blake2b(f"{model}\0{executor}".encode(), digest_size=8).digest()
        return (share if share < _NEARLY_FULL else 1.0, digest)

    return min(executors, key=place)


def _share(catalog: Catalog, executor: str) -> float:
    """Share of its model memory that an executor uses, by its last report; 1.0 without one."""
    view = catalog.executors.get(executor)
    told = view.described if view is not None else None
    if told is None or not (told.budget_bytes or told.most_models):
        return 1.0
    of_bytes = told.used_bytes / told.budget_bytes if told.budget_bytes else 0.0
    return max(of_bytes, told.loaded_models / told.most_models if told.most_models else 0.0)
