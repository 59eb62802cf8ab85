"""What this package needs of an object store, whoever's it is: a listing, and the content of one object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from charonia.errors import Unavailable


class RemoteError(Unavailable):
    """A store does not do what it is asked for; a sentence that says which repository, and what may help."""


class ObjectChanged(RemoteError):
    """An object is not the one that was listed any more."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object below a repository's prefix: `name` without that prefix.

    `stamp` is another one whenever its content is, and may be when only its time is. `is_directory`: it only marks that
    there is a directory, and its name has no slash at the end.
    """

    name: str
    size_bytes: int
    stamp: str
    is_directory: bool = False


class Sink(Protocol):
    """Where content goes, piece by piece."""

    def write(self, data: bytes, /) -> int: ...


class ObjectStore(Protocol):
    """One repository's store; used from several threads."""

    def objects(self, below: str = "") -> Iterator[RemoteObject]:
        """All objects whose names begin with `below`, in any order. Raises `RemoteError`."""

    def copy(self, found: RemoteObject, sink: Sink) -> None:
        """Write the content of an object, as it was when it was listed. Raises `RemoteError`, and what `sink` does."""

    def close(self) -> None:
        """Let connections go."""
