"""What clients may register and how requests use it, with Triton's texts (H46-H51)."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest
from memory_objects import MemoryObjects

from charonia.datatypes import DataType
from charonia.errors import (
    AlreadyExists,
    CharoniaError,
    InternalError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unsupported,
)
from charonia.inference import InferenceRequest, RegionPart, RegionUse
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord
from gateway.regions.client_regions import DISABLED, ClientRegions

MAX = 2**64 - 1


@pytest.fixture
def regions(tmp_path: Any) -> ClientRegions:
    return ClientRegions(allowed=True, directory=str(tmp_path))


class Counted:
    """What is held, and whether it may be."""

    def __init__(self, most: int = 2**40) -> None:
        self.most = most
        self.held: list[int] = []

    def hold(self, size: int) -> None:
        if size > self.most:
            raise ResourceExhausted("full")
        self.held.append(size)

    def release(self, size: int) -> None:
        self.held.append(-size)


def request(read: dict[int, RegionPart], written: dict[str, RegionPart] | None = None) -> InferenceRequest:
    tensors = [Tensor(f"I{at}", DataType.UINT8, (4,), b"") for at in range(max(read, default=-1) + 1)]
    return InferenceRequest("m", -1, tensors, regions=RegionUse(read, written or {}))


def answer(*outputs: Tensor, **fields: Any) -> ResponseRecord:
    return ResponseRecord(b"i", "m", 1, list(outputs), {}, **{"error": None, **fields})


async def read(
    regions: ClientRegions, asked: InferenceRequest, counted: Counted | None = None, tenant: str = ""
) -> Any:
    counted = counted or Counted()
    return await regions.read(asked, tenant, counted.hold, counted.release)


class TestRegistering:
    async def test_life(self, regions: ClientRegions, objects: MemoryObjects) -> None:
        keys = [objects.make(b"12345678") for _ in range(2)]
        assert await regions.status("system") == await regions.status("cuda") == []
        regions.register_system("b", keys[0], 0, 8)
        regions.register_system("a", keys[1].lstrip("/"), 4, 4)
        named = [(r.name, r.key, r.offset, r.size_bytes) for r in await regions.status("system")]
        assert named == [("a", keys[1].lstrip("/"), 4, 4), ("b", keys[0], 0, 8)]
        assert [r.name for r in await regions.status("system", "b")] == ["b"]
        assert await regions.status("cuda") == []
        await regions.unregister("cuda", "b")  # another kind
        await regions.unregister("cuda", "")
        await regions.unregister("system", "nope")
        await regions.unregister("system", "b")
        assert [r.name for r in await regions.status("system")] == ["a"]
        regions.register_system("b", keys[0], 0, 8)
        await regions.unregister("system", "")
        assert await regions.status("system") == []

    @pytest.mark.parametrize(
        ("name", "key", "offset", "size", "kind", "text"),
        [
            ("", "{key}", 0, 8, InvalidArgument, "'region name' is necessary to register system shared memory region"),
            ("n" * 1025, "{key}", 0, 8, InvalidArgument, "shared memory region names are at most 1024 bytes long"),
            *(
                ("r", key, 0, 8, InvalidArgument, f"cannot register shared memory region 'r' - invalid shm key '{key}'")
                for key in ("", "/", "///")
            ),
            *(
                ("r", slashes + prefix + "1", 0, 8, InvalidArgument,
                 f"cannot register shared memory region 'r' with key '{slashes}{prefix}1' as the key contains the "
                 f"reserved prefix '{prefix}'")
                for prefix in ("triton_python_backend_shm_region_", "charonia-") for slashes in ("", "/", "//")
            ),
            *(
                ("r", key, 0, 8, InternalError, f"Unable to open shared memory region: '{key}'")
                for key in ("/nothing-there", "../../etc/hostname", "/../shm/x", "/a/b", "..", "/\0x", "x\udc80")
            ),
            ("r", "k" * 300, 0, 8, InternalError, f"Unable to open shared memory region: '{'k' * 255}'"),
            *(
                ("r", "{key}", offset, size, InvalidArgument,
                 "failed to register shared memory region 'r': invalid args")
                for offset, size in ((0, 9), (1, 8), (9, 0), (2**63, 1), (MAX, 1), (MAX, MAX), (0, MAX))
            ),
            ("r", "{key}", 0, 0, InvalidArgument,
             "failed to register shared memory region 'r': unable to process address spaceInvalid argument"),
        ],
    )  # fmt: skip
    async def test_refusals(
        self, regions: ClientRegions, objects: MemoryObjects, name: str, key: str, offset: int, size: int,
        kind: type[CharoniaError], text: str,
    ) -> None:  # fmt: skip
        made = objects.make(b"12345678")
        with pytest.raises(kind) as caught:
            regions.register_system(name, key.replace("{key}", made), offset, size)
        assert caught.value.message == text
        assert await regions.status("system") == []

    def test_a_name_twice(self, regions: ClientRegions, objects: MemoryObjects) -> None:
        regions.register_system("r", objects.make(b"12345678"), 0, 8)
        with pytest.raises(AlreadyExists, match=r"^shared memory region 'r' already in manager$"):
            regions.register_system("r", objects.make(b"12345678"), 0, 8)

    def test_a_pipe_is_no_object(self, regions: ClientRegions, objects: MemoryObjects) -> None:
        key = objects.make(b"")
        objects.path(key).unlink()
        os.mkfifo(objects.path(key))
        with pytest.raises(InternalError, match=r"^Unable to open shared memory region: "):
            regions.register_system("r", key, 0, 8)

    async def test_other_kinds_and_unknown_names(self, regions: ClientRegions, objects: MemoryObjects) -> None:
        regions.register_system("r", objects.make(b"12345678"), 0, 8)
        for kind, name, text in (
            ("system", "s", "Unable to find system shared memory region: 's'"),
            ("cuda", "s", "Unable to find cuda shared memory region: 's'"),
            ("cuda", "r", "The region named 'r' is registered as system shared memory, not CUDA shared memory"),
        ):
            with pytest.raises(NotFound) as caught:
                await regions.status(kind, name)  # type: ignore[arg-type]
            assert caught.value.message == text

    async def test_no_gpu(self, regions: ClientRegions, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("charonia.cuda.cuda_library.LIBRARY", "libno-such-driver.so.1")
        for name, text in (
            ("r", "failed to register CUDA shared memory region: 'r', GPUs not supported"),
            ("", "'region name' is necessary to register cuda shared memory region"),
        ):
            with pytest.raises(InvalidArgument) as caught:
                await regions.register_cuda(name, bytes(64), 0, 1)
            assert caught.value.message == text

    async def test_it_is_off_by_default(self, objects: MemoryObjects, tmp_path: Any) -> None:
        on, off = ClientRegions(allowed=True, directory=str(tmp_path)), ClientRegions(directory=str(tmp_path))
        on.register_system("r", objects.make(b"12345678"), 0, 8)
        with pytest.raises(Unsupported, match=f"^{re.escape(DISABLED)}$"):
            off.register_system("s", objects.make(b"1"), 0, 1)
        with pytest.raises(Unsupported, match=f"^{re.escape(DISABLED)}$"):
            await off.register_cuda("s", bytes(64), 0, 1)
        for kind, name in (("system", "r"), ("system", ""), ("cuda", "")):
            with pytest.raises(Unsupported) as caught:
                await off.unregister(kind, name)  # type: ignore[arg-type]
            assert caught.value.message == DISABLED
        with pytest.raises(NotFound, match=r"^Unable to find shared memory region: 'r'$"):
            await read(off, request({0: RegionPart("r", 0, 4)}))


class TestUse:
    @pytest.mark.parametrize("size", [16, 40_000, 1_000_000], ids=["short", "large", "in a thread"])
    async def test_in_and_out(self, regions: ClientRegions, objects: MemoryObjects, size: int) -> None:
        values = np.random.default_rng(0).bytes(size)
        source, target = objects.make(b"...." + values * 2), objects.make(bytes(size + 8))
        regions.register_system("in", source, 4, 2 * size)
        regions.register_system("out", target, 0, size + 8)
        asked = request({0: RegionPart("in", 4, 8), 2: RegionPart("in", size, size)}, {"O": RegionPart("out", 8, size)})
        asked.inputs[1].data = b"own"
        counted = Counted()
        delivered = await read(regions, asked, counted)
        assert [bytes(tensor.data) for tensor in asked.inputs] == [(values * 2)[4:12], b"own", values]
        assert counted.held == [size + 8, -size - 8]
        kept = Tensor("P", DataType.UINT8, (1,), b"1")
        record = await delivered.write(answer(Tensor("O", DataType.UINT8, (size,), memoryview(values)), kept))
        assert record.error is None
        assert record.outputs == [Tensor("O", DataType.UINT8, (size,), b""), kept]
        assert objects.path(target).read_bytes() == bytes(8) + values

    async def test_large_tensors_are_read_into_the_memory_that_is_given(
        self, objects: MemoryObjects, tmp_path: Any
    ) -> None:
        room = bytearray(100_000)
        asked_for: list[int] = []

        def give(size: int, _skew: int) -> memoryview:
            asked_for.append(size)
            return memoryview(room)[:size]

        regions = ClientRegions(allowed=True, directory=str(tmp_path), allocate=give)
        values = np.random.default_rng(0).bytes(100_000)
        regions.register_system("r", objects.make(values), 0, len(values))
        asked = request({0: RegionPart("r", 0, 100_000), 1: RegionPart("r", 0, 100)})
        await read(regions, asked)
        assert asked_for == [100_000]
        assert bytes(room) == values
        assert asked.inputs[0].data.obj is room  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        ("part", "kind", "text"),
        [
            (("nope", 0, 1), NotFound, "Unable to find shared memory region: 'nope'"),
            (("", 0, 1), NotFound, "Unable to find shared memory region: ''"),
            (("x" * 5000, 0, 1), NotFound, f"Unable to find shared memory region: '{'x' * 1024}'"),
            *(
                (("r", offset, 1), InvalidArgument, "Invalid offset for shared memory region: 'r'")
                for offset in (8, 9, 2**63, MAX)
            ),
            *(
                (("r", *where), InvalidArgument, "Invalid offset + byte size for shared memory region: 'r'")
                for where in ((0, 9), (7, 2), (0, 2**63), (0, MAX), (1, MAX - 1))
            ),
            (("r", 1, MAX), InvalidArgument,
             "Integer overflow detected: byte_size (18446744073709551615) + offset (1) exceeds maximum value "
             "(18446744073709551615) for region 'r'"),
        ],
    )  # fmt: skip
    async def test_refusals(
        self, regions: ClientRegions, objects: MemoryObjects, part: tuple[str, int, int], kind: type[CharoniaError],
        text: str,
    ) -> None:  # fmt: skip
        regions.register_system("r", objects.make(b"12345678"), 0, 8)
        counted = Counted()
        for asked in (request({0: RegionPart(*part)}), request({}, {"O": RegionPart(*part)})):
            with pytest.raises(kind) as caught:
                await read(regions, asked, counted)
            assert caught.value.message == text
        assert not counted.held

    async def test_too_much_at_once(self, regions: ClientRegions, objects: MemoryObjects) -> None:
        regions.register_system("r", objects.make(b"12345678"), 0, 8)
        counted = Counted(most=15)
        with pytest.raises(ResourceExhausted):
            await read(regions, request({0: RegionPart("r", 0, 8), 1: RegionPart("r", 0, 8)}), counted)
        assert not counted.held

    async def test_a_smaller_object(self, regions: ClientRegions, objects: MemoryObjects) -> None:
        key = objects.make(b"12345678")
        regions.register_system("r", key, 0, 8)
        counted = Counted()
        delivered = await read(regions, request({0: RegionPart("r", 0, 8)}, {"O": RegionPart("r", 0, 8)}), counted)
        os.truncate(objects.path(key), 4)
        record = await delivered.write(answer(Tensor("O", DataType.UINT8, (8,), b"x" * 8)))
        assert isinstance(record.error, InvalidArgument)
        assert (record.outputs, str(record.error)) == ([], "shared memory region 'r' is smaller than it was registered")
        with pytest.raises(InvalidArgument, match="is smaller than it was registered"):
            await read(regions, request({0: RegionPart("r", 0, 8)}), counted)
        assert sum(counted.held) == 0

    async def test_an_answer_that_is_too_large(self, regions: ClientRegions, objects: MemoryObjects) -> None:
        key = objects.make(b"12345678")
        regions.register_system("r", key, 0, 8)
        parts = {"O": RegionPart("r", 4, 4), "P": RegionPart("r", 0, 4)}
        delivered = await read(regions, request({}, parts))
        outputs = [Tensor("P", DataType.UINT8, (4,), b"abcd"), Tensor("O", DataType.UINT8, (5,), b"x" * 5)]
        record = await delivered.write(answer(*outputs))
        assert isinstance(record.error, InternalError)
        assert str(record.error) == (
            "shared memory size specified with the request for output 'O' (4 bytes) should be at least 5 bytes to hold "
            "the results"
        )
        assert objects.path(key).read_bytes() == b"12345678"
        failed = answer(error=InvalidArgument("the model's own"))
        assert await delivered.write(failed) is failed

    async def test_what_is_unregistered_under_way_is_still_written(
        self, regions: ClientRegions, objects: MemoryObjects
    ) -> None:
        first, second = objects.make(b"first---"), objects.make(b"second--")
        regions.register_system("r", first, 0, 8)
        delivered = await read(regions, request({}, {"O": RegionPart("r", 0, 8)}))
        await regions.unregister("system", "r")
        regions.register_system("r", second, 0, 8)
        record = await delivered.write(answer(Tensor("O", DataType.UINT8, (8,), b"answered")))
        assert record.error is None
        assert objects.path(first).read_bytes() == b"answered"
        assert objects.path(second).read_bytes() == b"second--"
        asked = request({0: RegionPart("r", 0, 8)})
        await read(regions, asked)
        assert asked.inputs[0].data == b"second--"

    async def test_each_response_of_a_stream(self, regions: ClientRegions, objects: MemoryObjects) -> None:
        key = objects.make(b"12345678")
        regions.register_system("r", key, 0, 8)
        delivered = await read(regions, request({}, {"O": RegionPart("r", 0, 4)}))
        closed = False

        async def records() -> Any:
            nonlocal closed
            try:
                for data in (b"aaaa", b"too long", b"bbbb"):
                    yield answer(Tensor("O", DataType.UINT8, (len(data),), data))
            finally:
                closed = True

        seen = [(record.error is None, objects.path(key).read_bytes()) async for record in delivered.each(records())]
        assert seen == [(True, b"aaaa5678"), (False, b"aaaa5678"), (True, b"bbbb5678")]
        assert closed

    @pytest.mark.parametrize("sequence", [0, 7, "seven"])
    @pytest.mark.parametrize(("size", "parts", "waits"), [(100, 10, False), (1 << 20, 1, True), (1000, 1000, True)])
    def test_much_is_copied_in_a_thread(
        self, sequence: int | str, size: int, parts: int, waits: bool, regions: ClientRegions, objects: MemoryObjects
    ) -> None:
        regions.register_system("r", objects.make(bytes(size)), 0, size)
        asked = request({at: RegionPart("r", 0, size // parts) for at in range(parts)})
        asked.sequence_id = sequence
        reading = read(regions, asked)
        try:
            with pytest.raises(RuntimeError if waits else StopIteration):  # without a loop no thread can be awaited
                reading.send(None)
        finally:
            reading.close()

    async def test_regions_of_one_request_are_bounded(
        self, regions: ClientRegions, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gateway.regions.client_regions.MAX_REGIONS_AT_ONCE", 2)
        for name in "abc":
            regions.register_system(name, objects.make(name.encode() * 4), 0, 4)
        asked = request({at: RegionPart("ab"[at % 2], 0, 4) for at in range(10)}, {"O": RegionPart("a", 0, 4)})
        await read(regions, asked)
        assert [bytes(tensor.data) for tensor in asked.inputs] == [b"aaaa", b"bbbb"] * 5
        with pytest.raises(InvalidArgument, match="more than 2 shared memory regions"):
            await read(regions, request({at: RegionPart("abc"[at], 0, 4) for at in range(3)}))

    async def test_tenants(self, regions: ClientRegions, objects: MemoryObjects) -> None:
        regions.register_system("r", objects.make(b"12345678"), 0, 8, "acme")
        with pytest.raises(NotFound):
            await read(regions, request({0: RegionPart("r", 0, 8)}), tenant="other")
        await regions.unregister("system", "", "other")
        await read(regions, request({0: RegionPart("r", 0, 8)}), tenant="acme")
        assert [region.name for region in await regions.status("system", tenant="acme")] == ["r"]
