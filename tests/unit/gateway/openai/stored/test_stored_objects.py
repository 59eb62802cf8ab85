"""Files and batches in a log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import Cancelled, Unavailable
from charonia.eventlog.port import START
from gateway.openai.shapes.api_errors import ApiError
from gateway.openai.stored import stored_objects
from gateway.openai.stored.batch_facts import Counts
from gateway.openai.stored.stored_objects import CHUNK_BYTES, FileRecord, StoredBatches, StoredFiles

CREATED: dict[str, Any] = {
    "kind": "created",
    "time_s": 10,
    "tenant": "a",
    "input_file": "file-1",
    "endpoint": "/v1/responses",
    "metadata": None,
    "expires_s": 20,
    "output_ttl_s": 3600,
}


async def joined(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def test_a_file_is_in_pieces() -> None:
    log = MemoryLog()
    files = StoredFiles(log)
    writer = files.writer(7200)
    content = bytes(range(256)) * 10_000
    for at in range(0, len(content), 300_000):
        await writer.write(content[at : at + 300_000])
    record = await writer.end("a", "in.jsonl", "batch")
    assert (record.size_bytes, record.chunks) == (len(content), -(-len(content) // CHUNK_BYTES))
    assert record.expires_s == record.created_s + 7200
    found = await files.find(record.id, "a")
    assert found == record
    assert await joined(files.content(found)) == content
    assert await files.of_tenant("a") == [record]


async def test_a_file_belongs_to_its_tenant() -> None:
    files = StoredFiles(MemoryLog())
    writer = files.writer()
    await writer.write(b"x")
    record = await writer.end("a", "in", "batch")
    for file_id, tenant in ((record.id, "b"), ("file-none", "a"), ("x" * 10_000, "a")):
        with pytest.raises(ApiError) as missing:
            await files.find(file_id, tenant)
        assert missing.value.status == 404
    assert await files.of_tenant("b") == []


async def test_a_deleted_file_leaves_nothing() -> None:
    log = MemoryLog()
    files = StoredFiles(log)
    writer = files.writer()
    await writer.write(b"x" * (CHUNK_BYTES + 1))
    record = await writer.end("a", "in", "batch")
    await files.delete(record)
    assert await files.of_tenant("a") == []
    assert [await log.blob(f"{record.id}.{number}") for number in range(2)] == [None, None]
    with pytest.raises(ApiError):
        await joined(files.content(record))


async def test_a_file_is_kept_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    files = StoredFiles(log)
    writer = files.writer(3600)
    content = b"x" * (CHUNK_BYTES + 1)
    await writer.write(content)
    record = await writer.end("a", "in", "batch")
    await files.keep_until(record, record.expires_s - 1)
    assert await files.find(record.id, "a") == record
    await files.keep_until(record, record.expires_s + 3600)
    at_ns = monotonic_ns()
    monkeypatch.setattr("memory_log.projections.monotonic_ns", lambda: at_ns + 5400 * 1_000_000_000)
    kept = await files.find(record.id, "a")
    assert kept.expires_s == record.expires_s + 3600
    assert await joined(files.content(kept)) == content


async def test_the_stream_of_uploads_goes_some_time_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[bytes, int] = {}

    class Log(MemoryLog):
        async def keep_until(self, key: bytes, until_us: int) -> None:
            assert await self.range(key), "only what is there gets a time"
            kept[key] = until_us
            await super().keep_until(key, until_us)

    files = StoredFiles(Log())
    writer = files.writer()
    await writer.write(b"x")
    before_us = wall_ns() // 1000
    await files.end_upload(writer, "a", "in", "batch")
    assert before_us + 60_000_000 < kept[keys.ending_files("a")] < before_us + 86_400_000_000


async def test_what_was_not_ended_is_no_file() -> None:
    log = MemoryLog()
    files = StoredFiles(log)
    writer = files.writer()
    await writer.write(b"x" * (2 * CHUNK_BYTES))
    await writer.abandon()
    assert await files.of_tenant("a") == []


async def test_a_tenant_has_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_objects, "MAX_TENANT_BYTES", 10)
    log = MemoryLog()
    files, others = StoredFiles(log), StoredFiles(log)

    async def stored(size_bytes: int) -> None:
        writer = files.writer()
        await writer.write(b"x" * size_bytes)
        await files.end_upload(writer, "a", "in", "batch")

    async with files.capacity("a", 6) as limit:
        assert limit == 10
        async with files.capacity("a") as left, files.capacity("b") as free:
            assert (left, free) == (4, 10)
            with pytest.raises(ApiError, match="2 uploads are under way") as full:
                async with files.capacity("a", 1):
                    pass
            assert (full.value.status, full.value.code) == (429, "storage_exceeded")
        await stored(6)
    async with files.capacity("a") as left, others.capacity("a") as left_there:
        assert (left, left_there) == (4, 4)  # each gateway knows its own uploads
        await stored(3)
        with pytest.raises(ApiError) as full:
            await stored(2)
    assert (full.value.status, full.value.code) == (429, "storage_exceeded")
    assert [record.size_bytes for record in await files.of_tenant("a")] == [6, 3]
    await stored(1)
    with pytest.raises(ApiError):
        async with files.capacity("a"):
            pass


@pytest.mark.parametrize("how", ["the log is slow", "the client leaves", "the tenant has too many"])
async def test_an_upload_that_becomes_no_file_leaves_nothing(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    log = MemoryLog()
    files = StoredFiles(log)
    if how == "the log is slow":
        monkeypatch.setattr(stored_objects, "_DECIDED_S", -1)
    elif how == "the tenant has too many":
        monkeypatch.setattr(stored_objects, "MAX_FILES", 0)
    else:

        async def cancelled(*_: Any) -> list[FileRecord]:
            raise asyncio.CancelledError

        monkeypatch.setattr(files, "of_tenant", cancelled)
    writer = files.writer()
    await writer.write(b"x" * (CHUNK_BYTES + 1))
    with pytest.raises((Unavailable, ApiError, asyncio.CancelledError)):
        await files.end_upload(writer, "a", "in", "batch")
    assert writer.chunks == 2
    assert [await log.blob(f"{writer.id}.{number}") for number in range(2)] == [None, None]
    assert await log.range(keys.ending_files("a"), START, 10) == []


async def test_a_tenant_has_so_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_objects, "MAX_FILES", 2)
    files = StoredFiles(MemoryLog())
    async with files.capacity("a", 1):
        for more in (1, 2, 3):
            writer = files.writer()
            await writer.write(b"x")
            if more < 3:
                await files.end_upload(writer, "a", "in", "batch")
                continue
            with pytest.raises(ApiError):
                await files.end_upload(writer, "a", "in", "batch")
    assert len(await files.of_tenant("a")) == 2
    with pytest.raises(ApiError):
        async with files.capacity("a", 1):
            pass


async def test_one_living_gateway_drives_a_batch() -> None:
    log = MemoryLog()
    batches = StoredBatches(log)
    await batches.create("batch_1", CREATED)
    assert await batches.active() == ["batch_1"]
    for name in ("one", "two"):
        await log.beat("gateway", name, 60_000)
    token = await batches.take("batch_1", "one")
    assert token
    assert await batches.take("batch_1", "two") == 0
    again = await batches.take("batch_1", "one")  # the log was away when it was given back
    assert again > token
    await log.end_beat("gateway", "one")
    later = await batches.take("batch_1", "two")
    assert later > again
    assert await batches.owns("batch_1", later)
    assert not await batches.owns("batch_1", token)
    await batches.release("batch_1", "two", later)
    await log.beat("gateway", "one", 60_000)
    assert await batches.take("batch_1", "one") > later


async def test_facts_of_a_former_owner_are_refused() -> None:
    log = MemoryLog()
    batches = StoredBatches(log)
    await batches.create("batch_1", CREATED)
    await log.beat("gateway", "one", 60_000)
    first = await batches.take("batch_1", "one")
    await batches.add("batch_1", {"kind": "asked", "time_s": 1, "model": "m"}, first)
    await log.end_beat("gateway", "one")
    second = await batches.take("batch_1", "two")
    before = await batches.state("batch_1")
    with pytest.raises(Cancelled, match="another gateway drives batch batch_1"):
        await batches.add("batch_1", {"kind": "ended", "time_s": 1, "outcome": "completed"}, first)
    assert await batches.state("batch_1") == before
    await batches.add("batch_1", {"kind": "cancelling", "time_s": 2})  # as any gateway may
    await batches.add("batch_1", {"kind": "ended", "time_s": 3, "outcome": "cancelled"}, second)
    assert (await batches.state("batch_1")).outcome == "cancelled"


async def test_a_batch_with_a_larger_token_is_not_taken() -> None:
    """The owner's key is deleted at the end of a batch, and tokens may begin again."""
    log = MemoryLog()
    batches = StoredBatches(log)
    await log.append_fenced(keys.batch_facts("batch_1"), keys.batch_fence("batch_1"), 1 << 40, [], 60)
    assert await batches.take("batch_1", "one") == 0
    assert (await log.owner(keys.batch_owner("batch_1")))[0] == ""


