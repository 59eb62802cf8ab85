"""Decides what an executor loads and unloads, and keeps the state of every model version. Pure.

    UNAVAILABLE -> LOADING -> READY -> UNLOADING -> UNAVAILABLE;  a reload stays READY until its successor is (R22)

Its inputs are repository scans, load requests and the results of loads; its outputs are decisions (what to do next) and
facts (what to announce). `executors.service` and `executors.deployment.deployment` carry the decisions out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from charonia.catalog.executor_views import LOADING, READY, UNAVAILABLE, UNLOADED, UNLOADING
from charonia.errors import CharoniaError, InternalError, InvalidArgument, StartupError, Unavailable
from charonia.facts.events import ModelRequested, VersionFailed, VersionLoaded, VersionStateChanged, VersionUnloaded
from charonia.models.names import name_of

_FIRST_RETRY_S = 5.0
_LAST_RETRY_S = 300.0

NO_VERSION = -1
"""The version in facts and in errors of a model that has no version to load; the index shows none."""

EXPLICIT = "explicit"
POLL = "poll"
WILDCARD = "*"


class FileStamps(Protocol):
    """Detects changed files. Implemented by `executors.repository.model_directory.Fingerprint`."""

    @property
    def config(self) -> str: ...
    @property
    def shared(self) -> str: ...
    @property
    def versions(self) -> Mapping[int, str]: ...


class FoundModel(Protocol):
    """A model in the repository. Implemented by `executors.repository.model_directory.ModelDirectory`."""

    @property
    def key(self) -> str: ...
    @property
    def fingerprint(self) -> FileStamps: ...


@dataclass(frozen=True, slots=True)
class Override:
    """Replaces a model's files in the repository, by a load request, until the model is unloaded (R24, R25).

    `directory` is the temporary model directory of a file override, None when only the configuration is overridden. A
    file override also ends with the next load that a client requests. `request_id` is the id of its request.
    """

    config_json: str
    directory: Path | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Load a model's new and changed versions. `request` is the request to answer, if any.

    `model` is its key (`charonia.models.names`); with a request, the name, which several models may have.
    """

    model: str
    request: ModelRequested | None = None


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Unload every version of a model; `model` as in `LoadModel`."""

    model: str
    request: ModelRequested | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a request with an error and do nothing."""

    request: ModelRequested
    error: CharoniaError


Decision = LoadModel | UnloadModel | Refuse


@dataclass(frozen=True, slots=True)
class Plan:
    """The versions of one model to load (new, changed or failed before), to keep, and to unload; ascending."""

    load: tuple[int, ...]
    keep: tuple[int, ...]
    unload: tuple[int, ...]


@dataclass(slots=True)
class _Version:
    state: str
    reason: str = ""
    stamp: tuple[str, str, str] | None = None
    """The fingerprint of the files it was loaded from, while it is served."""


@dataclass(slots=True)
class _Model:
    versions: dict[int, _Version] = field(default_factory=dict)
    override: Override | None = None
    seen: FileStamps | None = None
    """The fingerprint at the last attempt to load it: polling tries again only when the files change."""


