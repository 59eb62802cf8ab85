"""Finds backends by their name in a configuration (`backend:`), and creates each when a model first needs it.

All backends, the shipped ones included, register in the entry-point group `charonia.backends`. Entry points are read
only for a backend that is not shipped, because reading the metadata of every installed distribution takes longer than
starting an executor.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from charonia.backend import ENTRY_POINT_GROUP, Backend, ModelSource
from charonia.errors import InvalidArgument, Unsupported

from .python.process_settings import RUNTIME, python_based, searched

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_PYTHON = "python"
_SHIPPED = {
    "onnxruntime": "executors.backends.onnxruntime:OnnxRuntimeBackend",
    "python": "executors.backends.python:PythonBackend",
}
"""The same entry points as in pyproject.toml. Other distributions cannot replace them."""

_LIBRARIES = {"onnxruntime": "onnxruntime"}
"""The modules that shipped backends need."""


class BackendRegistry:
    """The backends of one executor process. Safe to use from several threads."""

    def __init__(self, existing: Mapping[str, Backend] | None = None) -> None:
        """`existing` are instances of backends by name. They take precedence over all others."""
        self._existing = dict(existing or {})
        self._created: dict[str, Backend] = dict(self._existing)
        self._lock = threading.Lock()

    def of(self, source: ModelSource) -> Backend:
        """Return the backend of a model: by name, or python for a python-based backend (P20). Raises as `get` does.

        `runtime: "model.py"` selects a python-based backend even when a native backend has the same name.
        """
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
            raise InvalidArgument(
                f"unable to find Python backend based backend library '{RUNTIME}' for model '{source.name}', "
                f"searched: '{searched(source)}'"
            )
        return self.get(_PYTHON)

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
        """Whether a backend is installed, without importing it."""
        if name in self._created or name in _SHIPPED:
            return name in self._created or _importable(_LIBRARIES.get(name, ""))
        return any(_importable(entry.module) for entry in _installed(name))

    def available(self) -> list[str]:
        """The names of all installed backends, sorted. Reads every installed distribution's metadata."""
        from importlib.metadata import entry_points

        names = (
            {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)} | _SHIPPED.keys() | self._existing.keys()
        )
        return sorted(name for name in names if self.has(name))


def prefers_gpu(backend: Backend) -> bool:
    """Whether an instance group of kind AUTO uses a GPU when there is one (C8). A backend may define it."""
    says: Any = getattr(backend, "prefers_gpu", None)
    return bool(says()) if callable(says) else False


def _installed(name: str) -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINT_GROUP, name=name)


def _importable(module: str) -> bool:
    try:
        return not module or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _load(name: str) -> Backend:
    factory: Any
    if name in _SHIPPED:
        module_name, _, attribute = _SHIPPED[name].partition(":")
        factory = getattr(importlib.import_module(module_name), attribute)
        return cast("Backend", factory())
    for entry in _installed(name):
        try:
            factory = entry.load()
        except ImportError as error:
            raise Unsupported(f"backend '{name}' cannot be imported: {error}") from error
        return cast("Backend", factory())
    raise InvalidArgument(
        f"unable to find backend library for backend '{name}', try specifying runtime on the model configuration."
    )
