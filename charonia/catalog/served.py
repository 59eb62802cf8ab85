"""Which versions of a model are served, and the errors for those that are not (E5). Pure.

An executor reports what it has loaded, and `executor_views` holds that; this module combines the views of all executors
into one `ServedVersion` for each version. `catalog` folds the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from charonia.errors import NOT_READY, CharoniaError, NotFound, Unavailable
from charonia.facts.events import VersionLoaded
from charonia.models.interface import ModelInterface
from charonia.models.names import name_of
from protos.model_config_pb2 import ModelConfig

from .executor_views import READY, ExecutorView

_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """The current load of a model version: requests are checked against it, and it names their executors.

    `model` is its key (`names`); clients know `interface.name`. `slots` maps executor to batches at once, 0 for one
    that loads it on demand; it is empty when every executor that served it was lost, then accepted requests wait in the
    log for the next one. `accepting` is false while it unloads: accepted requests still run. `on_demand` are the
    executors that would load it and have not.
    """

    model: str
    version: int
    content_hash: str
    config: ModelConfig
    interface: ModelInterface
    labels: dict[str, list[str]]
    slots: dict[str, int]
    accepting: bool = True
    on_demand: frozenset[str] = frozenset()
    takes_waves: bool = False
    """Whether all executors that serve it take waves."""
    memory: dict[str, int] = field(default_factory=dict)
    """What it holds at all executors together, in bytes, as in `VersionLoaded`."""

    @property
    def is_unloaded(self) -> bool:
        """Whether no executor holds it in memory, and at least one would load it."""
        return bool(self.on_demand) and len(self.on_demand) == len(self.slots)


def held_versions(
    model: str,
    executors: Mapping[str, ExecutorView],
    parse: Callable[[VersionLoaded], tuple[ModelConfig, ModelInterface]],
) -> dict[int, ServedVersion]:
    """Versions that accepted requests can run on, ascending, each with its newest content."""
    newest = _newest(model, executors)
    found: dict[int, ServedVersion] = {}
    on_demand: dict[int, frozenset[str]] = {}
    without_waves: set[int] = set()
    accepting = {
        version
        for view in executors.values()
        for version, state in view.versions.of(model).items()
        if state.state == READY
    }
    for incarnation, view in executors.items():
        for version, state in view.versions.of(model).items():
            loaded = state.loaded
            if loaded is None or loaded.content_hash != newest[version]:
                continue
            entry = found.get(version)
            if entry is None:
                entry = found[version] = ServedVersion(
                    model, version, loaded.content_hash, *parse(loaded), loaded.labels, {}, version in accepting
                )
            if not view.away:
                entry.slots[incarnation] = loaded.slots
                for place, size_bytes in loaded.memory.items():
                    entry.memory[place] = entry.memory.get(place, 0) + size_bytes
                if state.on_demand:
                    on_demand[version] = on_demand.get(version, frozenset()) | {incarnation}
            if not loaded.takes_waves:
                without_waves.add(version)
    for version, entry in found.items():
        if version not in without_waves:
            found[version] = replace(entry, takes_waves=True)
    for version, those in on_demand.items():
        found[version] = replace(found[version], on_demand=those)
    return dict(sorted(found.items()))


def _newest(model: str, executors: Mapping[str, ExecutorView]) -> dict[int, str]:
    """The newest content hash of each version: that of the last load at executors that have it READY and take batches.

    Without such an executor it is that of the last load at any executor that still holds the version: it unloads it,
    drains or has left, and accepted requests wait.
    """
    best: dict[int, tuple[bool, int, str]] = {}
    for view in executors.values():
        for version, state in view.versions.of(model).items():
            if (loaded := state.loaded) is not None:
                rank = (state.state == READY and not view.away, state.loaded_at, loaded.content_hash)
                best[version] = max(rank, best.get(version, rank))
    return {version: content_hash for version, (_, _, content_hash) in best.items()}


def not_started(key: str, loading: Sequence[str]) -> Unavailable:
    """The error for a request before any executor has finished its start-up load; `loading` are the loading models."""
    if loading:
        more = len(loading) - _MAX_NAMED
        what = "still loading " + ", ".join(f"'{name_of(model)}'" for model in loading[:_MAX_NAMED])
        what += f" and {more} more" if more > 0 else ""
    else:
        what = "no executor has loaded its models"
    return Unavailable(f"model '{name_of(key)}' cannot be served yet: {what}")


def not_served(key: str, version: int, states: Sequence[tuple[int, str, str]]) -> CharoniaError:
    """The error for a request to a version that takes none (E5); `states` are those of the model's versions."""
    model = name_of(key)
    versions = {number for number, _, _ in states}
    if not versions:
        return NotFound(f"Request for unknown model: '{model}' is not found")
    if version < 0:
        return NotFound(f"Request for unknown model: '{model}' has no available versions")
    if version not in versions:
        return NotFound(f"Request for unknown model: '{model}' version {version} is not found")
    return Unavailable(NOT_READY.format(model=model, version=version))