class Lifecycle:
    """The states of one executor's models. `executor` is its id; `control_mode` is none, poll or explicit (R8)."""

    def __init__(self, executor: str, control_mode: str) -> None:
        self._executor = executor
        self._mode = control_mode
        self._models: dict[str, _Model] = {}

    # -- decisions ----------------------------------------------------------------------------------------------------

    def start(self, found: Mapping[str, FoundModel], load_model: Sequence[str]) -> list[LoadModel]:
        """Decide what to load at start: everything, or in explicit mode what `--load-model` names (R8).

        Raises `StartupError` for a wildcard among other names.
        """
        if self._mode != EXPLICIT:
            return [LoadModel(key) for key in found]
        if WILDCARD in load_model:
            if len(load_model) > 1:
                raise StartupError("Wildcard model name '*' must be the ONLY startup model if specified at all.")
            return [LoadModel(key) for key in found]
        keys = {name: [key for key in found if name_of(key) == name] for name in load_model}
        return [LoadModel(key) for name in keys for key in keys[name] or [name]]

    def requested(self, request: ModelRequested) -> Decision:
        """Decide on a load or unload request (R9, R25)."""
        if self._mode != EXPLICIT:
            return Refuse(request, Unavailable("explicit model load / unload is not allowed if polling is enabled"))
        if request.action == "unload":
            return UnloadModel(request.model, request)
        if request.action != "load":
            return Refuse(request, InvalidArgument(f"unknown model request '{request.action}'"))
        if request.files and not request.config_json:
            return Refuse(request, InvalidArgument("Load parameter 'config' must be specified for model file override"))
        return LoadModel(request.model, request)

    def polled(self, found: Mapping[str, FoundModel]) -> list[LoadModel | UnloadModel]:
        """Decide on what changed in the repository since the last scan (R10)."""
        decisions: list[LoadModel | UnloadModel] = []
        for key, directory in found.items():
            known = self._models.get(key)
            if known is None or known.seen is None or _differ(known.seen, directory.fingerprint):
                decisions.append(LoadModel(key))
        decisions.extend(
            UnloadModel(key) for key, model in self._models.items() if key not in found and model.seen is not None
        )
        return decisions

    def plan(self, directory: FoundModel, selected: Sequence[int]) -> Plan:
        """Plan a load of this model: versions that are served from unchanged files are kept (R22)."""
        model = self._model(directory.key)
        model.seen = directory.fingerprint
        load, keep = [], []
        for version in sorted(selected):
            known = model.versions.get(version)
            stamp = _stamp(directory.fingerprint, version)
            if known is not None and known.state == READY and known.stamp == stamp:
                keep.append(version)
            else:
                load.append(version)
        served = {version for version, known in model.versions.items() if known.state == READY}
        return Plan(tuple(load), tuple(keep), tuple(sorted(served - set(selected))))

    def invalidate(self, model: str) -> None:
        """Make the next load of a model reload all its served versions, even if their files are unchanged."""
        known = self._models.get(model)
        for version in known.versions.values() if known is not None else ():
            version.stamp = None

    def override(self, model: str) -> Override | None:
        """The override of a model (R24), or None."""
        known = self._models.get(model)
        return known.override if known is not None else None

    def set_override(self, model: str, override: Override | None) -> None:
        """Keep an override whose load succeeded, None after a load that ended one."""
        self._model(model).override = override

    def ready_versions(self, model: str) -> list[int]:
        known = self._models.get(model)
        return sorted(v for v, entry in known.versions.items() if entry.state == READY) if known is not None else []

    def keys(self, name: str) -> list[str]:
        """The keys of all known models with this name."""
        return [key for key in self._models if name_of(key) == name]

    def states(self) -> list[tuple[str, int, str, str]]:
        """(model, version, state, reason) of all versions that were to be loaded, sorted."""
        found = [(key, v, e.state, e.reason) for key, model in self._models.items() for v, e in model.versions.items()]
        return sorted(found)

    # -- what happened ------------------------------------------------------------------------------------------------

    def loading(self, model: str, version: int) -> VersionStateChanged:
        """The load of a version begins. A version that is served already stays READY (R22)."""
        known = self._model(model).versions.setdefault(version, _Version(UNAVAILABLE))
        if known.state != READY:
            known.state, known.reason = LOADING, ""
        return VersionStateChanged(self._executor, model, version, LOADING)

    def loaded(self, fact: VersionLoaded, fingerprint: FileStamps) -> VersionLoaded:
        """A version is served. Its predecessor may be drained now."""
        self._model(fact.model).versions[fact.version] = _Version(READY, "", _stamp(fingerprint, fact.version))
        return fact

    def failed(self, model: str, version: int, error: CharoniaError, *, unpolled: bool = False) -> VersionFailed:
        """A version could not be loaded. If it was served before, it still is (R21). `unpolled` as in the fact."""
        reason = f"{error.code.title}: {error.message}"
        known = self._model(model).versions.setdefault(version, _Version(UNAVAILABLE))
        if known.state != READY:
            known.state, known.reason = UNAVAILABLE, reason
        return VersionFailed(self._executor, model, version, int(error.code), reason, unpolled)

    def unreadable(self, directory: FoundModel) -> None:
        """A model's configuration cannot be used; polling tries again when its files change."""
        self._model(directory.key).seen = directory.fingerprint

    def abandoned(self, model: str, version: int) -> VersionUnloaded | None:
        """A loaded version is given up, as another one of its load failed. None when it is served from before."""
        known = self._model(model).versions.get(version)
        if known is None or known.state != LOADING:
            return None
        known.state, known.reason = UNAVAILABLE, UNLOADED
        return VersionUnloaded(self._executor, model, version, UNLOADED)

    def unloading(self, model: str, version: int) -> VersionStateChanged:
        """A version takes no new work (R27)."""
        self._model(model).versions[version] = _Version(UNLOADING)
        return VersionStateChanged(self._executor, model, version, UNLOADING)

    def unloaded(self, model: str, version: int, reason: str = UNLOADED) -> VersionUnloaded | None:
        """A version's instances are gone. None when it is being loaded again: its end must not be announced then."""
        known = self._model(model).versions.get(version)
        if known is None or known.state != UNLOADING:
            return None
        known.state, known.reason = UNAVAILABLE, reason
        return VersionUnloaded(self._executor, model, version, reason)

    def drop_failed(self, model: str, wanted: Collection[int] = ()) -> list[VersionUnloaded]:
        """Mark failed versions that are no longer wanted as unloaded, so that they do not prevent readiness (R40)."""
        known = self._models.get(model)
        facts = []
        for version, entry in sorted(known.versions.items()) if known is not None else ():
            if version not in wanted and entry.state == UNAVAILABLE and entry.reason not in ("", UNLOADED):
                entry.reason = UNLOADED
                facts.append(VersionUnloaded(self._executor, model, version, UNLOADED))
        return facts

    def forget(self, model: str) -> Override | None:
        """Forget the override of a model that was unloaded as a whole, and return it (R24)."""
        known = self._models.get(model)
        if known is None:
            return None
        before, known.override, known.seen = known.override, None, None
        return before

    def _model(self, name: str) -> _Model:
        return self._models.setdefault(name, _Model())


