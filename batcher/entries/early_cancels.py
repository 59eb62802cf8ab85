"""Cancels of requests that are not known here: of such as have ended, and of such as were not read yet.

Facts and queues are different streams, so a cancel may be read before the request it is about: in the same reply of the
log, or long before where a window is full (`windows`). Forgotten, it would let the request run for no caller, and one
that answers again and again for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from batcher.scheduling.observations import RequestCancelled, RequestQueued, WaveOpened
from charonia.wire import PREFIX_BYTES

_MOST = 16_384
"""Nearly all are of requests that ended in the same moment, which no request will match: the oldest go."""


class EarlyCancels:
    """Of one model."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self.ids: dict[bytes, None] = {}
        self._prefixes: Counter[bytes] = Counter()
        """Of those ids: a wave is known by it."""

    def __len__(self) -> int:
        return len(self.ids)

    def note(self, request_id: bytes) -> None:
        """A request was cancelled that is not known."""
        if request_id in self.ids:
            return
        self.ids[request_id] = None
        self._prefixes[request_id[:PREFIX_BYTES]] += 1
        if len(self.ids) > self._most:
            self._forget(next(iter(self.ids)))

    def of(self, queued: Sequence[RequestQueued]) -> list[RequestCancelled | WaveOpened]:
        """The cancels of these requests, which are known from now on. A wave of cancelled requests is burst first."""
        if not self.ids:
            return []
        opened = [WaveOpened(r.id) for r in queued if r.wave and r.id[:PREFIX_BYTES] in self._prefixes]
        found = [request.id for request in queued if request.id in self.ids]
        for request_id in found:
            self._forget(request_id)
        return [*opened, *(RequestCancelled(request_id) for request_id in found)]

    def _forget(self, request_id: bytes) -> None:
        del self.ids[request_id]
        prefix = request_id[:PREFIX_BYTES]
        self._prefixes[prefix] -= 1
        if not self._prefixes[prefix]:
            del self._prefixes[prefix]
