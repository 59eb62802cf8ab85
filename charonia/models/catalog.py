"""What is served where, right now: a pure fold of the control facts, the same in every process (design section 2).

Readiness, the repository index, routing and validation come from here and nowhere else, so any gateway can be asked
anything. Applying a fact twice changes nothing. Following the stream is `charonia.eventlog.control`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from charonia.errors import CharoniaError, NotFound, Unavailable
from charonia.events import (
    Fact,
    LanesWeighed,
    ModelRequestFinished,
    ProcessJoined,
    ProcessLeft,
    RepositoryScanned,
    VersionFailed,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
)
from protos.model_config_pb2 import ModelConfig

from .interface import ModelInterface

READY = "READY"
LOADING = "LOADING"
UNLOADING = "UNLOADING"
UNAVAILABLE = "UNAVAILABLE"

EXECUTOR_LOST = "executor lost"

_RANK = {READY: 3, UNLOADING: 2, LOADING: 1, UNAVAILABLE: 0}

_REPLACED_REMEMBERED = 64
"""Lost executors whose place was taken, kept in mind because a stalled one may come back."""


@dataclass(slots=True)
class ExecutorVersion:
    """One version on one executor: its state, the reason shown in the index, and what it serves while READY."""

    state: str
    reason: str = ""
    loaded: VersionLoaded | None = None


@dataclass(slots=True)
class ExecutorView:
    """One executor as its facts describe it. Once gone its versions stay in mind until a successor has scanned."""

    joined: ProcessJoined
    scan: RepositoryScanned | None = None
    versions: dict[tuple[str, int], ExecutorVersion] = field(default_factory=dict)
    lost: bool = False


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """The current incarnation of a model version: what requests are checked against and who executes it.

    `slots` maps executor to batches at once; it is empty when every executor that served it was lost, then accepted
    requests wait in the log for the next one. `accepting` is false while it unloads: what was accepted still runs.
    """

    model: str
    version: int
    content_hash: str
    config: ModelConfig
    interface: ModelInterface
    labels: dict[str, list[str]]
    slots: dict[str, int]
    accepting: bool = True


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One row of the repository index (H40); version 0 stands for a model that was never loaded."""

    model: str
    version: int
    state: str
    reason: str


