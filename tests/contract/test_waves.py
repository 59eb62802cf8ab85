"""What every adapter of the log port promises about waves: one append accepts, one deletion settles or bursts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from log_adapters import NO_LIMITS, PATIENCE_S, Collector, Subject, accept

from charonia import keys
from charonia.errors import ResourceExhausted
from charonia.eventlog.port import EndedWave, EventLog, Limits, Reply, StreamReader
from charonia.facts import counters
from charonia.wire import FIELD_WAVE

QUEUE = keys.queue("m", 0, 0)
STATISTICS = keys.statistics("m", 1, "hash")
PREFIX = b"p" * 15
REQUESTS = [(PREFIX + bytes((last,)), 10) for last in range(3)]
FIELDS = [part for request_id, _ in REQUESTS for part in (b"r", request_id)]


async def send(log: EventLog, *pieces: bytes, stream: bytes = QUEUE) -> bytes:
    told: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(PATIENCE_S):
        assert log.waves.send(stream, pieces, told.set_result)
        assert not told.done(), "it is told later"
        entry_id = await told
    assert isinstance(entry_id, bytes), entry_id
    return entry_id


async def settle(
    log: EventLog, waves: Sequence[EndedWave], counted: Mapping[str, int], replies: Sequence[Reply] = ()
) -> list[bool]:
    told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(PATIENCE_S):
        assert log.waves.end(waves, (STATISTICS, counted), replies, told.set_result)
        return list(await told)


async def end(log: EventLog, *entry_ids: bytes, replies: tuple[Reply, ...] = (), stream: bytes = QUEUE) -> int:
    return sum(await settle(log, [EndedWave(stream, entry_id) for entry_id in entry_ids], {}, replies))


async def burst(log: EventLog, entry_id: bytes, *, tenant: str = "") -> bytes:
    return await log.waves.burst("m", QUEUE, entry_id, REQUESTS, FIELDS, tenant=tenant)


async def test_a_wave_is_one_entry_made_of_pieces(subject: Subject) -> None:
    first = await send(subject.log, b"head", b"", b"column")
    second = await send(subject.log, b"x" * 100_000, b"y" * 100_000)

    entries = await subject.peer.range(QUEUE)
    assert [entry.id for entry in entries] == [first, second]
    assert [[bytes(field) for field in entry.fields] for entry in entries] == [
        [FIELD_WAVE, b"headcolumn"],
        [FIELD_WAVE, b"x" * 100_000 + b"y" * 100_000],
    ]
    assert await subject.peer.pending("m") == (0, 0), "its sender counts it"


async def test_waves_come_in_the_order_they_were_sent(subject: Subject, reader: tuple[StreamReader, Collector]) -> None:
    read, collector = reader
    read.add(QUEUE)
    told: list[object] = []
    all_told = asyncio.Event()

    def done(result: object) -> None:
        told.append(result)
        if len(told) == 50:
            all_told.set()

    for number in range(50):
        assert subject.log.waves.send(QUEUE, [b"%d" % number], done)
    assert await collector.count(QUEUE, 50) == [b"%d" % number for number in range(50)]
    await asyncio.wait_for(all_told.wait(), PATIENCE_S)
    assert told == [entry.id for entry in collector.entries[QUEUE]]


async def test_a_callback_that_raises_withholds_no_other_acceptance(subject: Subject) -> None:
    told: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def fails(_result: object) -> None:
        raise ValueError("one of several")

    assert subject.log.waves.send(QUEUE, [b"1"], fails)
    assert subject.log.waves.send(QUEUE, [b"2"], told.set_result)
    async with asyncio.timeout(PATIENCE_S):
        entry_id = await told
    assert [entry.id for entry in await subject.peer.range(QUEUE)][1:] == [entry_id]


async def test_a_wave_ends_once(subject: Subject) -> None:
    first, second = await send(subject.log, b"1"), await send(subject.log, b"2")
    assert await subject.peer.waves.waiting(QUEUE, [first, b"1-1", second]) == [True, False, True]
    assert await subject.peer.waves.waiting(QUEUE, []) == []

    assert await end(subject.peer, first) == 1
    assert await subject.log.waves.waiting(QUEUE, [first, second]) == [False, True]
    assert await end(subject.log, first, second) == 1
    assert await end(subject.log, first, second) == 0
    assert await subject.log.range(QUEUE) == []


async def test_replies_are_there_before_their_wave_is_gone(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    read, collector = reader
    replies, other = keys.replies("g-1"), keys.replies("g-2")
    read.add(replies)
    read.add(other)
    entry_id = await send(subject.log, b"1")
    written = (Reply(replies, [b"w", b"one"]), Reply(other, [b"w", b"two"]), Reply(replies, [b"r", b"three"]))
    ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    assert subject.log.waves.end([EndedWave(QUEUE, entry_id)], (STATISTICS, {}), written, ended.set_result)
    while await subject.peer.waves.waiting(QUEUE, [entry_id]) == [True]:
        await asyncio.sleep(0.001)
    # whoever sees that it is gone finds its replies
    assert [bytes(entry.fields[1]) for entry in await subject.log.range(replies)] == [b"one", b"three"]
    assert [bytes(entry.fields[1]) for entry in await subject.log.range(other)] == [b"two"]
    assert list(await ended) == [True]
    assert await collector.count(replies, 2) == [b"one", b"three"]
    # a settlement that is said again answers again: whoever reads them knows what it has answered
    assert await end(subject.log, entry_id, replies=written[:1]) == 0
    assert await collector.count(replies, 3) == [b"one", b"three", b"one"]


RUN = counters.of_execution(4)
COUNTED = {
    "one execution": dict(zip(RUN, (4, 400, 4, 200, 4, 40, 4, 80, 4, 44, 8, 1, 1, 10, 20, 11, 7), strict=True)),
    "several": dict(zip(RUN, (4, 400, 4, 200, 4, 40, 4, 80, 4, 44, 8, 2, 1, 10, 20, 11, 7), strict=True))
    | dict(zip(counters.of_size(2), (1, 5, 6, 7), strict=True))
    | {"fail_count": 1, "fail_ns": 9, "fail_BACKEND": 1},
    "large sums": dict(zip(RUN, (4, 4 * 10**17, 4, 0, 4, 0, 4, 0, 4, 0, 8, 1, 1, 0, 0, 0, 7), strict=True)),
}


def positive(statistics: Mapping[str, int]) -> dict[str, int]:
    """What was counted: the adapters need not have fields for the rest."""
    return {name: amount for name, amount in statistics.items() if amount}


@pytest.mark.parametrize("counted", COUNTED.values(), ids=COUNTED)
async def test_statistics_are_written_with_the_waves_that_they_count(subject: Subject, counted: dict[str, int]) -> None:
    other = keys.queue("m", 1, 0)
    ids = [(QUEUE, await send(subject.log, b"1")), (other, await send(subject.log, b"2", stream=other))]
    one, two = (EndedWave(stream, entry_id, 2, 4) for stream, entry_id in ids)
    assert await settle(subject.log, [one, two], counted) == [True, True]
    assert positive(await subject.peer.statistics(STATISTICS)) == positive(counted)
    # an attempt whose answer was lost is repeated
    assert await settle(subject.log, [one, two], counted) == [False, False]
    assert positive(await subject.peer.statistics(STATISTICS)) == positive(counted)


@pytest.mark.parametrize("counted", COUNTED.values(), ids=COUNTED)
async def test_burst_waves_are_not_counted(subject: Subject, counted: dict[str, int]) -> None:
    kept, lost = [EndedWave(QUEUE, await send(subject.log, b"w"), count, 2 * count) for count in (3, 1)]
    assert await burst(subject.peer, lost.entry_id)
    assert await settle(subject.log, [lost, kept], counted) == [False, True]
    seen = await subject.peer.statistics(STATISTICS)
    assert positive(seen) == positive(counters.without(counted, 1, 2))
    assert (seen["success_count"], seen["queue_count"], seen["inference_count"]) == (3, 3, 6)
    assert seen["success_ns"] == counted["success_ns"] * 3 // 4
    assert seen["execution_count"] == counted["execution_count"]
    share = counters.share_of(counted, 1, 2)
    assert {name: seen.get(name, 0) + share[name] for name in share} == {name: counted[name] for name in share}


async def test_waves_of_several_streams_are_answered_in_their_order(subject: Subject) -> None:
    other = keys.queue("m", 1, 0)
    waves = []
    for number, stream in enumerate((QUEUE, other, QUEUE, other, QUEUE)):
        waves.append(EndedWave(stream, await send(subject.log, b"w", stream=stream), 10**number, 2 * 10**number))
    assert await settle(subject.peer, [waves[1], waves[4]], {}) == [True, True]
    counted = {"success_count": 11_111, "inference_count": 22_222, "execution_count": 1}
    assert await settle(subject.log, waves, counted) == [True, False, True, True, False]
    seen = await subject.peer.statistics(STATISTICS)
    assert seen == {"success_count": 1101, "inference_count": 2202, "execution_count": 1}


async def test_statistics_that_no_wave_adds_are_written_at_once(subject: Subject) -> None:
    counted: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    assert subject.log.waves.count(STATISTICS, {"success_count": 3, "last_inference_ms": 7}, counted.set_result)
    async with asyncio.timeout(PATIENCE_S):
        assert await counted is None
    assert await subject.peer.statistics(STATISTICS) == {"success_count": 3, "last_inference_ms": 7}
    await subject.log.add_statistics(STATISTICS, {"success_count": 1})
    assert await subject.peer.statistics(STATISTICS) == {"success_count": 4, "last_inference_ms": 7}


async def test_the_entries_of_a_model_s_queues_are_counted(subject: Subject) -> None:
    assert await subject.peer.waves.queue_entries("m") == 0
    await accept(subject.log, "m", b"r" * 16)
    entries = await subject.peer.waves.queue_entries("m")
    first, second = await send(subject.log, b"1"), await send(subject.log, b"2")
    assert await subject.peer.waves.queue_entries("m") == entries + 2
    assert await end(subject.peer, first) == 1
    assert await burst(subject.log, second)
    assert await subject.peer.waves.queue_entries("m") == entries + 1, "its requests take its place"
    assert await subject.peer.waves.queue_entries("another") == 0


async def test_a_burst_wave_is_its_requests(subject: Subject) -> None:
    entry_id = await send(subject.log, b"wave")
    new_id = await burst(subject.peer, entry_id)

    (entry,) = await subject.log.range(QUEUE)
    assert new_id == entry.id
    assert new_id != entry_id
    assert [bytes(field) for field in entry.fields] == FIELDS
    assert await subject.log.waves.waiting(QUEUE, [entry_id]) == [False]
    assert await subject.log.pending("m") == (3, 30)
    ids = [request_id for request_id, _ in REQUESTS]
    assert await subject.log.unsettled("m", [*ids, PREFIX + b"\x03", PREFIX + b"\xff"]) == [0, 0, 0, -1, -1]
    assert await subject.log.settle("m", [(ids[1], 0)], None, []) == [True]
    assert await subject.log.settle("m", [(request_id, 0) for request_id in ids], None, []) == [True, False, True]
    assert await subject.log.pending("m") == (0, 0)


async def test_a_wave_is_burst_once_and_not_when_it_is_settled(subject: Subject) -> None:
    first, second = await send(subject.log, b"1"), await send(subject.log, b"2")
    assert await end(subject.log, first) == 1
    assert await burst(subject.log, first) == b""
    assert await subject.log.pending("m") == (0, 0)

    assert await burst(subject.log, second) != b""
    assert await burst(subject.peer, second) == b""
    assert await subject.log.pending("m") == (3, 30)
    assert len(await subject.log.range(QUEUE)) == 1
    assert await end(subject.log, second) == 0, "its requests are settled one by one now"
    assert await subject.log.pending("m") == (3, 30)


async def test_requests_of_a_burst_wave_are_their_tenants(subject: Subject) -> None:
    limits = Limits(tenant_requests=4)
    await burst(subject.log, await send(subject.log, b"1"), tenant="t é")
    with pytest.raises(ResourceExhausted):
        await subject.log.accept("m", 0, 0, [(b"a0", 1), (b"b0", 1)], [b"r", b"x"], limits, tenant="t é")
    await subject.log.accept("m", 0, 0, [(b"a0", 1)], [b"r", b"x"], limits, tenant="t é")
    await subject.log.accept("m", 0, 0, [(b"b0", 1), (b"c0", 1)], [b"r", b"x"], limits, tenant="u")
    await subject.log.settle("m", [(request_id, 0) for request_id, _ in REQUESTS], None, [])
    await subject.log.accept("m", 0, 0, [(b"d%d" % n, 1) for n in range(3)], [b"r", b"x"], limits, tenant="t é")


async def test_one_of_several_settles_or_bursts_a_wave(subject: Subject) -> None:
    """Who wins has it alone: either it ended once, or its requests are there once."""
    for number in range(24):
        entry_id = await send(subject.log, b"%d" % number)
        logs = (subject.log, subject.peer) if number % 2 else (subject.peer, subject.log)
        first, second = (burst, end) if number % 4 < 2 else (end, burst)
        results = await asyncio.gather(
            first(logs[0], entry_id), second(logs[1], entry_id), end(logs[0], entry_id), burst(logs[1], entry_id)
        )
        ended = sum(result for result in results if isinstance(result, int))
        bursts = [result for result in results if isinstance(result, bytes) and result]
        assert ended + len(bursts) == 1
        assert await subject.log.pending("m") == ((0, 0) if ended else (3, 30))
        if bursts:
            await subject.log.settle("m", [(request_id, 0) for request_id, _ in REQUESTS], None, [])
            await subject.log.delete_entries(QUEUE, bursts)


# -- leases ------------------------------------------------------------------------------------------------------------


async def test_a_lease_takes_the_place_of_the_one_before(subject: Subject) -> None:
    waves, limits = subject.log.waves, Limits(requests=10, size_bytes=100)
    assert await waves.lease("m", "g-1", 6, 60, limits)
    assert await subject.peer.waves.lease("m", "g-2", 4, 40, limits)
    assert not await waves.lease("m", "g-1", 7, 60, limits)
    assert not await waves.lease("m", "g-1", 6, 61, limits)
    assert await waves.lease("m", "g-1", 6, 60, limits), "what is held is held"
    assert await waves.lease("m", "g-1", 5, 60, limits)
    assert await waves.lease("m", "g-2", 5, 40, limits)
    assert await waves.lease("m", "g-1", 0, 0, limits)
    assert await waves.lease("m", "g-1", 0, 0, limits), "it may be ended again"
    assert await waves.lease("m", "g-3", 5, 60, limits)
    assert not await waves.lease("m", "g-4", 1, 0, limits)
    assert await waves.lease("m", "g-4", 1000, 10**12, NO_LIMITS)
    assert await waves.lease("other", "g-4", 10, 100, limits)
    assert await subject.log.pending("m") == (0, 0), "leased is not pending"


async def test_leased_room_is_taken_from_requests_and_theirs_from_it(subject: Subject) -> None:
    limits = Limits(requests=10, size_bytes=1000)
    assert await subject.log.waves.lease("m", "g-1", 8, 10, limits)
    await accept(subject.peer, "m", b"a", b"b", limits=limits)
    with pytest.raises(ResourceExhausted):
        await accept(subject.peer, "m", b"c", limits=limits)
    assert not await subject.log.waves.lease("m", "g-1", 9, 10, limits)
    assert not await subject.log.waves.lease("m", "g-1", 8, 981, limits)
    assert await subject.log.waves.lease("m", "g-1", 8, 980, limits)
    with pytest.raises(ResourceExhausted):
        await accept(subject.peer, "m", b"c", size_bytes=1, limits=Limits(size_bytes=1000))
    assert await subject.log.waves.lease("m", "g-1", 7, 10, limits)
    await accept(subject.peer, "m", b"c", limits=limits)
    await subject.log.settle("m", [(b"a", 0)], None, [])
    assert await subject.log.waves.lease("m", "g-1", 8, 10, limits)


async def test_a_bound_that_was_lowered_lets_leases_shrink(subject: Subject) -> None:
    waves = subject.log.waves
    assert await waves.lease("m", "g-1", 100, 100, NO_LIMITS)
    low = Limits(requests=10, size_bytes=10)
    assert not await waves.lease("m", "g-2", 1, 1, low)
    assert not await waves.lease("m", "g-1", 99, 101, low)
    assert await waves.lease("m", "g-1", 50, 100, low)
    assert await waves.lease("m", "g-1", 0, 0, low)
    assert await waves.lease("m", "g-2", 10, 10, low)


async def test_bounds_are_exact_with_leases_under_concurrency(subject: Subject) -> None:
    limits = Limits(requests=50)
    leases = [
        log.waves.lease("m", f"g-{number}", 5, 0, limits) for number in range(8) for log in (subject.log, subject.peer)
    ]
    requests = [
        accept(log, "m", b"%02d" % number * 8, b"%02d" % number * 7 + b"--", limits=limits)
        for number, log in enumerate([subject.peer, subject.log] * 10)
    ]
    mixed = [one for pair in zip(requests, [*leases, *[None] * 4], strict=True) for one in pair if one is not None]
    outcomes = await asyncio.gather(*mixed, return_exceptions=True)
    assert all(outcome in (None, True, False) or isinstance(outcome, ResourceExhausted) for outcome in outcomes)

    held = 0
    for number in range(8):  # each holder has asked twice for the same
        granted = [o for o, what in zip(outcomes, mixed, strict=True) if what in leases[2 * number : 2 * number + 2]]
        held += 5 if True in granted else 0
    pending, _ = await subject.log.pending("m")
    assert held + pending <= 50
    assert held + pending > 48, "no room was wasted"
    # exactly what is left may be had
    left = 50 - held - pending
    assert not await subject.log.waves.lease("m", "last", left + 1, 0, limits)
    assert await subject.log.waves.lease("m", "last", left, 0, limits)


async def test_a_burst_wave_counts_beside_the_lease_it_was_sent_under(subject: Subject) -> None:
    """The bound is not passed by what is taken apart later: its sender gives the room back when it is answered."""
    limits = Limits(requests=6)
    assert await subject.log.waves.lease("m", "g-1", 3, 0, limits)
    await burst(subject.log, await send(subject.log, b"wave"))
    with pytest.raises(ResourceExhausted):
        await accept(subject.log, "m", b"a", limits=limits)
    assert await subject.log.waves.lease("m", "g-1", 0, 0, limits)
    await accept(subject.log, "m", b"a", limits=limits)
