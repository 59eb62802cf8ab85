"""Waves under way: each caller has one answer, whichever way it comes, and nothing stays counted or held."""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_bench import GATEWAY, MODEL, Front, LaneBench, SentWave, reply_to

from charonia import keys
from charonia.clock import wall_ns
from charonia.datatypes import DataType
from charonia.errors import (
    OUTCOME_UNKNOWN,
    Cancelled,
    CharoniaError,
    DeadlineExceeded,
    InternalError,
    LogUnavailable,
    ResourceExhausted,
    Unavailable,
)
from charonia.wire import ResponseRecord, pack_wave_reply, records_of, reply_meta, unpack_request, unpack_wave_reply
from gateway.lane.door import Call, values_of
from gateway.lane.pending_waves import ReplyServer, response_in

LOOK_S = 1.0


@pytest.fixture
def bench() -> Iterator[LaneBench]:
    with LaneBench() as bench:
        yield bench


def one_wave(bench: LaneBench, *values: int) -> SentWave:
    """Requests of one front that left together."""
    bench.front().send(*values)
    (sent,) = bench.sent()
    return sent


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_wave_is_counted_and_held_until_it_is_answered(bench: LaneBench) -> None:
    appended = bench.service._dataplane.counts
    entries, requests, ridden = appended.entries, appended.requests, bench.waves.requests
    front = bench.front()
    front.send(1, 2, 3)
    bench.settle()
    assert (bench.lease.used_requests, bench.lease.used_bytes) == (3, 12)
    assert bench.service._dataplane.requester._size_bytes == 12
    drained = bench.begin(bench.service.drained())
    bench.settle()
    assert not drained.done()
    assert (appended.entries - entries, appended.requests - requests, bench.waves.requests - ridden) == (1, 3, 3)

    bench.answer()

    assert front.answers == [1, 2, 3]
    assert bench.is_quiet()
    assert drained.done()


def test_every_wave_has_a_name_of_its_own(bench: LaneBench) -> None:
    front = bench.front()
    prefixes = set()
    for value in range(150):  # more than are drawn at once
        front.send(value)
        prefixes |= {sent.wave.prefix for sent in bench.sent()}
        bench.answer()
    assert len(prefixes) == 150
    assert {len(prefix) for prefix in prefixes} == {15}
    assert front.answers == list(range(150))


def test_an_answer_waits_until_its_wave_has_reached_its_durability_level(bench: LaneBench) -> None:
    front = bench.front()
    bench.gate.holds = True
    front.send(1, 2)
    bench.answer()
    assert front.told == []
    bench.now(bench.gate.release)
    bench.settle()
    assert front.answers == [1, 2]
    assert bench.is_quiet()


@pytest.mark.parametrize(
    ("spoilt", "duplicates"),
    [
        (lambda reply, _: reply[:-1], 0),
        (lambda reply, _: b"\7" + reply[1:], 0),
        (lambda _, wave: reply_to(msgspec.structs.replace(wave, count=2, columns=(wave.columns[0][:8],))), 0),
        (lambda _, wave: reply_to(msgspec.structs.replace(wave, prefix=b"another" + bytes(8))), 1),
    ],
    ids=["short", "of another release", "of fewer requests", "of another wave"],
)
def test_a_reply_that_is_none_is_dropped(bench: LaneBench, spoilt: Any, duplicates: int) -> None:
    front = bench.front()
    front.send(1, 2, 3)
    (sent,) = bench.sent()
    bench.settle()
    bench.waves.on_reply(spoilt(reply_to(sent.wave), sent.wave))
    assert (front.told, bench.waves.duplicates) == ([], duplicates)
    bench.answer()
    assert front.answers == [1, 2, 3]


@pytest.mark.parametrize("holds", [False, True])
def test_the_first_of_two_replies_counts(bench: LaneBench, holds: bool) -> None:
    front = bench.front()
    bench.gate.holds = holds
    front.send(1, 2)
    (sent,) = bench.sent()
    bench.settle()
    bench.now(lambda: bench.waves.on_reply(reply_to(sent.wave, [5, 6])))
    bench.now(lambda: bench.waves.on_reply(reply_to(sent.wave, [7, 8])))
    bench.now(bench.gate.release)
    assert front.answers == [5, 6]
    assert bench.waves.duplicates == 1


