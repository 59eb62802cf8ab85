"""Cancels of requests that are not known here: of such as have ended, and of such as were not read yet.

Facts and queues are different streams, so a cancel may be read before the request it is about: in the same reply of the
log, or long before where a window is full (`windows`). Forgotten, it would let the request run for nobody, and one
that answers again and again for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from .scheduling.observations import RequestCancelled, RequestQueued

_MOST = 16_384
"""Nearly all are of requests that ended in the same moment, which nobody will ask for: the oldest go."""


class EarlyCancels:
    """Of one model."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._ids: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def note(self, request_id: bytes) -> None:
        """A request was cancelled that is not known."""
        self._ids[request_id] = None
        if len(self._ids) > self._most:
            del self._ids[next(iter(self._ids))]

    def of(self, queued: Sequence[RequestQueued]) -> list[RequestCancelled]:
        """The cancels of these requests, which are known from now on."""
        if not self._ids:
            return []
        found = [request.id for request in queued if request.id in self._ids]
        for request_id in found:
            del self._ids[request_id]
        return [RequestCancelled(request_id) for request_id in found]
