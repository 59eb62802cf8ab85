"""Blobs by who lends them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.calls.payload_transfer import LentBlobs, Payloads, sweep_lent
from charonia.errors import LogUnavailable
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory

LARGE = [b"x" * BY_REFERENCE_BYTES]
MINUTE_MS = 60_000


async def member(log: MemoryLog, name: str) -> Payloads:
    await log.beat("gateway", name, MINUTE_MS)
    return Payloads(log, PayloadDirectory("", name), {}, name)


async def lend(payloads: Payloads) -> str:
    reference = await payloads.lend(LARGE, 0)
    assert reference is not None
    return reference.name


async def test_what_the_dead_lent_is_swept_and_nothing_else() -> None:
    log = MemoryLog()
    dead, living = await member(log, "gateway-1"), await member(log, "gateway-2")
    lost = [await lend(dead) for _ in range(3)]
    kept = await lend(living)
    assert await sweep_lent(log, {}) == 0, "its lease holds"
    await log.end_beat("gateway", "gateway-1")
    assert await sweep_lent(log, {"gateway-1"}) == 0, "nobody has said that it is lost"
    assert await log.blob(lost[0]) is not None

    assert await sweep_lent(log, {}) >= 3
    assert [await log.blob(name) for name in lost] == [None] * 3
    assert await log.blob(kept) is not None
    assert await log.due(keys.LENDERS, 2**53, 10) == [b"gateway-2"]
    assert await log.count_times(keys.lent("gateway-1")) == 0


async def test_names_are_known_before_there_is_a_blob_and_forgotten_after_it() -> None:
    log = MemoryLog()
    blobs = LentBlobs(log, "gateway-1")
    first = await blobs.next(durable=True)
    passing = await asyncio.gather(*[blobs.next(durable=False) for _ in range(100)])
    assert not first.startswith(keys.PASSING)
    assert all(name.startswith(keys.PASSING) for name in passing)
    assert len(set(passing)) == 100
    known = {name.decode() for name in await log.due(keys.lent("gateway-1"), 2**53, 1000)}
    assert {first, *passing} <= known
    for name in passing:
        blobs.ended(name)
    for _ in range(len(known) - 101 + 1):  # all that is drawn, and one more
        await blobs.next(durable=False)
    left = {name.decode() for name in await log.due(keys.lent("gateway-1"), 2**53, 1000)}
    assert first in left
    assert not left & set(passing)


async def test_one_that_comes_back_lends_under_names_no_sweep_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    slow = await member(log, "gateway-1")
    await lend(slow)
    await log.end_beat("gateway", "gateway-1")
    names = log.due

    async def comes_back_between(key: bytes, until_us: int, count: int) -> list[bytes]:
        found = await names(key, until_us, count)
        if key == keys.lent("gateway-1"):
            await log.beat("gateway", "gateway-1", MINUTE_MS)
            await slow.renew()
            fresh.append(await lend(slow))
        return found

    fresh: list[str] = []
    monkeypatch.setattr(log, "due", comes_back_between)
    assert await sweep_lent(log, {}) == 0
    assert await log.blob(fresh[0]) is not None


async def test_without_a_sure_lease_payloads_travel_in_their_records() -> None:
    log = MemoryLog()
    payloads = await member(log, "gateway-1")
    payloads.leased = lambda: False
    assert await payloads.lend(LARGE, 0) is None
    payloads.leased = lambda: True
    assert await payloads.lend(LARGE, 0) is not None


async def test_what_could_not_be_removed_or_was_cut_off_is_removed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    payloads = await member(log, "gateway-1")
    reference = await payloads.lend(LARGE, 0)
    assert reference is not None
    put, deleted = log.put_blob, log.delete_keys

    async def written_but_not_heard(*arguments: Any) -> None:
        await put(*arguments)
        raise asyncio.CancelledError

    async def away(_keys: Any) -> None:
        raise LogUnavailable("away")

    monkeypatch.setattr(log, "put_blob", written_but_not_heard)
    with pytest.raises(asyncio.CancelledError):
        await payloads.lend(LARGE, 0)
    monkeypatch.setattr(log, "delete_keys", away)
    await payloads.end(reference)
    with pytest.raises(LogUnavailable):
        await payloads._delete_left()
    monkeypatch.setattr(log, "delete_keys", deleted)
    watching = asyncio.create_task(payloads.watch())
    async with asyncio.timeout(30):
        while payloads._left:
            await asyncio.sleep(0)
        while any([await log.blob(n.decode()) for n in await log.due(keys.lent("gateway-1"), 2**53, 99)]):
            await asyncio.sleep(0)
    watching.cancel()
