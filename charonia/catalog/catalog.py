"""The current state of executors, models and versions: a pure fold of the control facts, the same in every process.

Readiness, the repository index, routing and validation use only this, so any gateway can answer any request. Applying a
fact twice changes nothing. `charonia.eventlog.control` follows the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from charonia.errors import CharoniaError, InvalidArgument
from charonia.facts.events import (
    ExecutorDescribed,
    ExecutorDraining,
    Fact,
    LanesWeighed,
    ModelExcluded,
    ModelRequestFinished,
    ProcessJoined,
    ProcessLeft,
    RepositoryScanned,
    RouteChanged,
    TraceSettingChanged,
    VersionAnnounced,
    VersionFailed,
    VersionHealthChanged,
    VersionHeld,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
)
from charonia.models.interface import ModelInterface
from charonia.models.names import Namespaces
from charonia.releases.route_rule import Routes, standing_in
from protos.model_config_pb2 import ModelConfig

from .executor_views import (
    AWAITED,
    EXECUTOR_DRAINS,
    EXECUTOR_LOST,
    LOADING,
    ON_DEMAND,
    READY,
    UNAVAILABLE,
    UNLOADED,
    UNLOADING,
    ExecutorVersion,
    ExecutorView,
    IndexRow,
    after,
    index,
    states,
)
from .rollout import all_ready, has_loaded, loading, may_come, started
from .served import ServedVersion, held_versions, not_served, not_started

__all__ = [
    "EXECUTOR_DRAINS",
    "EXECUTOR_LOST",
    "LOADING",
    "ON_DEMAND",
    "READY",
    "UNAVAILABLE",
    "UNLOADED",
    "UNLOADING",
    "Catalog",
    "ExecutorVersion",
    "ExecutorView",
    "IndexRow",
    "ServedVersion",
    "failure_of",
]

EXPLICIT = "explicit"
_REPLACED_REMEMBERED = 64
"""Lost executors that were replaced, kept because a stalled one may come back."""


class Catalog:
    """The fold. `listeners` are called with a model's name after every fact that changes its versions or its route."""

    def __init__(self) -> None:
        self.processes: dict[str, ProcessJoined] = {}
        self.executors: dict[str, ExecutorView] = {}
        self._replaced: dict[str, ExecutorView] = {}
        self.finished: dict[tuple[str, str], ModelRequestFinished] = {}
        self.lane_weights: dict[int, int] = {}
        """Changed in place, so that lane sharing may keep a reference to it."""
        self.trace_settings: dict[str, TraceSettingChanged] = {}
        """Run-time trace settings of a model, or of all ("")."""
        self.routes = Routes()
        """The routing rules of models; its `rules` are changed in place."""
        self.listeners: list[Callable[[str], None]] = []
        self.process_listeners: list[Callable[[Fact], None]] = []
        self._told = 0
        """Number of facts so far: orders them."""
        self._served: dict[str, dict[int, ServedVersion]] = {}
        self._accepting: dict[str, dict[int, ServedVersion]] = {}
        self._parsed: dict[tuple[str, bytes], tuple[ModelConfig, ModelInterface]] = {}
        self._namespaces = Namespaces(self._is_meant)

    def clear(self) -> None:
        """Drop all state, as at the start, but the routing rules: no request may go by none until the new log has them.
        Listeners stay and are not called: the caller knows.
        """
        for known in (self.processes, self.executors, self._replaced, self.finished):
            known.clear()
        self._served.clear()
        self._accepting.clear()
        self._namespaces.clear()
        self.lane_weights.clear()
        self.trace_settings.clear()
        self.routes.begin_anew()

    # -- folding ------------------------------------------------------------------------------------------------------

    def apply(self, fact: Fact) -> None:
        """Fold one control fact."""
        self._told += 1
        # answers to load requests are deleted from the stream later (`compaction`), so nothing may depend on them
        view = None if isinstance(fact, ModelRequestFinished) else self._view(getattr(fact, "executor", ""))
        if view is not None:
            view.heard = self._told
        match fact:
            case ProcessJoined():
                self.processes[fact.incarnation] = fact
                if fact.role == "executor":
                    self._joined(fact)
            case ProcessLeft():
                self._leave(fact)
            case RepositoryScanned():
                self._scanned(fact)
            case VersionStateChanged() | VersionLoaded() | VersionAnnounced() | VersionFailed() | VersionUnloaded():
                self._version(fact)
            case VersionHeld():
                self._held(fact)
            case ExecutorDescribed():
                if (view := self._view(fact.executor)) is not None:
                    view.described = fact
            case ExecutorDraining():
                self._drains(fact.executor)
            case ModelExcluded():
                if (view := self._view(fact.executor)) is not None:
                    view.excluded[fact.model] = fact.reason
                    self._refresh({fact.model})
            case VersionHealthChanged():
                self._health(fact)
            case LanesWeighed():
                self._weighed(fact)
            case TraceSettingChanged():
                self.trace_settings[fact.model] = fact
            case RouteChanged():
                if self.routes.apply(fact):
                    for changed in self.listeners:
                        changed(fact.model)
            case ModelRequestFinished():
                self.finished[(fact.request_id, fact.executor)] = fact
                while len(self.finished) > 1024:
                    self.finished.pop(next(iter(self.finished)))
            case _:
                return
        for listener in self.process_listeners:
            listener(fact)

    def _weighed(self, fact: LanesWeighed) -> None:
        self.lane_weights.clear()
        for lane, weight in fact.weights.items():
            if lane.isascii() and lane.isdecimal() and type(weight) is int and weight >= 1:
                self.lane_weights[int(lane)] = weight

    def _joined(self, fact: ProcessJoined) -> None:
        view = self.executors.get(fact.incarnation) or self._replaced.pop(fact.incarnation, None)
        if view is None:
            view = ExecutorView(fact, first=self._told)
        view.heard = self._told
        self.executors[fact.incarnation] = view
        if view.lost:
            # it was only stalled: it still serves its versions
            view.lost = False
            self._refresh(view.versions.models())

    def _view(self, executor: str) -> ExecutorView | None:
        return self.executors.get(executor) or self._replaced.get(executor)

    def _held(self, fact: VersionHeld) -> None:
        view = self._view(fact.executor)
        known = view.versions.get(fact.model, fact.version) if view is not None else None
        if known is None or known.loaded is None:
            return
        known.loaded = replace(known.loaded, slots=fact.slots)
        known.on_demand = fact.slots == 0
        known.reason = ON_DEMAND if known.on_demand else ""
        known.well = True  # its instances have changed
        self._refresh({fact.model})

    def _drains(self, executor: str) -> None:
        view = self._view(executor)
        if view is not None and not view.draining:
            view.draining = True
            self._refresh(view.versions.models())

    def _leave(self, fact: ProcessLeft) -> None:
        self.processes.pop(fact.incarnation, None)
        view = self.executors.get(fact.incarnation)
        if view is None:
            return
        # for any reason: requests for its versions are accepted until a successor has reported its own
        view.lost = True
        if self._was_succeeded(view):
            self._replace(fact.incarnation)
        self._refresh(view.versions.models())

    def _was_succeeded(self, lost: ExecutorView) -> bool:
        """Whether its successor was ready before its lease ended: it was silent since that one joined."""
        return any(
            view.first > lost.heard and not view.away and view.scan is not None and view.scan.ready
            for view in self.executors.values()
            if view.joined.pool == lost.joined.pool
        )

    def _replace(self, incarnation: str) -> ExecutorView:
        """Stop waiting for a successor to serve its versions."""
        view = self._replaced[incarnation] = self.executors.pop(incarnation)
        while len(self._replaced) > _REPLACED_REMEMBERED:
            self._replaced.pop(next(iter(self._replaced)))
        return view

    def _scanned(self, fact: RepositoryScanned) -> None:
        view = self._view(fact.executor)
        if view is None:
            return
        view.scan = fact
        models: set[str] = set()
        # an executor presumed dead replaces no other, not even itself: it reports again once it has joined again
        if fact.ready and not view.lost:
            pool = view.joined.pool
            for incarnation in [i for i, v in self.executors.items() if v.lost and v.joined.pool == pool]:
                models |= self._replace(incarnation).versions.models()
        self._refresh(models)

    def _version(
        self, fact: VersionStateChanged | VersionLoaded | VersionAnnounced | VersionFailed | VersionUnloaded
    ) -> None:
        view = self._view(fact.executor)
        if view is None:
            return
        key = (fact.model, fact.version)
        self._namespaces.heard_of(fact.model)
        known = view.versions.get(*key)
        if not isinstance(fact, VersionFailed | VersionUnloaded):
            view.excluded.pop(fact.model, None)
        changed = after(fact, known, self._told)
        if changed is not None and changed is known:
            return
        if isinstance(fact, VersionLoaded | VersionAnnounced):
            assert changed is not None
            assert changed.loaded is not None
            self._parse(changed.loaded)  # an unreadable fact must change nothing
        if changed is not None:
            view.versions.put(*key, changed)
        else:
            view.versions.drop(*key)
        if isinstance(fact, VersionUnloaded) or (isinstance(fact, VersionStateChanged) and fact.state == UNLOADING):
            # the departure of an executor must not make requests wait for versions unloaded on purpose
            for other in self.executors.values():
                if other.lost and other is not view and other.joined.pool == view.joined.pool:
                    other.versions.drop(*key)
        self._refresh({fact.model})

    def _health(self, fact: VersionHealthChanged) -> None:
        view = self._view(fact.executor)
        known = view.versions.get(fact.model, fact.version) if view is not None else None
        if known is not None:
            known.well = fact.well

    def _refresh(self, models: set[str]) -> None:
        self._namespaces.changed()
        for model in models:
            held = held_versions(model, self.executors, self._parse)
            if held:
                self._served[model] = held
                self._accepting[model] = {number: v for number, v in held.items() if v.accepting}
            else:
                self._served.pop(model, None)
                self._accepting.pop(model, None)
            for listener in self.listeners:
                listener(model)

    def _parse(self, loaded: VersionLoaded) -> tuple[ModelConfig, ModelInterface]:
        key = (loaded.model, loaded.config)  # instance groups may differ where the content does not
        parsed = self._parsed.get(key)
        if parsed is None:
            config = ModelConfig.FromString(loaded.config)
            parsed = self._parsed[key] = (config, ModelInterface.of(config))
            while len(self._parsed) > 4096:
                self._parsed.pop(next(iter(self._parsed)))
        return parsed

    # -- reading ------------------------------------------------------------------------------------------------------

    def served_models(self) -> list[str]:
        """Models with a version that executors hold, including one that is unloading."""
        return sorted(self._served)

    def held(self, model: str) -> dict[int, ServedVersion]:
        """Versions that accepted requests can still run on, ascending."""
        return self._served.get(model, {})

    def content_hashes(self, model: str) -> dict[int, str]:
        """Which of the versions are held."""
        return {number: version.content_hash for number, version in self.held(model).items()}

    def served(self, model: str) -> dict[int, ServedVersion]:
        """Versions that requests are accepted for, ascending; empty for an unknown model."""
        return self._accepting.get(model, {})

    def resolve(self, model: str, near: str = "") -> str:
        """The key of the one model that a name means; a model in the namespace `near` comes first (`Namespaces`).
        Raises `InvalidArgument` if the name is ambiguous (R2).
        """
        return self._namespaces.resolve(model, near)

    def _is_meant(self, key: str) -> bool:
        """An unloaded model no longer has its name; one that failed to load keeps it, as in Triton."""
        return any(reason != UNLOADED for _, _, reason in self._states(key))

    def find(self, model: str, version: int) -> ServedVersion:
        """The version for an inference: `version` -1 is the highest (I1), or what the model's routing rule makes
        of it (`standing_in`). `model` is a name or a key.

        Raises E5's `NotFound` or `Unavailable`, and `InvalidArgument` for a name that several models have (R2). Until
        an executor has finished its start-up load, any model may still come: `Unavailable` then says what is loading.
        """
        if self._namespaces.any:
            model = self.resolve(model)
        served = self.served(model)
        if served:
            if version < 0:
                rule = self.routes.rules.get(model)
                return served[next(reversed(served)) if rule is None else standing_in(rule, served)]
            if version in served:
                return served[version]
        if not self.started(awaited=True):
            raise not_started(model, loading(self.executors.values()))
        raise not_served(model, version, self._states(model))

    def is_ready(self, model: str, version: int) -> bool:
        """H3: whether that version (-1: the one that `find` returns) has an executor that would run it now and reports
        it healthy.
        """
        try:
            model = self.resolve(model)
        except InvalidArgument:
            return False
        served = self.served(model)
        if not served:
            return False
        number = self.find(model, version).version if version < 0 else version
        found = served.get(number)
        return found is not None and any(self._is_well(e, model, number) for e in found.slots)

    def _is_well(self, executor: str, model: str, version: int) -> bool:
        entry = self.executors[executor].versions.get(model, version)
        return entry is not None and entry.well

    def may_come(self, model: str) -> bool:
        """Whether a model that no executor holds may be held soon (`rollout`)."""
        return may_come(self.executors.values(), model)

    def index(self) -> list[IndexRow]:
        """Every model any executor's repository holds, sorted by name, then version (H40)."""
        return list(index(self.executors.values()))

    def failure(self, model: str, version: int) -> str:
        """Why a version that is not served could not be loaded; "" when no load failed."""
        for number, state, reason in self._states(model):
            if number == version and state == UNAVAILABLE and reason not in (UNLOADED, *AWAITED):
                return reason
        return ""

    def _states(self, model: str) -> list[tuple[int, str, str]]:
        return states(self.executors.values(), model)

    def started(self, *, awaited: bool = False) -> bool:
        """Whether some executor has finished its start-up load (`rollout`)."""
        return started(self.executors.values(), awaited=awaited)

    def all_ready(self, *, awaited: bool = False) -> bool:
        """R40's strict readiness (`rollout`)."""
        return all_ready(self.executors.values(), awaited=awaited)

    def registered(self) -> dict[str, str]:
        """The keys of the models whose repositories were registered, by alias."""
        scans = [view.scan for view in self.executors.values() if view.scan is not None and not view.lost]
        return {alias: key for scan in scans for alias, key in scan.registered.items()}

    def control_modes(self) -> set[str]:
        """The control modes of the live executors: none, poll, explicit (R8)."""
        return {v.scan.control_mode for v in self.executors.values() if v.scan is not None and not v.away}

    def answering_executors(self) -> list[str]:
        """The executors that load and unload on request: in explicit mode, and not draining."""
        return [
            incarnation
            for incarnation, view in self.executors.items()
            if not view.away and (view.scan is None or view.scan.control_mode == EXPLICIT)
        ]

    def loaded_executors(self) -> list[str]:
        """The executors that have finished their start-up load and take batches."""
        return [i for i, view in self.executors.items() if has_loaded(view) and not view.away]

    def live_executors(self) -> list[str]:
        return [incarnation for incarnation, view in self.executors.items() if not view.lost]


def failure_of(finished: ModelRequestFinished) -> CharoniaError | None:
    """The error that an executor reported for a load or unload, None when it succeeded."""
    return CharoniaError.of(finished.error_code, finished.error) if finished.error else None