def poll_failure(model: str) -> InternalError:
    """Triton's error for a model that is unknown or whose configuration cannot be read (R20, C62)."""
    return InternalError(f"failed to load '{name_of(model)}', failed to poll from model repository")


def load_failure(model: str, failures: Mapping[int, CharoniaError]) -> InvalidArgument:
    """Triton's error for a failed load: one part for each version that failed, ascending (R21).

    With `NO_VERSION` it is the error alone: the load ended before there were versions, or an ensemble does not fit.
    """
    parts = "".join(
        error.message
        if version == NO_VERSION
        else f"version {version} is at UNAVAILABLE state: {error.code.title}: {error.message};"
        for version, error in sorted(failures.items())
    )
    return InvalidArgument(f"load failed for model '{model}': {parts}\n")


def retry_delay_s(failures: int) -> float:
    """Seconds until a load is tried again that has failed `failures` times: 5, then twice as long each time, up to 300.

    A failed load may have taken long, and much memory.
    """
    doublings = min(failures - 1, 16)  # far beyond the max: a larger power may be no float
    return min(_LAST_RETRY_S, _FIRST_RETRY_S * 2.0**doublings)


def _stamp(fingerprint: FileStamps, version: int) -> tuple[str, str, str]:
    return (fingerprint.config, fingerprint.shared, fingerprint.versions.get(version, ""))


def _differ(one: FileStamps, other: FileStamps) -> bool:
    return (one.config, one.shared, dict(one.versions)) != (other.config, other.shared, dict(other.versions))
