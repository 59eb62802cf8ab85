"""Which model a name means where several repositories may have one of it (R2). Pure.

A name that one model has means that one; of several it means the one in the namespace of the caller, and without one
it means none: clients cannot say a namespace, as with Triton.
"""

from __future__ import annotations

from collections.abc import Callable

from charonia.errors import InvalidArgument
from charonia.models.names import is_namespaced, model_key, name_of

_REMEMBERED = 4096


class Namespaces:
    """The keys that were heard of. `is_meant` says whether a model of a key is there, or was to be."""

    def __init__(self, is_meant: Callable[[str], bool]) -> None:
        self._is_meant = is_meant
        self._keys: dict[str, set[str]] = {}
        self._resolved: dict[tuple[str, str], str] = {}

    def __bool__(self) -> bool:
        """Whether there are any: without them a name is a key."""
        return bool(self._keys)

    def clear(self) -> None:
        self._keys.clear()
        self._resolved.clear()

    def heard_of(self, key: str) -> None:
        """Something is said of a model."""
        if is_namespaced(key):
            self._keys.setdefault(name_of(key), set()).add(key)

    def changed(self) -> None:
        """What `is_meant` says may be another now."""
        self._resolved.clear()

    def resolve(self, model: str, near: str = "") -> str:
        """The key of the one model of this name, the one in the namespace `near` before others; a key is itself.

        So is a name that no model has. Raises `InvalidArgument` when several have it and none is in that namespace.
        """
        if not self._keys:
            return model
        key = self._resolved.get((model, near))
        if key is None:
            if len(self._resolved) >= _REMEMBERED:
                self._resolved.clear()  # clients may ask for any name
            key = self._resolved[(model, near)] = self._choose(model, near)
        return key

    def _choose(self, model: str, near: str) -> str:
        keys = sorted(key for key in {*self._keys.get(model, ()), model} if self._is_meant(key))
        if near and model_key(near, model) in keys:
            return model_key(near, model)
        if len(keys) > 1:
            raise InvalidArgument(
                f"There are {len(keys)} identifiers of model '{model}' in global map, model namespace must be provided "
                "to resolve ambiguity."
            )
        return keys[0] if keys else model