class Catalog:
    """The fold. `on_change(model)` listeners run after every fact that touches a model's served versions."""

    def __init__(self) -> None:
        self.processes: dict[str, ProcessJoined] = {}
        self.executors: dict[str, ExecutorView] = {}
        self._replaced: dict[str, ExecutorView] = {}
        self.finished: dict[tuple[str, str], ModelRequestFinished] = {}
        self.lane_weights: dict[int, int] = {}
        """Changed in place, so that who shares among lanes may keep it."""
        self.listeners: list[Callable[[str], None]] = []
        self.process_listeners: list[Callable[[Fact], None]] = []
        self._served: dict[str, dict[int, ServedVersion]] = {}
        self._newest: dict[tuple[str, int], str] = {}
        self._parsed: dict[tuple[str, str], tuple[ModelConfig, ModelInterface]] = {}

    def clear(self) -> None:
        """Forget everything, as at the start; listeners stay and are not told: who clears knows why."""
        for known in (self.processes, self.executors, self._replaced, self.finished, self._served, self._newest):
            known.clear()
        self.lane_weights.clear()

    # -- folding ------------------------------------------------------------------------------------------------------

    def apply(self, fact: Fact) -> None:
        """Fold one control fact."""
        match fact:
            case ProcessJoined():
                self.processes[fact.incarnation] = fact
                if fact.role == "executor":
                    self._joined(fact)
            case ProcessLeft():
                self._leave(fact)
            case RepositoryScanned():
                self._scanned(fact)
            case VersionStateChanged() | VersionLoaded() | VersionFailed() | VersionUnloaded():
                self._version(fact)
            case LanesWeighed():
                self._weighed(fact)
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
            view = ExecutorView(fact)
        self.executors[fact.incarnation] = view
        if view.lost:
            # it was only stalled: what it serves it still serves
            view.lost = False
            self._refresh({model for model, _ in view.versions})

    def _leave(self, fact: ProcessLeft) -> None:
        self.processes.pop(fact.incarnation, None)
        view = self.executors.get(fact.incarnation)
        if view is None:
            return
        # whatever its reason: what it served is accepted on until a successor has said what it serves
        view.lost = True
        models = {model for model, _ in view.versions}
        self._refresh(models)

    def _scanned(self, fact: RepositoryScanned) -> None:
        view = self.executors.get(fact.executor)
        if view is None:
            return
        view.scan = fact
        models: set[str] = set()
        if fact.ready:
            for incarnation in [i for i, v in self.executors.items() if v.lost]:
                view = self.executors.pop(incarnation)
                models |= {model for model, _ in view.versions}
                self._replaced[incarnation] = view
            while len(self._replaced) > _REPLACED_REMEMBERED:
                self._replaced.pop(next(iter(self._replaced)))
        self._refresh(models)

    def _version(self, fact: VersionStateChanged | VersionLoaded | VersionFailed | VersionUnloaded) -> None:
        view = self.executors.get(fact.executor) or self._replaced.get(fact.executor)
        if view is None:
            return
        key = (fact.model, fact.version)
        known = view.versions.get(key)
        if isinstance(fact, VersionLoaded):
            self._parse(fact)  # one that cannot be read must leave everything as it was
            view.versions[key] = ExecutorVersion(READY, "", fact)
            self._newest[key] = fact.content_hash
        elif isinstance(fact, VersionStateChanged):
            # a reload keeps serving the old incarnation while the new one loads (R22)
            if known is not None and known.state == READY and fact.state == LOADING:
                return
            # an unloading version still runs what was accepted before (R27)
            view.versions[key] = ExecutorVersion(fact.state, "", known.loaded if known is not None else None)
        elif isinstance(fact, VersionFailed):
            if known is not None and known.state == READY:
                return
            view.versions[key] = ExecutorVersion(UNAVAILABLE, fact.message)
        elif fact.version < 1:
            # it stood for a model that had no version to load
            view.versions.pop(key, None)
        else:
            view.versions[key] = ExecutorVersion(UNAVAILABLE, fact.reason)
        if isinstance(fact, VersionUnloaded) or view.versions[key].state == UNLOADING:
            # what is unloaded on purpose is not waited for on account of an executor that is gone
            for other in self.executors.values():
                if other.lost and other is not view:
                    other.versions.pop(key, None)
        self._refresh({fact.model})

    def _refresh(self, models: set[str]) -> None:
        for model in models:
            served: dict[int, ServedVersion] = {}
            accepting = {
                version
                for view in self.executors.values()
                for (name, version), state in view.versions.items()
                if name == model and state.state == READY
            }
            for incarnation, view in self.executors.items():
                for (name, version), state in view.versions.items():
                    loaded = state.loaded
                    if name != model or loaded is None or loaded.content_hash != self._newest[(name, version)]:
                        continue
                    entry = served.get(version)
                    if entry is None:
                        config, interface = self._parse(loaded)
                        entry = served[version] = ServedVersion(
                            model,
                            version,
                            loaded.content_hash,
                            config,
                            interface,
                            loaded.labels,
                            {},
                            version in accepting,
                        )
                    if not view.lost:
                        entry.slots[incarnation] = loaded.slots
            if served:
                self._served[model] = dict(sorted(served.items()))
            else:
                self._served.pop(model, None)
            for listener in self.listeners:
                listener(model)

    def _parse(self, loaded: VersionLoaded) -> tuple[ModelConfig, ModelInterface]:
        key = (loaded.model, loaded.content_hash)
        parsed = self._parsed.get(key)
        if parsed is None:
            config = ModelConfig.FromString(loaded.config)
            parsed = self._parsed[key] = (config, ModelInterface.of(config))
            while len(self._parsed) > 4096:
                self._parsed.pop(next(iter(self._parsed)))
        return parsed

    # -- reading ------------------------------------------------------------------------------------------------------

    def served_models(self) -> list[str]:
        """Models with a version that executors hold, one that is unloading included."""
        return sorted(self._served)

    def held(self, model: str) -> dict[int, ServedVersion]:
        """Versions that accepted requests can still run on, ascending."""
        return self._served.get(model, {})

    def served(self, model: str) -> dict[int, ServedVersion]:
        """Versions that requests are accepted for, ascending; empty for an unknown model."""
        held = self._served.get(model)
        if not held:
            return {}
        if all(v.accepting for v in held.values()):
            return held
        return {number: v for number, v in held.items() if v.accepting}

    def find(self, model: str, version: int) -> ServedVersion:
        """The version an inference uses: `version` -1 is the highest (I1). Raises E5's `NotFound` or `Unavailable`."""
        served = self.served(model)
        if served:
            if version < 0:
                return served[max(served)]
            if version in served:
                return served[version]
        raise self._missing(model, version)

    def _missing(self, model: str, version: int) -> CharoniaError:
        states = {v: s for v, s, _ in self._states(model)}
        if not states:
            return NotFound(f"Request for unknown model: '{model}' is not found")
        if version < 0:
            return NotFound(f"Request for unknown model: '{model}' has no available versions")
        if version not in states:
            return NotFound(f"Request for unknown model: '{model}' version {version} is not found")
        return Unavailable(f"Request for unknown model: '{model}' version {version} is not at ready state")

    def is_ready(self, model: str, version: int) -> bool:
        """H3: that version (-1: the highest served) has an executor that would run it now."""
        served = self.served(model)
        if not served:
            return False
        found = served.get(max(served) if version < 0 else version)
        return found is not None and bool(found.slots)

    def may_come(self, model: str) -> bool:
        """Whether a model that nobody holds may be held soon: an executor loads it, still starts, or is missing.

        What was accepted for it waits meanwhile; after a restart of everything that may be all there is to do.
        """
        live = [view for view in self.executors.values() if not view.lost]
        return not live or any(
            view.scan is None
            or not view.scan.ready
            or any(name == model and entry.state == LOADING for (name, _), entry in view.versions.items())
            for view in live
        )

    def index(self) -> list[IndexRow]:
        """Every model any executor's repository holds, sorted by name, then version (H40)."""
        names = {name for view in self.executors.values() if view.scan for name in view.scan.models}
        names |= {model for view in self.executors.values() for model, _ in view.versions}
        rows: list[IndexRow] = []
        for name in sorted(names):
            states = self._states(name)
            if not states:
                rows.append(IndexRow(name, 0, "", ""))
            rows.extend(IndexRow(name, version, state, reason) for version, state, reason in states)
        return rows

    def _states(self, model: str) -> list[tuple[int, str, str]]:
        best: dict[int, tuple[str, str]] = {}
        for view in self.executors.values():
            for (name, version), entry in view.versions.items():
                if name != model:
                    continue
                state, reason = entry.state, entry.reason
                if view.lost and state != UNAVAILABLE:
                    state, reason = UNAVAILABLE, EXECUTOR_LOST
                known = best.get(version)
                if known is None or _RANK[state] > _RANK[known[0]] or (known[1] == EXECUTOR_LOST and not view.lost):
                    best[version] = (state, reason)
        return [(version, state, reason) for version, (state, reason) in sorted(best.items())]

    def started(self) -> bool:
        """Some executor has finished its start-up load."""
        return any(v.scan is not None and v.scan.ready and not v.lost for v in self.executors.values())

    def all_ready(self) -> bool:
        """R40's strict readiness: nothing that should be served failed or is missing; unloaded models do not count."""
        return all(
            row.state == READY or row.state == "" or row.reason == "unloaded" or row.state == UNLOADING
            for row in self.index()
        )

    def control_modes(self) -> set[str]:
        """The control modes of the live executors: none, poll, explicit (R8)."""
        return {v.scan.control_mode for v in self.executors.values() if v.scan is not None and not v.lost}

    def live_executors(self) -> list[str]:
        return [incarnation for incarnation, view in self.executors.items() if not view.lost]


def failure_of(finished: ModelRequestFinished) -> CharoniaError | None:
    """The error an executor reported for a load or unload, None when it succeeded."""
    return CharoniaError.of(finished.error_code, finished.error) if finished.error else None