_ANSWERS = st.tuples(st.sampled_from(["whole", "one", "one", "error", "gone"]), st.integers(0, 7))


@settings(max_examples=examples(150))
@given(st.integers(1, 8), st.lists(_ANSWERS, max_size=12))
def test_each_caller_has_the_answer_that_came_first(count: int, steps: list[tuple[str, int]]) -> None:
    """One by one where an owner took the wave apart, all at once where it did not, or both."""
    with LaneBench() as bench:
        front = bench.front()
        counts = front.door.counts
        succeeded = counts.success
        calls = front.send(*range(count))
        bench.settle()
        (sent,) = bench.sent()
        first: dict[int, object] = {}
        gone: set[int] = set()
        for number, (what, which) in enumerate([*steps, ("whole", 0)], 100):
            index = which % count
            if what == "whole":
                reply = reply_to(sent.wave, [number] * count)
                bench.now(lambda reply=reply: bench.waves.on_reply(reply))
                first = dict.fromkeys(range(count), number) | first
            elif what != "gone":
                bench.answer_one(sent.wave.ids()[index], InternalError("it failed") if what == "error" else number)
                first.setdefault(index, "error" if what == "error" else number)
            elif index not in first:
                bench.now(calls[index].abandon)
                gone.add(index)
        for index, call in enumerate(calls):
            told = ["error" if isinstance(answer, CharoniaError) else answer for answer in front.told_of(call)]
            assert told == ([] if index in gone else [first[index]])
        failed = [index for index, answer in first.items() if answer == "error" and index not in gone]
        assert counts.success - succeeded == count - len(gone) - len(failed)
        assert (counts.failures["BACKEND"], counts.failures["CANCELED"]) == (len(failed), len(gone))
        assert bench.is_quiet()
        front.send(7)
        bench.settle()
        assert bench.values()[-1] == [7], "it is the turn of the next wave"


def test_an_error_of_one_request_is_counted_by_its_reason(bench: LaneBench) -> None:
    front = bench.front()
    counts = front.door.counts
    succeeded = counts.success
    calls = front.send(1, 2, 3)
    ids = bench.sent()[0].wave.ids()
    bench.settle()
    bench.answer_one(ids[0], InternalError("it failed"))
    bench.answer_one(ids[1], Cancelled("it ended"))
    bench.answer_one(ids[2], 30)
    assert [str(what) for what in front.answers] == ["it failed", "it ended", "30"]
    assert [call for call, _ in front.told] == calls
    assert (counts.failures["BACKEND"], counts.failures["CANCELED"], counts.success - succeeded) == (1, 1, 1)
    bench.answer_one(ids[0], 5)
    assert (len(front.told), bench.service._dataplane.duplicates) == (3, 1)


def test_of_two_answers_to_one_request_the_first_counts(bench: LaneBench) -> None:
    front = bench.front()
    front.send(1, 2)
    ids = bench.sent()[0].wave.ids()
    bench.settle()
    for answer in (10, 11):
        bench.answer_one(ids[0], answer)
    assert (front.answers, bench.waves.duplicates) == ([10], 1)
    assert not bench.is_quiet()
    bench.answer_one(ids[1], 20)
    assert (front.answers, bench.waves.duplicates) == ([10, 20], 1)
    assert bench.is_quiet()


