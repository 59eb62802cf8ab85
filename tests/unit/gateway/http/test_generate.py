"""`generate` and `generate_stream` through the HTTP application (H30-H37)."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx2
import pytest

from charonia.errors import InternalError, ResourceExhausted, StreamInterrupted
from charonia.inference import InferenceRequest, InferenceResponse
from charonia.options.settings import GatewaySettings
from gateway.http.bodies import CLIENT_LEFT
from gateway.http.http_application import HttpApplication

GENERATE = "/v2/models/stream/generate"
STREAM = "/v2/models/stream/generate_stream"
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


def events(reply: httpx2.Response) -> list[Any]:
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in reply.headers
    parts = reply.text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def test_one_response(client: httpx2.AsyncClient) -> None:
    reply = await client.post(GENERATE, json={"INPUT0": 1, "id": "mine"})
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert "content-length" not in reply.headers
    assert reply.json() == {"id": "mine", "model_name": "stream", "model_version": "1", "OUTPUT0": 0.0}


async def test_a_version_in_the_url_and_a_model_that_answers_once(client: httpx2.AsyncClient) -> None:
    values = [float(number) for number in range(16)]
    reply = await client.post("/v2/models/identity/versions/1/generate", json={"INPUT0": values})
    assert reply.json() == {"model_name": "identity", "model_version": "1", "OUTPUT0": values}
    reply = await client.post("/v2/models/identity/generate_stream", json={"INPUT0": values})
    assert [event["OUTPUT0"] for event in events(reply)] == [values]


@pytest.mark.parametrize("url", ["/v2/models/identity/generate", "/v2/models/identity/generate_stream"])
async def test_one_answer_without_outputs(client: httpx2.AsyncClient, handler: Any, url: str) -> None:
    async def empty(request: InferenceRequest, **_: Any) -> InferenceResponse:
        return InferenceResponse(request.model, 1, [], request.id)

    handler.infer = empty
    reply = await client.post(url, json={"INPUT0": [0.0] * 16})
    told = {"model_name": "identity", "model_version": "1"}
    assert (events(reply) if "stream" in url else [reply.json()]) == [told]


@pytest.mark.parametrize("count", [0, 2])
async def test_another_number_of_responses_is_an_error_with_status_200(
    client: httpx2.AsyncClient, handler: Any, count: int
) -> None:
    reply = await client.post(GENERATE, json={"INPUT0": count})
    assert (reply.status_code, reply.json()) == (200, {"error": NOT_ONE})
    assert handler.cancelled_ids == ([""] if count else [])  # the others are not made for nobody


@pytest.mark.parametrize("count", [0, 1, 2])
async def test_a_receipt_after_the_last_response_belongs_to_it(
    client: httpx2.AsyncClient, handler: Any, count: int
) -> None:
    receipt = InferenceResponse("stream", 1, [], parameters={"charonia_receipt": "{}"})
    handler.scripts["mine"] = [*range(count), receipt]
    reply = await client.post(GENERATE, json={"INPUT0": 1, "id": "mine", "charonia_receipt": True})
    told = {"id": "mine", "model_name": "stream", "model_version": "1", "charonia_receipt": "{}", "OUTPUT0": 0}
    assert reply.json() == (told if count == 1 else {"error": NOT_ONE})
    reply = await client.post(STREAM, json={"INPUT0": 1, "id": "mine", "charonia_receipt": True})
    assert len(events(reply)) == count + 1


async def test_another_response_without_outputs_is_one(client: httpx2.AsyncClient, handler: Any) -> None:
    receipt = {"charonia_receipt": "{}"}
    for last in (
        InferenceResponse("stream", 1, [], parameters={"note": "kept"}),
        InferenceResponse("stream", 1, [], bare=True),
        InferenceResponse("stream", 1, [], parameters=receipt, bare=True),
    ):
        handler.scripts["mine"] = [0, last]
        reply = await client.post(GENERATE, json={"INPUT0": 1, "id": "mine"})
        assert reply.json() == {"error": NOT_ONE}


async def test_responses_are_events(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.response_parameters = {"note": "kept"}
    reply = await client.post(STREAM, json={"INPUT0": 3, "id": "r", "style": "short"})
    assert reply.status_code == 200
    told = {"id": "r", "model_name": "stream", "model_version": "1", "note": "kept"}
    assert events(reply) == [{**told, "OUTPUT0": float(value)} for value in range(3)]
    assert handler.requests[0].parameters == {"style": "short"}


async def test_no_responses_at_all(client: httpx2.AsyncClient) -> None:
    reply = await client.post(STREAM, json={"INPUT0": 0})
    assert (reply.status_code, events(reply)) == (200, [])


async def test_the_first_response_decides_the_status(client: httpx2.AsyncClient, handler: Any) -> None:
    failed = InferenceResponse("stream", 1, [], error=InternalError("An Error Occurred"))
    handler.scripts["first"] = [failed, 1, None]
    reply = await client.post(STREAM, json={"INPUT0": 1, "id": "first"})
    assert reply.status_code == 500
    told = events(reply)
    assert told[0] == {"error": "An Error Occurred"}
    assert told[1]["OUTPUT0"] == 1
    handler.scripts["later"] = [1, failed]
    reply = await client.post(STREAM, json={"INPUT0": 1, "id": "later"})
    assert reply.status_code == 200
    assert [event.get("error") for event in events(reply)] == [None, "An Error Occurred"]
    handler.scripts["lost"] = [1, StreamInterrupted("lost")]
    reply = await client.post(STREAM, json={"INPUT0": 1, "id": "lost"})
    assert events(reply)[1] == {"error": "STREAM_INTERRUPTED: lost"}


async def test_one_failed_response(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.scripts["x"] = [InferenceResponse("stream", 1, [], error=InternalError("no")), None]
    reply = await client.post(GENERATE, json={"INPUT0": 1, "id": "x"})
    assert (reply.status_code, reply.json()) == (500, {"error": "no"})


@pytest.mark.parametrize("url", [GENERATE, STREAM])
async def test_what_fails_before_inference_is_json(client: httpx2.AsyncClient, handler: Any, url: str) -> None:
    for body, status, error in (
        (b'{"INPUT0": "x"}', 500, "Unable to parse 'data': attempt to access JSON non-number as double"),
        (b'{"INPUT0": [1, 2], "x": {}}', 400,
         "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."),
    ):  # fmt: skip
        reply = await client.post(url, content=body)
        assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json")
        assert reply.json() == {"error": error}
    handler.refusal = ResourceExhausted("full")
    reply = await client.post(url, json={"INPUT0": 1})
    assert (reply.status_code, reply.json(), reply.headers["retry-after"]) == (429, {"error": "full"}, "1")


@pytest.mark.parametrize("url", [GENERATE, STREAM])
async def test_the_same_rules_as_for_inferences(handler: Any, url: str) -> None:
    settings = GatewaySettings(
        incarnation="test",
        http_restricted_api=((("inference",), "key", "secret"),),
        http_header_forward_pattern="x-.*",
        http_max_input_size=100,
    )
    application = HttpApplication(settings, handler)
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=application), base_url="http://gateway", headers={"key": "secret"}
    ) as client:
        reply = await client.post(url, json={"INPUT0": 1}, headers={"key": "wrong"})
        assert reply.status_code == 403
        reply = await client.post(url, json={"INPUT0": 1}, headers={"X-Trace": "t"})
        assert reply.status_code == 200
        assert handler.requests[0].parameters == {"x-trace": "t"}
        reply = await client.post(url, json={"INPUT0": 1, "pad": "x" * 200})
        assert reply.status_code == 400
        assert "exceeds the maximum allowed input size of 100 bytes" in reply.json()["error"]
        reply = await client.post(url, json={"INPUT0": 1}, headers={"content-encoding": "gzip"})
        assert (reply.status_code, reply.json()) == (
            400, {"error": "Unsupported content-encoding, only 'identity' is supported."},
        )  # fmt: skip
        reply = await client.get(url)
        assert (reply.status_code, reply.json()) == (405, {"error": "Method Not Allowed"})
        reply = await client.post(url.replace("stream/", "nope/"), json={})
        assert reply.status_code == 404
        application.draining = True
        assert (await client.post(url, json={"INPUT0": 1})).status_code == 503


@pytest.mark.parametrize("url", [GENERATE, STREAM])
async def test_a_job_is_accepted(client: httpx2.AsyncClient, url: str) -> None:
    reply = await client.post(url, json={"INPUT0": 1}, headers={"prefer": "respond-async"})
    assert reply.status_code == 202
    assert reply.headers["location"].startswith("/v2/jobs/")


async def test_words_of_delivery_reach_the_stream(client: httpx2.AsyncClient, handler: Any) -> None:
    await client.post(STREAM, json={"INPUT0": 1, "charonia_idempotency_key": "k"})
    assert handler.options[-1].idempotency_key == "k"
    assert handler.requests[-1].parameters == {}


class Connection:
    """A client of the ASGI application whose body has come and who may leave."""

    def __init__(self, application: HttpApplication, body: bytes) -> None:
        self.sent: list[Any] = []
        self.first = asyncio.Event()
        self.state: dict[str, Any] = {}
        scope = {
            "type": "http", "path": STREAM, "method": "POST", "headers": [(b"host", b"x")], "state": self.state,
        }  # fmt: skip
        messages = iter([{"type": "http.request", "body": body}])

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            self.sent.append(message)
            if message.get("body"):
                self.first.set()

        self.task = asyncio.create_task(application(scope, receive, send))


async def test_a_client_that_leaves_cancels_its_generation(application: HttpApplication, handler: Any) -> None:
    handler.scripts["r"] = [1, asyncio.Event(), 2]
    connection = Connection(application, b'{"INPUT0": 1, "id": "r"}')
    await connection.first.wait()
    connection.state[CLIENT_LEFT] = True
    connection.task.cancel()
    await asyncio.wait({connection.task})
    assert handler.cancelled_ids == ["r"]
    assert len(connection.sent) == 2


async def test_a_server_that_stops_says_so_in_the_stream(application: HttpApplication, handler: Any) -> None:
    handler.scripts["r"] = [1, asyncio.Event(), 2]
    connection = Connection(application, b'{"INPUT0": 1, "id": "r"}')
    await connection.first.wait()
    connection.task.cancel()
    await asyncio.wait({connection.task})
    assert handler.cancelled_ids == ["r"]
    assert connection.sent[-2]["body"] == b'data: {"error":"Server exiting"}\n\n'
    assert connection.sent[-1] == {"type": "http.response.body", "body": b""}


async def test_inference_of_a_decoupled_model(client: httpx2.AsyncClient) -> None:
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    for body in ({"inputs": [tensor]}, {}, {"inputs": [tensor], "parameters": {"charonia_idempotency_key": "k"}}):
        reply = await client.post("/v2/models/stream/infer", json=body)
        assert (reply.status_code, reply.json()) == (
            501, {"error": "HTTP end point doesn't support models with decoupled transaction policy"},
        )  # fmt: skip
    reply = await client.post("/v2/models/stream/infer", json={"inputs": [tensor]}, headers={"prefer": "handling=x"})
    assert reply.status_code == 501
    reply = await client.post("/v2/models/stream/infer", json={"inputs": [tensor]}, headers={"prefer": "respond-async"})
    assert reply.status_code == 202
    body = {"inputs": [tensor], "parameters": {"charonia_prefer": "respond-async"}}
    assert (await client.post("/v2/models/stream/infer", json=body)).status_code == 202
    packed = gzip.compress(json.dumps(body).encode())
    headers = {"content-encoding": "gzip"}
    assert (await client.post("/v2/models/stream/infer", content=packed, headers=headers)).status_code == 202
    plain = gzip.compress(json.dumps({"inputs": [tensor]}).encode())
    assert (await client.post("/v2/models/stream/infer", content=plain, headers=headers)).status_code == 501
