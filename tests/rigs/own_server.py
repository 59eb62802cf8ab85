"""A server of the test's own, to be killed and started again, and the log on it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from charonia.eventlog.embedded import PrivateServer
from charonia.eventlog.redis import RedisLog
from charonia.eventlog.redis.server.address import parse_address
from charonia.eventlog.redis.server.hot_connection import Connection

PATIENCE_S = 60.0


@contextmanager
def own_server() -> Iterator[PrivateServer]:
    """A server of the test's own, to be killed."""
    state_dir = Path(tempfile.mkdtemp(prefix="charonia-test-"))
    server = PrivateServer(state_dir)
    server.start()
    server.wait_ready()
    yield server
    server.stop()
    shutil.rmtree(state_dir)


@asynccontextmanager
async def log_on(server: PrivateServer) -> AsyncIterator[RedisLog]:
    log = RedisLog(server.url)
    await log.open()
    yield log
    await log.close()


async def admin(server: PrivateServer, *command: str) -> object:
    connection = Connection(parse_address(server.url), name="test")
    await connection.open()
    try:
        return await connection.execute(*command)
    finally:
        await connection.close()