def test_an_answer_that_cannot_be_written_costs_no_other_call(
    bench: LaneBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a wave whose requests are answered one by one, the last ones together."""
    front = bench.front()
    respond = Front.respond

    def breaks(self: Front, call: Call, record: ResponseRecord) -> None:
        if call.index in (0, 1):
            raise ValueError("a defect")
        respond(self, call, record)

    monkeypatch.setattr(Front, "respond", breaks)
    front.send(1, 2, 3)
    (sent,) = bench.sent()
    bench.settle()
    bench.answer_one(sent.wave.ids()[0], 10)
    bench.now(lambda: bench.waves.on_reply(reply_to(sent.wave, [20, 20, 20])))
    said = "the answer cannot be written: ValueError: a defect"
    assert [str(what) for what in front.answers] == [said, said, "20"]
    assert bench.is_quiet()


def test_who_goes_after_the_answer_cancels_nothing(bench: LaneBench) -> None:
    front = bench.front()
    calls = front.send(1, 2)
    bench.answer()
    bench.now(calls[0].abandon)
    bench.settle()
    assert bench.owner_was_told() == []


def test_the_answer_to_a_request_that_no_wave_has_is_not_for_waves(bench: LaneBench) -> None:
    front = bench.front()
    front.send(1)
    (sent,) = bench.sent()
    bench.settle()
    bench.answer_one(sent.wave.prefix + b"\1", 5)
    bench.answer_one(b"another" + bytes(9), 5)
    assert (front.told, bench.waves.duplicates, bench.service._dataplane.duplicates) == ([], 0, 2)


@pytest.mark.parametrize("error", [ResourceExhausted("the log is full"), LogUnavailable("it is away")])
def test_an_append_that_fails_ends_its_requests_with_the_log_s_words(bench: LaneBench, error: CharoniaError) -> None:
    front = bench.front()
    bench.gate.error = error
    entries = bench.service._dataplane.counts.entries
    front.send(1, 2)
    bench.settle()
    assert front.answers == [error, error]
    assert front.door.counts.failures["REJECTED"] == 2
    assert bench.is_quiet()
    assert bench.service._dataplane.counts.entries == entries
    bench.gate.error = None
    front.send(3)
    assert bench.values() == [[3]]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8), st.data())
def test_the_answer_to_one_request_is_its_part_of_the_columns(values: list[int], data: st.DataObject) -> None:
    with LaneBench() as bench:
        reply = unpack_wave_reply(reply_to(one_wave(bench, *values).wave))
        of_all = [part for (part,) in values_of([None] * len(values), 0, reply, with_ids=False)]  # type: ignore[list-item]
        index = data.draw(st.integers(0, len(values) - 1))
        response = response_in(reply, index)
        assert (response.model, response.version, response.error) == (MODEL, 1, None)
        assert bytes(response.outputs[0].data) == of_all[index] == values[index].to_bytes(4, "little")
        assert list(response.outputs[0].shape) == [1, 1]


def test_an_output_without_elements_is_an_answer_too() -> None:
    places = (("y", DataType.INT32, (1, 1), 4), ("none", DataType.FP64, (0,), 0))
    packed = pack_wave_reply(bytes(15), 2, reply_meta(MODEL, 1, places), [b"\1\0\0\0\2\0\0\0", b""], 0)
    calls: list[Any] = [None] * 2
    assert list(values_of(calls, 0, unpack_wave_reply(packed), with_ids=False)) == [
        (b"\1\0\0\0", b""),
        (b"\2\0\0\0", b""),
    ]


# -- room --------------------------------------------------------------------------------------------------------------


def test_what_this_gateway_cannot_hold_goes_the_full_way() -> None:
    with LaneBench(max_pending_per_gateway_bytes=400) as bench:
        front = bench.front(width=16)
        wide = [Call(front, (bytes(64),)) for _ in range(15)]
        front.read(*wide[:7])
        bench.settle()
        assert front.answers == ["left"] * 7
        assert bench.is_quiet()
        front.read(*wide[7:13])
        bench.settle()
        assert not bench.is_quiet()
        front.read(wide[13])
        bench.settle()
        assert [call for call, _ in front.told] == [*wide[:7], wide[13]]
        bench.answer()
        front.read(wide[14])
        bench.settle()
        assert len(bench.sent()) == 1


def test_the_lease_grows_before_it_is_full(bench: LaneBench) -> None:
    front = bench.front()
    held = bench.lease.held_requests
    for first in range(0, 3 * held, 8):
        front.send(*range(first, first + 8))
        bench.settle()
    assert front.told == []
    assert bench.lease.held_requests >= 4 * held


def test_a_lease_that_ran_out_grows_too(bench: LaneBench) -> None:
    front = bench.front()
    bench.waves.leases.mark_ended()
    front.send(1)
    assert front.answers == ["left"]
    bench.settle()
    front.send(2)
    assert bench.values() == [[2]]


@pytest.fixture(autouse=True)
def virtual_deadlines(bench: LaneBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines come by the clock of the loop."""
    began_ns, began_s = wall_ns(), bench.loop.time()

    def now_ns() -> int:
        return began_ns + int((bench.loop.time() - began_s) * 1e9)

    monkeypatch.setattr("gateway.lane.door.wall_ns", now_ns)
    monkeypatch.setitem(globals(), "wall_ns", now_ns)


def wait(bench: LaneBench, seconds: float) -> None:
    """Let time pass, and all happen that does then."""
    bench.loop.advance(seconds)
    bench.settle()


# -- deadlines ---------------------------------------------------------------------------------------------------------


def with_deadline(bench: LaneBench, front: Any, *values: int, seconds: float = 0.5) -> list[Call]:
    """Calls with a deadline, which is watched."""
    calls = [front.call(value, deadline_ns=wall_ns() + int(seconds * 1e9)) for value in values]
    for call in calls:
        bench.now(lambda call=call: bench.waves.expiry.watch(call.deadline_ns))
    return calls


def test_a_request_that_expires_before_its_wave_leaves_is_never_sent(bench: LaneBench) -> None:
    bench.prove()
    front = bench.front()
    front.send(0)
    (due,) = with_deadline(bench, front, 1, seconds=0.005)
    front.read(due, front.call(2))
    wait(bench, 0.004)
    assert front.told == []
    wait(bench, 0.002)
    ((call, error),) = front.told
    assert call is due
    assert isinstance(error, DeadlineExceeded)
    assert bench.service._dataplane.deadlines.expired == 1
    bench.answer()
    assert bench.values() == [[2]]


def test_a_request_that_expires_in_a_wave_is_settled_and_the_others_go_on(bench: LaneBench) -> None:
    front = bench.front()
    served = front.door.served
    (due,) = with_deadline(bench, front, 2)
    first, last = front.call(1), front.call(3)
    front.read(first, due, last)
    ids = bench.sent()[0].wave.ids()
    bench.settle()
    wait(bench, 0.6)
    assert [(call, type(what)) for call, what in front.told] == [(due, DeadlineExceeded)]
    assert bench.service._dataplane.deadlines.expired == 1
    assert bench.sent() == [], "it was taken apart"
    (entry,) = bench.run(bench.log.range(bench.stream))
    assert [unpack_request(record).id for record in records_of(entry.fields)] == ids
    assert bench.run(bench.log.unsettled(MODEL, ids)) == [0, -1, 0]
    key = keys.statistics(MODEL, 1, served.content_hash)
    counted = bench.run(bench.log.statistics(key))
    assert (counted["fail_count"], counted["fail_REJECTED"]) == (1, 1)
    bench.answer_one(ids[0], 10)
    bench.answer_one(ids[2], 30)
    assert [(call, what) for call, what in front.told[1:]] == [(first, 10), (last, 30)]
    assert bench.is_quiet()


def test_several_that_expire_take_their_wave_apart_once(bench: LaneBench) -> None:
    front = bench.front()
    front.read(*with_deadline(bench, front, 1, 2, 3))
    bench.settle()
    wait(bench, 0.6)
    assert [type(what) for what in front.answers] == [DeadlineExceeded] * 3
    assert len(bench.run(bench.log.range(bench.stream))) == 1
    assert bench.is_quiet()


def test_a_wave_that_was_settled_before_the_deadline_is_answered(bench: LaneBench) -> None:
    """Whoever settles first wins; its reply is on the way."""
    front = bench.front()
    front.read(*with_deadline(bench, front, 1))
    (sent,) = bench.sent()
    bench.run(bench.log.delete_entries(bench.stream, [sent.entry_id]))
    wait(bench, 0.6)
    assert front.told == []
    bench.now(lambda: bench.waves.on_reply(reply_to(sent.wave)))
    assert front.answers == [1]
    assert bench.service._dataplane.deadlines.expired == 0


def test_where_the_log_cannot_say_the_outcome_is_unknown(bench: LaneBench) -> None:
    front = bench.front()
    front.read(*with_deadline(bench, front, 1))
    bench.settle()
    bench.gate.is_away = True
    wait(bench, 0.6)
    assert [str(what) for what in front.answers] == [OUTCOME_UNKNOWN]
    assert bench.is_quiet()


def test_a_later_deadline_of_the_wave_asks_the_log_again(bench: LaneBench) -> None:
    front = bench.front()
    (first,), (second,) = (with_deadline(bench, front, value, seconds=seconds) for value, seconds in ((1, 0.5), (2, 2)))
    front.read(first, second)
    bench.settle()
    bench.gate.is_away = True
    wait(bench, 0.6)
    bench.gate.is_away = False
    wait(bench, 1.5)
    assert [(call, type(what)) for call, what in front.told] == [(first, LogUnavailable), (second, DeadlineExceeded)]
    assert bench.is_quiet()


@pytest.mark.parametrize("is_accepted", [True, False])
def test_a_deadline_before_the_log_has_the_wave_waits_for_it_but_not_for_ever(
    bench: LaneBench, is_accepted: bool
) -> None:
    front = bench.front()
    bench.gate.holds = True
    front.read(*with_deadline(bench, front, 1))
    wait(bench, 0.6)
    assert front.told == []
    if is_accepted:
        bench.now(bench.gate.release)
    wait(bench, 0.1)
    wait(bench, 1.0)
    (error,) = front.answers
    assert type(error) is (DeadlineExceeded if is_accepted else LogUnavailable)


# -- what is lost ------------------------------------------------------------------------------------------------------


def look(bench: LaneBench) -> None:
    """Let the gateway look after its waves once."""
    wait(bench, LOOK_S)


def test_a_wave_that_is_gone_without_a_reply_is_unknown_after_two_looks(bench: LaneBench) -> None:
    front = bench.front()
    front.send(1, 2)
    (sent,) = bench.sent()
    bench.settle()
    bench.run(bench.log.delete_entries(bench.stream, [sent.entry_id]))
    look(bench)
    assert front.told == [], "it is young"
    bench.age(2)
    look(bench)
    assert front.told == [], "its reply may be on the way"
    look(bench)
    assert [str(what) for what in front.answers] == [OUTCOME_UNKNOWN] * 2
    assert front.door.counts.failures["REJECTED"] == 2
    assert bench.is_quiet()


def test_a_reply_between_two_looks_counts(bench: LaneBench) -> None:
    front = bench.front()
    front.send(1)
    (sent,) = bench.sent()
    bench.settle()
    bench.run(bench.log.delete_entries(bench.stream, [sent.entry_id]))
    bench.age(2)
    look(bench)
    bench.now(lambda: bench.waves.on_reply(reply_to(sent.wave)))
    look(bench)
    assert front.answers == [1]


def test_a_wave_in_the_log_is_waited_for_and_so_are_its_requests_once_it_is_taken_apart(bench: LaneBench) -> None:
    front = bench.front()
    calls = front.send(1, 2)
    (sent,) = bench.sent()
    bench.settle()
    bench.age(2)
    for _ in range(3):
        look(bench)
    sizes = [(request_id, 4) for request_id in sent.wave.ids()]
    assert bench.run(bench.gate.burst(MODEL, bench.stream, sent.entry_id, sizes, [b"r", b"x"]))
    for _ in range(3):
        look(bench)
    assert front.told == []
    assert bench.run(bench.log.settle(MODEL, [(sent.wave.ids()[1], 0)], None, [])) == [True]
    look(bench)
    look(bench)
    assert [(call, str(what)) for call, what in front.told] == [(calls[1], OUTCOME_UNKNOWN)]


@pytest.mark.parametrize("error", [Unavailable("Server exiting"), LogUnavailable("the log is another one")])
def test_all_that_is_under_way_can_be_lost_at_once(bench: LaneBench, error: CharoniaError) -> None:
    front = bench.front()
    front.send(1, 2)
    other = bench.front(timeout_us=5)
    other.send(3)
    bench.settle()
    (sent, *_) = bench.sent()
    bench.waves.lose_all(error)
    assert (front.answers, other.answers) == ([error, error], [error])
    assert bench.is_quiet()
    bench.waves.on_reply(reply_to(sent.wave))
    assert len(front.told) == 2


# -- leases and doors --------------------------------------------------------------------------------------------------


def test_the_lease_of_a_model_that_nobody_asks_is_given_back(bench: LaneBench) -> None:
    front = bench.front()
    front.send(1)
    bench.settle()
    bench.age(11)
    look(bench)
    assert bench.waves.leases.has(MODEL), "a wave is under way"
    bench.answer()
    front.send(2)
    bench.answer()
    look(bench)
    assert bench.waves.leases.has(MODEL), "it is used"
    assert bench.run(bench.log.waves.leases(MODEL)) == [GATEWAY]
    bench.age(11)
    bench.gate.is_away = True
    look(bench)
    assert MODEL in bench.waves.leases._held, "the log is to be told later"
    bench.gate.is_away = False
    look(bench)
    assert not bench.waves.leases.has(MODEL)
    assert bench.run(bench.log.waves.leases(MODEL)) == []
    assert front.door.is_closed


def test_leases_end_with_the_gateway(bench: LaneBench) -> None:
    assert bench.run(bench.log.waves.leases(MODEL)) == [GATEWAY]
    bench.run(bench.waves.close())
    assert bench.run(bench.log.waves.leases(MODEL)) == []
    assert not bench.waves.leases.has(MODEL)


def test_no_room_is_reserved_under_narrow_bounds() -> None:
    with LaneBench(ready=False, max_pending_requests=4095) as bench:
        assert not bench.run(bench.waves.leases.reserve(MODEL))
        assert not bench.waves.leases.has(MODEL)
        assert bench.run(bench.log.waves.leases(MODEL)) == []


def test_room_is_reserved_once_and_again_when_it_was_forgotten(bench: LaneBench) -> None:
    lease = bench.lease
    assert bench.run(bench.waves.leases.reserve(MODEL))
    assert bench.lease is lease
    bench.waves.leases.mark_ended()
    assert not bench.waves.leases.has(MODEL)
    assert bench.run(bench.waves.leases.reserve(MODEL))
    bench.waves.leases.drop()
    assert not bench.waves.leases.has(MODEL)


def test_what_waits_at_a_door_that_closes_is_sent(bench: LaneBench) -> None:
    bench.prove()
    front = bench.front()
    front.send(0)
    front.send(1, 2)
    assert bench.values() == [[0]]
    bench.now(lambda: bench.waves.close_door(front.door))
    assert front.door.is_closed
    assert bench.values() == [[0], [1, 2]]
    bench.answer()
    assert front.answers == [0, 1, 2]


# -- replies over a socket ---------------------------------------------------------------------------------------------


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="charonia-test-") as directory:  # pytest's own may be too long for a socket
        yield str(Path(directory) / "replies.sock")


