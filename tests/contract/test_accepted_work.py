"""What every adapter of the log port promises about requests from their acceptance to their settlement."""

from __future__ import annotations

import asyncio
import os

import pytest
from log_adapters import NO_LIMITS, PATIENCE_S, Collector, Subject, accept, values

from charonia import keys
from charonia.errors import Cancelled, CharoniaError, ResourceExhausted
from charonia.eventlog.port import Limits, Reply, StreamReader
from charonia.facts.events import FIELD_FACT, LaneOpened, unpack_fact
from charonia.facts.jobs import JobEnd, JobState, NewJob
from charonia.facts.journal import read_facts
from charonia.facts.sequence_states import SequenceStep

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
    near, far, facts = b"r", b"r:away", b"f"

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
    endpoint, other = b"r:1", b"r:2"
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
    follow.add(b"r")
    for number in range(20):
        await accept(subject.log, "m", b"%d" % number)
        settling = asyncio.ensure_future(
            subject.log.settle("m", [(b"%d" % number, 0)], None, [], [Reply(b"r", [b"r", b"x"])])
        )
        await collector.count(b"r", number + 1)
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


# -- payloads ----------------------------------------------------------------------------------------------------------


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

    kept = {b"b": (b"run-2 at 1", b"late"), b"a": (b"run-1 at 4", b"stale"), b"none": (b"", b"x")}
    assert await log.keep_states("m", kept) == [True, False, False]
    assert await log.keep_states("m", {}) == []
    assert await log.sequence_states("m", [b"a", b"b"]) == [(b"run-1 at 3", b"state 1"), (b"run-2 at 1", b"late")]

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
