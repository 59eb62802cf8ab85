"""Jobs whose ends are to be told to a real endpoint, and how that stands."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import webhook_receiver as parts
from memory_log.log import MemoryLog

from charonia import keys
from charonia.clock import wall_ns
from charonia.eventlog.port import EventLog, Limits
from charonia.eventlog.redis import open_log
from charonia.facts.jobs import JobEnd, JobState, NewJob
from charonia.options.settings import LogSettings, WebhookSettings
from gateway.webhooks.deliveries import Delivery, delivery_of

HEARTBEATS = LogSettings(heartbeat_ttl_ms=4000)
"""Long enough that no busy machine makes a sender seem lost."""
FIRST_RETRY_S = 0.05


@asynccontextmanager
async def receiving() -> AsyncIterator[parts.Receiver]:
    """An endpoint that listens."""
    receiver = parts.Receiver()
    await receiver.start()
    yield receiver
    await receiver.close()


@asynccontextmanager
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[EventLog]:
    """The log of a test's parameter: in memory or on a server."""
    log: EventLog = MemoryLog()
    if request.param == "redis":
        log = open_log(request.getfixturevalue("fresh_log_url"))
    await log.open()
    yield log
    await log.close()


def sender_settings(directory: Path) -> Callable[..., WebhookSettings]:
    """Settings of one sender more."""
    path = directory / "secrets"
    path.write_text(parts.SECRET)

    def new(**changes: Any) -> WebhookSettings:
        values: dict[str, Any] = {
            "incarnation": f"webhooks-{secrets.token_hex(4)}",
            "secrets": str(path),
            "allow": ("127.0.0.1/32",),
            "first_retry_s": FIRST_RETRY_S,
        }
        return WebhookSettings(**(values | changes))

    return new


async def end_job(
    log: EventLog,
    webhook: dict[str, Any] | None,
    *,
    model: str = "m",
    state: JobState = JobState.SUCCEEDED,
    tenant: str = "",
    retention_s: int = 3600,
) -> bytes:
    """A job that has ended, as accept and settle leave it."""
    job_id = secrets.token_bytes(16)
    about = {"version": 1} | ({"webhook": webhook} if webhook else {})
    job = NewJob(job_id, 10, wall_ns() // 1000, retention_s, tenant=tenant, about=about)
    await log.accept_job(model, 0, 0, job, [b"r", b"record"], Limits())
    owner, token = await log.owner(model)
    token = token if owner else await log.take_ownership(model, "batcher", "")
    assert await log.begin_attempt(model, token, [job_id], 1, jobs=[job_id]) == [True]
    end = JobEnd(state, b"result", {} if state is JobState.SUCCEEDED else {"error": "boom"})
    assert await log.settle(model, [(job_id, 1)], None, [], ends={job_id: end}) == [True]
    return job_id


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(parts.PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def state_of(log: EventLog, job_id: bytes, wanted: Callable[[Delivery], bool], model: str = "m") -> Delivery:
    """A job's delivery, once it is as wanted."""
    async with asyncio.timeout(parts.PATIENCE_S):
        while True:
            delivery = await delivery_of(log, model, job_id)
            if delivery is not None and wanted(delivery):
                return delivery
            await asyncio.sleep(0.005)


async def nothing_left(log: EventLog, model: str = "m") -> None:
    async with asyncio.timeout(parts.PATIENCE_S):
        while await log.count_times(keys.webhook_times(model)) or await log.range(keys.webhooks(model)):
            await asyncio.sleep(0.005)


def final(delivery: Delivery) -> bool:
    return delivery.state.final
