"""What every adapter of the log port promises: one suite over memory, Redis and the two side by side."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import Cancelled, CharoniaError, ResourceExhausted
from charonia.eventlog.colocated import ColocatedLog
from charonia.eventlog.memory import MemoryLog
from charonia.eventlog.port import START, Entry, EventLog, Limits, Reply, StreamReader
from charonia.eventlog.redis import open_log
from charonia.events import FIELD_FACT, LaneOpened, unpack_fact
from charonia.jobs import JobEnd, JobState, NewJob
from charonia.journal import read_facts
from charonia.sequences import SequenceStep

NO_LIMITS = Limits()
PATIENCE_S = 10.0


@dataclass
class Subject:
    """A log under test, a second handle on the same data as another process would have it, and stream names."""

    log: EventLog
    peer: EventLog
    prefix: bytes = b""

    def stream(self, name: bytes) -> bytes:
        return self.prefix + name


@pytest.fixture(params=["memory", "redis", "cluster", "colocated", "colocated-local"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    if request.param == "memory":
        log = MemoryLog()
        yield Subject(log, log)
        return
    url = request.getfixturevalue("fresh_cluster_url" if request.param == "cluster" else "fresh_log_url")
    local = MemoryLog()
    pair: list[EventLog] = [open_log(url), open_log(url)]
    if request.param.startswith("colocated"):
        pair = [ColocatedLog(log, local) for log in pair]
    for log in pair:
        await log.open()
    yield Subject(pair[0], pair[1], keys.LOCAL if request.param == "colocated-local" else b"")
    for log in pair:
        await log.close()


class Collector:
    """Entries as a reader's callback gets them, with a way to wait for them."""

    def __init__(self) -> None:
        self.entries: dict[bytes, list[Entry]] = {}
        self._changed = asyncio.Event()

    def __call__(self, stream: bytes, entries: list[Entry]) -> None:
        assert entries
        self.entries.setdefault(stream, []).extend(entries)
        self._changed.set()

    def values(self, stream: bytes) -> list[bytes]:
        return [bytes(entry.fields[1]) for entry in self.entries.get(stream, [])]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def count(self, stream: bytes, count: int) -> list[bytes]:
        await self.until(lambda: len(self.values(stream)) >= count)
        return self.values(stream)


@pytest.fixture
async def reader(subject: Subject) -> AsyncIterator[tuple[StreamReader, Collector]]:
    collector = Collector()
    reader = subject.log.reader()
    reader.start(collector)
    yield reader, collector
    await reader.close()


async def put(log: EventLog, stream: bytes, *values: bytes) -> list[bytes]:
    return [await log.append(stream, [b"r", value]) for value in values]


def values(entries: list[Entry]) -> list[bytes]:
    return [bytes(entry.fields[1]) for entry in entries]


async def accept(log: EventLog, model: str, *ids: bytes, size_bytes: int = 10, limits: Limits = NO_LIMITS) -> None:
    fields = [part for request_id in ids for part in (b"r", request_id)]
    await log.accept(model, 0, 0, [(request_id, size_bytes) for request_id in ids], fields, limits)


# -- streams -----------------------------------------------------------------------------------------------------------


async def test_range_gives_entries_in_the_order_of_their_appends(subject: Subject) -> None:
    stream = subject.stream(b"s")
    ids = await put(subject.log, stream, b"a", b"b", b"c")

    entries = await subject.peer.range(stream)

    assert [entry.id for entry in entries] == ids
    assert values(entries) == [b"a", b"b", b"c"]


async def test_range_begins_above_an_id_and_ends_at_a_count(subject: Subject) -> None:
    stream = subject.stream(b"s")
    ids = await put(subject.log, stream, b"a", b"b", b"c", b"d")

    assert values(await subject.log.range(stream, ids[0], 2)) == [b"b", b"c"]
    assert await subject.log.range(stream, ids[3]) == []
    assert await subject.log.range(subject.stream(b"none")) == []


async def test_appends_of_one_tick_keep_their_order(subject: Subject) -> None:
    stream = subject.stream(b"s")
    numbers = [b"%d" % number for number in range(200)]

    await asyncio.gather(*[subject.log.append(stream, [b"r", number]) for number in numbers])

    assert values(await subject.log.range(stream)) == numbers


async def test_deleted_entries_are_gone_and_deleting_again_does_nothing(subject: Subject) -> None:
    stream = subject.stream(b"s")
    ids = await put(subject.log, stream, b"a", b"b", b"c")

    for _ in range(2):
        await subject.log.delete_entries(stream, [ids[1]])
    await subject.log.delete_entries(stream, [])

    assert values(await subject.log.range(stream)) == [b"a", b"c"]


