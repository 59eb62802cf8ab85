"""Releases the responses of a batch in the order of its requests: `preserve_ordering` of decoupled models (S6). Pure.

Responses of the first open request are released at once, others are held back. The owner keeps the order of batches:
it dispatches one at a time.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

MAX_HELD_BYTES = 64 << 20
"""The limit of held responses of one batch."""


class ResponseOrder(Generic[T]):
    """Orders the responses of requests 0 to `count` - 1. Each request ends with its final response."""

    def __init__(self, count: int) -> None:
        self._next_index = 0
        self._held: list[list[tuple[T, int, bool]]] = [[] for _ in range(count)]
        self.held_bytes = 0

    def holds_back(self, index: int) -> bool:
        """Whether responses of this request are held back now."""
        return index > self._next_index

    def put(self, index: int, response: T, size_bytes: int, *, final: bool) -> list[T]:
        """Add a response; return the responses that may be sent now."""
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
        """Drop the held responses of a request; return how many there were."""
        dropped = self._held[index]
        self._held[index] = []
        self.held_bytes -= sum(size for _, size, _ in dropped)
        return len(dropped)
