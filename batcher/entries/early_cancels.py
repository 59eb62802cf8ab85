"""Cancels of requests that the scheduler does not know: they have ended, were not read yet, or are in a running wave.

Facts and queues are different streams, so a cancel may be read before its request: in the same reply of the log, or
long before where a window is full (`carriers.Windows`). If it were dropped, the request would run for no caller, and
a decoupled one might never end. The requests of a running wave come back alone if its batch fails or is returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from batcher.scheduling.observations import RequestCancelled, RequestQueued, WaveOpened
from charonia.wire import PREFIX_BYTES

_MOST = 16_384
"""Nearly all belong to requests that ended at that moment and will never match; the oldest are dropped."""


class EarlyCancels:
    """Of one model."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self.ids: dict[bytes, None] = {}
        self._prefixes: Counter[bytes] = Counter()
        """The same cancels by id prefix, which identifies a wave."""

    def __len__(self) -> int:
        return len(self.ids)

    def note(self, request_id: bytes) -> None:
        """Record the cancel of an unknown request."""
        if request_id in self.ids:
            return
        self.ids[request_id] = None
        self._prefixes[request_id[:PREFIX_BYTES]] += 1
        if len(self.ids) > self._most:
            self._forget(next(iter(self.ids)))

    def of(self, queued: Sequence[RequestQueued]) -> list[RequestCancelled | WaveOpened]:
        """Take the cancels of these requests, which are known from now on. A wave with a cancelled request is burst
        first.
        """
        if not self.ids:
            return []
        opened: list[RequestCancelled | WaveOpened] = []
        found: list[RequestCancelled] = []
        for request in queued:
            request_id = request.id
            if request.wave and request_id[:PREFIX_BYTES] in self._prefixes:
                opened.append(WaveOpened(request_id))
            if request_id in self.ids:
                found.append(RequestCancelled(request_id))
        for one in found:
            self._forget(one.id)
        return opened + found

    def forget_waves(self, ended: Iterable[RequestQueued]) -> None:
        """Drop the cancels of requests whose wave has ended: they will not come back."""
        for wave in ended:
            prefix = wave.id[:PREFIX_BYTES]
            if wave.wave and prefix in self._prefixes:
                for request_id in [prefix + bytes((index,)) for index in range(wave.count)]:
                    if request_id in self.ids:
                        self._forget(request_id)

    def _forget(self, request_id: bytes) -> None:
        del self.ids[request_id]
        prefix = request_id[:PREFIX_BYTES]
        self._prefixes[prefix] -= 1
        if not self._prefixes[prefix]:
            del self._prefixes[prefix]
