"""A wave that is taken apart comes back as requests; those that were aboard a death are looked at one by one."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from memory_log.log import MemoryLog
from scheduler_bench import interface

from batcher.entries.bursting import Bursting
from batcher.entries.carriers import Deletions, Windows, carried_of
from batcher.scheduling.decisions import BurstWave, DispatchBatch
from batcher.scheduling.observations import BatchDied, BatchLost, PolicyChanged, RequestQueued, VersionServed
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia import keys
from charonia.clock import monotonic_ns, wall_ns
from charonia.datatypes import DataType
from charonia.errors import LogUnavailable
from charonia.eventlog.port import START, EndedWave
from charonia.models.scheduling import DynamicBatching
from charonia.tensors import Tensor
from charonia.wire import Wave, request_meta, wave_head

QUEUE = keys.queue("m", 0, 0)
PREFIX = b"p" * 15
COUNT = 4


class Owner:
    """What an owner does with its queue."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.windows = Windows(self.log.reader(), 100, Deletions(self.log), lambda _stream, _entries: None)
        self.windows.open(QUEUE, 0)
        self.bursting = Bursting(self.log, "m", self.windows.has_read)
        self.scheduler = ModelScheduler("p")
        self.after = START
        self.see(PolicyChanged(interface(8, DynamicBatching())), VersionServed("a", 1, "h", 2))

    def see(self, *events: object) -> list[object]:
        return list(self.scheduler.observe_all(list(events), monotonic_ns()))  # type: ignore[arg-type]

    async def send(self, count: int = COUNT) -> None:
        tensor = Tensor("x", DataType.INT32, (1, 1), bytes(4))
        meta = request_meta(1, "h", [tensor], (), {})
        about = {"rows": 1, "signature": 70, "level": 0, "accepted_ns": wall_ns()}
        head = wave_head(PREFIX, count, b"g", meta, **about)  # type: ignore[arg-type]
        told: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        assert self.log.waves.send(QUEUE, [head, *[bytes([n] * 4) for n in range(count)]], told.set_result)
        await told

    async def read(self, attempts: dict[bytes, int] | None = None) -> list[RequestQueued]:
        """`attempts` as for `Windows.read`."""
        entries = await self.log.range(QUEUE, self.after)
        self.after = entries[-1].id if entries else self.after
        return self.windows.read(QUEUE, entries, attempts, set())


@pytest.fixture
async def owner() -> Owner:
    return Owner()


async def test_a_wave_is_one_item_that_stands_for_its_requests(owner: Owner) -> None:
    await owner.send()
    (item,) = await owner.read()
    assert (item.id, item.wave, item.count, item.rows) == (PREFIX + b"\xff", True, COUNT, COUNT)
    assert item.signature != 70, "it shares no batch with requests"
    assert carried_of(item).entry.remaining == COUNT


async def test_requests_of_a_burst_wave_keep_what_was_asked(owner: Owner) -> None:
    await owner.send()
    (item,) = await owner.read()
    wave: object = carried_of(item).record
    assert isinstance(wave, Wave)
    await owner.bursting.burst(BurstWave(item))
    queued = await owner.read()
    assert [request.id for request in queued] == wave.ids()
    assert [request.enqueued_ns for request in queued] == pytest.approx([item.enqueued_ns] * COUNT, abs=1_000_000_000)
    assert {(r.wave, r.count, r.rows, r.signature, r.attempt) for r in queued} == {(False, 1, 1, 70, 0)}
    assert owner.bursting.suspected(queued) == []
    assert await owner.log.pending("m") == (COUNT, 4 * COUNT)
    await owner.bursting.burst(BurstWave(item))  # it is said again
    assert await owner.read() == []


async def test_those_aboard_a_death_do_not_run_together_again(owner: Owner) -> None:
    await owner.send()
    (item,) = await owner.read()
    (batch,) = owner.see(item)
    assert isinstance(batch, DispatchBatch)
    (decision,) = owner.see(BatchDied(batch.batch_id, "a", frozenset({item.id}), "died", "", False, False))
    assert decision == BurstWave(item, suspect=True, executor="a")
    await owner.bursting.burst(decision)  # type: ignore[arg-type]
    queued = await owner.read()
    lost = owner.bursting.suspected(queued)
    assert [(one.executor, len(one.requests), one.members) for one in lost] == [("a", COUNT, COUNT)]
    assert owner.bursting.suspected(queued) == [], "it is said once"
    assert owner.bursting._entries == {}
    decisions = owner.see(*queued, *lost)
    assert decisions
    for given in decisions:
        assert isinstance(given, DispatchBatch)
        assert given.suspects
        assert len(given.requests) < COUNT