@settings(max_examples=examples(50))
@given(st.integers(1, 3), st.lists(st.integers(0, 400), max_size=6), st.booleans())
def test_replies_are_read_from_a_socket_however_they_are_cut(count: int, cuts: list[int], has_junk: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="charonia-test-") as directory, LaneBench() as bench:
        server = ReplyServer(bench.waves)
        bench.run(server.start(f"{directory}/s"))
        fronts = [bench.front(timeout_us=1 + number) for number in range(count)]
        for number, front in enumerate(fronts):
            front.send(number, 10 + number)
        bench.settle()
        replies = [reply_to(sent.wave) for sent in bench.sent()]
        if has_junk:  # it is as long as it says, and no reply
            replies.insert(1, b"junk")
        data = b"".join(struct.pack("<I", len(reply)) + reply for reply in replies)
        edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        with socket.socket(socket.AF_UNIX) as executor:
            executor.connect(f"{directory}/s")
            for start, end in pairwise(edges):
                executor.sendall(data[start:end])
                bench.settle()
            assert [front.answers for front in fronts] == [[number, 10 + number] for number in range(count)]
            bench.run(server.close())
            bench.settle()
            assert executor.recv(1) == b""


def test_an_executor_that_writes_no_replies_is_hung_up_on(bench: LaneBench, path: str) -> None:
    server = ReplyServer(bench.waves)
    bench.run(server.start(path))
    with socket.socket(socket.AF_UNIX) as executor:
        executor.connect(path)
        executor.sendall(struct.pack("<I", (1 << 28) + 1))
        bench.settle()
        assert executor.recv(1) == b""
    bench.run(server.close())


@pytest.mark.parametrize("where", ["", "/none/replies.sock"])
def test_without_a_socket_replies_come_through_the_log(bench: LaneBench, where: str) -> None:
    server = ReplyServer(bench.waves)
    bench.run(server.start(where))
    front = bench.front()
    front.send(1)
    bench.answer()
    assert front.answers == [1]
    bench.run(server.close())
