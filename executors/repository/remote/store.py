"""The interface of an object store: a listing, and the content of one object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from charonia.errors import Unavailable


class RemoteError(Unavailable):
    """A call of a store failed. The message names the repository, and says what may help."""


class ObjectChanged(RemoteError):
    """An object has changed since it was listed."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object in a repository. `name` is relative to the repository's prefix.

    `stamp` changes with the content, and may change with the time alone. `is_directory`: the object only marks a
    directory; its name has no trailing slash.
    """

    name: str
    size_bytes: int
    stamp: str
    is_directory: bool = False


class Sink(Protocol):
    """Receives content piece by piece."""

    def write(self, data: bytes, /) -> int: ...


class ObjectStore(Protocol):
    """One repository's store. Used from several threads."""

    def objects(self, below: str = "") -> Iterator[RemoteObject]:
        """Yield all objects whose names begin with `below`, in any order. Raises `RemoteError`."""

    def copy(self, found: RemoteObject, sink: Sink) -> None:
        """Write an object's content, as it was when listed, to `sink`. Raises `RemoteError`, and what `sink` raises."""

    def close(self) -> None:
        """Close the connections."""