async def test_a_wave_that_was_answered_leaves_no_suspects(owner: Owner) -> None:
    await owner.send()
    (item,) = await owner.read()
    told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ended, counted = EndedWave(QUEUE, carried_of(item).entry.entry_id), (keys.statistics("m", 1, "hash"), {})
    assert owner.log.waves.end([ended], counted, [], told.set_result)
    assert list(await told) == [True]
    await owner.bursting.burst(BurstWave(item, suspect=True, executor="a"))
    assert await owner.read() == []
    assert owner.bursting.suspects == {}
    assert await owner.log.pending("m") == (0, 0)


def lose_answers(owner: Owner, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the log carry out the next bursts, and lose its answers."""
    burst, lost = owner.log.waves.burst, itertools.count()

    async def unheard(*words: object, **more: object) -> bytes:
        new_id = await burst(*words, **more)  # type: ignore[arg-type]
        if next(lost) < count:
            raise LogUnavailable("no answer")
        return new_id

    monkeypatch.setattr(owner.log.waves, "burst", unheard)


@pytest.mark.parametrize("lost", [1, 2])
async def test_those_aboard_a_death_stay_suspects_when_the_answer_to_their_burst_is_lost(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    await owner.send()
    (item,) = await owner.read()
    lose_answers(owner, monkeypatch, lost)
    decision = BurstWave(item, suspect=True, executor="a")
    for _ in range(lost):
        with pytest.raises(LogUnavailable):
            await owner.bursting.burst(decision)

    await owner.bursting.burst(decision)

    (said,) = owner.bursting.suspected(await owner.read())
    assert isinstance(said, BatchLost)
    assert (said.executor, said.members) == ("a", COUNT)
    assert owner.bursting.suspects == owner.bursting._entries == {}
    assert not owner.bursting._unsure


async def test_those_that_are_read_before_the_burst_is_tried_again_are_suspected_once(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    await owner.send()
    (item,) = await owner.read()
    lose_answers(owner, monkeypatch, 1)
    decision = BurstWave(item, suspect=True, executor="a")
    with pytest.raises(LogUnavailable):
        await owner.bursting.burst(decision)
    assert len(owner.bursting.suspected(await owner.read())) == 1

    await owner.bursting.burst(decision)

    assert not owner.bursting.suspects
    assert not owner.bursting._unsure


async def test_a_wave_that_was_answered_leaves_no_suspects_when_an_answer_is_lost(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    await owner.send()
    (item,) = await owner.read()
    await owner.log.delete_entries(QUEUE, [carried_of(item).entry.entry_id])
    lose_answers(owner, monkeypatch, 1)
    decision = BurstWave(item, suspect=True, executor="a")
    with pytest.raises(LogUnavailable):
        await owner.bursting.burst(decision)

    await owner.bursting.burst(decision)

    assert owner.bursting.suspects == {}
    assert not owner.bursting._unsure


@pytest.mark.parametrize("how", ["their entry is gone", "they were settled before they were read"])
async def test_suspects_that_do_not_come_are_forgotten(owner: Owner, how: str) -> None:
    await owner.send()
    (item,) = await owner.read()
    await owner.bursting.burst(BurstWave(item, suspect=True, executor="a"))
    owner.bursting.forget_read()
    assert list(owner.bursting.suspects) == [PREFIX], "they may still come"
    if how == "their entry is gone":
        (entry,) = await owner.log.range(QUEUE, owner.after)
        await owner.log.delete_entries(QUEUE, [entry.id])
        await owner.send(1)
    found = await owner.read({} if how == "they were settled before they were read" else None)
    assert [request.wave for request in found] == ([True] if how == "their entry is gone" else [])
    assert owner.bursting.suspected(found) == []
    owner.bursting.forget_read()
    assert owner.bursting.suspects == owner.bursting._entries == {}


async def test_suspects_that_come_before_the_log_answers_leave_nothing_behind(owner: Owner) -> None:
    await owner.send()
    (item,) = await owner.read()
    lost: list[object] = []
    burst = owner.log.waves.burst

    async def slow(*words: object, **more: object) -> bytes:
        new_id = await burst(*words, **more)  # type: ignore[arg-type]
        lost.extend(owner.bursting.suspected(await owner.read()))
        return new_id

    owner.log.waves.burst = slow  # type: ignore[method-assign]
    await owner.bursting.burst(BurstWave(item, suspect=True, executor="a"))
    assert len(lost) == 1
    assert owner.bursting.suspects == owner.bursting._entries == {}
