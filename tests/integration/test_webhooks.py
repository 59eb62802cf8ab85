"""Senders of webhooks against a real endpoint: what comes, how often, and what may go wrong in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import webhook_receiver as parts
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

from charonia import keys
from charonia.eventlog.membership import preferred_owner
from charonia.eventlog.port import EventLog
from charonia.eventlog.redis import open_log
from charonia.facts.jobs import JobState
from charonia.options.settings import WebhookSettings
from gateway.webhooks.app import WebhooksApp
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


@pytest.fixture
async def sender(log: EventLog, settings: Callable[..., WebhookSettings]) -> AsyncIterator[WebhooksApp]:
    app = WebhooksApp(log, settings(), HEARTBEATS)
    assert app.health.unready() == "it starts"
    await app.start()
    yield app
    await app.stop()
    assert app.health.unready() == "it drains"


async def test_the_end_of_a_job_is_told_once_and_signed(
    log: EventLog, sender: WebhooksApp, receiver: parts.Receiver
) -> None:
    job_id = await end_job(log, {"url": receiver.url("/hook")})
    await end_job(log, None)
    (told,) = await receiver.wait_for("/hook", 1)
    assert told.verified["type"] == "job.succeeded"
    assert told.verified["data"]["id"] == f"{job_id.hex()}.m"
    assert told.headers["webhook-id"] == f"msg_{job_id.hex()}"
    delivery = await state_of(log, job_id, final)
    assert (delivery.state, delivery.attempts, delivery.last_status) == (DeliveryState.DELIVERED, 1, 204)
    await nothing_left(log)
    assert len(receiver.received) == 1
    assert sender.sender.outcomes["delivered"] == 1


async def test_what_happened_before_the_sender_came_is_told_and_only_the_ends_asked_for(
    log: EventLog, settings: Callable[..., WebhookSettings], receiver: parts.Receiver
) -> None:
    failures = {"url": receiver.url("/failures"), "events": ["failed", "expired"]}
    for state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED):
        await end_job(log, failures, state=state)
    app = WebhooksApp(log, settings(), HEARTBEATS)
    await app.start()
    told = await receiver.wait_for("/failures", 2)
    await nothing_left(log)
    assert {t.verified["type"] for t in told} == {"job.failed", "job.expired"}
    assert {t.verified["data"]["error"] for t in told} == {"boom"}
    assert len(receiver.received) == 2
    await app.stop()


async def test_a_failure_is_tried_again_as_the_same_message(
    log: EventLog, sender: WebhooksApp, receiver: parts.Receiver
) -> None:
    receiver.answers["/hook"] = [parts.status(500), parts.status(204)]
    job_id = await end_job(log, {"url": receiver.url("/hook")})
    first, second = await receiver.wait_for("/hook", 2)
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body
    delivery = await state_of(log, job_id, final)
    assert (delivery.state, delivery.attempts) == (DeliveryState.DELIVERED, 2)
    await nothing_left(log)
    assert sender.sender.outcomes["failed"] == 1


async def test_a_redirect_is_a_failure_and_410_the_end(
    log: EventLog, sender: WebhooksApp, receiver: parts.Receiver
) -> None:
    receiver.answers["/gone"] = [parts.status(410)]
    receiver.answers["/moved"] = [parts.status(307, f"location: {receiver.url('/elsewhere')}")]
    gone = await end_job(log, {"url": receiver.url("/gone")})
    moved = await end_job(log, {"url": receiver.url("/moved")})
    assert (await state_of(log, gone, final)).state is DeliveryState.DISABLED
    waiting = await state_of(log, moved, lambda delivery: delivery.attempts >= 2)
    assert (waiting.state, waiting.last_status) == (DeliveryState.PENDING, 307)
    assert waiting.next_us > waiting.last_us
    assert len(receiver.at("/gone")) == 1
    assert not receiver.at("/elsewhere")


async def test_an_inner_address_is_refused_for_good(
    log: EventLog, settings: Callable[..., WebhookSettings], receiver: parts.Receiver
) -> None:
    app = WebhooksApp(log, settings(allow=()), HEARTBEATS)
    await app.start()
    literal = await end_job(log, {"url": receiver.url("/hook")})
    named = await end_job(log, {"url": receiver.url("/hook", "localhost.")})
    nonsense = await end_job(log, {"url": 17})
    for job_id in (literal, named, nonsense):
        delivery = await state_of(log, job_id, final)
        assert (delivery.state, delivery.attempts, delivery.last_status) == (DeliveryState.REFUSED, 1, 0)
    assert not receiver.received
    await nothing_left(log)
    await app.stop()


async def test_a_slow_endpoint_keeps_only_itself_waiting(
    log: EventLog, settings: Callable[..., WebhookSettings], receiver: parts.Receiver
) -> None:
    quick = parts.Receiver()
    await quick.start()
    release = asyncio.Event()

    async def slow(_received: object) -> bytes:
        await release.wait()
        return parts.status(204)

    receiver.answers["/slow"] = slow
    # more than one page of them, all before the others
    for _ in range(300):
        await end_job(log, {"url": receiver.url("/slow")})
    for _ in range(30):
        await end_job(log, {"url": quick.url("/quick")})
    app = WebhooksApp(log, settings(), HEARTBEATS)
    await app.start()
    await quick.wait_for("/quick", 30)
    assert len(receiver.received) <= 4
    assert len(app.sender._held) <= 16 + 16  # what is in memory is bounded for each host
    release.set()
    await receiver.wait_for("/slow", 300)
    assert receiver.most_open["/slow"] == 4
    await nothing_left(log)
    assert len({r.headers["webhook-id"] for r in receiver.received}) == 300
    await app.stop()
    await quick.close()


async def test_slow_hosts_of_one_tenant_keep_no_other_tenant_waiting(
    log: EventLog, settings: Callable[..., WebhookSettings], receiver: parts.Receiver
) -> None:
    """More hosts that never answer than calls may run, and more of their webhooks than a sender holds."""
    calls, hosts, each = 32, 20, 16

    async def never(_received: object) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    slow = [parts.Receiver(answers={"/slow": never}) for _ in range(hosts)]
    for one in slow:
        await one.start()
    for _ in range(each):
        for one in slow:
            await end_job(log, {"url": one.url("/slow")}, tenant="slow")
    app = WebhooksApp(log, settings(concurrency=calls, timeout_s=600.0), HEARTBEATS)
    await app.start()
    await until(lambda: sum(one.open_now for one in slow) == 24)  # three of four turns
    for path in ("/a", "/b", "/c"):
        await end_job(log, {"url": receiver.url(path)}, tenant="quick")
        await receiver.wait_for(path, 1)
    assert sum(one.open_now for one in slow) == 24
    assert len(app.sender._held) <= calls * 4
    assert await log.count_times(keys.webhook_times("m")) >= hosts * each  # those that wait are in the log
    await app.stop()
    for one in slow:
        await one.close()


async def test_a_busy_host_is_shared_by_its_tenants_in_turns(
    log: EventLog, settings: Callable[..., WebhookSettings], receiver: parts.Receiver
) -> None:
    """One tenant has sent a host more than a sender holds: the other tenant's webhook to it is called next."""
    turn = asyncio.Semaphore(0)

    async def slow(_received: object) -> bytes:
        await turn.acquire()
        return parts.status(204)

    receiver.answers["/many"] = slow
    receiver.answers["/few"] = slow
    for _ in range(100):
        await end_job(log, {"url": receiver.url("/many")}, tenant="many")
    app = WebhooksApp(log, settings(timeout_s=600.0), HEARTBEATS)
    await app.start()
    await receiver.wait_for("/many", 4)
    await until(lambda: len(app.sender._held) == 16)
    await end_job(log, {"url": receiver.url("/few")}, tenant="few")
    await until(lambda: len(app.sender._held) == 17)
    turn.release()
    await receiver.wait_for("/few", 1)
    assert len(receiver.at("/many")) == 4
    for _ in range(101):
        turn.release()
    await receiver.wait_for("/many", 100)
    await nothing_left(log)
    assert max(receiver.most_open.values()) == 4
    await app.stop()


