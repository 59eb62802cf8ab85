"""Knows which overrides of load requests other executors serve, of requests that this one was not there for. Pure.

An executor that starts reads only what its repository holds. Others may serve a configuration or files that a load
request brought before (R24, R25). Two executors must not serve different content as one model: `agreement` takes such
a configuration over, and leaves a model whose files it cannot have to the others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from charonia.catalog.executor_views import UNLOADING
from charonia.facts.events import (
    ExecutorDraining,
    ModelRequested,
    ProcessJoined,
    ProcessLeft,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
)
from charonia.models.names import name_of

_REMEMBERED = 65536
"""Max requests whose ids are remembered: more than are carried out while one override lasts."""


class OverridesElsewhere:
    """A fold of the control facts; `executor` is the one that asks."""

    def __init__(self, executor: str) -> None:
        self._executor = executor
        self._loaded: dict[str, dict[tuple[str, int], VersionLoaded]] = {}
        """By model: what other executors serve, by executor and version."""
        self._away: set[str] = set()
        """Executors that drain or left: what they report until they have joined again does not count."""
        self._heard: dict[str, None] = {}
        """The ids of load requests with a configuration, oldest first: this executor carries these out itself."""
        self._unloaded: dict[str, None] = {}
        """Names of models that were unloaded since this executor started: no earlier override holds for them."""

    def executors(self) -> set[str]:
        """The executors whose versions count."""
        return {executor for found in self._loaded.values() for executor, _ in found} - self._away

    def presume_lost(self, executor: str) -> None:
        """What an executor serves does not count until it has joined again. Its loss may be reported later."""
        self._away.add(executor)

    def requested(self, request: ModelRequested) -> None:
        """This executor carries out a request."""
        if request.action == "unload":
            _remember(self._unloaded, request.model)
        elif request.config_json:
            _remember(self._heard, request.request_id)

    def apply(self, fact: Any) -> Collection[str]:
        """Fold one control fact; return the models for which the answers below may have changed."""
        match fact:
            case ProcessJoined() if fact.role == "executor":
                self._away.discard(fact.incarnation)
            case ProcessLeft() if fact.role == "executor":
                return self._leave(fact.incarnation)  # one that comes back reports its versions again
            case ExecutorDraining():
                return self._leave(fact.executor)
            case VersionLoaded() if fact.executor != self._executor and fact.executor not in self._away:
                self._loaded.setdefault(fact.model, {})[fact.executor, fact.version] = fact
                return (fact.model,)
            case VersionStateChanged() if fact.state == UNLOADING:
                return self._drop(fact.executor, fact.model, fact.version)
            case VersionUnloaded():
                return self._drop(fact.executor, fact.model, fact.version)
        return ()

    def _leave(self, executor: str) -> Collection[str]:
        self._away.add(executor)
        had = [(model, version) for model, found in self._loaded.items() for e, version in found if e == executor]
        for model, version in had:
            self._drop(executor, model, version)
        return {model for model, _ in had}

    def _drop(self, executor: str, model: str, version: int) -> Collection[str]:
        found = self._loaded.get(model, {})
        if found.pop((executor, version), None) is None:
            return ()
        if not found:
            del self._loaded[model]
        return (model,)

    def of(self, model: str) -> VersionLoaded | None:
        """A version that another executor serves with an override which this one has not heard of; None without one."""
        if name_of(model) in self._unloaded:
            return None
        for loaded in self._loaded.get(model, {}).values():
            if loaded.executor not in self._away and loaded.override_id and loaded.override_id not in self._heard:
                return loaded
        return None

    def has_override(self, model: str) -> bool:
        """Whether another executor serves a version of a model with an override, of any request."""
        found = self._loaded.get(model, {}).values()
        return any(loaded.override_id and loaded.executor not in self._away for loaded in found)

    def end_files(self, model: str) -> None:
        """A load that was carried out here ends the files of all earlier requests; other executors are about to."""
        for loaded in self._loaded.get(model, {}).values():
            if loaded.override_id and not loaded.override_config:
                _remember(self._heard, loaded.override_id)

    def is_of_repository(self, model: str, mine: Collection[str]) -> bool:
        """Whether another executor serves a version of a model without an override. `mine` are content hashes of what
        is served here: executors of older releases do not say of the same content that a request brought it.
        """
        found = self._loaded.get(model, {}).values()
        return any(not loaded.override_id and loaded.content_hash not in mine for loaded in found)


def _remember(known: dict[str, None], name: str) -> None:
    known[name] = None
    if len(known) > _REMEMBERED:
        del known[next(iter(known))]
