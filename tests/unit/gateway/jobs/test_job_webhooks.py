"""What a gateway does about a job's webhook: checks it before anything is recorded, and shows how far it has come."""

from __future__ import annotations

from typing import Any

import pytest
from job_bench import options
from job_bench import request as request_of

from charonia.errors import InternalError, InvalidArgument, StartupError, Unsupported
from charonia.facts.jobs import JobState, parse_public_id
from charonia.options.settings import GatewaySettings
from gateway.requests.delivery import Webhook
from gateway.webhooks.deliveries import Delivery, keep
from gateway.webhooks.retries import DeliveryState


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://169.254.169.254/", "http://u:p@example.org/", "x"])
async def test_a_webhook_that_could_never_be_called_is_refused_and_nothing_is_recorded(bench: Any, url: str) -> None:
    gateway = await bench.gateway()
    with pytest.raises(InvalidArgument, match="webhook url"):
        await gateway.submit_job(request_of(1), options(webhook=Webhook(url)))
    assert await bench.queued() == []
    assert await bench.log.job_models() == []


async def test_without_senders_no_webhook_is_taken(bench: Any) -> None:
    gateway = await bench.gateway(allow_webhooks=False)
    with pytest.raises(Unsupported, match="webhooks are not available"):
        await gateway.submit_job(request_of(1), options(webhook=Webhook("https://example.org/hook")))
    await gateway.submit_job(request_of(1), options())
    assert len(await bench.queued()) == 1


async def test_an_operator_may_allow_more(bench: Any) -> None:
    gateway = await bench.gateway(webhook_allow=("10.0.0.0/8",))
    await gateway.submit_job(request_of(1), options(webhook=Webhook("http://10.1.2.3/hook")))
    assert len(await bench.queued()) == 1
    with pytest.raises(StartupError, match="--webhook-allow"):
        await bench.gateway("other", webhook_allow=("10.0.0.0/99",))
    assert GatewaySettings("g").webhook_allow == ()


async def test_a_view_shows_how_far_the_webhook_has_come(bench: Any) -> None:
    gateway = await bench.gateway()
    hook = Webhook("https://example.org/hook", ("failed",))
    receipts = [await gateway.submit_job(request_of(n), options(webhook=hook)) for n in range(2)]
    succeeding, failing = await bench.queued()
    assert (await gateway.jobs.queries.view(receipts[0].id)).webhook == {}
    for record, error in ((succeeding, None), (failing, InternalError("boom"))):
        assert await bench.begin(record)
        assert await bench.finish(record, error=error)
    assert (await gateway.jobs.queries.view(receipts[0].id)).webhook == {}, "nobody asked to be told"
    view = await gateway.jobs.queries.view(receipts[1].id)
    assert view.state is JobState.FAILED
    assert (view.webhook["state"], view.webhook["attempts"]) == ("pending", 0)

    known = parse_public_id(receipts[1].id)
    assert known is not None
    record = await bench.log.job(*known)
    await keep(bench.log, record, Delivery(DeliveryState.DELIVERED, 2, 204, "", 1_763_700_000_000_000))
    assert (await gateway.jobs.queries.view(receipts[1].id)).webhook == {
        "state": "delivered",
        "attempts": 2,
        "last_status": 204,
        "last_error": None,
        "last_attempt": "2025-11-21T04:40:00.000000Z",
        "next_attempt": None,
    }
