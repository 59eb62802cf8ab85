"""Blocks of memory of one instance, each used again once nothing refers to what was made of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Generic, Protocol, TypeVar

from charonia.cuda.cuda_library import CudaError

_LEAST_BYTES = 4096
_MOST_TIMES = 8
"""A block serves what is at least an eighth of it."""


class Block(Protocol):
    """Memory that a driver call frees."""

    size_bytes: int

    def free(self) -> None: ...


B = TypeVar("B", bound=Block)


class RecycledBlocks(Generic[B]):
    """`make` makes a block of a size, or none; `current` makes the device's context the thread's.

    Blocks are taken in the instance's thread. They come back in any thread, as the last reference goes.
    """

    def __init__(self, make: Callable[[int], B | None], current: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._current = current
        self._unused: list[B] = []
        self._is_closed = False

    def take(self, size_bytes: int) -> B | None:
        """A block with at least so many bytes; None where none can be made. The context is current."""
        fitting = [b for b in self._unused if size_bytes <= b.size_bytes <= max(_LEAST_BYTES, size_bytes * _MOST_TIMES)]
        if fitting:
            block = min(fitting, key=lambda one: one.size_bytes)
            self._unused.remove(block)
            return block
        rounded = 1 << (max(_LEAST_BYTES, size_bytes) - 1).bit_length()
        made = self._tried(rounded)
        if made is None and self._unused:  # of other sizes
            self._free()
            made = self._tried(rounded)
        return made if made is not None else self._make(size_bytes)

    def _tried(self, size_bytes: int) -> B | None:
        try:
            return self._make(size_bytes)
        except CudaError:  # less may be had
            return None

    def lend(self, block: B, user: object) -> None:
        """A block that was taken comes back at the end of `user`."""
        # it outlives this object, as a user may
        weakref.finalize(user, self._come_back, block).atexit = False

    def close(self) -> None:
        """Free all blocks; those that are used still when their users end. The context is current."""
        self._is_closed = True
        self._free()

    def _come_back(self, block: B) -> None:
        self._unused.append(block)
        if self._is_closed:  # maybe only since a moment: another thread may have freed the rest meanwhile
            with suppress(CudaError), self._current():
                self._free()

    def _free(self) -> None:
        with suppress(IndexError):
            while True:
                self._unused.pop().free()
