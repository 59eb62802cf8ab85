"""A door: how many requests make a wave, what a wave says of each, and who gets which answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_bench import GATEWAY, MODEL, Front, LaneBench

from batcher.entries.bursting import burst_wave
from charonia import failpoints, keys
from charonia.clock import wall_ns
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError
from charonia.eventlog.port import Sent
from charonia.facts.events import RequestCancelled
from charonia.tensors import Buffer
from charonia.wire import PREFIX_BYTES, WaveReply, pack_wave_reply, reply_meta, unpack_wave_reply
from gateway.lane.door import Call, values_of
from gateway.lane.gathering import SLOW_NS


@pytest.fixture
def bench() -> Iterator[LaneBench]:
    with LaneBench() as bench:
        yield bench


@pytest.mark.parametrize(
    ("block", "rows", "request_", "most"),
    [
        ("dynamic_batching { }", 8, {}, 8),
        ("dynamic_batching { }", 8, {"batch": 3}, 2),
        ("dynamic_batching { }", 8, {"batch": 8}, 1),
        ("dynamic_batching { }", 64, {}, 64),
        ("dynamic_batching { }", 1000, {}, 64),
        ("dynamic_batching { }", 64, {"width": 4096}, 16),
        ("dynamic_batching { }", 8, {"width": 4096}, 8),
        ("", 8, {}, 1),
    ],
)
def test_a_wave_is_no_more_than_a_batch_a_group_of_ids_and_a_quarter_of_a_megabyte(
    block: str, rows: int, request_: dict[str, int], most: int
) -> None:
    with LaneBench(block, rows=rows) as bench:
        assert bench.front(**request_).door.most == most


_NAMES = st.sampled_from([b"", b"", b"a", b"seven-7"])
_DEADLINES = st.sampled_from([0, 0, 5, 2**62])


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 999), _NAMES, _DEADLINES), min_size=1, max_size=20), st.integers(1, 3))
def test_what_leaves_is_what_came(requests: list[tuple[int, bytes, int]], inputs: int) -> None:
    with LaneBench(inputs=inputs) as bench:
        door = bench.front(timeout_us=7).door
        front = Front(bench, door)
        calls = [front.call(*one) for one in requests]
        door.waiting += calls
        before_ns = wall_ns()
        count = bench.now(door.send)
        bench.settle()
        sent = [one.wave for one in bench.sent()]
        assert (count, door.waiting) == (len(sent), [])
        assert [wave.count for wave in sent] == [8] * (len(calls) // 8) + [len(calls) % 8] * (len(calls) % 8 > 0)
        assert len({wave.prefix for wave in sent}) == len(sent)
        records = [record for wave in sent for record in wave.requests()]
        for call, record, (value, client_id, deadline_ns) in zip(calls, records, requests, strict=True):
            assert call.wave is not None
            assert record.id == call.wave.prefix + bytes((call.index,))
            values = [int.from_bytes(tensor.data, "little") for tensor in record.inputs()]
            assert values == [value, value + 1000, value + 2000][:inputs]
            assert (record.client_id, record.deadline_ns) == (client_id.decode(), deadline_ns)
            assert (record.endpoint, record.rows, record.level, record.timeout_us) == (GATEWAY, 1, 0, 7)
            assert before_ns <= record.accepted_ns <= wall_ns()
        for wave in sent:
            assert any(wave.client_ids) == bool(wave.client_ids), "what no request has is not in the record"
            assert any(wave.deadlines) == bool(wave.deadlines)


def test_as_many_full_waves_leave_as_there_are(bench: LaneBench) -> None:
    front = bench.front()
    front.door.waiting += [front.call(value) for value in range(21)]
    assert bench.now(lambda: front.door.send(full_only=True)) == 2
    bench.settle()
    assert bench.values() == [list(range(8)), list(range(8, 16))]
    assert len(front.door.waiting) == 5
    assert bench.now(lambda: front.door.send(full_only=True)) == 0


def test_inputs_that_differ_in_length_have_their_sizes() -> None:
    """Of BYTES models, whose requests are read in full and awaited."""
    texts = [b"\1\0\0\0a", b"\4\0\0\0four", b"\0\0\0\0"]
    with LaneBench(datatype="TYPE_STRING") as bench:
        asked = [bench.begin(bench.service.infer(bench.text_request(text))) for text in texts]
        bench.settle()
        waves = [sent.wave for sent in bench.sent()]
        assert [wave.sizes for wave in waves] == [((5,),), ((8, 4),)]
        assert [bytes(one.inputs()[0].data) for wave in waves for one in wave.requests()] == texts
        assert [bench.waves._under_way[wave.prefix].size_bytes for wave in waves] == [5, 12]
        for task in asked:
            task.cancel()
        bench.settle()


# -- what cannot leave -------------------------------------------------------------------------------------------------


def test_what_finds_no_room_goes_the_full_way(bench: LaneBench) -> None:
    front = bench.front()
    held = bench.lease.held_requests
    calls = [front.call(value) for value in range(held + 9)]
    front.door.waiting += calls
    assert bench.now(front.door.send) == held // 8
    bench.settle()
    assert front.told == [(call, "left") for call in calls[held:]]
    bench.answer()
    assert len(front.told) == len(calls)
    assert bench.lease.is_idle


def went_the_full_way(bench: LaneBench, front: Front, calls: list[Call]) -> None:
    """These calls of a front left the lane, once each, and nothing is counted for them."""
    bench.settle()
    assert front.told == [(call, "left") for call in calls]
    assert [call.wave for call in calls] == [None] * len(calls)
    assert bench.waves._under_way == {}
    assert bench.lease.is_idle


def test_what_the_log_does_not_take_goes_the_full_way(bench: LaneBench) -> None:
    front = bench.front()
    bench.gate.is_away = True
    calls = front.send(1, 2, 3)
    went_the_full_way(bench, front, calls)
    bench.gate.is_away = False
    front.send(4)
    assert bench.values() == [[4]], "nothing is counted as under way"


def test_what_cannot_be_packed_goes_the_full_way(bench: LaneBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> bytes:
        raise ValueError("broken")

    front = bench.front()
    with monkeypatch.context() as patch:
        patch.setattr("gateway.lane.door.wave_head", broken)
        calls = front.send(1, 2, 3)
    went_the_full_way(bench, front, calls)
    front.send(4)
    assert bench.values() == [[4]], "nothing is counted as under way"


def test_what_was_handed_on_before_an_error_is_answered_once(bench: LaneBench, monkeypatch: pytest.MonkeyPatch) -> None:
    send = bench.gate.send

    def breaks(stream: bytes, record: Sequence[Buffer], done: Sent) -> bool:
        send(stream, record, done)
        raise ValueError("a defect")

    front = bench.front()
    with monkeypatch.context() as patch:
        patch.setattr(bench.waves, "_send_wave", breaks)
        calls = front.send(1, 2, 3)
    went_the_full_way(bench, front, calls)
    assert bench.values() == [[1, 2, 3]], "the log has it all the same"
    bench.answer()
    assert len(front.told) == 3
    assert bench.waves.duplicates == 1
    assert bench.is_quiet()


def test_all_that_waits_may_be_sent_the_full_way(bench: LaneBench) -> None:
    front = bench.front()
    calls = [front.call(value) for value in range(3)]
    front.door.waiting += calls
    front.door.leave_all()
    assert front.told == [(call, "left") for call in calls]
    assert front.door.waiting == []


@pytest.mark.parametrize("way", ["the log is away", "all leave"])
@pytest.mark.parametrize("fails_too", [False, True])
def test_what_cannot_go_the_full_way_costs_no_other_call(
    bench: LaneBench, monkeypatch: pytest.MonkeyPatch, way: str, fails_too: bool
) -> None:
    front, other = bench.front(), bench.front()
    leave, fail = Front.leave_lane, Front.fail

    def breaks(self: Front, call: Call) -> None:
        if call is calls[0]:
            raise ValueError("a defect")
        leave(self, call)

    def breaks_too(self: Front, call: Call, error: CharoniaError) -> None:
        if fails_too:
            raise ValueError("another")
        fail(self, call, error)

    monkeypatch.setattr(Front, "leave_lane", breaks)
    monkeypatch.setattr(Front, "fail", breaks_too)
    bench.gate.is_away = True
    calls = [front.call(value) for value in range(3)]
    others = [other.call(value) for value in range(2)]
    if way == "all leave":
        front.door.waiting += calls
        front.door.leave_all()
    else:
        front._append(calls)
        other.read(*others)
        bench.settle()
        assert other.told == [(call, "left") for call in others]
    assert [front.told_of(call) for call in calls[1:]] == [["left"], ["left"]]
    assert [call.wave for call in calls] == [None] * 3
    found = [str(error) for error in front.told_of(calls[0])]
    assert found == ([] if fails_too else ["the request cannot be sent: ValueError: a defect"])
    assert front.door.counts.failures["OTHER"] == 1
    assert bench.is_quiet()


# -- callers that go ---------------------------------------------------------------------------------------------------


def test_a_caller_that_goes_before_its_wave_is_never_sent(bench: LaneBench) -> None:
    bench.prove()
    front = bench.front()
    front.send(0)
    _, gone, _ = front.send(1, 2, 3)
    gone.abandon()
    gone.abandon()
    bench.settle()
    bench.answer()
    assert bench.values() == [[1, 3]]
    bench.answer()
    assert front.answers == [0, 1, 3]
    assert bench.owner_was_told() == []
    assert front.door.counts.failures["CANCELED"] == 1


def test_of_a_caller_that_goes_later_the_owner_is_told(bench: LaneBench) -> None:
    front = bench.front()
    counts = front.door.counts
    succeeded = counts.success
    _, gone, _ = front.send(1, 2, 3)
    (sent,) = bench.sent()
    bench.now(gone.abandon)
    bench.now(gone.abandon)
    bench.settle()
    assert bench.owner_was_told() == [RequestCancelled(sent.wave.ids()[1])]
    bench.answer()
    assert front.answers == [1, 3]
    assert (counts.failures["CANCELED"], counts.success - succeeded) == (1, 2)
    assert bench.lease.is_idle


def pass_seconds(bench: LaneBench, seconds: int) -> None:
    for _ in range(seconds):
        bench.loop.advance(1)
        bench.settle()


def test_a_new_owner_that_burst_the_wave_is_told_again(bench: LaneBench) -> None:
    """It does not know which cancels the owner before it was told of while the wave ran."""
    front = bench.front()
    _, gone, _ = front.send(1, 2, 3)
    (sent,) = bench.sent()
    bench.now(gone.abandon)
    bench.settle()
    bench.run(bench.log.delete_stream(keys.facts(MODEL)))  # the owner before it has read that
    pass_seconds(bench, 5)
    assert bench.owner_was_told() == [], "the wave runs"
    bench.run(burst_wave(bench.log, MODEL, sent.stream, sent.entry_id, sent.wave))
    bench.age(5)

    pass_seconds(bench, 5)

    assert bench.owner_was_told() == [RequestCancelled(sent.wave.ids()[1])]
    bench.run(bench.log.settle(MODEL, [(sent.wave.ids()[1], 1)], None, []))
    pass_seconds(bench, 100)
    assert len(bench.owner_was_told()) == 1
    assert not bench.service._dataplane.requester.cancels


def test_what_a_front_counts_itself_is_not_counted_twice(bench: LaneBench) -> None:
    front = Front(bench, bench.front().door, counted_by_lane=False)
    counts = front.door.counts
    before = counts.success, counts.duration_ns
    (_, gone) = front.send(1, 2)
    bench.now(gone.abandon)
    bench.answer()
    assert front.answers == [1]
    assert (counts.success, counts.duration_ns) == before
    assert counts.failures["CANCELED"] == 0


# -- answers -----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(100))
@given(
    st.lists(st.sampled_from([b"a", b"seven-7"]), min_size=1, max_size=6), st.integers(1, 3), st.booleans(), st.data()
)
def test_each_call_has_its_own_part_of_the_columns(
    ids: list[bytes], outputs: int, with_ids: bool, data: st.DataObject
) -> None:
    """Also where calls of another signature are before it in the wave."""
    start = data.draw(st.integers(0, len(ids) - 1))
    calls = [Call(cast("Any", None), (), client_id) for client_id in ids]
    values = [[b"%d:%d" % (column, number) for number in range(len(ids))] for column in range(outputs)]
    places = tuple((f"y{column}", DataType.UINT8, (3,), 3) for column in range(outputs))
    columns = [b"".join(column) for column in values]
    packed = pack_wave_reply(bytes(PREFIX_BYTES), len(ids), reply_meta(MODEL, 1, places), columns, 1)
    found = values_of(calls[start:], start, unpack_wave_reply(packed), with_ids=with_ids)
    expected = zip(*([ids] if with_ids else []), *values, strict=True)
    assert list(found) == list(expected)[start:]


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.booleans())
def test_each_signature_answers_its_own_and_neighbours_together(whose: list[int], in_halves: bool) -> None:
    with LaneBench() as bench:
        door = bench.front().door
        fronts = [Front(bench, door) for _ in range(3)]
        calls = [fronts[which].call(value) for value, which in enumerate(whose)]
        fronts[0].read(*calls)
        before = door.counts.success
        if in_halves:  # as drills have it, which stop a gateway between them
            failpoints.activate("/none")
        try:
            bench.answer()
        finally:
            failpoints.activate("")
        told = {id(call): value for front in fronts for call, value in front.told}
        assert [told[id(call)] for call in calls] == list(range(len(whose)))
        for which, front in enumerate(fronts):
            assert [value for _, value in front.told] == [value for value, one in enumerate(whose) if one == which]
            if not in_halves:
                text = "".join("x" if one == which else " " for one in whose)
                assert front.runs == [len(run) for run in text.split()]
        assert door.counts.success == before + len(whose)


def test_callers_behind_an_answer_that_cannot_be_written_get_an_error(
    bench: LaneBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = bench.front()
    calls = front.send(1, 2, 3)
    answer = Front.answer

    def breaks(self: Front, calls: list[Call], start: int, reply: WaveReply) -> None:
        answer(self, calls[:1], start, reply)
        calls[0].gone = True  # it has its answer
        raise ValueError("a defect")

    monkeypatch.setattr(Front, "answer", breaks)
    bench.answer()
    assert front.told_of(calls[0]) == [1]
    for call in calls[1:]:
        (error,) = front.told_of(call)
        assert isinstance(error, InternalError)
        assert str(error) == "the answer cannot be written: ValueError: a defect"
    assert bench.is_quiet()


def test_the_door_of_a_model_that_is_too_slow_closes(bench: LaneBench) -> None:
    closed = []
    bench.service.lane.fronts.append(closed.append)
    front = bench.front()
    for value in range(4):
        assert not front.door.is_closed
        front.send(value)
        bench.answer(infer_ns=SLOW_NS + 1)
    assert (front.door.is_closed, closed) == (True, [front.door])
    assert front.answers == [0, 1, 2, 3]
    assert bench.door() is None


def test_it_knows_when_it_was_used(bench: LaneBench) -> None:
    front = bench.front()
    made_ns = front.door.used_ns
    front.send(1)
    assert made_ns < front.door.used_ns
    assert front.door.served.model == MODEL
