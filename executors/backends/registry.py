"""Finds backends by the word `backend:` has in a configuration; each is made once, when a model first needs it.

Backends register in the entry-point group `charonia.backends`, the shipped ones included. Nothing is looked up or
imported before the first model that is not shipped with us asks: reading every installed distribution's metadata
costs more than starting an executor.
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

from .python.runtime_file import RUNTIME, python_based

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_PYTHON = "python"
_SHIPPED = {
    "onnxruntime": "executors.backends.onnxruntime:OnnxRuntimeBackend",
    "python": "executors.backends.python:PythonBackend",
}
"""The same entry points as in pyproject.toml; a distribution cannot take these words away from us."""

_LIBRARIES = {"onnxruntime": "onnxruntime"}
"""What a shipped backend cannot be imported without."""


class BackendRegistry:
    """The backends of one executor process. Safe to use from several threads."""

    def __init__(self, given: Mapping[str, Backend] | None = None) -> None:
        """`given` are backends that exist already, by their words: they go before all others."""
        self._given = dict(given or {})
        self._made: dict[str, Backend] = dict(self._given)
        self._lock = threading.Lock()

    def of(self, source: ModelSource) -> Backend:
        """The backend of a model: that of its word, or python for a python-based one (P20). Raises as `get` does.

        `runtime: "model.py"` asks for a python-based one even where the word is also a native backend's.
        """
        word = source.config.backend
        if word in self._given or word == _PYTHON or not word:
            return self.get(word)
        if source.config.runtime != RUNTIME:
            try:
                return self.get(word)
            except InvalidArgument:
                if python_based(source) is None:
                    raise
        elif python_based(source) is None:
            raise InvalidArgument(
                f"unable to find '{RUNTIME}' of backend '{word}', the runtime of model '{source.name}'"
            )
        return self.get(_PYTHON)

    def made(self) -> list[Backend]:
        """The backends that models have needed so far."""
        with self._lock:
            return list(self._made.values())

    def places(self) -> dict[str, str]:
        """The words of the backends that models have needed so far, and the files they are in."""
        with self._lock:
            made = dict(self._made)
        modules = {word: sys.modules.get(type(backend).__module__) for word, backend in sorted(made.items())}
        return {word: getattr(module, "__file__", None) or "" for word, module in modules.items()}

    def get(self, name: str) -> Backend:
        """The backend of that word. Raises `InvalidArgument` for an unknown one, `Unsupported` for a broken one."""
        with self._lock:
            found = self._made.get(name)
            if found is None:
                found = self._made[name] = _load(name)
            return found

    def has(self, name: str) -> bool:
        """Whether the backend could be had, without importing it."""
        if name in self._made or name in _SHIPPED:
            return name in self._made or _importable(_LIBRARIES.get(name, ""))
        return any(_importable(entry.module) for entry in _installed(name))

    def available(self) -> list[str]:
        """The words of all backends that could be had, sorted. Reads every installed distribution's metadata."""
        from importlib.metadata import entry_points

        words = {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)} | _SHIPPED.keys() | self._given.keys()
        return sorted(word for word in words if self.has(word))


def prefers_gpu(backend: Backend) -> bool:
    """Whether an instance group of kind AUTO goes to a GPU when there is one (C8); a backend may say so itself."""
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
        f"unable to find backend '{name}': no installed package registers it in the entry-point group "
        f"'{ENTRY_POINT_GROUP}'"
    )
