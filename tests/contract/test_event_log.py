"""What every adapter of the log port promises about statistics, ownership, heartbeats, payloads and its clock."""

from __future__ import annotations

import asyncio
import os

import pytest
from log_adapters import PATIENCE_S, Subject, accept, put

from charonia import keys
from charonia.clock import wall_ns
from charonia.facts import counters
from charonia.facts.sequence_states import SequenceStep

# -- statistics --------------------------------------------------------------------------------------------------------


RUN = dict(zip(counters.of_execution(4), (4, 400, 4, 200, 4, 40, 4, 80, 4, 44, 10, 1, 1, 10, 20, 11, 7), strict=True))


@pytest.mark.parametrize("counted", [RUN, RUN | {"ended_in_us": 3}], ids=["packed", "named"])
@pytest.mark.parametrize("of_sequences", [False, True])
@pytest.mark.parametrize("rows", [(1, 2, 3, 4), (2, 2, 2, 2)])
async def test_statistics_count_what_was_won(
    subject: Subject, counted: dict[str, int], of_sequences: bool, rows: tuple[int, ...]
) -> None:
    key = keys.statistics("m", 1, "h")
    ids = [bytes([group]) * 15 + bytes([last]) for last in (0, 1) for group in (2, 1)]
    await accept(subject.log, "m", *ids)
    assert await subject.log.settle("m", [(ids[1], 0), (ids[3], 0)], None, []) == [True, True]
    steps = {ids[0]: SequenceStep(b"key", b"about", None)} if of_sequences else None
    requests = [(request_id, 0) for request_id in ids]
    won = await subject.log.settle("m", requests, (key, counted), [], rows=rows, sequences=steps)
    assert won == [True, False, True, False]
    lost_rows = rows[1] + rows[3]
    assert await subject.peer.statistics(key) == counters.without(counted, 2, lost_rows)
    assert (await subject.peer.statistics(key))["inference_count"] == 10 - lost_rows
    # an attempt whose answer was lost is repeated
    assert await subject.log.settle("m", requests, (key, counted), [], rows=rows, sequences=steps) == [False] * 4
    assert await subject.peer.statistics(key) == counters.without(counted, 2, lost_rows)


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
    """What a batch that is one execution adds (`executors.batches.batch_results`)."""
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


async def test_an_entry_with_a_smaller_token_is_fenced(subject: Subject) -> None:
    stream, fence = keys.batch_facts("b"), keys.batch_fence("b")
    assert await subject.log.append_fenced(stream, fence, 7, [b"f", b"one", b"g", b"more"], 60)
    assert await subject.peer.append_fenced(stream, fence, 7, [b"f", b"two"], 60)
    assert await subject.peer.append_fenced(stream, fence, 9, [], 60), "a larger token is only noted"
    assert not await subject.log.append_fenced(stream, fence, 7, [b"f", b"late"], 60)
    assert not await subject.log.append_fenced(stream, fence, 8, [], 60)
    assert await subject.log.append_fenced(stream, fence, 9, [b"f", b"three"], 60)
    assert await subject.log.append(stream, [b"f", b"without a token"])
    found = [entry.fields[1] for entry in await subject.peer.range(stream)]
    assert found == [b"one", b"two", b"three", b"without a token"]


async def test_a_fence_is_kept_for_its_time(subject: Subject) -> None:
    stream, fence = keys.batch_facts("b"), keys.batch_fence("b")
    assert await subject.log.append_fenced(stream, fence, 9, [], 1)
    async with asyncio.timeout(PATIENCE_S):
        while not await subject.peer.append_fenced(stream, fence, 8, [b"f", b"late"], 60):
            await asyncio.sleep(0.01)


async def test_a_heartbeat_is_a_lease(subject: Subject) -> None:
    assert not await subject.log.beat("batcher", "long", 30_000)
    assert await subject.log.beat("batcher", "long", 40_000), "it had not ended"
    assert await subject.peer.prolong("batcher", "long", 60_000)
    await subject.log.beat("batcher", "short", 1)
    await subject.log.beat("batcher", "ended", 60_000)
    await subject.log.end_beat("batcher", "ended")
    assert not await subject.peer.prolong("batcher", "ended", 60_000), "only its process makes a lease again"

    async with asyncio.timeout(PATIENCE_S):
        while (await subject.peer.alive("batcher", ["short"]))[0]:
            await asyncio.sleep(0.001)
    assert await subject.peer.alive("batcher", ["long", "short", "ended", "never"]) == [True, False, False, False]
    assert await subject.peer.alive("gateway", ["long"]) == [False]
    long, *others = await subject.peer.last_beat_ms("batcher", ["long", "short", "ended", "never"])
    assert 0 <= long < 30_000
    assert others == [-1, -1, -1]
    assert not await subject.log.beat("batcher", "ended", 60_000)
    assert await subject.peer.alive("batcher", ["ended"]) == [True]
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
    stream, key = b"s", keys.statistics("m", 1, "h")
    await put(subject.log, stream, b"a")
    await subject.log.add_statistics(key, {"n": 1})

    await subject.log.delete_keys(iter([stream, key]))
    await subject.log.delete_keys([])

    assert await subject.log.range(stream) == []
    assert await subject.log.statistics(key) == {}


async def test_the_log_says_what_memory_it_uses(subject: Subject) -> None:
    await put(subject.log, b"s", b"a")
    used, most = await subject.log.memory_bytes()
    assert used > 0
    assert most >= 0


async def test_the_log_shows_a_time_that_goes_on(subject: Subject) -> None:
    first = await subject.log.clock_ns()
    second = await subject.peer.clock_ns()
    assert first <= second + 1_000_000_000, "two nodes of a cluster need not agree to the last"
    assert abs(second - wall_ns()) < 3600 * 1_000_000_000
