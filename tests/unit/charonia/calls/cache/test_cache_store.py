"""Where cached responses lie: bounded here and in the log, gone when their time is up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.calls.cache import cache_store
from charonia.calls.cache.cache_store import CacheStore, pack
from charonia.datatypes import DataType
from charonia.errors import LogUnavailable
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord

NOW_NS = 1_763_700_000_000_000_000


class Clock:
    def __init__(self) -> None:
        self.ns = NOW_NS

    def __call__(self) -> int:
        self.ns += 1000  # no two uses at one time
        return self.ns


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cache_store, "wall_ns", clock)
    return clock


@pytest.fixture
async def log() -> MemoryLog:
    return MemoryLog()


def key(number: int) -> bytes:
    return bytes([number]) * 32


def response(size_bytes: int = 100, fill: int = 1) -> ResponseRecord:
    return ResponseRecord(
        b"i" * 16, "m", 3, [Tensor("y", DataType.UINT8, (size_bytes,), bytes([fill]) * size_bytes)], {"p": 1}, None
    )


ONE_BYTES = len(pack(response(), 0)) + cache_store.OVERHEAD_BYTES


async def put(store: CacheStore, number: int, record: ResponseRecord | None = None, ttl_s: int = 60) -> None:
    stored = store.put(key(number), record or response(fill=number), ttl_s)
    if stored is not None:
        await stored


async def in_log(log: MemoryLog, numbers: range) -> list[int]:
    notes = await log.notes([keys.cached(key(n)) for n in numbers])
    return [n for n, note in zip(numbers, notes, strict=True) if note is not None]


def fill_of(cached: Any) -> int:
    return int(cached.answer().outputs[0].data[0])


async def test_a_response_comes_back_as_it_was(log: MemoryLog) -> None:
    one, other = CacheStore(log, 10_000), CacheStore(log, 10_000)
    await put(one, 1)
    for found in (one.here(key(1)), await other.look(key(1)), other.here(key(1))):
        assert found is not None
        answer = found.answer()
        (output,) = answer.outputs
        assert (answer.model, answer.version, answer.parameters) == ("m", 3, {"p": 1})
        assert (output.name, output.shape, bytes(output.data)) == ("y", (100,), b"\x01" * 100)
    assert (len(other), other.size_here_bytes) == (1, ONE_BYTES)
    assert other.here(key(2)) is await other.look(key(2)) is None


async def test_both_places_give_up_what_was_used_longest_ago(log: MemoryLog) -> None:
    store = CacheStore(log, 3 * ONE_BYTES)
    for number in (1, 2, 3):
        await put(store, number)
    assert store.here(key(1)) is not None
    await store.tell_uses()
    await put(store, 4)
    assert await in_log(log, range(1, 5)) == [1, 3, 4]
    assert [n for n in range(1, 5) if store.here(key(n))] == [1, 3, 4]
    assert (store.size_here_bytes, store.evictions) == (3 * ONE_BYTES, 1)
    assert await log.count_times(keys.CACHE_EXPIRIES) == 3
    # one that has grown takes the room of what was used longest ago
    await store.tell_uses()
    await put(store, 4, response(ONE_BYTES))
    assert await in_log(log, range(1, 5)) == [3, 4]
    assert 2 * ONE_BYTES < store.size_here_bytes <= 3 * ONE_BYTES
    assert [n for n in range(1, 5) if store.here(key(n))] == [3, 4]


async def test_a_use_at_another_gateway_keeps_it(log: MemoryLog) -> None:
    one, other = CacheStore(log, 2 * ONE_BYTES), CacheStore(log, 2 * ONE_BYTES)
    await put(one, 1)
    await put(one, 2)
    assert await other.look(key(1)) is not None
    await other.tell_uses()
    await put(one, 3)
    assert await in_log(log, range(1, 4)) == [1, 3]


async def test_a_use_of_what_the_log_gave_up_changes_nothing(log: MemoryLog) -> None:
    one, other = CacheStore(log, ONE_BYTES), CacheStore(log, ONE_BYTES)
    await put(one, 1)
    await put(other, 2)
    assert one.here(key(1)) is not None
    await one.tell_uses()
    assert await in_log(log, range(1, 3)) == [2]
    assert await log.keep_recent(keys.CACHE_USES, {}, 0) == [key(2)]


async def test_what_is_larger_than_all_is_not_kept(log: MemoryLog, caplog: pytest.LogCaptureFixture) -> None:
    store = CacheStore(log, ONE_BYTES)
    await put(store, 1)
    assert store.put(key(2), response(101), 60) is None
    assert store.put(key(3), response(101), 60) is None
    assert store.here(key(2)) is None
    assert await in_log(log, range(1, 3)) == [1]
    (said,) = caplog.messages
    assert said.startswith(f"a response of model 'm' is not cached: its {ONE_BYTES + 1} bytes are more than the cache")


async def test_what_is_large_lies_in_the_log_alone(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_store, "MAX_HERE_BYTES", 2 * ONE_BYTES)
    store = CacheStore(log, 100 * ONE_BYTES)
    await put(store, 1)
    await put(store, 2, response(3 * ONE_BYTES, 2))
    assert store.here(key(2)) is None
    assert fill_of(await store.look(key(2))) == 2
    assert store.here(key(1)) is not None


async def test_what_is_on_its_way_is_bounded(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_store, "_MAX_ON_THE_WAY_BYTES", 2 * len(pack(response(), 0)))
    store = CacheStore(log, 100 * ONE_BYTES)
    ways = [store.put(key(number), response(), 60) for number in range(1, 4)]
    assert [way is None for way in ways] == [False, False, True]
    await asyncio.gather(*[way for way in ways if way is not None])
    assert await in_log(log, range(1, 4)) == [1, 2]
    assert store.here(key(3)) is not None
    await put(store, 3)
    assert await in_log(log, range(1, 4)) == [1, 2, 3]


async def test_time_goes_by(log: MemoryLog, clock: Clock) -> None:
    store, other = CacheStore(log, 10_000), CacheStore(log, 10_000)
    await put(store, 1, ttl_s=10)
    await put(store, 2, ttl_s=100)
    clock.ns += 9_000_000_000
    assert store.here(key(1)) is not None
    await store.sweep()
    assert await log.count_times(keys.CACHE_EXPIRIES) == 2
    clock.ns += 2_000_000_000
    # its note is still there: the memory log has a clock of its own
    assert store.here(key(1)) is await store.look(key(1)) is await other.look(key(1)) is None
    assert (len(store), store.size_here_bytes) == (1, ONE_BYTES)
    await store.sweep()
    assert await log.count_times(keys.CACHE_EXPIRIES) == 1
    assert await log.keep_recent(keys.CACHE_USES, {}, 0) == [key(2)]


async def test_forgetting_is_of_this_process_alone(log: MemoryLog) -> None:
    store = CacheStore(log, 10_000)
    await put(store, 1)
    store.forget()
    assert (store.here(key(1)), len(store), store.size_here_bytes) == (None, 0, 0)
    assert await store.look(key(1)) is not None


async def test_a_log_that_fails_fails_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Away(MemoryLog):
        async def keep_recent(self, *_: Any, **__: Any) -> list[bytes]:
            raise LogUnavailable("away")

        async def notes(self, keys: Any) -> list[bytes | None]:
            raise LogUnavailable("away")

    store = CacheStore(Away(), 10_000)
    await put(store, 1)
    assert store.here(key(1)) is not None
    assert await store.look(key(2)) is None
    assert caplog.messages == ["response cache: a response is not shared with other processes: away"]
    store.start()
    await asyncio.sleep(0)
    await store.close()


async def test_a_log_that_hangs_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hanging(MemoryLog):
        looks = 0
        hangs = True

        async def notes(self, keys: Any) -> list[bytes | None]:
            self.looks += 1
            if self.hangs:
                await asyncio.Event().wait()
            return await super().notes(keys)

    now_ns = 1
    monkeypatch.setattr(cache_store, "_LOOK_S", 0.0)
    monkeypatch.setattr(cache_store, "monotonic_ns", lambda: now_ns)
    log = Hanging()
    store = CacheStore(log, 10_000)
    assert await store.look(key(1)) is None
    assert await store.look(key(1)) is None
    assert log.looks == 1
    assert caplog.messages == ["response cache: no response can be looked up: no answer in time"]
    now_ns += 6_000_000_000
    monkeypatch.setattr(cache_store, "_LOOK_S", 10.0)
    log.hangs = False
    assert await store.look(key(1)) is None
    assert log.looks == 2
