"""Two gateways' stores over one Redis or Valkey: they share, and together stay within the bound."""

from __future__ import annotations

import asyncio

import pytest

from charonia import keys
from charonia.calls.cache.cache_store import OVERHEAD_BYTES, CacheStore, pack
from charonia.datatypes import DataType
from charonia.eventlog.redis import open_log
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord

RESPONSES = 400
KEPT = 100


def response(number: int) -> ResponseRecord:
    data = number.to_bytes(4, "little") * 16
    return ResponseRecord(bytes(16), "m", 1, [Tensor("y", DataType.INT32, (16,), data)], {}, None)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture
def limit_bytes() -> int:
    return KEPT * (len(pack(response(0), 0)) + OVERHEAD_BYTES)


async def test_stores_share_and_stay_within_the_bound(fresh_log_url: str, limit_bytes: int) -> None:
    logs = [open_log(fresh_log_url), open_log(fresh_log_url)]
    for log in logs:
        await log.open()
    one, other = stores = [CacheStore(log, limit_bytes) for log in logs]
    ways = [stores[n % 2].put(key(n), response(n), 60) for n in range(RESPONSES)]
    await asyncio.gather(*[way for way in ways if way is not None])

    async def there() -> list[int]:
        notes = await logs[0].notes([keys.cached(key(n)) for n in range(RESPONSES)])
        return [n for n, note in enumerate(notes) if note is not None]

    kept = await there()
    assert len(kept) == KEPT
    assert await logs[0].count_times(keys.CACHE_EXPIRIES) == KEPT
    assert one.evictions + other.evictions == RESPONSES - KEPT
    for store in stores:
        store.forget()
        found = await store.look(key(kept[0]))
        assert found is not None
        assert found.answer().outputs[0].data == response(kept[0]).outputs[0].data

    # what was used last is what is kept
    for number in kept[50:60]:
        assert await other.look(key(number)) is not None
    await other.tell_uses()
    for number in range(RESPONSES, RESPONSES + KEPT - 10):
        way = one.put(key(number), response(number), 60)
        assert way is not None
        await way
    assert set(kept[50:60]) <= set(await there())

    # the same by both at once: one may take out what the other puts in, never leave it there unknown
    ways = [store.put(key(n), response(n), 60) for n in range(RESPONSES) for store in stores]
    await asyncio.gather(*[way for way in ways if way is not None])
    kept = await there()
    assert 0 < len(kept) <= KEPT
    assert {key(n) for n in kept} <= set(await logs[0].keep_recent(keys.CACHE_USES, {}, 0))
    for log in logs:
        await log.close()
