from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from random import Random

import pytest
import pytest_asyncio

from charonia.errors import ResourceExhausted
from charonia.offload.pool import SECOND_WORKER_BYTES, Offload
from gateway.requests.decompression import (
    AFTER_END,
    INFLATED_IN_LOOP_BYTES,
    TOO_LARGE,
    TRUNCATED,
    DecompressionFault,
    inflate,
    inflated,
)

LIMIT_BYTES = 4 * SECOND_WORKER_BYTES


@pytest_asyncio.fixture
async def offload() -> AsyncIterator[Offload]:
    made = Offload(max_bytes=2 * LIMIT_BYTES)
    yield made
    made.close()


def fault_of(encoding: str, data: bytes, limit_bytes: int = 1000, *, several: bool = False) -> str:
    with pytest.raises(DecompressionFault) as caught:
        inflated(encoding, data, limit_bytes, several=several)
    return caught.value.fault


def test_faults_are_named() -> None:
    good = gzip.compress(b"some data" * 50)
    assert fault_of("gzip", good + good) == fault_of("gzip", good + b"x") == AFTER_END
    assert fault_of("gzip", good[:-1]) == fault_of("gzip", b"") == TRUNCATED
    assert fault_of("gzip", good, 449) == TOO_LARGE
    assert "incorrect header check" in fault_of("deflate", b"no zip")
    assert "incorrect header check" in fault_of("gzip", good + b"xx", several=True)


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_the_limit_itself_is_allowed_and_any_damage_is_found(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    whole = compress(b"abcdef" * 100)
    assert inflated(encoding, whole, 600, several=False) == b"abcdef" * 100
    assert fault_of(encoding, whole, 599) == TOO_LARGE
    assert fault_of(encoding, whole[:-3]) == fault_of(encoding, whole[:5]) == TRUNCATED
    assert fault_of(encoding, whole + b"x") == AFTER_END


def test_members_of_any_size_follow_one_another() -> None:
    bodies = [Random(size).randbytes(size) for size in (1, 300_000, 0, 262_144, 7)]
    assert inflated("gzip", b"".join(map(gzip.compress, bodies)), 600_000, several=True) == b"".join(bodies)


def test_a_bomb_is_never_large() -> None:
    bomb = gzip.compress(bytes(32 << 20), 1)
    tracemalloc.start()
    assert fault_of("gzip", bomb, 4 << 20) == TOO_LARGE
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize("size", [10, 60_000, SECOND_WORKER_BYTES, 3 * SECOND_WORKER_BYTES])
async def test_data_of_any_size_comes_back(offload: Offload, size: int) -> None:
    for data in (bytes(size), Random(size).randbytes(size)):
        assert await inflate(offload, "deflate", zlib.compress(data, 1), LIMIT_BYTES, several=False) == data


async def test_what_grows_much_is_for_the_worker_of_large_messages(offload: Offload) -> None:
    small = Random(1).randbytes(INFLATED_IN_LOOP_BYTES)
    assert await inflate(offload, "gzip", gzip.compress(small), LIMIT_BYTES, several=False) == small
    assert len(offload.processes) == 1  # more than it may be in the event loop, with its header
    await inflate(offload, "gzip", gzip.compress(bytes(SECOND_WORKER_BYTES)), LIMIT_BYTES, several=False)
    assert len(offload.processes) == 2
    assert (offload.tasks, offload.size_bytes) == (0, 0)


@pytest.mark.parametrize(("data", "fault"), [
    (gzip.compress(bytes(LIMIT_BYTES + 1)), TOO_LARGE), (gzip.compress(bytes(LIMIT_BYTES))[:-1], TRUNCATED),
])  # fmt: skip
async def test_faults_come_from_workers(offload: Offload, data: bytes, fault: str) -> None:
    with pytest.raises(DecompressionFault) as caught:
        await inflate(offload, "gzip", data, LIMIT_BYTES, several=False)
    assert caught.value.fault == fault


async def test_the_bound_of_work_counts_what_the_data_may_become() -> None:
    offload = Offload(max_bytes=SECOND_WORKER_BYTES // 2)
    offload.tasks, offload.size_bytes = 1, 1  # another is under way
    with pytest.raises(ResourceExhausted):
        await inflate(offload, "gzip", gzip.compress(bytes(4 << 20)), LIMIT_BYTES, several=False)
    offload.close()