async def test_results_are_read_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_objects, "_RESULTS_PAGE", 3)
    batches = StoredBatches(MemoryLog())
    await batches.create("batch_1", CREATED)
    for number in range(8):
        jobs = [f"job-{number}"] * (number % 3)
        await batches.add_result("batch_1", number, number != 2, (number, 1), b"line %d\n" % number, jobs)
    found = [one async for one in batches.results("batch_1")]
    assert found == [
        (number, number != 2, (number, 1), b"line %d\n" % number, [f"job-{number}"] * (number % 3))
        for number in range(8)
    ]


async def test_a_batch_that_has_ended_leaves_its_facts() -> None:
    log = MemoryLog()
    batches = StoredBatches(log)
    await batches.create("batch_1", CREATED)
    await log.beat("gateway", "one", 60_000)
    await batches.take("batch_1", "one")
    await batches.add_result("batch_1", 1, True, (0, 0), b"x")
    await batches.report("batch_1", Counts(2, 1))
    assert await batches.progress(["batch_1", "none"]) == [Counts(2, 1), None]
    await batches.ended("batch_1")
    assert await batches.active() == []
    assert await batches.progress(["batch_1"]) == [None]
    assert [one async for one in batches.results("batch_1")] == []
    assert (await batches.find("batch_1", "a")).exists


async def test_batches_whose_time_is_over_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_objects, "KEPT_S", -1)
    log = MemoryLog()
    batches = StoredBatches(log)
    await batches.create("batch_1", CREATED)
    await batches.sweep()
    with pytest.raises(ApiError):
        await batches.find("batch_1", "a")
    assert await batches.active() == []
    assert await log.due(keys.BATCHES_EXPIRING, 1 << 62, 10) == []
    await batches.forget("a", ["batch_1"])
    assert await batches.of_tenant("a") == []
