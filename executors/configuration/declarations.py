"""What backends declare of themselves as class attributes, read without creating them or importing their libraries.

Modules of shipped backends are imported one by one, as far as a search needs. Of other distributions, a model that
names its backend has that one's module imported; one that names none has what is registered as `charonia.formats`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

from charonia.backend import ENTRY_POINT_GROUP, FORMATS_ENTRY_POINT_GROUP, Backend, Feature, Format

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_log = logging.getLogger(__name__)

SHIPPED = {
    "onnxruntime": "executors.backends.onnxruntime:OnnxRuntimeBackend",
    "python": "executors.backends.python:PythonBackend",
    "tensorflow": "executors.backends.openvino:TensorFlowBackend",
    "openvino": "executors.backends.openvino:OpenVinoBackend",
    "tensorrt": "executors.backends.tensorrt:TensorRtBackend",
    "pytorch": "executors.backends.pytorch:PyTorchBackend",
    "fil": "executors.backends.fil:FilBackend",
    "llm": "executors.backends.llm:LlmBackend",
    "vllm": "executors.backends.vllm:VllmBackend",
}
"""The same entry points as in pyproject.toml, in order of precedence. Only `_STAND_INS` replace any."""

_STAND_INS = {"tensorflow": "charonia-tensorflow"}
"""Distributions whose backend is used in place of the shipped one of that name, where they are installed."""

BOUND = "bound"
"""The backend of a hosting program's callables, which no distribution brings."""

# Triton's that are not shipped; an installed backend of the name takes precedence
_OF_TRITON = {
    "dali": (Format(files=("model.dali",)),),
}


@dataclass(frozen=True, slots=True)
class Declaration:
    """The class attributes of a backend, checked."""

    formats: tuple[Format, ...] = ()
    supports: frozenset[Feature] = frozenset()
    requires: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(backend: Any) -> Declaration:
        """What a backend or its class declares. Raises `TypeError` for something else than the contract has."""
        supports = frozenset(getattr(backend, "supports", Backend.supports))
        unknown = supports.difference(get_args(Feature))
        if unknown:
            raise TypeError(f"'supports' has {', '.join(sorted(unknown))}, of {', '.join(get_args(Feature))}")
        formats = _checked_formats(getattr(backend, "formats", Backend.formats))
        return Declaration(formats, supports, tuple(getattr(backend, "requires", Backend.requires)))


def shipped(name: str) -> Any:
    """The class of a shipped backend, or of the distribution that stands in for it."""
    other = _stand_in(name) if name in _STAND_INS else None
    if other is not None:
        return other.load()
    module, _, attribute = SHIPPED[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def declared_by(name: str) -> Declaration:
    """What the backend of a name declares; nothing for an unknown one."""
    if name in SHIPPED:
        return Declaration.of(shipped(name))
    return Declaration() if name in ("", BOUND) else _installed(name)


def formats_of(name: str) -> tuple[Format, ...]:
    """The formats of a backend, the usual one first; none for an unknown backend."""
    return declared_by(name).formats or _OF_TRITON.get(name, ())


def every_format() -> Iterator[tuple[str, Format]]:
    """Each format after the name of its backend, in order of precedence."""
    for name in SHIPPED:
        yield from ((name, found) for found in formats_of(name))
    for name, formats in (*_registered_formats().items(), *_OF_TRITON.items()):
        yield from ((name, found) for found in formats)


@cache
def _stand_in(name: str) -> EntryPoint | None:
    from importlib.metadata import entry_points

    found = entry_points(group=ENTRY_POINT_GROUP, name=name)
    return next((entry for entry in found if entry.dist is not None and entry.dist.name == _STAND_INS[name]), None)


@cache
def _installed(name: str) -> Declaration:
    """What a backend of another distribution declares."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return Declaration.of(entry.load())
        except Exception as error:  # code of others; a load of such a model fails with the reason
            _log.warning("backend '%s' cannot be asked for its formats: %s: %s", name, type(error).__name__, error)
    return Declaration()


@cache
def _registered_formats() -> dict[str, tuple[Format, ...]]:
    from importlib.metadata import entry_points

    found: dict[str, tuple[Format, ...]] = {}
    for entry in sorted(entry_points(group=FORMATS_ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        if entry.name in SHIPPED:
            continue
        try:
            found.setdefault(entry.name, _checked_formats(entry.load()))
        except Exception as error:  # code of others: it must not keep other models from being found
            _log.warning("the formats of backend '%s' cannot be read: %s: %s", entry.name, type(error).__name__, error)
    return found


def _checked_formats(declared: Any) -> tuple[Format, ...]:
    formats = tuple(declared)
    if not all(isinstance(found, Format) for found in formats):
        raise TypeError("'formats' must be a tuple of charonia.backend.Format")
    return formats
