"""The catalog's view of one executor, one version and one row of the index. Data only; `catalog` folds facts into it.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from charonia.facts.events import (
    ExecutorDescribed,
    ProcessJoined,
    RepositoryScanned,
    VersionAnnounced,
    VersionFailed,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
)

READY = "READY"
LOADING = "LOADING"
UNLOADING = "UNLOADING"
UNAVAILABLE = "UNAVAILABLE"

EXECUTOR_LOST = "executor lost"
EXECUTOR_DRAINS = "executor drains"
ON_DEMAND = "on demand"
"""The reason of a READY version that no executor holds in memory: its first request has it loaded."""

AWAITED = (EXECUTOR_LOST, EXECUTOR_DRAINS)
"""The reasons of versions that wait for a successor of their executor."""

UNLOADED = "unloaded"
"""The reason of a version that was unloaded on purpose (H40)."""

_RANK = {READY: 3, UNLOADING: 2, LOADING: 1, UNAVAILABLE: 0}


@dataclass(slots=True)
class ExecutorVersion:
    """One version on one executor: its state, the reason shown in the index, and what it serves while READY.

    An announced version (`on_demand`) is READY with no slots: requests are accepted, and the first one loads it. If
    that load fails it is UNAVAILABLE, and still `on_demand`. `unpolled`: as in the fact. `well` is
    false while its health function says that it is not ready (P6): requests are still accepted.
    """

    state: str
    reason: str = ""
    loaded: VersionLoaded | None = None
    on_demand: bool = False
    unpolled: bool = False
    well: bool = True
    loaded_at: int = 0
    """When it was loaded or announced, counted in facts."""


class Versions:
    """The versions of one executor, by model: with many models, searching all of them for each would take too long."""

    __slots__ = ("_models",)

    def __init__(self) -> None:
        self._models: dict[str, dict[int, ExecutorVersion]] = {}

    def __iter__(self) -> Iterator[tuple[str, int, ExecutorVersion]]:
        return ((model, number, entry) for model, found in self._models.items() for number, entry in found.items())

    def models(self) -> set[str]:
        return set(self._models)

    def of(self, model: str) -> Mapping[int, ExecutorVersion]:
        return self._models.get(model, _NONE)

    def get(self, model: str, version: int) -> ExecutorVersion | None:
        return self.of(model).get(version)

    def put(self, model: str, version: int, entry: ExecutorVersion) -> None:
        self._models.setdefault(model, {})[version] = entry

    def drop(self, model: str, version: int) -> None:
        """Remove a version, if it is known."""
        found = self._models.get(model)
        if found is not None and found.pop(version, None) is not None and not found:
            del self._models[model]


_NONE: Mapping[int, ExecutorVersion] = {}


@dataclass(slots=True)
class ExecutorView:
    """One executor according to its facts. After it left, its versions are kept until a successor has scanned."""

    joined: ProcessJoined
    scan: RepositoryScanned | None = None
    versions: Versions = field(default_factory=Versions)
    lost: bool = False
    draining: bool = False
    described: ExecutorDescribed | None = None
    excluded: dict[str, str] = field(default_factory=dict)
    """Models that are not placed on it, with the reasons."""
    first: int = 0
    heard: int = 0
    """When it joined and when it last wrote a fact, counted in facts."""

    @property
    def away(self) -> bool:
        """It takes no batches: it left, or is about to. Requests for its versions are accepted until a successor is
        there.
        """
        return self.lost or self.draining


VersionFact = VersionStateChanged | VersionLoaded | VersionAnnounced | VersionFailed | VersionUnloaded


def after(fact: VersionFact, known: ExecutorVersion | None, at: int) -> ExecutorVersion | None:
    """The view of a version after a fact about it, the `at`-th of all facts; `known` itself when nothing changed, None
    when it is removed.
    """
    if isinstance(fact, VersionLoaded):
        return ExecutorVersion(READY, "", fact, loaded_at=at)
    if isinstance(fact, VersionAnnounced):
        return ExecutorVersion(READY, ON_DEMAND, _without_slots(fact), on_demand=True, loaded_at=at)
    if isinstance(fact, VersionStateChanged):
        # a reload keeps serving the old incarnation while the new one loads (R22)
        if known is not None and known.state == READY and fact.state == LOADING:
            return known
        # an unloading version still runs the requests accepted before (R27)
        if known is None:
            return ExecutorVersion(fact.state)
        return ExecutorVersion(fact.state, "", known.loaded, loaded_at=known.loaded_at)
    if isinstance(fact, VersionFailed):
        if known is not None and known.state == READY and not known.on_demand:
            return known
        on_demand = known is not None and known.on_demand
        return ExecutorVersion(UNAVAILABLE, fact.message, on_demand=on_demand, unpolled=fact.unpolled)
    # version 0 stood for a model that had no version to load
    return ExecutorVersion(UNAVAILABLE, fact.reason) if fact.version >= 1 else None


def _without_slots(fact: VersionAnnounced) -> VersionLoaded:
    return VersionLoaded(fact.executor, fact.model, fact.version, fact.content_hash, 0, fact.config, fact.labels)


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One row of the repository index (H40); version 0 stands for a model that was never loaded."""

    model: str
    version: int
    state: str
    reason: str


def states(views: Collection[ExecutorView], model: str) -> list[tuple[int, str, str]]:
    """(version, state, reason) of a model over all executors, the best of each version, ascending (H40)."""
    best: dict[int, tuple[str, str]] = {}
    for view in views:
        for version, entry in view.versions.of(model).items():
            state, reason = entry.state, entry.reason
            if view.away and state != UNAVAILABLE:
                state, reason = UNAVAILABLE, EXECUTOR_LOST if view.lost else EXECUTOR_DRAINS
            known = best.get(version)
            if (
                known is None
                or _RANK[state] > _RANK[known[0]]
                or (state == known[0] and known[1] == ON_DEMAND)
                or (known[1] in AWAITED and not view.away)
            ):
                best[version] = (state, reason)
    return [(version, state, reason) for version, (state, reason) in sorted(best.items())]


def index(views: Collection[ExecutorView]) -> Iterator[IndexRow]:
    """Every model any executor's repository holds, sorted by name, then version (H40)."""
    names = {name for view in views if view.scan for name in view.scan.models}
    names |= {model for view in views for model in view.versions.models()}
    for name in sorted(names):
        known = states(views, name)
        if reason := _excluded(views, name, known):
            yield IndexRow(name, 0, UNAVAILABLE, reason)
        elif not known:
            yield IndexRow(name, 0, "", "")
        else:
            for version, state, why in known:
                yield IndexRow(name, version, state, why)


def _excluded(views: Collection[ExecutorView], model: str, known: list[tuple[int, str, str]]) -> str:
    """Why no executor may load a model, "" when one may or has tried."""
    if any(reason != UNLOADED for _, _, reason in known) or not any(model in view.excluded for view in views):
        return ""
    holders = [view for view in views if not view.away and view.scan is not None and model in view.scan.models]
    if not holders or not all(model in view.excluded for view in holders):
        return ""
    return "; ".join(dict.fromkeys(view.excluded[model] for view in holders))
