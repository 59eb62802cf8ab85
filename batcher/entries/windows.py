"""How far each queue stream of a model is read, and what of it is unsettled. Decides nothing about requests.

Every stream, that is every lane, has a window of its own: one with thousands of requests is left alone for a while, and
another with one is still read. A stream that was longer than its window at takeover is `behind`: what follows was
written before this owner, so it is read by pages that ask which requests are settled (`restoring.restore_queue`).
"""

from __future__ import annotations

from collections.abc import Callable

from charonia.eventlog.port import START, StreamReader

from .carriers import CarrierEntry

_LEAST_PER_LANE = 128


class Lane:
    """One queue stream. `entries` are those read and not done, oldest first; `unsettled` counts their requests."""

    __slots__ = ("after", "behind", "catching_up", "entries", "followed", "number", "unsettled")

    def __init__(self, number: int) -> None:
        self.number = number
        self.after = START
        self.followed = False
        self.behind = False
        self.catching_up = False
        self.unsettled = 0
        self.entries: dict[bytes, None] = {}


class Windows:
    """The queue streams of one model. `catch_up(stream)` reads on where a stream fell behind; the owner sets it."""

    def __init__(self, reader: StreamReader, window_requests: int) -> None:
        self._reader = reader
        self._window = window_requests
        self.catch_up: Callable[[bytes], None] = lambda _stream: None
        self._lanes: dict[bytes, Lane] = {}
        self._following = False

    def __contains__(self, stream: object) -> bool:
        return stream in self._lanes

    @property
    def unsettled(self) -> int:
        """Requests that were read and are not settled."""
        return sum([lane.unsettled for lane in self._lanes.values()])

    @property
    def all_read(self) -> bool:
        """Whether every stream is followed to its end."""
        return all(lane.followed for lane in self._lanes.values())

    def streams(self) -> list[bytes]:
        return list(self._lanes)

    @property
    def has_several(self) -> bool:
        """Whether there is more than one stream."""
        return len(self._lanes) > 1

    def lane(self, stream: bytes) -> int:
        """The number of a stream's lane."""
        return self._lanes[stream].number

    def after(self, stream: bytes) -> bytes:
        """The id of the last entry read."""
        return self._lanes[stream].after

    def has_read(self, stream: bytes, entry_id: bytes) -> bool:
        """Whether an entry that is in a stream now was read."""
        return _place(entry_id) <= _place(self._lanes[stream].after)

    def holds(self, stream: bytes, entry_id: bytes) -> bool:
        """Whether an entry was read and is not done."""
        return entry_id in self._lanes[stream].entries

    def oldest(self) -> bytes | None:
        """The id of the oldest entry that is, or may be, unfinished; None when nothing is."""
        found = [next(iter(lane.entries)) for lane in self._lanes.values() if lane.entries]
        found += [lane.after for lane in self._lanes.values() if not lane.followed and not lane.entries]
        return min(found, key=_place, default=None)

    # -- reading ------------------------------------------------------------------------------------------------------

    def open(self, stream: bytes, lane: int) -> None:
        """A stream there is from now on; `lane` is the number of its tenants."""
        if stream not in self._lanes:
            self._lanes[stream] = Lane(lane)
            if self._following:
                self._follow(stream)

    def follow(self) -> None:
        """Start reading all streams, each from where it was read to."""
        self._following = True
        for stream, lane in self._lanes.items():
            if not lane.behind and not lane.followed:
                self._follow(stream)

    def read(self, stream: bytes, last_id: bytes) -> None:
        """Entries up to this one were read."""
        self._lanes[stream].after = last_id

    def took(self, carrier: CarrierEntry) -> None:
        """An entry with unsettled requests was read."""
        lane = self._lanes[carrier.stream]
        lane.unsettled += carrier.remaining
        lane.entries[carrier.entry_id] = None

    def is_full(self, stream: bytes) -> bool:
        return self._lanes[stream].unsettled >= self._limit()

    def pause_if_full(self, stream: bytes) -> bool:
        """Read no more of a stream whose window is full; whether it was read until now."""
        lane = self._lanes[stream]
        if lane.followed and lane.unsettled >= self._limit():
            lane.followed = False
            self._reader.remove(stream)
            return True
        return False

    def fell_behind(self, stream: bytes, behind: bool) -> None:
        """Whether what follows in a stream was written before this owner."""
        lane = self._lanes[stream]
        lane.behind, lane.catching_up = behind, False
        if self._following and not behind:
            self._follow(stream)

    def settled(self, carrier: CarrierEntry, count: int = 1) -> None:
        """So many of the entry's requests are settled; `remaining` is counted down already."""
        lane = self._lanes[carrier.stream]
        lane.unsettled -= count
        if carrier.remaining == 0:
            lane.entries.pop(carrier.entry_id, None)
        waits = self._following and not lane.followed and not lane.catching_up
        if waits and lane.unsettled <= self._limit() // 2:
            if lane.behind:
                lane.catching_up = True
                self.catch_up(carrier.stream)
            else:
                self._follow(carrier.stream)

    def close(self) -> None:
        self._following = False
        for stream in self._lanes:
            self._reader.remove(stream)

    def _follow(self, stream: bytes) -> None:
        lane = self._lanes[stream]
        lane.followed = True
        self._reader.add(stream, lane.after)

    def _limit(self) -> int:
        return max(min(self._window, _LEAST_PER_LANE), self._window // max(1, len(self._lanes)))


def _place(entry_id: bytes) -> tuple[int, int]:
    time, _, number = entry_id.partition(b"-")
    return int(time), int(number or 0)
