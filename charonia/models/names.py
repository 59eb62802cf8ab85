"""What a model may be called (R11), and how models of one name are told apart (R2).

With `--model-namespacing` each repository is a namespace: its absolute path or its URL. A model's *key* is then
`<namespace>::<name>`, without it the name alone. Keys say which model is meant everywhere in the log and between the
parts; clients know names. A name has no slash and a namespace has, so that the two forms differ.

A name that one model has means that one; of several it means the one in the namespace of the caller, and without one
it means none: clients cannot say a namespace, as with Triton.
"""

from __future__ import annotations

from collections.abc import Callable

from charonia.errors import InvalidArgument

SEPARATOR = "::"
_REMEMBERED = 4096


def check_model_name(name: str) -> None:
    """Raises `InvalidArgument` for a name that is empty, could leave the repository's directory, or is not UTF-8.

    Names like "..a", "a\\b" and "." pass, as in Triton: a model that does not exist has its own error (R20).
    """
    trimmed = name.strip()
    if not trimmed:
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if trimmed == ".." or "/" in name or "\0" in name:
        raise InvalidArgument(f"invalid model name '{name}', model name must not contain path traversal characters")
    try:
        name.encode()
    except UnicodeEncodeError:  # a directory's name may be any bytes
        raise InvalidArgument(f"invalid model name {name!a}, model name must be UTF-8") from None


def can_be_model(name: str) -> bool:
    """Whether `check_model_name` passes a name."""
    try:
        check_model_name(name)
    except InvalidArgument:
        return False
    return True


def model_key(namespace: str, name: str) -> str:
    """The key of a model in a namespace; "" means none."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def is_namespaced(key: str) -> bool:
    return "/" in key


def name_of(key: str) -> str:
    """The name that clients use for a model."""
    return _parts(key)[1]


def namespace_of(key: str) -> str:
    """The namespace of a key, "" for none."""
    return _parts(key)[0]


def can_be_namespace(path: str) -> bool:
    """Whether keys with this path as namespace can be split again."""
    last = path.rpartition("/")[2]
    return "/" in path and bool(last) and SEPARATOR not in last and not last.endswith(":")


def _parts(key: str) -> tuple[str, str]:
    parent, slash, last = key.rpartition("/")
    if not slash:
        return "", key
    directory, _, name = last.partition(SEPARATOR)
    return f"{parent}/{directory}", name


class Namespaces:
    """The known keys. `is_meant` says whether a model with this key exists, or did."""

    def __init__(self, is_meant: Callable[[str], bool]) -> None:
        self._is_meant = is_meant
        self._keys: dict[str, set[str]] = {}
        self._resolved: dict[tuple[str, str], str] = {}
        self.any = False
        """Whether there are namespaces; otherwise a name is a key."""

    def clear(self) -> None:
        self.any = False
        self._keys.clear()
        self._resolved.clear()

    def heard_of(self, key: str) -> None:
        """A fact names this model."""
        if is_namespaced(key):
            self._keys.setdefault(name_of(key), set()).add(key)
            self.any = True

    def changed(self) -> None:
        """Results of `is_meant` may have changed."""
        self._resolved.clear()

    def resolve(self, model: str, near: str = "") -> str:
        """The key of the only model of this name, or of the one in the namespace `near`; a key is itself.

        So is a name that no model has. Raises `InvalidArgument` if several models have it and none is in that
        namespace.
        """
        if not self._keys:
            return model
        key = self._resolved.get((model, near))
        if key is None:
            if len(self._resolved) >= _REMEMBERED:
                self._resolved.clear()  # bounded: clients may ask for any name
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
