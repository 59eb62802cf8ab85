"""Payloads of work at the level `memory` on a server of their own: two real servers, one of which may forget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import log_servers as servers
import pytest
import redis

from charonia import keys
from charonia.calls.payload_transfer import Payloads
from charonia.errors import LogUnavailable, StartupError
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.redis import RedisLog
from charonia.eventlog.redis.blob_server import BlobServer
from charonia.eventlog.redis.server.address import with_password

pytestmark = pytest.mark.integration

LARGE = bytes(range(256)) * 1024


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Any]:
    """A log, and a blob server whose user may do no more than docs/durability.md says."""
    main, beside = servers.LogServer().start(), servers.LogServer(appendonly="no").start()
    beside.ask("ACL", "SETUSER", "blobs", "reset", "on", ">p:w", *documented_rights())
    secret = tmp_path / "password"
    secret.write_text("p:w\n")
    log = RedisLog(main.url)
    address = beside.url.replace("redis://", "redis://blobs@")
    log.blobs = BlobServer(RedisLog(with_password(address, str(secret))))
    await log.open()
    await log.blobs.open()
    yield SimpleNamespace(log=log, main=main, beside=beside)
    await log.close()
    await log.blobs.close()
    main.stop()
    beside.stop()


def documented_rights() -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "durability.md").read_text()
    return next(found for line in text.splitlines() if (found := line.strip()).endswith("%R~ctl")).split()


def names(server: Any) -> list[bytes]:
    with redis.Redis("127.0.0.1", server.port) as client:
        return sorted(key for key in client.keys("blob:*"))


async def test_only_what_may_be_forgotten_is_kept_beside_the_log(two: Any) -> None:
    payloads = Payloads(two.log, PayloadDirectory("", "gateway-1"), {}, "gateway-1")
    passing = await payloads.lend([LARGE], 0)
    durable = await payloads.lend([LARGE], 0, durable=True)
    assert passing is not None
    assert durable is not None
    assert names(two.beside) == [keys.blob(passing.name)]
    assert names(two.main) == [keys.blob(durable.name)]
    assert await two.log.blob(passing.name) == await two.log.blob(durable.name) == LARGE

    other = RedisLog(two.main.url)  # one that was not told of the blob server
    await other.open()
    assert await other.blob(durable.name) == LARGE
    assert await other.blob(passing.name) is None
    await other.close()

    await payloads.end(passing)
    await payloads.end(durable)
    assert names(two.beside) == names(two.main) == []


async def test_without_the_blob_server_requests_are_refused_and_the_log_goes_on(two: Any) -> None:
    payloads = Payloads(two.log, PayloadDirectory("", "gateway-1"), {}, "gateway-1")
    lent = await payloads.lend([LARGE], 0)
    assert lent is not None
    two.beside.kill()
    async with asyncio.timeout(servers.PATIENCE_S):
        while True:
            try:
                await payloads.lend([LARGE], 0)
            except LogUnavailable as error:
                if error.message == f"the blob server at {two.beside.url}/0 cannot be reached":
                    break
            await asyncio.sleep(0.01)
    with pytest.raises(LogUnavailable, match=r"^the blob server at "):
        await two.log.blob(lent.name)
    await payloads.end(lent)  # it is gone either way
    assert await payloads.lend([LARGE], 0, durable=True) is not None
    two.beside.start()
    two.beside.ask("ACL", "SETUSER", "blobs", "reset", "on", ">p:w", *documented_rights())
    async with asyncio.timeout(servers.PATIENCE_S):
        while True:
            try:
                again = await payloads.lend([LARGE], 0)
                break
            except LogUnavailable:
                await asyncio.sleep(0.01)
    assert again is not None
    assert await two.log.blob(lent.name) is None
    assert await two.log.blob(again.name) == LARGE


async def test_a_blob_server_that_cannot_be_used_is_named_so(two: Any) -> None:
    blobs = BlobServer(RedisLog(two.beside.url.replace("redis://", "redis://blobs:wrong@")))
    with pytest.raises(StartupError, match="the blob server at"):
        await blobs.open()
    await blobs.close()
