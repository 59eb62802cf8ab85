"""Senders of webhooks as processes, and logs of theirs that go and come back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import redis
import webhook_receiver as parts
from own_server import admin
from webhook_bench import (
    HEARTBEATS,
    end_job,
    final,
    nothing_left,
    opened,
    receiving,
    sender_settings,
    state_of,
    until,
)

from charonia.errors import LogUnavailable
from charonia.eventlog.embedded import PrivateServer
from charonia.eventlog.port import EventLog
from charonia.eventlog.redis import open_log
from charonia.options.settings import WebhookSettings
from gateway.webhooks.app import WebhooksApp
from gateway.webhooks.deliveries import delivery_of
from gateway.webhooks.retries import DeliveryState


@pytest.fixture
async def receiver() -> AsyncIterator[parts.Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.integration)])
async def log(request: pytest.FixtureRequest) -> AsyncIterator[EventLog]:
    async with opened(request) as log:
        yield log


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., WebhookSettings]:
    return sender_settings(tmp_path)


async def start_process(url: str, secrets_file: str, *flags: str) -> asyncio.subprocess.Process:
    """`charonia webhooks` as an operator starts it, up."""
    reading, writing = os.pipe()
    command: Sequence[str] = [
        *(sys.executable, "-m", "charonia.cli", "webhooks", f"--log-url={url}", f"--webhook-secrets={secrets_file}"),
        *("--webhook-allow=127.0.0.1/32", "--webhook-retry-secs=0.05", "--allow-metrics=false"),
        *(f"--report-fd={writing}", *flags),
    ]
    process = await asyncio.create_subprocess_exec(*command, pass_fds=[writing])
    os.close(writing)
    with os.fdopen(reading, "rb") as report:
        assert b'"ready": true' in await asyncio.to_thread(report.readline)
    return process


@pytest.mark.integration
async def test_a_sender_killed_in_mid_call_is_made_up_for_by_the_next(
    fresh_log_url: str, settings: Callable[..., WebhookSettings], receiver: parts.Receiver
) -> None:
    async def never(_received: object) -> bytes:
        await asyncio.Event().wait()
        return b""

    log = open_log(fresh_log_url)
    await log.open()
    receiver.answers["/hook"] = never
    receiver.answers["/down"] = [parts.status(500)]
    process = await start_process(fresh_log_url, settings().secrets)
    down = await end_job(log, {"url": receiver.url("/down")})
    tried = await state_of(log, down, lambda delivery: delivery.attempts >= 2)
    job_id = await end_job(log, {"url": receiver.url("/hook")})
    await receiver.wait_for("/hook", 1)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    del receiver.answers["/hook"]
    process = await start_process(fresh_log_url, settings().secrets)
    first, second = (await receiver.wait_for("/hook", 2))[:2]
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert (await state_of(log, job_id, final)).state is DeliveryState.DELIVERED
    # and one that had failed goes on where it was
    assert (await delivery_of(log, "m", down) or tried).attempts >= tried.attempts
    process.terminate()
    assert await process.wait() == 0
    await log.close()


@pytest.mark.integration
async def test_in_another_log_it_begins_anew(
    server: PrivateServer, settings: Callable[..., WebhookSettings], receiver: parts.Receiver
) -> None:
    log = open_log(server.url)
    await log.open()
    apps = [WebhooksApp(log, settings(), HEARTBEATS) for _ in range(2)]
    for app in apps:
        await app.start()
    await until(lambda: all(len(app._control.catalog.processes) == 2 for app in apps))
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    await until(lambda: all(app.membership.epoch_changes for app in apps))
    await until(lambda: all(len(app._control.catalog.processes) == 2 for app in apps))
    job_id = await end_job(log, {"url": receiver.url("/hook")})
    assert (await state_of(log, job_id, final)).state is DeliveryState.DELIVERED
    for app in apps:
        await app.stop()
    await log.close()


@pytest.mark.integration
async def test_a_log_that_goes_and_comes_back_loses_nothing(
    server: PrivateServer, settings: Callable[..., WebhookSettings], receiver: parts.Receiver
) -> None:
    log = open_log(server.url)
    await log.open()
    app = WebhooksApp(log, settings(), HEARTBEATS)
    await app.start()
    await end_job(log, {"url": receiver.url("/before")})
    await receiver.wait_for("/before", 1)
    await nothing_left(log)
    gate = asyncio.Event()

    async def held(_received: object) -> bytes:
        await gate.wait()
        return parts.status(204)

    receiver.answers["/during"] = held
    during = await end_job(log, {"url": receiver.url("/during")})
    await receiver.wait_for("/during", 1)
    while b"aof_buffer_length:0\r" not in await admin(server, "INFO", "persistence"):
        await asyncio.sleep(0.001)  # it postpones writes while the disk is busy
    os.kill(server.pid, signal.SIGKILL)
    while server.poll() is None:
        await asyncio.sleep(0.001)
    gate.set()  # the call succeeds while there is nowhere to write that down
    server.start()
    await asyncio.to_thread(server.wait_ready)
    async with asyncio.timeout(parts.PATIENCE_S):
        while True:
            try:
                after = await end_job(log, {"url": receiver.url("/after")})
                break
            except LogUnavailable:
                await asyncio.sleep(0.01)
    await receiver.wait_for("/after", 1)
    for job_id in (during, after):
        assert (await state_of(log, job_id, final)).state is DeliveryState.DELIVERED
    assert len(receiver.at("/during")) == 1
    await nothing_left(log)
    await app.stop()
    await log.close()
