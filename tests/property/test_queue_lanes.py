"""A lane of a queue is never left: it is read, or being caught up, or its settlements will resume it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.entries.carriers import Carried, CarrierEntry, Windows
from batcher.scheduling.observations import RequestQueued

LANES = (b"a", b"b")


class Owner:
    """Reads lanes as an owner does: by pages until it follows them, and where they were longer than their window."""

    def __init__(self, window: int) -> None:
        nothing: Any = SimpleNamespace(add=lambda *_, **__: None, remove=lambda _stream: None)
        self.windows = Windows(nothing, window, nothing, lambda _stream, _entries: None)
        self.windows.catch_up = lambda stream: self.catching_up.add(stream)
        self.catching_up: set[bytes] = set()
        self.unsettled: dict[bytes, list[RequestQueued]] = {stream: [] for stream in LANES}
        self.is_following = False

    def open(self, stream: bytes) -> None:
        self.windows.open(stream, 0)

    def page(self, stream: bytes, requests: int, is_last: bool) -> None:
        """A page of what was written before this owner."""
        lane = self.windows.lanes.get(stream)
        if lane is None or lane.followed or (self.is_following and stream not in self.catching_up):
            return
        self._take(stream, requests)
        is_full = self.windows.is_full(stream)
        if is_full or is_last:
            self.catching_up.discard(stream)
            self.windows.fell_behind(stream, is_full)

    def read(self, stream: bytes, requests: int) -> None:
        """An entry of a lane that is followed."""
        if stream in self.windows.lanes and self.windows.lanes[stream].followed:
            self._take(stream, requests)
            self.windows.pause_if_full(stream)

    def _take(self, stream: bytes, requests: int) -> None:
        lane, entry = self.windows.lanes[stream], CarrierEntry(stream, b"1-0", requests)
        lane.unsettled += requests
        for _ in range(requests):
            carried = Carried(cast(Any, None), entry, 0)
            self.unsettled[stream].append(RequestQueued(b"1" * 16, 1, 0, 1, 7, 0, 0, 0, carrier=carried))

    def settle(self, stream: bytes, requests: int) -> None:
        settled, self.unsettled[stream] = self.unsettled[stream][:requests], self.unsettled[stream][requests:]
        for request in settled:
            self.windows.settle([request])

    def follow(self) -> None:
        self.is_following = True
        self.windows.follow()

    def left(self) -> list[bytes]:
        """Lanes without anything that will have them read on."""
        return [
            stream
            for stream, lane in self.windows.lanes.items()
            if not lane.followed and stream not in self.catching_up and not self.unsettled[stream]
        ]


LANE = st.sampled_from(LANES)
ACT = st.one_of(
    st.tuples(st.just("open"), LANE),
    st.tuples(st.just("page"), LANE, st.integers(0, 9), st.booleans()),
    st.tuples(st.just("read"), LANE, st.integers(1, 9)),
    st.tuples(st.just("settle"), LANE, st.integers(1, 20)),
)


@settings(max_examples=examples(300), deadline=None)
@given(window=st.integers(1, 8), before=st.lists(ACT, max_size=30), after=st.lists(ACT, max_size=30))
def test_no_lane_is_left(window: int, before: list[Any], after: list[Any]) -> None:
    owner = Owner(window)
    for name, *arguments in [*before, ("follow",), *after]:
        getattr(owner, name)(*arguments)
        assert not (owner.is_following and owner.left())
    for stream in LANES:
        owner.settle(stream, len(owner.unsettled[stream]))
    assert owner.left() == []
