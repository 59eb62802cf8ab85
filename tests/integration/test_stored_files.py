"""Uploads that end at several gateways at the same time, over a real log."""

from __future__ import annotations

import asyncio

import pytest

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.eventlog.redis import open_log
from gateway.openai.shapes.api_errors import ApiError
from gateway.openai.stored import stored_objects
from gateway.openai.stored.stored_objects import FileRecord, StoredFiles

pytestmark = pytest.mark.integration

ROUNDS = 20


async def ended(files: StoredFiles, size_bytes: int, tenant: str) -> FileRecord | ApiError:
    """What becomes of an upload."""
    writer = files.writer()
    await writer.write(b"x" * size_bytes)
    try:
        return await files.end_upload(writer, tenant, "in", "batch")
    except ApiError as error:
        return error


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ((6, 6), 1),
        ((6, 6, 6, 6), 1),
        ((4, 4, 4, 4), 2),
        ((11, 6), 1),  # one never fits
    ],
)
async def test_of_uploads_that_end_together_those_stay_that_fit(
    fresh_log_url: str, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], kept: int
) -> None:
    monkeypatch.setattr(stored_objects, "MAX_TENANT_BYTES", 10)
    logs = [open_log(fresh_log_url) for _ in sizes]
    for log in logs:
        await log.open()
    gateways = [StoredFiles(log) for log in logs]
    for number in range(ROUNDS):
        tenant = f"tenant {number}"
        found = await asyncio.gather(*[ended(files, size, tenant) for files, size in zip(gateways, sizes, strict=True)])
        stored = [one for one in found if isinstance(one, FileRecord)]
        assert len(stored) == kept, found
        for one in found:
            assert isinstance(one, FileRecord) or (one.status, one.code) == (429, "storage_exceeded")
        assert {record.id for record in await gateways[0].of_tenant(tenant)} == {record.id for record in stored}
    for log in logs:
        await log.close()


async def test_an_upload_whose_gateway_died_as_it_ended_is_not_waited_for(
    fresh_log_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts for a while, as it may still become visible, and then no more."""
    monkeypatch.setattr(stored_objects, "MAX_TENANT_BYTES", 10)
    log = open_log(fresh_log_url)
    await log.open()
    files = StoredFiles(log)
    writer = files.writer()
    await writer.write(b"x" * 6)

    async def dies(*_: object) -> FileRecord:
        raise asyncio.CancelledError

    async def stays(*_: object) -> None:
        raise LogUnavailable("the gateway is gone")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "end", dies)
        patch.setattr(log, "delete_entries", stays)
        with pytest.raises(asyncio.CancelledError):
            await files.end_upload(writer, "a", "in", "batch")
    assert isinstance(await ended(files, 6, "a"), ApiError)
    monkeypatch.setattr(stored_objects, "_ENDING_S", 0)
    await asyncio.sleep(0.002)  # entries have times in milliseconds
    assert isinstance(await ended(files, 6, "a"), FileRecord)
    assert await log.range(keys.ending_files("a")) == []
    await log.close()