async def test_tenants_whose_paths_of_a_host_are_slow_keep_no_other_one_waiting(
    log: EventLog, settings: Callable[..., WebhookSettings], receiver: parts.Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are known to be slow by a first call of 3 s, and all later ones hang."""
    monkeypatch.setattr("gateway.webhooks.loads._SLOW_S", 0.5)
    goes_on = asyncio.Event()

    async def slow(received: Any) -> bytes:
        if len(receiver.at(received.path)) == 1:
            await asyncio.sleep(3)
        else:
            await goes_on.wait()
        return parts.status(204)

    app = WebhooksApp(log, settings(timeout_s=600.0), HEARTBEATS)
    await app.start()
    paths = [f"/slow-{number}" for number in range(4)]
    for path in paths:
        receiver.answers[path] = slow
        await end_job(log, {"url": receiver.url(path)}, tenant=path)
    await nothing_left(log)
    for path in paths * 5:
        await end_job(log, {"url": receiver.url(path)}, tenant=path)
    await until(lambda: sum(len(receiver.at(path)) for path in paths) >= 7 and len(app.sender._held) == 20)
    for number in range(1, 4):
        await end_job(log, {"url": receiver.url("/few")}, tenant="quick")
        await receiver.wait_for("/few", number)
    assert sum(len(receiver.at(path)) for path in paths) == 7
    goes_on.set()
    for path in paths:
        await receiver.wait_for(path, 6)
    await nothing_left(log)
    await app.stop()


async def test_a_tenant_without_a_secret_waits_for_one(
    log: EventLog, settings: Callable[..., WebhookSettings], receiver: parts.Receiver, tmp_path: Path
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f'tenants.other = "{parts.SECRET}"')
    app = WebhooksApp(log, settings(secrets=str(path)), HEARTBEATS)
    await app.start()
    unsigned = await end_job(log, {"url": receiver.url("/hook")}, tenant="acme")
    await end_job(log, {"url": receiver.url("/hook")}, tenant="other")
    await receiver.wait_for("/hook", 1)
    delivery = await state_of(log, unsigned, lambda delivery: bool(delivery.last_error))
    assert (delivery.state, delivery.attempts) == (DeliveryState.PENDING, 0)
    assert delivery.last_error == "no secret to sign with"
    path.write_text(f'tenants.acme = "{parts.SECRET}"')
    await until(lambda: app.sender._keyring.secrets_of("acme"))
    await app.stop()


async def test_several_senders_share_the_models_and_take_over_from_one_that_leaves(
    log: EventLog, settings: Callable[..., WebhookSettings], receiver: parts.Receiver
) -> None:
    apps = [WebhooksApp(log, settings(), HEARTBEATS) for _ in range(2)]
    for app in apps:
        await app.start()
    await until(lambda: all(len(app._control.catalog.processes) == 2 for app in apps))
    names = [app._settings.incarnation for app in apps]
    models = {name: next(m for m in map(str, range(1000)) if preferred_owner(m, names) == name) for name in names}
    for model in models.values():
        await end_job(log, {"url": receiver.url("/hook")}, model=model)
    for app in apps:
        await until(lambda app=app: app.sender.outcomes["delivered"] == 1)
    assert len(receiver.received) == 2
    await apps[0].stop()
    for model in models.values():
        await end_job(log, {"url": receiver.url("/after")}, model=model)
    await receiver.wait_for("/after", 2)
    await apps[1].stop()


async def test_what_the_sender_did_is_measured(log: EventLog, sender: WebhooksApp, receiver: parts.Receiver) -> None:
    receiver.answers["/down"] = [parts.status(500)]
    await end_job(log, {"url": receiver.url("/up")})
    await end_job(log, {"url": receiver.url("/down")})
    await receiver.wait_for("/down", 1)
    await until(lambda: sender.sender.outcomes["delivered"] == 1 and sender.sender.pending == 1)
    page = sender._render().decode()
    assert 'charonia_webhook_deliveries_total{outcome="delivered"} 1.0' in page
    assert "charonia_webhook_pending 1.0" in page


@pytest.mark.integration
async def test_what_is_gone_or_unreadable_is_passed_over(
    fresh_log_url: str,
    log_client: Callable[[], Any],
    settings: Callable[..., WebhookSettings],
    receiver: parts.Receiver,
) -> None:
    log = open_log(fresh_log_url)
    await log.open()
    gone = await end_job(log, {"url": receiver.url("/gone")})
    broken = await end_job(log, {"url": receiver.url("/broken")})
    await log.delete_keys([keys.job("m", gone), keys.job("m", broken)])
    with log_client() as client:
        client.hset(keys.job("m", broken), mapping={"no": "job"})
    for fields in ([b"i", b"zz"], [b"i", b"00"], [b"x", gone.hex().encode()]):
        await log.append(keys.webhooks("m"), fields)
    await end_job(log, {"url": receiver.url("/hook")})
    await log.set_times(keys.webhook_times("m"), {gone + b"12345678": 1, b"short": 1})
    app = WebhooksApp(log, settings(), HEARTBEATS)
    await app.start()
    await receiver.wait_for("/hook", 1)
    await until(lambda: app.sender.outcomes["lost"] >= 3)
    assert await log.range(keys.webhooks("m")) == []
    assert len(receiver.received) == 1
    await app.stop()
    await log.close()
