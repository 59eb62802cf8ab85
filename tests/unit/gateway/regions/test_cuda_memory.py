"""Regions of GPUs, over a driver library without a GPU that is as strict as the real one (`fake_cuda`)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from memory_objects import MemoryObjects

from charonia.cuda.cuda_library import CudaError
from charonia.datatypes import DataType
from charonia.errors import AlreadyExists, CharoniaError, InternalError, InvalidArgument, NotFound
from charonia.inference import InferenceRequest, RegionPart, RegionUse
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord
from gateway.regions.client_regions import ClientRegions
from gateway.regions.cuda_driver import CudaDriver

INVALID = "failed to register shared memory region: invalid args"


@pytest.fixture
def regions(cuda: FakeCuda, tmp_path: Path) -> Iterator[ClientRegions]:
    made = ClientRegions(allowed=True, directory=str(tmp_path / "shm"))
    yield made
    made.close()


def request(read: dict[int, RegionPart], written: dict[str, RegionPart] | None = None) -> InferenceRequest:
    tensors = [Tensor(f"I{at}", DataType.UINT8, (4,), b"") for at in range(max(read, default=-1) + 1)]
    return InferenceRequest("m", -1, tensors, regions=RegionUse(read, written or {}))


async def read(regions: ClientRegions, asked: InferenceRequest) -> Any:
    return await regions.read(asked, "", lambda _: None, lambda _: None)


def answer(data: bytes) -> ResponseRecord:
    return ResponseRecord(b"i", "m", 1, [Tensor("O", DataType.UINT8, (len(data),), data)], {}, error=None)


async def closed(regions: ClientRegions, cuda: FakeCuda) -> bool:
    """Whether nothing is open once what was dropped has been closed."""
    gc.collect()
    await regions.unregister("cuda", "no such region")
    return cuda.open_handles() == ""


class TestRegistering:
    async def test_life(self, regions: ClientRegions, cuda: FakeCuda) -> None:
        await regions.register_cuda("r", cuda.make(b"12345678"), 1, 8)
        await regions.register_cuda("part", cuda.make(b"12345678"), 0, 5)
        found = await regions.status("cuda")
        assert [(r.name, r.device_id, r.size_bytes) for r in found] == [("part", 0, 5), ("r", 1, 8)]
        assert [r.name for r in await regions.status("cuda", "r")] == ["r"]
        assert await regions.status("system") == []
        with pytest.raises(NotFound, match=r"^The region named 'r' is registered as CUDA shared memory, not system "):
            await regions.status("system", "r")
        await regions.unregister("system", "r")  # another kind
        with pytest.raises(AlreadyExists, match=r"^shared memory region 'r' already in manager$"):
            await regions.register_cuda("r", cuda.make(b"1"), 0, 1)
        await regions.unregister("cuda", "r")
        assert [r.name for r in await regions.status("cuda")] == ["part"]
        await regions.unregister("cuda", "")
        assert await regions.status("cuda") == []
        assert cuda.open_handles() == ""

    @pytest.mark.parametrize("device_id", [-1, 2, 2**63, 2**64 - 1])
    async def test_devices_that_are_not_there(self, regions: ClientRegions, cuda: FakeCuda, device_id: int) -> None:
        with pytest.raises(InvalidArgument) as caught:
            await regions.register_cuda("r", cuda.make(b"1"), device_id, 1)
        assert caught.value.message == INVALID
        assert await regions.status("cuda") == []

    @pytest.mark.parametrize(
        "handle", [b"", b"\0", bytes(63), bytes(65), bytes(64), b"\xff" * 64, b"/no".ljust(64, b"\0")]
    )
    async def test_handles_of_nothing(self, regions: ClientRegions, handle: bytes) -> None:
        with pytest.raises(InvalidArgument) as caught:
            await regions.register_cuda("r", handle, 0, 1)
        assert caught.value.message == INVALID

    async def test_more_than_there_is(self, regions: ClientRegions, cuda: FakeCuda) -> None:
        for size in (9, 2**64 - 1):
            with pytest.raises(InvalidArgument) as caught:
                await regions.register_cuda("r", cuda.make(b"12345678"), 0, size)
            assert caught.value.message == "failed to register shared memory region 'r': invalid args"
        assert cuda.open_handles() == ""

    async def test_a_library_without_a_device(self, regions: ClientRegions, cuda: FakeCuda) -> None:
        cuda.set("devices", "0")
        with pytest.raises(InvalidArgument) as caught:
            await regions.register_cuda("r", cuda.make(b"1"), 0, 1)
        assert caught.value.message == "failed to register CUDA shared memory region: 'r', GPUs not supported"

    async def test_a_library_that_is_too_old(
        self, regions: ClientRegions, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("charonia.cuda.cuda_library.LIBRARY", "libc.so.6")
        with pytest.raises(InvalidArgument, match=r"GPUs not supported$"):
            await regions.register_cuda("r", cuda.make(b"1"), 0, 1)


class TestUse:
    @pytest.mark.parametrize("size", [16, 1_000_000])
    async def test_in_and_out(self, regions: ClientRegions, cuda: FakeCuda, objects: MemoryObjects, size: int) -> None:
        values = np.random.default_rng(0).bytes(size)
        source, target, other = cuda.make(values * 2), cuda.make(bytes(size + 8)), objects.make(b"system")
        await regions.register_cuda("in", source, 0, 2 * size)
        await regions.register_cuda("out", target, 1, size + 8)
        regions.register_system("other", other, 0, 6)
        asked = request(
            {0: RegionPart("in", 4, 8), 1: RegionPart("other", 0, 6), 2: RegionPart("in", size, size)},
            {"O": RegionPart("out", 8, size)},
        )
        delivered = await read(regions, asked)
        assert [bytes(tensor.data) for tensor in asked.inputs] == [values[4:12], b"system", values]
        record = await delivered.write(answer(values))
        assert record.error is None
        assert cuda.content(target) == bytes(8) + values
        assert len(cuda.open_handles().splitlines()) == 2
        del delivered
        assert await closed(regions, cuda)

    async def test_sequences_are_read_like_others(self, regions: ClientRegions, cuda: FakeCuda) -> None:
        """What follows in the sequence waits for its turn (`dataplane`)."""
        await regions.register_cuda("in", cuda.make(b"12345678"), 0, 8)
        asked = request({0: RegionPart("in", 0, 8)})
        asked.sequence_id = 7
        await read(regions, asked)
        assert bytes(asked.inputs[0].data) == b"12345678"

    async def test_others_are_read_in_the_thread(
        self, regions: ClientRegions, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads: set[str] = set()
        own = CudaDriver.read

        def seen(*arguments: Any) -> None:
            threads.add(threading.current_thread().name)
            own(*arguments)

        monkeypatch.setattr(CudaDriver, "read", seen)
        await regions.register_cuda("in", cuda.make(b"12345678"), 0, 8)
        for _ in range(3):
            await read(regions, request({0: RegionPart("in", 0, 8)}))
        assert threads == {"cuda-regions_0"}

    async def test_beyond_the_region(self, regions: ClientRegions, cuda: FakeCuda) -> None:
        await regions.register_cuda("r", cuda.make(b"12345678"), 0, 6)
        for part, text in (
            (RegionPart("r", 6, 0), "Invalid offset for shared memory region: 'r'"),
            (RegionPart("r", 4, 3), "Invalid offset + byte size for shared memory region: 'r'"),
        ):
            with pytest.raises(InvalidArgument) as caught:
                await read(regions, request({0: part}))
            assert caught.value.message == text

    async def test_memory_that_its_owner_freed(self, regions: ClientRegions, cuda: FakeCuda) -> None:
        handle = cuda.make(b"12345678")
        await regions.register_cuda("r", handle, 0, 8)
        cuda.free(handle)
        with pytest.raises(InternalError) as caught:
            await read(regions, request({0: RegionPart("r", 0, 4)}))
        assert caught.value.message == "shared memory region 'r' cannot be read: invalid resource handle"
        delivered = await read(regions, request({}, {"O": RegionPart("r", 0, 4)}))
        record = await delivered.write(answer(b"1234"))
        assert failure(record) == "shared memory region 'r' cannot be written: invalid resource handle"
        assert record.outputs == []

    async def test_memory_that_became_smaller(self, regions: ClientRegions, cuda: FakeCuda) -> None:
        handle = cuda.make(b"12345678")
        await regions.register_cuda("r", handle, 0, 8)
        cuda.replace(handle, b"1234")
        with pytest.raises(InternalError) as caught:
            await read(regions, request({0: RegionPart("r", 0, 4)}))
        assert caught.value.message == (
            "shared memory region 'r' cannot be read: the memory is smaller than it was registered"
        )
        assert await closed(regions, cuda)

    async def test_a_device_that_is_lost(self, regions: ClientRegions, cuda: FakeCuda) -> None:
        handle = cuda.make(b"12345678")
        await regions.register_cuda("r", handle, 0, 8)
        delivered = await read(regions, request({0: RegionPart("r", 0, 4)}, {"O": RegionPart("r", 4, 4)}))
        cuda.set("lost")
        record = await delivered.write(answer(b"1234"))
        assert failure(record) == "shared memory region 'r' cannot be written: an illegal memory access was encountered"
        with pytest.raises(InternalError) as caught:
            await read(regions, request({0: RegionPart("r", 0, 4)}))
        assert caught.value.message == (
            "shared memory region 'r' cannot be read: an illegal memory access was encountered"
        )
        with pytest.raises(InvalidArgument, match=f"^{INVALID}$"):
            await regions.register_cuda("s", cuda.make(b"1"), 0, 1)
        del delivered
        await regions.unregister("cuda", "r")  # it can be forgotten all the same
        assert await regions.status("cuda") == []
        assert cuda.content(handle) == b"12345678"

    async def test_a_region_unregistered_under_way(self, regions: ClientRegions, cuda: FakeCuda) -> None:
        handle = cuda.make(b"12345678")
        await regions.register_cuda("r", handle, 0, 8)
        delivered = await read(regions, request({0: RegionPart("r", 0, 4)}, {"O": RegionPart("r", 4, 4)}))
        await regions.unregister("cuda", "r")
        assert (await delivered.write(answer(b"abcd"))).error is None
        assert cuda.content(handle) == b"1234abcd"
        del delivered
        assert await closed(regions, cuda)
        with pytest.raises(NotFound, match=r"^Unable to find shared memory region: 'r'$"):
            await read(regions, request({0: RegionPart("r", 0, 4)}))

    async def test_another_gateway_of_the_machine(self, regions: ClientRegions, cuda: FakeCuda, tmp_path: Path) -> None:
        await regions.register_cuda("r", cuda.make(b"12345678"), 0, 8)
        other = ClientRegions(allowed=True, directory=str(tmp_path / "shm"))
        asked = request({0: RegionPart("r", 4, 4)})
        await read(other, asked)  # its first use of the library
        assert bytes(asked.inputs[0].data) == b"5678"
        other.close()


def failure(record: ResponseRecord) -> str:
    assert isinstance(record.error, CharoniaError)
    return record.error.message


def test_nothing_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.cuda.cuda_library.LIBRARY", "libno-such-driver.so.1")
    with pytest.raises(CudaError):
        CudaDriver()
