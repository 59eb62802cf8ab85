"""Cancels are repeated until the log has an outcome of their requests, ever more rarely, and not without a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.calls.cancels import Cancels
from charonia.calls.requester import Requester
from charonia.calls.waiters import OpenRequest, Waiter
from charonia.errors import LogUnavailable
from charonia.eventlog.port import Limits
from charonia.facts.events import RequestCancelled, facts_of

MODEL = "m"
ONE, TWO = b"1" * 16, b"2" * 16


def parts(**more: Any) -> tuple[MemoryLog, Cancels, list[Coroutine[Any, Any, Any]]]:
    log, spawned = MemoryLog(), list[Coroutine[Any, Any, Any]]()
    return log, Cancels(log, spawned.append, **more), spawned


async def accept(log: MemoryLog, *ids: bytes) -> None:
    await log.accept(MODEL, 0, 0, [(one, 1) for one in ids], [b"r", b""], Limits())


async def told(log: MemoryLog) -> list[Any]:
    """The cancels that the owner has not read."""
    found = [fact for entry in await log.range(keys.facts(MODEL)) for fact in facts_of(entry)]
    await log.delete_stream(keys.facts(MODEL))
    return [fact for fact in found if isinstance(fact, RequestCancelled)]


async def test_what_stays_unsettled_is_cancelled_again_ever_more_rarely() -> None:
    log, cancels, spawned = parts()
    await accept(log, ONE)
    cancels.send(MODEL, ONE, gentle=True)
    await asyncio.gather(*spawned)
    assert await told(log) == [RequestCancelled(ONE, gentle=True)]

    at = []
    for second in range(1, 200):
        await cancels.repeat()
        if await told(log) == [RequestCancelled(ONE, gentle=True)]:
            at.append(second)

    assert at == [2, 6, 14, 30, 62, 126, 190]


async def test_what_is_settled_is_forgotten() -> None:
    log, cancels, spawned = parts()
    await accept(log, ONE, TWO)
    cancels.send(MODEL, ONE)
    cancels.send(MODEL, TWO)
    await asyncio.gather(*spawned)
    await told(log)
    await log.settle(MODEL, [(ONE, 1)], None, [])
    await cancels.repeat()
    await cancels.repeat()
    assert await told(log) == [RequestCancelled(TWO)]
    assert len(cancels) == 1
    cancels.forget()
    assert len(cancels) == 0


async def test_a_request_that_is_wanted_after_all_is_not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the log is asked about it meanwhile."""
    log, cancels, _ = parts()
    await accept(log, ONE, TWO)
    unsettled = log.unsettled

    async def overtaken(*arguments: Any) -> list[int]:
        cancels.drop(ONE)
        return await unsettled(*arguments)

    monkeypatch.setattr(log, "unsettled", overtaken)
    cancels.keep(MODEL, ONE)
    cancels.keep(MODEL, TWO)
    await cancels.repeat()
    await cancels.repeat()
    assert await told(log) == [RequestCancelled(TWO)]
    assert len(cancels) == 1


async def test_a_caller_that_read_on_and_then_leaves_cancels_for_good() -> None:
    log, cancels, spawned = parts()
    await accept(log, ONE)
    cancels.send(MODEL, ONE, gentle=True)
    cancels.send(MODEL, ONE)
    cancels.keep(MODEL, ONE, gentle=True)
    await asyncio.gather(*spawned)
    await told(log)
    await cancels.repeat()
    await cancels.repeat()
    assert await told(log) == [RequestCancelled(ONE)]


async def test_a_cancel_that_the_log_did_not_take_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    log, cancels, spawned = parts()
    await accept(log, ONE)

    async def away(*_: Any) -> bytes:
        raise LogUnavailable("away")

    with monkeypatch.context() as context:
        context.setattr(log, "append", away)
        cancels.send(MODEL, ONE)
        await asyncio.gather(*spawned)
    await cancels.repeat()
    await cancels.repeat()
    assert await told(log) == [RequestCancelled(ONE)]


async def test_no_more_than_the_newest_are_kept() -> None:
    log, cancels, _ = parts(most=1)
    await accept(log, ONE, TWO)
    cancels.keep(MODEL, ONE)
    cancels.keep(MODEL, TWO)
    await cancels.repeat()
    await cancels.repeat()
    assert await told(log) == [RequestCancelled(TWO)]


async def test_while_the_owner_reads_nothing_no_repetitions_pile_up() -> None:
    """A model may be without an owner for hours, with a full queue of requests that nobody waits for."""
    log, cancels, spawned = parts()
    ids = [bytes([n]) * 16 for n in range(50)]
    await accept(log, *ids)
    entries = len(await log.range(keys.facts(MODEL)))
    for one in ids:
        cancels.send(MODEL, one)
    await asyncio.gather(*spawned)
    for _ in range(1000):
        await cancels.repeat()
    assert len(await log.range(keys.facts(MODEL))) - entries == len(ids) + 1
    assert len(await told(log)) == 2 * len(ids)

    for _ in range(4):  # an owner has read them, and knew none
        await cancels.repeat()
    assert [fact.id for fact in await told(log)] == ids


async def test_a_repetition_that_the_log_did_not_take_is_tried_at_the_next_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log that is full answers questions and takes no facts."""
    log, cancels, _ = parts()
    await accept(log, ONE)
    cancels.keep(MODEL, ONE)

    async def refused(*_: Any) -> bytes:
        raise LogUnavailable("full")

    with monkeypatch.context() as context:
        context.setattr(log, "append", refused)
        for _ in range(2):
            await cancels.repeat()
    await cancels.repeat()
    assert await told(log) == [RequestCancelled(ONE)]


async def test_a_thousand_and_more_are_repeated_in_one_round() -> None:
    log, cancels, _ = parts()
    ids = [n.to_bytes(16) for n in range(2500)]
    await accept(log, *ids)
    await log.delete_stream(keys.facts(MODEL))
    for one in ids:
        cancels.keep(MODEL, one)
    for _ in range(2):
        await cancels.repeat()
    assert len(await log.range(keys.facts(MODEL))) == 3
    assert [fact.id for fact in await told(log)] == ids


async def test_a_log_that_was_replaced_knows_none_of_them() -> None:
    log = MemoryLog()
    requester = Requester[OpenRequest](log, "gateway-0")
    request = OpenRequest(MODEL, ONE)
    request.sent = True
    requester.withdraw(request)
    assert len(requester.cancels) == 1
    requester.begin_anew()
    assert len(requester.cancels) == 0
    await requester.close()


async def test_a_part_of_the_log_that_is_away_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster each model is at one primary."""
    log = MemoryLog()
    unsettled = log.unsettled

    async def of_those_that_are_there(model: str, ids: Sequence[bytes]) -> list[int]:
        if model == "away":
            raise LogUnavailable("its primary is away")
        return await unsettled(model, ids)

    monkeypatch.setattr(log, "unsettled", of_those_that_are_there)
    requester = Requester[OpenRequest](log, "gateway-0", max_size_bytes=100)
    await accept(log, ONE)
    await told(log)
    requester.cancels.keep("away", TWO)
    requester.cancels.keep(MODEL, ONE)
    lost = Waiter(MODEL, b"3" * 16)
    lost.accepted = True
    requester.add(lost, 1)
    for _ in range(2):
        await requester.recheck([lost.id])
    with pytest.raises(LogUnavailable, match="outcome"):
        await lost.future
    assert await told(log) == [RequestCancelled(ONE)]
    assert len(requester.cancels) == 2
    await requester.close()