async def test_a_deleted_stream_is_empty_and_can_be_written_again(subject: Subject) -> None:
    stream = subject.stream(b"s")
    await put(subject.log, stream, b"a")

    await subject.log.delete_stream(stream)

    assert await subject.log.range(stream) == []
    await put(subject.log, stream, b"b")
    assert values(await subject.log.range(stream)) == [b"b"]


@pytest.mark.parametrize("fields", [[], [b"r"], [b"r", b"a", b"r"]], ids=["none", "one", "three"])
async def test_fields_that_are_no_pairs_are_refused(subject: Subject, fields: list[bytes]) -> None:
    stream = subject.stream(b"s")
    with pytest.raises(ValueError, match="alternate names and values"):
        await subject.log.append(stream, fields)
    assert await subject.log.range(stream) == []


async def test_large_and_binary_fields_come_back_as_they_were(subject: Subject) -> None:
    stream = subject.stream(b"s")
    large = os.urandom(5_000_000)
    every_byte = bytes(range(256)) + b"\r\n$5\r\n*1\r\n"
    fields = [b"h", every_byte, b"r", memoryview(large), b"r", bytearray(every_byte), b"r", b"", b"r", large]

    await asyncio.gather(subject.log.append(stream, fields), put(subject.log, stream, b"next"))

    first, second = await subject.peer.range(stream)
    assert [bytes(field) for field in first.fields] == [bytes(field) for field in fields]
    assert bytes(second.fields[1]) == b"next"


# -- readers -----------------------------------------------------------------------------------------------------------


