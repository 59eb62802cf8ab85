from __future__ import annotations

import gzip
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from echo_handler import EchoHandler

from charonia.errors import InternalError
from charonia.options.settings import GatewaySettings, SageMakerSettings
from gateway.clouds.sagemaker import SageMakerApplication

MIME = "application/vnd.sagemaker-triton.binary+json;json-header-size="
VALUE = struct.pack("<16f", *range(16))
TENSOR = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32"}
JSON = {"inputs": [{**TENSOR, "data": list(range(16))}]}


@asynccontextmanager
async def front(handler: EchoHandler, **own: str) -> AsyncIterator[httpx2.AsyncClient]:
    settings = GatewaySettings("test", http_restricted_api=((("trace",), "key", "x"),))
    application = SageMakerApplication(settings, handler, SageMakerSettings(**{"default_model": "identity", **own}))
    transport = httpx2.ASGITransport(application)
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


async def test_ping(handler: EchoHandler) -> None:
    async with front(handler) as client:
        assert (await client.get("/ping")).status_code == 200
        assert (await client.post("/ping")).status_code == 405
        handler.is_ready = False
        assert (await client.get("/ping")).status_code == 400
    async with front(handler, ping_mode="live") as client:
        assert (await client.get("/ping")).status_code == 200


async def test_json_in_and_out(handler: EchoHandler) -> None:
    async with front(handler) as client:
        reply = await client.post("/invocations", json=JSON)
        assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
        assert reply.json()["outputs"][0]["data"] == list(range(16))
        packed = gzip.compress(json.dumps(JSON).encode())
        reply = await client.post("/invocations", content=packed, headers={"content-encoding": "gzip"})
        assert reply.json()["outputs"][0]["data"] == list(range(16))


async def test_binary_in_and_out(handler: EchoHandler) -> None:
    head = json.dumps(
        {
            "inputs": [{**TENSOR, "parameters": {"binary_data_size": 64}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    async with front(handler) as client:
        reply = await client.post("/invocations", content=head + VALUE, headers={"content-type": MIME + str(len(head))})
        assert reply.status_code == 200
        assert "inference-header-content-length" not in reply.headers
        at = int(reply.headers["content-type"].removeprefix(MIME))
        assert reply.content[at:] == VALUE
        # the header of the v2 interface says nothing here
        headers = {"inference-header-content-length": str(len(head))}
        assert (await client.post("/invocations", content=head + VALUE, headers=headers)).status_code == 500
        raw = await client.post("/invocations", content=VALUE, headers={"content-type": MIME + "0"})
        assert raw.content.endswith(VALUE)


async def test_large_bodies_and_replies(handler: EchoHandler) -> None:
    rows = 4096
    value = VALUE * rows
    head = json.dumps(
        {
            "inputs": [{**TENSOR, "shape": [64, 16], "parameters": {"binary_data_size": 64 * 64}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    async with front(handler) as client:
        content, headers = head + value[: 64 * 64], {"content-type": MIME + str(len(head))}
        reply = await client.post("/invocations", content=content, headers=headers)
        assert reply.content.endswith(value[: 64 * 64])


async def test_errors_have_their_status(handler: EchoHandler) -> None:
    async with front(handler, default_model="none") as client:
        reply = await client.post("/invocations", json=JSON)
        assert (reply.status_code, "unknown model: 'none'" in reply.text) == (404, True)
    async with front(handler) as client:
        assert (await client.get("/invocations")).status_code == 405
        handler.failure = InternalError("broken")
        reply = await client.post("/invocations", json=JSON)
        assert (reply.status_code, reply.json()) == (500, {"error": "broken"})
        handler.failure = ValueError("a bug")
        reply = await client.post("/invocations", json=JSON)
        assert (reply.status_code, reply.json()) == (500, {"error": "internal server error"})


async def test_nothing_else_is_here(handler: EchoHandler) -> None:
    async with front(handler) as client:
        for path in ("/", "/v2", "/v2/health/live", "/v2/models/identity/infer", "/pings", "/ping/", "/docs"):
            for method in ("GET", "POST"):
                reply = await client.request(method, path, json=JSON)
                assert (reply.status_code, reply.content) == (400, b""), path
    assert handler.requests == []


async def test_generate(handler: EchoHandler) -> None:
    async with front(handler, default_model="text", inference="generate") as client:
        reply = await client.post("/invocations", json={"INPUT0": "hello"})
        assert (reply.status_code, reply.json()["OUTPUT0"]) == (200, "hello")
    async with front(handler, default_model="stream", inference="generate_stream") as client:
        reply = await client.post("/invocations", json={"INPUT0": 1.5})
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.text.startswith('data: {"OUTPUT0":')
