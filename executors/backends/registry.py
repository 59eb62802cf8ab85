"""Finds backends by their name in a configuration (`backend:`), and creates each when a model first needs it.

All backends, the shipped ones included, register in the entry-point group `charonia.backends`. Entry points are read
only for a backend that is not shipped, because reading the metadata of every installed distribution takes longer than
starting an executor.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from charonia.backend import API, ENTRY_POINT_GROUP, Backend, ModelSource
from charonia.errors import CharoniaError, InvalidArgument, Unsupported
from executors.configuration.declarations import SHIPPED, Declaration, declared_by, shipped

from .python.model_environments import ENVIRONMENT
from .python.process_settings import RUNTIME, python_based, searched

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_PYTHON = "python"
_RUNS_CLASSES = frozenset({"pytorch"})
"""Backends that themselves run a model with `runtime: "model.py"`."""
_REMEDIES = {
    "tensorrtllm": " Charonia has none of this name: docs/howto/tensorrt-llm.md says how its tensors are served."
}
"""What to do about a backend of Triton's that there is not, after Triton's words."""


class BackendRegistry:
    """The backends of one executor process. Safe to use from several threads."""

    def __init__(self, existing: Mapping[str, Backend] | None = None) -> None:
        """`existing` are instances of backends by name. They take precedence over all others."""
        self._existing = dict(existing or {})
        self._created: dict[str, Backend] = dict(self._existing)
        self._lock = threading.Lock()

    def of(self, source: ModelSource) -> Backend:
        """Return the backend of a model: by name, or python for a python-based backend (P20). Raises as `get` does.

        `runtime: "model.py"` selects a python-based backend even when a native backend has the same name. Raises
        `Unsupported` for a backend whose library is not installed.
        """
        found = self._of(source)
        if has_own_environment(source, found):
            return found
        for module, remedy in Declaration.of(found).requires:
            if not _importable(module):
                if source.config.backend != _PYTHON and python_based(source) is not None:
                    return self.get(_PYTHON)  # the operator has put Triton's own in its place
                raise Unsupported(
                    f"model '{source.name}' needs the {found.name} backend, whose library is not installed: install "
                    f"{remedy} (No module named '{module}')"
                )
        return found

    def _of(self, source: ModelSource) -> Backend:
        name = source.config.backend
        if name in self._existing or name == _PYTHON or not name:
            return self.get(name)
        if source.config.runtime != RUNTIME:
            try:
                return self.get(name)
            except InvalidArgument:
                if python_based(source) is None:
                    raise
        elif python_based(source) is None:
            if name in _RUNS_CLASSES:
                return self.get(name)
            raise InvalidArgument(
                f"unable to find Python backend based backend library '{RUNTIME}' for model '{source.name}', "
                f"searched: '{searched(source)}'"
            )
        return self.get(_PYTHON)

    def is_movable(self, backend: Backend) -> bool:
        """Whether another process can have such a backend for one of its models."""
        return backend.name != _PYTHON and backend not in self._existing.values()

    def created(self) -> list[Backend]:
        """The backends that models have used so far."""
        with self._lock:
            return list(self._created.values())

    def files(self) -> dict[str, str]:
        """The names of the backends that models have used so far, and their modules' files."""
        with self._lock:
            created = dict(self._created)
        modules = {name: sys.modules.get(type(backend).__module__) for name, backend in sorted(created.items())}
        return {name: getattr(module, "__file__", None) or "" for name, module in modules.items()}

    def get(self, name: str) -> Backend:
        """Return a backend by name. Raises `InvalidArgument` for an unknown one, `Unsupported` for a broken one."""
        with self._lock:
            found = self._created.get(name)
            if found is None:
                found = self._created[name] = _load(name)
            return found

    def has(self, name: str) -> bool:
        """Whether a backend and its library are installed, without importing the library."""
        if name in self._existing:
            return True
        known = name in SHIPPED or any(_importable(entry.module) for entry in _installed(name))
        return known and all(_importable(module) for module, _ in declared_by(name).requires)

    def available(self) -> list[str]:
        """The names of all installed backends, sorted. Reads every installed distribution's metadata."""
        from importlib.metadata import entry_points

        names = {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)} | SHIPPED.keys() | self._existing.keys()
        return sorted(name for name in names if self.has(name))


def has_own_environment(source: ModelSource, backend: Backend) -> bool:
    """Whether the libraries of a model are those of its own environment, in whose process its backend runs."""
    return getattr(backend, "isolation", "none") != "none" and ENVIRONMENT in source.config.parameters


def prefers_gpu(backend: Backend) -> bool:
    """Whether an instance group of kind AUTO uses a GPU when there is one (C8); not without the backend's library."""
    says: Any = getattr(backend, "prefers_gpu", None)
    try:
        return bool(says()) if callable(says) else False
    except ImportError:
        return False


def _installed(name: str) -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINT_GROUP, name=name)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _checked(name: str, backend: Any) -> Backend:
    """Raises `Unsupported` for a backend that was written for another version of the contract.

    Raises `TypeError` for one that declares something else than the contract has.
    """
    api = getattr(backend, "api", API)
    older = not callable(getattr(backend, "load", None))
    if older or api[0] != API[0] or api[1] > API[1]:
        written_for = "a version before 1.0" if older else f"version {api[0]}.{api[1]}"
        raise Unsupported(
            f"backend '{name}' was written for {written_for} of the contract of backends (`charonia.backend`), this is "
            f"version {API[0]}.{API[1]}: install a release of it that fits"
        )
    Declaration.of(backend)
    return cast("Backend", backend)


def _load(name: str) -> Backend:
    if name in SHIPPED:
        return _checked(name, shipped(name)())
    for entry in _installed(name):
        try:
            return _checked(name, entry.load()())
        except CharoniaError:
            raise
        except ImportError as error:
            raise Unsupported(f"backend '{name}' cannot be imported: {error}") from error
        except Exception as error:  # code of others: it must not end the loads of other models
            raise Unsupported(f"backend '{name}' cannot be created: {type(error).__name__}: {error}") from error
    raise InvalidArgument(
        f"unable to find backend library for backend '{name}', try specifying runtime on the model configuration."
        f"{_REMEDIES.get(name, '')}"
    )
