"""Which requests the loss of an executor counts against, for when it turns out that it was not lost. Pure.

An executor whose machine is overloaded misses its heartbeats and is taken for lost; later it is heard of again. That
was the infrastructure's doing, so what counted is taken back. `MAX_STALLS` times a request: one
that stops its executor's heartbeat whenever it runs would be run for ever else.
"""

from __future__ import annotations

from batcher.scheduling.observations import QueuedRequest

MAX_STALLS = 10
_MOST_EXECUTORS = 64
_MOST_REQUESTS = 1024


class Blame:
    """The counted losses of one model's requests, by executor."""

    __slots__ = ("_counted", "_stalls")

    def __init__(self) -> None:
        self._counted: dict[str, list[QueuedRequest]] = {}
        self._stalls: dict[bytes, int] = {}

    def lost(self, executor: str, counted: list[QueuedRequest]) -> None:
        """An executor was lost; its loss counts against the requests that are put into the list."""
        self._counted.pop(executor, None)
        self._counted[executor] = counted
        if len(self._counted) > _MOST_EXECUTORS:
            del self._counted[next(iter(self._counted))]

    def returned(self, executor: str) -> None:
        """It lives."""
        for request in self._counted.pop(executor, ()):
            stalls = self._stalls.get(request.id, 0)
            if stalls < MAX_STALLS:
                request.losses_apart -= 1
                self._stalls.pop(request.id, None)
                self._stalls[request.id] = stalls + 1
                if len(self._stalls) > _MOST_REQUESTS:
                    del self._stalls[next(iter(self._stalls))]
