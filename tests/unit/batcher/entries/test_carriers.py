"""Reading windows: one lane's flood leaves another lane's stream read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from batcher.entries.carriers import Carried, CarrierEntry, Windows
from batcher.scheduling.observations import RequestQueued
from charonia.eventlog.port import Entry
from charonia.tensors import Tensor
from charonia.wire import FIELD_RECORD, FIELD_WAVE, pack_request, record_fields, request_meta


class Reader:
    def __init__(self) -> None:
        self.followed: dict[bytes, bytes] = {}

    def add(self, stream: bytes, after: bytes = b"0-0", *, consume: bool = False, take: Any = None) -> None:
        self.followed[stream] = after

    def remove(self, stream: bytes) -> None:
        self.followed.pop(stream, None)


class Deletions:
    def __init__(self) -> None:
        self.wanted: list[tuple[bytes, bytes]] = []

    def add(self, stream: bytes, entry_id: bytes) -> None:
        self.wanted.append((stream, entry_id))


class Model:
    def __init__(self, window: int) -> None:
        self.reader = Reader()
        self.deletions = Deletions()
        self.behind: list[bytes] = []
        self.windows = Windows(self.reader, window, self.deletions, lambda _stream, _entries: None)  # type: ignore[arg-type]
        self.windows.catch_up = self.behind.append
        self.queued: dict[bytes, list[RequestQueued]] = {}

    def take(self, stream: bytes, entry_id: bytes, requests: int = 1) -> None:
        """An entry of so many requests is read."""
        lane, entry = self.windows.lanes[stream], CarrierEntry(stream, entry_id, requests)
        lane.after = entry_id
        lane.unsettled += requests
        lane.entries[entry_id] = None
        self.windows.pause_if_full(stream)
        for _ in range(requests):
            carried = Carried(cast(Any, SimpleNamespace()), entry, 0)
            self.queued.setdefault(stream, []).append(RequestQueued(b"1" * 16, 1, 0, 1, 7, 0, 0, 0, carrier=carried))

    def settle(self, stream: bytes) -> None:
        request = self.queued[stream].pop(0)
        self.windows.settle([request])
        self.windows.settle([request])  # saying so again changes nothing


def test_requests_beside_one_that_cannot_be_read_are_queued() -> None:
    model = Model(4)
    model.windows.open(b"a", 1)
    tensor = Tensor.of("x", np.zeros((1, 1), np.uint8))
    meta = request_meta(1, "", [tensor], (), {})
    first, other, last = [
        pack_request(bytes([number]) * 16, b"g", b"", meta, [tensor.data], rows=1, signature=1, level=0, accepted_ns=1)
        for number in (1, 2, 3)
    ]
    for fields in ([FIELD_RECORD, first, FIELD_RECORD, other[:-1]], record_fields([first, other[:1] + b"\0", last])):
        queued = model.windows.read(b"a", [Entry(b"1-0", fields)], None, {})
        assert [request.id[0] for request in queued] == ([1] if fields[0] == FIELD_RECORD else [1, 3])
    assert model.deletions.wanted == []
    assert model.windows.read(b"a", [Entry(b"2-0", [FIELD_WAVE, b"none"])], None, {}) == []
    assert model.deletions.wanted == [(b"a", b"2-0")]


def test_a_full_lane_is_left_alone_and_others_are_read() -> None:
    model = Model(4)
    model.windows.follow()
    model.windows.open(b"a", 1)
    model.windows.open(b"b", 2)
    model.take(b"a", b"5-0", 4)
    assert model.reader.followed == {b"b": b"0-0"}
    assert not model.windows.all_read
    assert (model.windows.lanes[b"a"].number, model.windows.unsettled) == (1, 4)
    model.settle(b"a")
    assert b"a" not in model.reader.followed
    model.settle(b"a")
    assert model.reader.followed[b"a"] == b"5-0"
    assert model.windows.all_read
    assert model.deletions.wanted == []
    model.settle(b"a")
    model.settle(b"a")
    assert model.deletions.wanted == [(b"a", b"5-0")]
    assert (model.windows.settled_requests, model.windows.oldest()) == (4, None)


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


def test_a_lane_whose_requests_were_settled_before_it_is_followed_is_caught_up() -> None:
    model = Model(2)
    for stream in (b"a", b"b", b"c"):
        model.windows.open(stream, 0)
        model.take(stream, b"1-0", 2)
        model.windows.fell_behind(stream, stream != b"c")
    for stream in (b"a", b"a", b"c", b"c"):
        model.settle(stream)
    assert model.behind == []

    model.windows.follow()

    assert model.behind == [b"a"], "the window of b is full"
    assert model.reader.followed == {b"c": b"1-0"}
    model.windows.follow()
    assert model.behind == [b"a"]
    model.settle(b"b")
    assert model.behind == [b"a", b"b"]


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


def joined(model: Model, *streams: bytes) -> list[RequestQueued]:
    """A request that was read from several streams."""
    for stream in streams:
        model.windows.open(stream, 0)
        model.take(stream, b"1-0")
    requests = [model.queued[stream].pop() for stream in streams]
    for again in requests[1:]:
        model.windows.join(requests[0], again)
    return requests


def test_the_entries_of_a_request_are_settled_together_by_any_of_them() -> None:
    for settled in range(3):
        model = Model(4)
        model.windows.follow()
        requests = joined(model, b"a", b"b", b"c")
        assert model.deletions.wanted == []
        model.windows.settle([requests[settled]])
        assert sorted(model.deletions.wanted) == [(b"a", b"1-0"), (b"b", b"1-0"), (b"c", b"1-0")]
        assert (model.windows.unsettled, model.windows.oldest()) == (0, None)
        model.windows.settle(requests)
        assert len(model.deletions.wanted) == 3


def test_an_entry_of_a_request_that_is_settled_already_is_settled_at_once() -> None:
    model = Model(4)
    (known,) = joined(model, b"a")
    model.windows.settle([known])
    model.windows.open(b"b", 0)
    model.take(b"b", b"2-0")
    model.windows.join(known, model.queued[b"b"].pop())
    assert model.deletions.wanted == [(b"a", b"1-0"), (b"b", b"2-0")]
    assert model.windows.unsettled == 0


def test_attempts_are_as_in_either_entry_and_the_younger_record_is_sent() -> None:
    model = Model(4)
    model.windows.open(b"a", 0)
    model.windows.open(b"b", 0)
    model.take(b"a", b"1-0")
    model.take(b"b", b"1-0")
    known, again = model.queued[b"a"].pop(), model.queued[b"b"].pop()
    known.carrier.begun, again.carrier.restored = 2, True
    record = again.carrier.record
    model.windows.join(known, again)
    for request in (known, again):
        carried = request.carrier
        assert (carried.begun, carried.restored, carried.record is record) == (2, True, True)


def test_of_a_wave_with_two_entries_both_are_deleted() -> None:
    model = Model(4)
    known, again = joined(model, b"a", b"b")
    known.wave = again.wave = True
    model.windows.settle([known])
    assert (b"b", b"1-0") in model.deletions.wanted, "its settlement has deleted the other one"
    assert model.windows.unsettled == 0
