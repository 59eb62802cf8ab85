"""Asks executors for versions that none has in memory while requests wait for them (models on demand).

One executor is asked at a time, and again another one when it leaves or cannot load the version. An executor that is
asked twice, by a new owner perhaps, loads once. What has a backlog for seconds is asked of another one that has room.
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
"""Requests for each instance that wait before more of them are wanted."""


class Demand:
    """The demand for one model. `choose(model, executors)` says which executor is asked.

    `ask_to_load(executor, version)` asks it, and says whether the log took that.
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
        """Versions no executor has in memory, and which would load them."""
        self._shared: dict[int, ServedVersion] = {}
        """Versions that some have in memory, and others would load."""
        self._asked: dict[int, str] = {}
        self._looks: dict[int, int] = {}
        """How often in a row `tend` found a version waited for."""

    @property
    def is_for_this_model(self) -> bool:
        """Whether any version is loaded on demand anywhere."""
        return bool(self.unloaded or self._shared)

    def on_served(self, versions: Mapping[int, ServedVersion]) -> None:
        """The catalog's newest word about this model."""
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
        """Called about once a second: ask again for what has not come, and for more of what one cannot do alone.

        `has_room(executor)` says whether an executor could load one more without letting another go.
        """
        for number, executor in self._asked.items():
            if waiting.get(number):
                looks = self._looks[number] = self._looks.get(number, 0) + 1
                if looks % _ASK_AGAIN_LOOKS == 0:  # the log may have lost what was said
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
    """Whether an executor could probably load one more model without letting another go."""
    return _share(catalog, executor) < _NEARLY_FULL


def most_room(catalog: Catalog, model: str, executors: Collection[str]) -> str:
    """Who loads a model: of those that have room for one more the emptiest, else always the same one of them.

    The same one, so that models which take turns find their place where they were before.
    """

    def place(executor: str) -> tuple[float, bytes]:
        share = _share(catalog, executor)
        # nearly full is full: what there is left is seldom enough, and who asks knows no sizes
        digest = hashlib.blake2b(f"{model}\0{executor}".encode(), digest_size=8).digest()
        return (share if share < _NEARLY_FULL else 1.0, digest)

    return min(executors, key=place)


def _share(catalog: Catalog, executor: str) -> float:
    """How much of its room for models an executor uses, as it last said; 1.0 for one that has not said."""
    view = catalog.executors.get(executor)
    told = view.described if view is not None else None
    if told is None or not (told.budget_bytes or told.most_models):
        return 1.0
    of_bytes = told.used_bytes / told.budget_bytes if told.budget_bytes else 0.0
    return max(of_bytes, told.loaded_models / told.most_models if told.most_models else 0.0)