async def test_a_reader_gives_what_is_there_and_then_what_comes_in_order(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    stream = subject.stream(b"s")
    before = [b"%d" % number for number in range(150)]
    after = [b"%d" % number for number in range(150, 300)]
    await asyncio.gather(*[subject.log.append(stream, [b"r", value]) for value in before])

    follow.add(stream)
    await collector.count(stream, 1)
    await asyncio.gather(*[subject.peer.append(stream, [b"r", value]) for value in after])

    assert await collector.count(stream, 300) == before + after


async def test_a_stream_may_be_added_before_the_reader_starts(subject: Subject) -> None:
    stream = subject.stream(b"s")
    await put(subject.log, stream, b"a")
    collector, states = Collector(), []
    reader = subject.log.reader()
    reader.add(stream)
    up = asyncio.Event()

    def on_state(is_up: bool) -> None:
        states.append(is_up)
        up.set()

    reader.start(collector, on_state)
    assert await collector.count(stream, 1) == [b"a"]
    await asyncio.wait_for(up.wait(), PATIENCE_S)
    assert states == [True]
    await reader.close()


async def test_a_reader_begins_after_an_id(subject: Subject, reader: tuple[StreamReader, Collector]) -> None:
    follow, collector = reader
    stream = subject.stream(b"s")
    ids = await put(subject.log, stream, b"a", b"b", b"c")

    follow.add(stream, ids[0])

    assert await collector.count(stream, 2) == [b"b", b"c"]


async def test_from_now_on_means_from_the_call(subject: Subject, reader: tuple[StreamReader, Collector]) -> None:
    follow, collector = reader
    full, empty = subject.stream(b"full"), subject.stream(b"empty")
    await put(subject.log, full, b"old", b"older")

    follow.add(full, b"$")
    follow.add(empty, b"$")
    await asyncio.gather(put(subject.log, full, b"new"), put(subject.log, empty, b"first"))

    assert await collector.count(full, 1) == [b"new"]
    assert await collector.count(empty, 1) == [b"first"]


async def test_adding_a_followed_stream_again_changes_nothing(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    stream = subject.stream(b"s")
    await put(subject.log, stream, b"a")
    follow.add(stream)
    await collector.count(stream, 1)

    follow.add(stream, START, consume=True)
    await put(subject.log, stream, b"b")

    assert await collector.count(stream, 2) == [b"a", b"b"]
    assert values(await subject.log.range(stream)) == [b"a", b"b"]


async def test_streams_can_be_added_while_the_reader_waits(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    first = subject.stream(b"first")
    follow.add(first)
    for number in range(40):
        stream = subject.stream(b"more-%d" % number)
        if number % 2:
            follow.add(stream)
            await put(subject.peer, stream, b"x")
        else:
            await put(subject.peer, stream, b"x")
            follow.add(stream)
        assert await collector.count(stream, 1) == [b"x"]
        await put(subject.peer, first, b"%d" % number)
        assert await collector.count(first, number + 1) == [b"%d" % n for n in range(number + 1)]


async def test_a_removed_stream_is_silent_and_goes_on_where_it_is_told_to(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    stream, other = subject.stream(b"s"), subject.stream(b"other")
    follow.add(stream)
    follow.add(other)
    (first,) = await put(subject.log, stream, b"a")
    await collector.count(stream, 1)

    follow.remove(stream)
    follow.remove(subject.stream(b"never added"))
    await put(subject.log, stream, b"b", b"c")
    await put(subject.log, other, b"x")
    await collector.count(other, 1)
    assert collector.values(stream) == [b"a"]

    follow.add(stream, first)
    assert await collector.count(stream, 3) == [b"a", b"b", b"c"]


async def test_a_stream_removed_and_added_at_once_is_read_from_its_new_place(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    stream = subject.stream(b"s")
    follow.add(stream)
    ids = await put(subject.log, stream, b"a", b"b")
    await collector.count(stream, 2)

    follow.remove(stream)
    follow.add(stream, ids[0])
    await put(subject.log, stream, b"c")

    assert await collector.count(stream, 4) == [b"a", b"b", b"b", b"c"]


async def test_a_callback_may_remove_the_other_streams_of_the_same_read(subject: Subject) -> None:
    streams = [subject.stream(b"%d" % number) for number in range(3)]
    for stream in streams:
        await put(subject.log, stream, b"a")
    reader, collector = subject.log.reader(), Collector()

    def only_one(stream: bytes, entries: list[Entry]) -> None:
        collector(stream, entries)
        for other in streams:
            if other != stream:
                reader.remove(other)

    for stream in streams:
        reader.add(stream)
    reader.start(only_one)
    await collector.until(lambda: bool(collector.entries))
    (delivered,) = collector.entries
    await put(subject.log, delivered, b"b")
    await collector.count(delivered, 2)

    assert set(collector.entries) == {delivered}
    await reader.close()


async def test_consumed_entries_are_deleted_after_the_callback_had_them(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    stream = subject.stream(b"s")
    ids = await put(subject.log, stream, b"old", b"a", b"b")
    follow.add(stream, ids[0], consume=True)
    await collector.count(stream, 2)
    await put(subject.log, stream, b"c")
    assert await collector.count(stream, 3) == [b"a", b"b", b"c"]

    async with asyncio.timeout(PATIENCE_S):
        while len(left := await subject.peer.range(stream)) > 1:
            pass
    # what the callback never had is not the reader's to delete
    assert values(left) == [b"old"]


async def test_entries_deleted_before_they_are_read_are_not_delivered(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    stream = subject.stream(b"s")
    ids = await put(subject.log, stream, b"a", b"b")
    await subject.log.delete_entries(stream, [ids[0]])

    follow.add(stream)

    assert await collector.count(stream, 1) == [b"b"]


async def test_a_failing_callback_loses_no_other_entries(subject: Subject) -> None:
    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context.get("exception")))
    stream = subject.stream(b"s")
    reader, collector = subject.log.reader(), Collector()

    def fail_once(stream: bytes, entries: list[Entry]) -> None:
        collector(stream, entries)
        if len(collector.values(stream)) == 1:
            raise RuntimeError("on purpose")

    reader.add(stream)
    reader.start(fail_once)
    await put(subject.log, stream, b"a")
    await collector.count(stream, 1)
    await put(subject.log, stream, b"b")

    assert await collector.count(stream, 2) == [b"a", b"b"]
    assert [str(failure) for failure in failures] == ["on purpose"]
    await reader.close()


async def test_two_readers_both_get_everything(subject: Subject) -> None:
    stream = subject.stream(b"s")
    readers = [(log.reader(), Collector()) for log in (subject.log, subject.peer)]
    for reader, collector in readers:
        reader.start(collector)
        reader.add(stream)
    await put(subject.log, stream, b"a", b"b")
    for reader, collector in readers:
        assert await collector.count(stream, 2) == [b"a", b"b"]
        await reader.close()


# -- accepted work -----------------------------------------------------------------------------------------------------


async def test_accepted_requests_are_counted_and_queued(subject: Subject) -> None:
    await subject.log.accept("m", 2, 7, [(b"a", 100), (b"b", 20)], [b"r", b"A", b"r", b"B"], NO_LIMITS)

    assert await subject.peer.pending("m") == (2, 120)
    assert await subject.peer.unsettled("m", [b"a", b"none", b"b"]) == [0, -1, 0]
    assert await subject.peer.unsettled("m", []) == []
    (entry,) = await subject.peer.range(keys.queue("m", 2, 7))
    assert [bytes(field) for field in entry.fields] == [b"r", b"A", b"r", b"B"]
    assert await subject.peer.pending("other") == (0, 0)


async def test_a_lane_is_opened_once(subject: Subject) -> None:
    for level, lane in [(0, 0), (0, 0), (1, 0), (0, 3), (1, 0)]:
        await subject.log.accept("m", level, lane, [(os.urandom(16), 1)], [b"r", b"x"], NO_LIMITS)
    await asyncio.gather(
        *[log.accept("m", 5, 5, [(os.urandom(16), 1)], [b"r", b"x"], NO_LIMITS) for log in (subject.log, subject.peer)]
    )

    assert await subject.log.lanes("m") == [(0, 0), (0, 3), (1, 0), (5, 5)]
    assert await subject.log.lanes("other") == []
    facts = await subject.log.range(keys.facts("m"))
    assert all(entry.fields[0] == FIELD_FACT for entry in facts)
    assert [unpack_fact(entry.fields[1]) for entry in facts] == [
        LaneOpened(0, 0),
        LaneOpened(1, 0),
        LaneOpened(0, 3),
        LaneOpened(5, 5),
    ]


@pytest.mark.parametrize(
    ("limits", "named"),
    [(Limits(requests=50), "50 unsettled requests"), (Limits(size_bytes=500), "500 unsettled bytes")],
    ids=["requests", "bytes"],
)
async def test_limits_are_exact_under_concurrency(subject: Subject, limits: Limits, named: str) -> None:
    attempts = [
        accept(log, "m", os.urandom(16), os.urandom(16), size_bytes=10, limits=limits)
        for _ in range(40)
        for log in (subject.log, subject.peer)
    ]
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)

    refused = [outcome for outcome in outcomes if outcome is not None]
    assert len(refused) == 80 - 25
    assert all(isinstance(error, ResourceExhausted) and named in str(error) for error in refused)
    assert await subject.log.pending("m") == (50, 500)
    # all or none: what was refused left nothing behind
    assert len(await subject.log.range(keys.queue("m", 0))) == 25


async def test_a_limit_may_be_reached_but_not_passed(subject: Subject) -> None:
    await accept(subject.log, "m", b"a", b"b", limits=Limits(requests=3, size_bytes=30))
    with pytest.raises(ResourceExhausted):
        await accept(subject.log, "m", b"c", b"d", limits=Limits(requests=3))
    with pytest.raises(ResourceExhausted):
        await accept(subject.log, "m", b"c", size_bytes=11, limits=Limits(size_bytes=30))
    await accept(subject.log, "m", b"c", size_bytes=10, limits=Limits(requests=3, size_bytes=30))

    assert await subject.log.settle("m", [(b"a", 0)], None, []) == [True]
    await accept(subject.log, "m", b"d", limits=Limits(requests=3, size_bytes=30))
    assert await subject.log.pending("m") == (3, 30)


async def test_thousands_of_requests_in_one_call(subject: Subject) -> None:
    ids = [b"%016d" % number for number in range(9000)]
    await subject.log.accept("m", 0, 0, [(request_id, 3) for request_id in ids], [b"r", b"all"], NO_LIMITS)
    token = await subject.log.take_ownership("m", "me", "")

    assert await subject.log.pending("m") == (9000, 27000)
    assert await subject.log.begin_attempt("m", token, ids, 1) == [True] * 9000
    assert await subject.log.unsettled("m", ids) == [1] * 9000
    assert await subject.log.settle("m", [(request_id, 1) for request_id in ids], None, []) == [True] * 9000
    assert await subject.log.pending("m") == (0, 0)


async def test_the_first_settle_of_a_request_wins(subject: Subject) -> None:
    ids = [b"%d" % number for number in range(60)]
    await accept(subject.log, "m", *ids)

    results = await asyncio.gather(
        *[
            log.settle("m", [(request_id, 0) for request_id in ids[start : start + 20]], None, [])
            for start in range(0, 50, 10)
            for log in (subject.log, subject.peer)
        ]
    )

    assert sum(map(sum, results)) == 60
    assert await subject.log.pending("m") == (0, 0)
    assert await subject.log.settle("m", [(b"0", 0), (b"unknown", 0)], None, []) == [False, False]
    assert await subject.log.settle("m", [], None, []) == []


async def test_a_settlement_without_waiting_is_one(subject: Subject) -> None:
    key = keys.statistics("m", 1, "h")
    group = [b"%015d" % 7 + bytes((last,)) for last in range(3)]
    await accept(subject.log, "m", *group, b"a", b"b")
    near, far, facts = subject.stream(b"r"), b"r:away", subject.stream(b"f")

    async def settle(*ids: bytes) -> list[bool]:
        done: asyncio.Future[list[bool] | CharoniaError] = asyncio.get_running_loop().create_future()
        requests = [(request_id, 0) for request_id in ids]
        replies = [Reply(near, [b"r", b"near"]), Reply(far, [b"r", b"far"])]
        told = [Reply(facts, [b"e", b"done"])]
        if not subject.log.settle_now("m", requests, (key, {"n": 1}), replies, told, done.set_result):
            return await subject.log.settle("m", requests, (key, {"n": 1}), replies, told)
        assert not done.done()
        outcome = await asyncio.wait_for(done, PATIENCE_S)
        assert isinstance(outcome, list)
        return outcome

    assert await settle(*group) == [True] * 3
    assert await settle(b"b", group[1], b"a") == [True, False, True]
    assert await settle(group[0], b"a", group[2]) == [False] * 3
    assert await subject.log.pending("m") == (0, 0)
    assert await subject.log.statistics(key) == {"n": 1}
    for stream, value in ((near, b"near"), (far, b"far"), (facts, b"done")):
        assert values(await subject.log.range(stream)) == [value] * 3


async def test_a_settlement_without_waiting_is_journalled(subject: Subject) -> None:
    torn = [os.urandom(15) + b"a", os.urandom(15) + b"b"]
    ids = [torn[0][:-1] + b"x", torn[1], torn[0]]
    await subject.log.accept("m", 0, 0, [(one, 5) for one in ids], [b"r", b"x"], Limits(), journalled=True)
    requests, told = [(one, 1) for one in ids], {"outcomes": b"sfx", "ran": ("executor", "batch")}
    for expected in ([True] * 3, [False] * 3):
        done: asyncio.Future[list[bool] | CharoniaError] = asyncio.get_running_loop().create_future()
        if subject.log.settle_now("m", requests, None, [], [], done.set_result, **told):
            assert await asyncio.wait_for(done, PATIENCE_S) == expected
        else:
            assert await subject.log.settle("m", requests, None, [], **told) == expected

    entries = await subject.log.range(keys.journal("m"))
    accepted, started, ended = [fact for entry in entries for fact in read_facts(entry.fields)]
    outcomes = dict(zip(ids, (JobState.SUCCEEDED, JobState.FAILED, JobState.EXPIRED), strict=True))
    assert (set(accepted.ids), set(started.ids), started.executor) == (set(ids), set(ids), "executor")
    assert dict(zip(ended.ids, ended.outcomes, strict=True)) == outcomes


async def test_a_request_named_twice_is_won_once(subject: Subject) -> None:
    await accept(subject.log, "m", b"a", b"b")

    assert await subject.log.settle("m", [(b"a", 0), (b"b", 0), (b"a", 0)], None, []) == [True, True, False]
    assert await subject.log.pending("m") == (0, 0)


async def test_a_settle_of_an_older_attempt_is_fenced(subject: Subject) -> None:
    await accept(subject.log, "m", b"a", b"b")
    token = await subject.log.take_ownership("m", "me", "")
    assert await subject.log.begin_attempt("m", token, [b"a", b"gone"], 1) == [True, False]
    assert await subject.log.unsettled("m", [b"a", b"b"]) == [1, 0]

    assert await subject.log.settle("m", [(b"a", 0), (b"b", 0)], None, []) == [False, True]
    assert await subject.log.pending("m") == (1, 10)
    assert await subject.log.settle("m", [(b"a", 1)], None, []) == [True]
    assert await subject.log.pending("m") == (0, 0)


async def test_everything_unsettled_is_named(subject: Subject) -> None:
    assert await subject.log.unsettled_ids("m") == []
    together = [b"p" * 15 + bytes([number]) for number in range(4)]
    await accept(subject.log, "m", *together)
    await accept(subject.log, "m", b"q" * 15 + b":", b"q" * 15 + b"\xff")
    await accept(subject.log, "other", b"a")
    token = await subject.log.take_ownership("m", "me", "")
    await subject.log.begin_attempt("m", token, [together[2]], 1)
    await subject.log.settle("m", [(together[1], 0)], None, [])

    left = [together[0], *together[2:], b"q" * 15 + b":", b"q" * 15 + b"\xff"]
    assert sorted(await subject.log.unsettled_ids("m")) == left


async def test_an_attempt_is_raised_and_never_lowered(subject: Subject) -> None:
    await accept(subject.log, "m", b"a", b"b")
    token = await subject.log.take_ownership("m", "me", "")

    await subject.log.begin_attempt("m", token, [b"a"], 3)
    assert await subject.log.begin_attempt("m", token, [b"a", b"b"], 2) == [True, True]

    assert await subject.log.unsettled("m", [b"a", b"b"]) == [3, 2]
    # several attempts in one settle, each compared by itself
    assert await subject.log.settle("m", [(b"a", 2), (b"b", 2)], None, []) == [False, True]


async def test_a_former_owner_begins_no_attempt(subject: Subject) -> None:
    await accept(subject.log, "m", b"a")
    stale = await subject.log.take_ownership("m", "old", "")
    fresh = await subject.peer.take_ownership("m", "new", "old")

    with pytest.raises(Cancelled):
        await subject.log.begin_attempt("m", stale, [b"a"], 1)
    assert await subject.log.unsettled("m", [b"a"]) == [0]

    await subject.peer.release_ownership("m", "new", fresh)
    with pytest.raises(Cancelled):
        await subject.peer.begin_attempt("m", fresh, [b"a"], 1)
    with pytest.raises(Cancelled):
        await subject.peer.begin_attempt("never owned", 0, [b"a"], 1)


async def test_replies_go_out_whoever_won(subject: Subject, reader: tuple[StreamReader, Collector]) -> None:
    follow, collector = reader
    endpoint, other = subject.stream(b"r:1"), b"r:2"
    follow.add(endpoint, consume=True)
    follow.add(other, consume=True)
    await accept(subject.log, "m", b"a", b"b")
    large = os.urandom(300_000)

    for won in (True, False):
        replies = [Reply(endpoint, [b"r", b"A", b"r", b"B"]), Reply(other, [b"r", large])]
        assert await subject.log.settle("m", [(b"a", 0), (b"b", 0)], None, replies) == [won, won]

    assert await collector.count(endpoint, 2) == [b"A", b"A"]
    assert await collector.count(other, 2) == [large, large]


async def test_a_reader_of_a_fact_finds_its_requests_settled(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    follow.add(subject.stream(b"r"))
    for number in range(20):
        await accept(subject.log, "m", b"%d" % number)
        settling = asyncio.ensure_future(
            subject.log.settle("m", [(b"%d" % number, 0)], None, [], [Reply(subject.stream(b"r"), [b"r", b"x"])])
        )
        await collector.count(subject.stream(b"r"), number + 1)
        assert await subject.peer.unsettled("m", [b"%d" % number]) == [-1]
        assert await settling == [True]


@pytest.mark.parametrize(
    "model", ["a{b}c", "x:1:2", "{", "}{", "modèle-模型", "with space", "%7B", "new\nline", "m" * 300, "x*?[a]"]
)
async def test_any_model_name_keeps_to_itself(subject: Subject, model: str) -> None:
    neighbours = [model + ":0", model[:-1], "{" + model + "}"]
    await accept(subject.log, model, b"a\r\n:{}", b"\xff\x00")
    token = await subject.log.take_ownership(model, "me", "")
    key = keys.statistics(model, 1, "h")

    assert await subject.log.lanes(model) == [(0, 0)]
    assert await subject.log.begin_attempt(model, token, [b"a\r\n:{}"], 1) == [True]
    for neighbour in neighbours:
        assert await subject.log.pending(neighbour) == (0, 0)
        assert await subject.log.lanes(neighbour) == []
        assert await subject.log.owner(neighbour) == ("", 0)
    assert await subject.log.settle(model, [(b"a\r\n:{}", 1), (b"\xff\x00", 0)], (key, {"n": 2}), []) == [True, True]
    assert await subject.log.statistics(key) == {"n": 2}


# -- statistics --------------------------------------------------------------------------------------------------------


async def test_statistics_are_added_only_when_all_were_won(subject: Subject) -> None:
    key = keys.statistics("m", 1, "h")
    await accept(subject.log, "m", b"a", b"b", b"c")
    increments = {"success_count": 1, "success_ns": 10**15 + 1, "zero": 0, "last_inference_ms": 5}

    assert await subject.log.settle("m", [(b"a", 0)], (key, increments), []) == [True]
    assert await subject.log.settle("m", [(b"b", 0), (b"a", 0)], (key, increments), []) == [True, False]
    assert await subject.log.settle("m", [(b"c", 0)], (key, increments), []) == [True]

    found = await subject.log.statistics(key)
    assert found.get("zero", 0) == 0
    assert {name: value for name, value in found.items() if value} == {
        "success_count": 2,
        "success_ns": 2 * 10**15 + 2,
        "last_inference_ms": 5,
    }


async def test_sums_are_sums_and_last_is_the_latest(subject: Subject) -> None:
    key = keys.statistics("m", 1, "h")
    near = 2**60  # neighbours a double cannot tell apart
    for value in (99, near + 1, near, 100):
        await subject.log.add_statistics(key, {"last_ns": value, "count": value, "back": -1})

    assert await subject.peer.statistics(key) == {"last_ns": near + 1, "count": 2 * near + 200, "back": -4}
    assert await subject.peer.statistics(b"none") == {}


async def test_sums_stay_exact_beyond_what_a_double_holds(subject: Subject) -> None:
    key = keys.statistics("m", 1, "h")
    values = [999_999_999_999_999, 1, 10**15, 2**53 - 1, 2, 1, 10**17, 1, -(10**16), 7]
    for value in values:
        await subject.log.add_statistics(key, {"compute_ns": value})

    assert await subject.log.statistics(key) == {"compute_ns": sum(values)}


def run_of(rows: int, ns: int, last_ms: int) -> dict[str, int]:
    """What a batch that is one execution adds (`executors.accounting`)."""
    parts = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    added = {f"{part}_{what}": rows if what == "count" else ns for part in parts for what in ("count", "ns")}
    added |= {"inference_count": rows, "execution_count": 1, f"b{rows}_count": 1}
    added |= {f"b{rows}_{part}_ns": ns for part in ("input", "infer", "output")}
    return added | {"last_inference_ms": last_ms}


async def test_runs_add_up_with_all_else_and_stay_exact(subject: Subject) -> None:
    key = keys.statistics("m", 1, "h")
    # neighbours a double cannot tell apart, alone and in sum
    runs = [run_of(8, 2**52 - 1, 7), run_of(3, 10, 90), run_of(8, 5, 8), run_of(8, 2**52, 6), run_of(3, 2**60 + 1, 5)]
    await subject.log.add_statistics(key, {"success_ns": 1, "fail_count": 2, "last_inference_ms": 80})
    await accept(subject.log, "m", b"a" * 16, b"b" * 16)
    assert await subject.log.settle("m", [(b"a" * 16, 1)], (key, runs[0]), []) == [True]
    assert await subject.log.settle("m", [(b"b" * 16, 1)], (key, runs[1]), [], outcomes=b"s") == [True]
    for run in runs[2:]:
        await subject.log.add_statistics(key, run)

    expected = {"success_ns": 1, "fail_count": 2, "last_inference_ms": 80}
    for run in runs:
        for name, value in run.items():
            known = expected.get(name, 0)
            expected[name] = max(known, value) if name.startswith("last_") else known + value
    assert await subject.peer.statistics(key) == expected


async def test_settle_keeps_the_latest_of_last_too(subject: Subject) -> None:
    key = keys.statistics("m", 1, "h")
    for request_id, value in ((b"a", 99), (b"b", 1000), (b"c", 998)):
        await accept(subject.log, "m", request_id)
        await subject.log.settle("m", [(request_id, 0)], (key, {"last_ns": value}), [])

    assert await subject.log.statistics(key) == {"last_ns": 1000}


# -- ownership and liveness --------------------------------------------------------------------------------------------


async def test_one_of_many_becomes_the_owner(subject: Subject) -> None:
    assert await subject.log.owner("m") == ("", 0)
    tokens = await asyncio.gather(
        *[log.take_ownership("m", f"b{n}", "") for n in range(10) for log in (subject.log, subject.peer)]
    )

    (token,) = [token for token in tokens if token]
    owner, owner_token = await subject.log.owner("m")
    assert owner_token == token
    assert owner.startswith("b")


async def test_tokens_grow_through_takeover_and_release(subject: Subject) -> None:
    first = await subject.log.take_ownership("m", "a", "")
    assert await subject.log.take_ownership("m", "b", "") == 0
    assert await subject.log.take_ownership("m", "b", "c") == 0
    second = await subject.log.take_ownership("m", "b", "a")
    assert second > first

    await subject.log.release_ownership("m", "a", first)
    await subject.log.release_ownership("m", "b", first)
    assert await subject.log.owner("m") == ("b", second)

    await subject.log.release_ownership("m", "b", second)
    assert await subject.log.owner("m") == ("", second)
    assert await subject.log.take_ownership("m", "c", "b") == 0
    assert await subject.log.take_ownership("m", "c", "") > second


async def test_a_heartbeat_is_a_lease(subject: Subject) -> None:
    await subject.log.beat("batcher", "long", 60_000)
    await subject.log.beat("batcher", "short", 1)
    await subject.log.beat("batcher", "ended", 60_000)
    await subject.log.end_beat("batcher", "ended")

    async with asyncio.timeout(PATIENCE_S):
        while (await subject.peer.alive("batcher", ["short"]))[0]:
            pass
    assert await subject.peer.alive("batcher", ["long", "short", "ended", "never"]) == [True, False, False, False]
    assert await subject.peer.alive("gateway", ["long"]) == [False]
    long, *others = await subject.peer.last_beat_ms("batcher", ["long", "short", "ended", "never"])
    assert 0 <= long < 30_000
    assert others == [-1, -1, -1]
    assert await subject.peer.last_beat_ms("batcher", []) == []
    assert await subject.peer.alive("gateway", []) == []


# -- payloads ----------------------------------------------------------------------------------------------------------


async def test_blobs_come_back_until_their_time_is_over(subject: Subject) -> None:
    large = os.urandom(5_000_000)
    await subject.log.put_blob("one", memoryview(large), 60)
    await subject.log.put_blob("two", b"", 60)

    assert await subject.peer.blob("one") == large
    assert await subject.peer.blob("two") == b""
    assert await subject.peer.blob("three") is None
    await subject.log.delete_keys([keys.blob("one"), keys.blob("three")])
    assert await subject.peer.blob("one") is None
    await subject.log.put_blob("two", b"new", 60)
    assert await subject.peer.blob("two") == b"new"


async def test_deleted_keys_are_gone_whatever_they_were(subject: Subject) -> None:
    stream, key = subject.stream(b"s"), keys.statistics("m", 1, "h")
    await put(subject.log, stream, b"a")
    await subject.log.add_statistics(key, {"n": 1})

    await subject.log.delete_keys(iter([stream, key]))
    await subject.log.delete_keys([])

    assert await subject.log.range(stream) == []
    assert await subject.log.statistics(key) == {}


async def test_a_sequences_record_changes_with_the_settlement_that_is_won(subject: Subject) -> None:
    log = subject.log
    ids = [bytes(15) + bytes([n]) for n in range(4)]
    await log.accept("m", 0, 0, [(one, 1) for one in ids], [b"r", b"x"], NO_LIMITS)
    first = {ids[0]: SequenceStep(b"a", b"run-1 at 1", b"state 1"), ids[1]: SequenceStep(b"b", b"run-2 at 1")}
    assert await log.settle("m", [(ids[0], 0), (ids[1], 0)], None, [], sequences=first) == [True, True]
    assert await subject.peer.sequences("m") == {b"a": b"run-1 at 1", b"b": b"run-2 at 1"}
    states = await subject.peer.sequence_states("m", [b"b", b"none", b"a"])
    assert states == [(b"run-2 at 1", b""), None, (b"run-1 at 1", b"state 1")]
    assert await subject.peer.sequence_states("m", []) == []

    lost = {ids[0]: SequenceStep(b"a", b"run-1 at 2", b"wrong"), ids[2]: SequenceStep(b"a", b"run-1 at 3")}
    assert await log.settle("m", [(ids[0], 0), (ids[2], 0)], None, [], sequences=lost) == [False, True]
    assert await log.sequence_states("m", [b"a"]) == [(b"run-1 at 3", b"state 1")]

    assert await log.settle("m", [(ids[3], 0)], None, [], sequences={ids[3]: SequenceStep(b"a", b"")}) == [True]
    assert await log.sequences("m") == {b"b": b"run-2 at 1"}
    await log.forget_sequences("m", {b"b": b"run-9", b"none": b""})
    assert await log.sequences("m") == {b"b": b"run-2 at 1"}
    await log.forget_sequences("m", {b"b": b"run-2"})
    assert (await log.sequences("m"), await log.sequence_states("m", [b"b"])) == ({}, [None])


async def test_a_job_of_a_sequence_ends_and_steps_in_one(subject: Subject) -> None:
    job = NewJob(bytes(15) + b"j", 10, accepted_us=5, retention_s=60)
    await subject.log.accept_job("m", 0, 0, job, [b"r", b"x"], NO_LIMITS)
    end = JobEnd(JobState.SUCCEEDED, b"result", {"k": 1})
    statistics = (keys.statistics("m", 1, "h"), {"success_count": 1})
    state = bytes(100_000)
    steps = {job.id: SequenceStep(b"a", b"about", state)}
    won = await subject.log.settle(
        "m", [(job.id, 0)], statistics, [], ends={job.id: end}, outcomes=b"s", sequences=steps
    )
    assert won == [True]
    assert await subject.peer.sequence_states("m", [b"a"]) == [(b"about", state)]
    assert await subject.peer.job_result("m", job.id) == b"result"
    assert await subject.peer.statistics(statistics[0]) == {"success_count": 1}


async def test_the_log_shows_a_time_that_goes_on(subject: Subject) -> None:
    first = await subject.log.clock_ns()
    second = await subject.peer.clock_ns()
    assert first <= second + 1_000_000_000, "two nodes of a cluster need not agree to the last"
    assert abs(second - wall_ns()) < 3600 * 1_000_000_000
