"""Lets the responses of a batch out in the order of its requests: `preserve_ordering` of decoupled models (S6). Pure.

Those of the first request that has not ended go out as they come, others are held until it is their turn. Order over
batches is the owner's: it gives out one at a time.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

MAX_HELD_BYTES = 64 << 20
"""Of one batch."""


class ResponseOrder(Generic[T]):
    """The responses of requests 0 to `count` - 1. Each request ends with its final response."""

    def __init__(self, count: int) -> None:
        self._next_index = 0
        self._held: list[list[tuple[T, int, bool]]] = [[] for _ in range(count)]
        self.held_bytes = 0

    def holds_back(self, index: int) -> bool:
        """Whether it is not yet the turn of this request."""
        return index > self._next_index

    def put(self, index: int, response: T, size_bytes: int, *, final: bool) -> list[T]:
        """What may go out now that this response has come."""
        self._held[index].append((response, size_bytes, final))
        self.held_bytes += size_bytes
        out: list[T] = []
        while self._next_index < len(self._held):
            ended = False
            for held, size, ends in self._held[self._next_index]:
                out.append(held)
                self.held_bytes -= size
                ended |= ends
            self._held[self._next_index].clear()
            if not ended:
                break
            self._next_index += 1
        return out

    def drop(self, index: int) -> int:
        """Forget what is held of a request; how many responses that were."""
        dropped = self._held[index]
        self._held[index] = []
        self.held_bytes -= sum(size for _, size, _ in dropped)
        return len(dropped)
