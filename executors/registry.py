"""Finds backends by the word `backend:` has in a configuration; each is made once, when a model first needs it.

Backends register in the entry-point group `charonia.backends`, the shipped ones included. Nothing is looked up or
imported before the first model that is not shipped with us asks: reading every installed distribution's metadata
costs more than starting an executor.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from typing import Any, cast

from charonia.backend import ENTRY_POINT_GROUP, Backend, ModelSource
from charonia.errors import InvalidArgument, Unsupported

from .backends.python.runtime_file import RUNTIME, python_based

_PYTHON = "python"
_SHIPPED = {
    "onnxruntime": "executors.backends.onnxruntime:OnnxRuntimeBackend",
    "python": "executors.backends.python:PythonBackend",
}
"""The same entry points as in pyproject.toml; a distribution cannot take these words away from us."""


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

    def get(self, name: str) -> Backend:
        """The backend of that word. Raises `InvalidArgument` for an unknown one, `Unsupported` for a broken one."""
        with self._lock:
            found = self._made.get(name)
            if found is None:
                found = self._made[name] = _load(name)
            return found


def prefers_gpu(backend: Backend) -> bool:
    """Whether an instance group of kind AUTO goes to a GPU when there is one (C8); a backend may say so itself."""
    says: Any = getattr(backend, "prefers_gpu", None)
    return bool(says()) if callable(says) else False


def _load(name: str) -> Backend:
    factory: Any
    if name in _SHIPPED:
        module_name, _, attribute = _SHIPPED[name].partition(":")
        factory = getattr(importlib.import_module(module_name), attribute)
        return cast("Backend", factory())
    from importlib.metadata import entry_points

    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            factory = entry.load()
        except ImportError as error:
            raise Unsupported(f"backend '{name}' cannot be imported: {error}") from error
        return cast("Backend", factory())
    raise InvalidArgument(
        f"unable to find backend '{name}': no installed package registers it in the entry-point group "
        f"'{ENTRY_POINT_GROUP}'"
    )
