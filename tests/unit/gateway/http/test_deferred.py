from __future__ import annotations

import asyncio
import json
import time
from collections.abc import MutableMapping
from typing import Any

import httpx2
import pytest

from charonia.errors import ResourceExhausted
from gateway.http.http_application import HttpApplication

INFER = "/v2/models/identity/infer"
BODY = {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.5]}], "id": "mine"}
ASYNC = {"prefer": "respond-async"}


def with_parameters(**parameters: Any) -> dict[str, Any]:
    return {**BODY, "parameters": parameters}


async def test_a_job_is_accepted(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.gate.clear()
    reply = await client.post(INFER, json=BODY, headers={**ASYNC, "charonia-durability": "fsync"})
    body = reply.json()
    assert reply.status_code == 202
    assert reply.headers["location"] == f"/v2/jobs/{body['id']}"
    assert reply.headers["preference-applied"] == "respond-async"
    assert body == {
        "id": "00000000000000000000000000000001.identity", "state": "queued", "location": reply.headers["location"],
        "durability": "fsync", "position": 1, "queue_length": 1, "eta_s": 0.5,
    }  # fmt: skip
    handler.gate.set()
    result = await client.get(reply.headers["location"] + "/result?wait=5")
    direct = await client.post(INFER, json=BODY)
    assert (result.status_code, result.content) == (200, direct.content)
    assert result.headers["content-type"] == direct.headers["content-type"]


async def test_a_parameter_says_the_same(client: httpx2.AsyncClient, handler: Any) -> None:
    reply = await client.post(
        INFER, json=with_parameters(charonia_prefer="respond-async", charonia_retention_s=7, own="mine")
    )
    assert reply.status_code == 202
    await client.get(reply.headers["location"] + "/result?wait=5")
    (request,) = handler.requests
    assert request.parameters == {"own": "mine"}
    assert handler.options[0].retention_s == 7


async def test_a_header_wins_over_a_parameter(client: httpx2.AsyncClient, handler: Any) -> None:
    await client.post(INFER, json=with_parameters(charonia_idempotency_key="a"), headers={"idempotency-key": "b"})
    assert handler.options[0].idempotency_key == "b"


async def test_ordinary_requests_have_no_options(client: httpx2.AsyncClient, handler: Any) -> None:
    await client.post(INFER, json=BODY)
    assert handler.options == [None]


@pytest.mark.parametrize("key", ["charonia_job_id", "charonia_own", "charonia_"])
async def test_the_prefix_is_reserved(client: httpx2.AsyncClient, handler: Any, key: str) -> None:
    reply = await client.post(INFER, json=with_parameters(**{key: "x"}))
    assert reply.status_code == 400
    assert reply.json() == {"error": f"unknown parameter '{key}': names starting with 'charonia_' are reserved"}
    assert not handler.requests


async def test_a_short_wait_gives_the_answer(client: httpx2.AsyncClient, handler: Any) -> None:
    reply = await client.post(INFER, json=BODY, headers={"prefer": "respond-async, wait=5"})
    assert reply.status_code == 200
    assert reply.headers["preference-applied"] == "respond-async, wait=5"
    assert reply.json()["outputs"][0]["data"] == [1.5, 2.5]
    assert reply.json()["id"] == "mine"
    assert handler.waits_s == [5.0]


async def test_a_wait_that_is_too_short_gives_the_job(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.gate.clear()
    reply = await client.post(INFER, json=BODY, headers={"prefer": "wait=0.01"})
    assert (reply.status_code, reply.json()["state"]) == (202, "running")
    assert reply.headers["preference-applied"] == "wait=0.01"


@pytest.mark.parametrize(
    ("headers", "cancelled"),
    [
        ({}, True),
        ({"idempotency-key": "k"}, False),
        ({"charonia-webhook": "https://example.org"}, False),
        ({"charonia-on-disconnect": "keep"}, False),
        ({"idempotency-key": "k", "charonia-on-disconnect": "cancel"}, True),
    ],
)
async def test_leaving_while_waiting(
    application: HttpApplication, client: httpx2.AsyncClient, handler: Any, headers: dict[str, str], cancelled: bool
) -> None:
    handler.gate.clear()

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        raise AssertionError(f"answered a client that has left: {message}")

    given = {"prefer": "wait=30", **headers}
    scope = {
        "type": "http", "method": "POST", "path": INFER, "state": {"charonia.client_left": True},
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }  # fmt: skip
    task = asyncio.create_task(application(scope, receive, send))
    await handler.waiting.wait()
    task.cancel()
    await task
    if cancelled:
        await asyncio.wait_for(handler.cancelled.wait(), 30)
    else:
        handler.gate.set()
    (job,) = (await client.get("/v2/jobs")).json()["jobs"]
    result = await client.get(job["location"] + "/result?wait=5")
    assert result.status_code == (400 if cancelled else 200)


class TestKeys:
    async def test_the_same_key_is_the_same_job(self, client: httpx2.AsyncClient, handler: Any) -> None:
        handler.gate.clear()
        headers = {**ASYNC, "idempotency-key": "k"}
        first = await client.post(INFER, json=BODY, headers=headers)
        await handler.waiting.wait()
        again = await client.post(INFER, json=BODY, headers=headers)
        assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
        assert again.json()["state"] == "running"
        handler.gate.set()
        await client.get(first.headers["location"] + "/result?wait=5")
        ended = await client.post(INFER, json=BODY, headers=headers)
        assert (ended.json()["state"], ended.json()["position"]) == ("succeeded", 0)
        assert len(handler.requests) == 1

    async def test_another_body_is_refused(self, client: httpx2.AsyncClient) -> None:
        headers = {**ASYNC, "idempotency-key": "k"}
        await client.post(INFER, json=BODY, headers=headers)
        other = {"inputs": [{**BODY["inputs"][0], "data": [9, 9]}]}  # type: ignore[dict-item]
        reply = await client.post(INFER, json=other, headers=headers)
        assert (reply.status_code, reply.json()) == (422, {"error": "the key was used for another request"})

    async def test_a_synchronous_call_hands_its_key_on(self, client: httpx2.AsyncClient, handler: Any) -> None:
        reply = await client.post(INFER, json=BODY, headers={"idempotency-key": "k"})
        assert reply.status_code == 200
        assert handler.options[0].idempotency_key == "k"
        assert not handler.options[0].respond_async


class TestDeadlines:
    async def test_the_earliest_counts(self, client: httpx2.AsyncClient, handler: Any) -> None:
        before_ns = time.time_ns()
        await client.post(INFER, json=BODY, headers={"charonia-timeout-ms": "60000"})
        absolute_us = before_ns // 1000 + 1_000_000
        await client.post(
            INFER, json=with_parameters(charonia_deadline_us=absolute_us), headers={"charonia-timeout-ms": "60000"}
        )
        relative, absolute = handler.requests
        assert before_ns + 60 * 10**9 <= relative.deadline_ns <= time.time_ns() + 60 * 10**9
        assert absolute.deadline_ns == absolute_us * 1000


async def test_bad_words_reach_no_model(client: httpx2.AsyncClient, handler: Any) -> None:
    for headers in ({"charonia-timeout-ms": "soon"}, {"charonia-on-disconnect": "x"}, {"idempotency-key": ""}):
        assert (await client.post(INFER, json=BODY, headers=headers)).status_code == 400
    assert (await client.post(INFER, json=with_parameters(charonia_prefer=["x"]))).status_code == 400
    assert not handler.requests


async def test_a_full_queue_says_when_to_come_again(client: httpx2.AsyncClient, handler: Any) -> None:
    refusal = ResourceExhausted("the queue is full")
    refusal.retry_after_s = 7
    handler.refusal = refusal
    reply = await client.post(INFER, json=BODY, headers=ASYNC)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")


class TestTenants:
    @pytest.fixture
    def handler(self, handler: Any) -> Any:
        handler.tenants = {"key-a": "a", "key-b": "b"}
        return handler

    async def test_without_a_key_nothing_is_served(self, client: httpx2.AsyncClient, handler: Any) -> None:
        for method, url in (("POST", INFER), ("GET", "/v2/jobs"), ("GET", "/v2/jobs/x"), ("DELETE", "/v2/jobs/x")):
            reply = await client.request(method, url, json=BODY if method == "POST" else None)
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"] == 'Bearer realm="charonia"'
        assert not handler.requests

    async def test_each_sees_its_own(self, client: httpx2.AsyncClient) -> None:
        a, b = {"authorization": "Bearer key-a"}, {"x-api-key": "key-b"}
        location = (await client.post(INFER, json=BODY, headers={**ASYNC, **a})).headers["location"]
        assert (await client.get(location + "/result?wait=5", headers=a)).status_code == 200
        absent = f"/v2/jobs/{'0' * 31}9.identity"
        for tail in ("", "/result", "/events", "/timeline"):
            foreign = await client.get(location + tail, headers=b)
            unknown = await client.get(absent + tail, headers=b)
            assert (foreign.status_code, foreign.content, foreign.headers) == (
                unknown.status_code, unknown.content, unknown.headers,
            )  # fmt: skip
            assert (foreign.status_code, foreign.json()) == (404, {"error": "job not found"})
        assert (await client.delete(location, headers=b)).status_code == 404
        assert (await client.get("/v2/jobs", headers=b)).json() == {"jobs": [], "next": None}

    async def test_an_ordinary_request_is_its_tenants(self, client: httpx2.AsyncClient, handler: Any) -> None:
        reply = await client.post(INFER, json=BODY, headers={"x-api-key": "key-b"})
        assert reply.status_code == 200
        assert handler.options[0].caller.tenant == "b"
