"""Reading windows: one lane's flood leaves another lane's stream read."""

from __future__ import annotations

from batcher.entries.carriers import CarrierEntry
from batcher.entries.windows import Windows


class Reader:
    def __init__(self) -> None:
        self.followed: dict[bytes, bytes] = {}

    def add(self, stream: bytes, after: bytes = b"0-0", *, consume: bool = False) -> None:
        self.followed[stream] = after

    def remove(self, stream: bytes) -> None:
        self.followed.pop(stream, None)


class Model:
    def __init__(self, window: int) -> None:
        self.reader = Reader()
        self.behind: list[bytes] = []
        self.windows = Windows(self.reader, window)  # type: ignore[arg-type]
        self.windows.catch_up = self.behind.append
        self.read: dict[bytes, list[CarrierEntry]] = {}

    def take(self, stream: bytes, entry_id: bytes, requests: int = 1) -> None:
        entry = CarrierEntry(stream, entry_id, requests)
        self.windows.read(stream, entry_id)
        self.windows.took(entry)
        self.windows.pause_if_full(stream)
        self.read.setdefault(stream, []).append(entry)

    def settle(self, stream: bytes) -> None:
        entry = self.read[stream][0]
        entry.remaining -= 1
        if not entry.remaining:
            self.read[stream].pop(0)
        self.windows.settled(entry)


def test_a_full_lane_is_left_alone_and_others_are_read() -> None:
    model = Model(4)
    model.windows.follow()
    model.windows.open(b"a", 1)
    model.windows.open(b"b", 2)
    model.take(b"a", b"5-0", 4)
    assert model.reader.followed == {b"b": b"0-0"}
    assert not model.windows.all_read
    assert (model.windows.lane(b"a"), model.windows.unsettled) == (1, 4)
    model.settle(b"a")
    assert b"a" not in model.reader.followed
    model.settle(b"a")
    assert model.reader.followed[b"a"] == b"5-0"
    assert model.windows.all_read


def test_what_is_behind_is_caught_up_once_at_a_time() -> None:
    model = Model(2)
    model.windows.open(b"a", 0)
    model.take(b"a", b"1-0", 2)
    model.windows.fell_behind(b"a", True)
    model.windows.follow()
    assert model.reader.followed == {}
    model.settle(b"a")
    model.settle(b"a")
    assert model.behind == [b"a"]
    model.take(b"a", b"2-0")
    model.settle(b"a")
    assert model.behind == [b"a"]
    model.windows.fell_behind(b"a", False)
    assert model.reader.followed == {b"a": b"2-0"}


def test_the_oldest_unfinished_entry_is_known() -> None:
    model = Model(2)
    model.windows.follow()
    for stream in (b"a", b"b"):
        model.windows.open(stream, 0)
    assert model.windows.oldest() is None
    model.take(b"a", b"10-0")
    model.take(b"b", b"9-5")
    assert model.windows.oldest() == b"9-5"
    model.settle(b"b")
    assert model.windows.oldest() == b"10-0"
    model.take(b"b", b"11-0", 2)
    model.settle(b"a")
    assert model.windows.oldest() == b"11-0"


def test_a_lane_opened_twice_is_one() -> None:
    model = Model(2)
    model.windows.open(b"a", 3)
    model.take(b"a", b"1-0")
    model.windows.open(b"a", 3)
    assert model.windows.unsettled == 1
    model.windows.close()
    model.settle(b"a")
    assert model.reader.followed == {}
