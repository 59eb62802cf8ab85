from __future__ import annotations

import asyncio
import gzip
import json
import struct
import zlib
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from charonia.errors import CharoniaError, ErrorCode
from charonia.options.settings import GatewaySettings
from gateway.http.http_application import HttpApplication

INFER = "/v2/models/simple/infer"


def tensor(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "shape": [1, 16], "datatype": "INT32", "data": list(range(16)), **changes}


def document(**changes: Any) -> dict[str, Any]:
    return {"inputs": [tensor("INPUT0"), tensor("INPUT1")], **changes}


def binary(value: bytes, **members: Any) -> tuple[bytes, dict[str, str]]:
    text = json.dumps(
        {
            "inputs": [
                {"name": "INPUT0", "shape": [1, len(value) // 4], "datatype": "FP32",
                 "parameters": {"binary_data_size": len(value)}}
            ],
            **members,
        }
    ).encode()  # fmt: skip
    return text + value, {"inference-header-content-length": str(len(text))}


async def test_a_json_inference(client: httpx2.AsyncClient) -> None:
    reply = await client.post(INFER, json=document(id="a"))
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in reply.headers
    assert reply.json() == {
        "id": "a", "model_name": "simple", "model_version": "1",
        "outputs": [
            {"name": f"OUTPUT{i}", "datatype": "INT32", "shape": [1, 16], "data": list(range(16))} for i in range(2)
        ],
    }  # fmt: skip


async def test_a_binary_inference(client: httpx2.AsyncClient) -> None:
    value = struct.pack("<16f", *range(16))
    body, headers = binary(value, parameters={"binary_data_output": True})
    reply = await client.post("/v2/models/identity/versions/1/infer", content=body, headers=headers)
    assert reply.status_code == 200
    at = int(reply.headers["inference-header-content-length"])
    assert reply.headers["content-type"] == "application/octet-stream"
    assert reply.content[at:] == value
    assert json.loads(reply.content[:at])["outputs"][0]["parameters"] == {"binary_data_size": 64}


async def test_a_raw_inference(client: httpx2.AsyncClient) -> None:
    reply = await client.post(
        "/v2/models/identity/infer", content=b"\1" * 64, headers={"inference-header-content-length": "0"}
    )
    assert reply.content[int(reply.headers["inference-header-content-length"]) :] == b"\1" * 64


async def test_binary_by_default_is_for_unlisted_outputs(client: httpx2.AsyncClient) -> None:
    reply = await client.post(
        INFER, json=document(outputs=[{"name": "OUTPUT1"}], parameters={"binary_data_output": True})
    )
    assert [output["name"] for output in reply.json()["outputs"]] == ["OUTPUT1"]
    assert reply.json()["outputs"][0]["data"] == list(range(16))


async def test_classification(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.labels = {"OUTPUT0": ["none"] * 15 + ["best"]}
    reply = await client.post(INFER, json=document(outputs=[{"name": "OUTPUT0", "parameters": {"classification": 2}}]))
    (output,) = reply.json()["outputs"]
    assert output == {
        "name": "OUTPUT0", "datatype": "BYTES", "shape": [1, 2], "data": ["15:15:best", "14:14:none"],
    }  # fmt: skip


# what Triton 2.51 was seen to answer, as far as the front decides it
@pytest.mark.parametrize(
    ("url", "content", "status", "error"),
    [
        (INFER, b"x{", 500, "failed to parse the request JSON buffer: Invalid value. at 0"),
        (INFER, b"", 400, "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but "
         "got 2 inputs in 'simple' model configuration"),
        (INFER, b"{}", 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (INFER, b"[]", 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (INFER, document(inputs=[tensor("INPUT0", data=[1.5] * 16)]), 500,
         "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        (INFER, document(inputs=[tensor("INPUT0", data=[1] * 8)]), 500,
         "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        (INFER, document(inputs=[tensor("INPUT0", shape=[1, -16])]), 500,
         "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (INFER, document(inputs=[tensor("INPUT0", datatype="BYTES", data=[5] * 16)]), 500,
         "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        ("/v2/models/simple/versions/99/infer", document(), 404,
         "Request for unknown model: 'simple' version 99 is not found"),
        ("/v2/models/nope/infer", b"x{", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/stream/infer", document(), 501,
         "HTTP end point doesn't support models with decoupled transaction policy"),
        ("/v2/models/simple/versions/abc/infer", document(), 404, "Not Found"),
        ("/v2/models/a/b/infer", document(), 404, "Not Found"),
        ("/api/infer/simple", document(), 404, "Not Found"),
    ],
)  # fmt: skip
async def test_observed_refusals(
    client: httpx2.AsyncClient, handler: Any, url: str, content: Any, status: int, error: str
) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    reply = await client.post(url, content=body)
    assert (reply.status_code, reply.json()) == (status, {"error": error})
    assert reply.headers["content-type"] == "application/json"
    assert not handler.requests


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        ([3_000_000_000] * 16, [-1294967296] * 16),
        ([[1, 2, 3, 4], [5, 6, 7, 8], 9, 10, 11, 12, 13, 14, 15, 16], list(range(1, 17))),
    ],
)
async def test_observed_lenience(client: httpx2.AsyncClient, data: list[Any], answer: list[int]) -> None:
    reply = await client.post(INFER, json=document(inputs=[tensor("INPUT0", data=data), tensor("INPUT1")]))
    assert reply.json()["outputs"][0]["data"] == answer


async def test_not_finite_numbers_go_both_ways(client: httpx2.AsyncClient) -> None:
    body = b'{"inputs":[{"name":"INPUT0","shape":[3],"datatype":"FP32","data":[NaN,Infinity,-Infinity]}]}'
    reply = await client.post("/v2/models/any_FP32/infer", content=body)
    assert b'"data":[NaN,Infinity,-Infinity]' in reply.content


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
async def test_a_wrong_method_is_405_in_plain_text(client: httpx2.AsyncClient, method: str) -> None:
    for url in (INFER, "/v2/models/simple/versions/1/infer"):
        reply = await client.request(method, url)
        assert reply.status_code == 405
        assert reply.headers["content-type"] == "text/plain"
        if method != "HEAD":
            assert reply.json() == {"error": "Method Not Allowed"}


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_the_handlers_errors_reach_the_client(client: httpx2.AsyncClient, handler: Any, code: ErrorCode) -> None:
    handler.failure = CharoniaError.of(code, 'it "failed"')
    reply = await client.post(INFER, json=document())
    assert reply.json() == {"error": 'it "failed"'}


async def test_an_unexpected_failure_tells_nothing(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.failure = KeyError("internals")
    reply = await client.post(INFER, json=document())
    assert reply.status_code == 500
    assert reply.json() == {"error": "internal server error"}


class TestCompression:
    @pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity", "GZIP"])
    async def test_requests(self, client: httpx2.AsyncClient, encoding: str) -> None:
        pack: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
        body, headers = binary(b"\2" * 64)
        packed = pack.get(encoding.lower(), bytes)(body)
        reply = await client.post(
            "/v2/models/identity/infer", content=packed, headers={**headers, "content-encoding": encoding}
        )
        assert reply.status_code == 200

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    @pytest.mark.parametrize("size", [64, 2_000_000])
    async def test_replies(self, client: httpx2.AsyncClient, encoding: str, size: int) -> None:
        body, headers = binary(b"\3" * size, parameters={"binary_data_output": True})
        reply = await client.post(
            "/v2/models/identity/infer", content=body, headers={**headers, "accept-encoding": encoding}
        )
        assert reply.headers["content-encoding"] == encoding
        # the client has decompressed: the header counts in what it sees (H18)
        at = int(reply.headers["inference-header-content-length"])
        assert reply.content[at:] == b"\3" * size
        json.loads(reply.content[:at])

    async def test_an_unknown_encoding(self, client: httpx2.AsyncClient) -> None:
        reply = await client.post(INFER, content=b"x", headers={"content-encoding": "br"})
        assert reply.status_code == 501
        assert reply.json() == {"error": "Unsupported compression type"}
        assert reply.headers["accept-encoding"] == "gzip, deflate"

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    async def test_nothing_to_decompress(self, client: httpx2.AsyncClient, encoding: str) -> None:
        reply = await client.post(INFER, content=b"", headers={"content-encoding": encoding})
        assert (reply.status_code, reply.json()) == (400, {"error": "nothing to be decompressed"})

    async def test_a_bomb(self, client: httpx2.AsyncClient) -> None:
        bomb = gzip.compress(b"\0" * 70_000_000)
        reply = await client.post(INFER, content=bomb, headers={"content-encoding": "gzip"})
        assert reply.status_code == 413


class TestLimits:
    @pytest.fixture
    def settings(self) -> GatewaySettings:
        return GatewaySettings(incarnation="test", http_max_input_size=100_000)

    async def test_a_declared_length_is_refused_unread(self, application: HttpApplication) -> None:
        reads = 0

        async def receive() -> MutableMapping[str, Any]:
            nonlocal reads
            reads += 1
            return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

        status, body = await call(application, receive, {b"content-length": b"200000"})
        assert (status, reads) == (400, 0)
        assert json.loads(body)["error"] == (
            "request JSON size of 200000 bytes exceeds the maximum allowed input size of 100000 bytes. Use "
            "--http-max-input-size to increase the limit."
        )

    @pytest.mark.parametrize(
        ("headers", "start"),
        [
            ({}, "request JSON size of 10"),
            ({b"inference-header-content-length": b"0"}, "Raw input has a byte_size (10"),
        ],
    )
    async def test_reading_stops_past_the_limit(
        self, application: HttpApplication, headers: dict[bytes, bytes], start: str
    ) -> None:
        reads = 0

        async def receive() -> MutableMapping[str, Any]:
            nonlocal reads
            reads += 1
            return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

        status, body = await call(application, receive, headers)
        assert (status, reads) == (400, 101)
        assert json.loads(body)["error"].startswith(start)

    async def test_a_body_in_many_pieces(self, client: httpx2.AsyncClient) -> None:
        whole = json.dumps(document()).encode()

        async def pieces() -> Any:
            for i in range(0, len(whole), 7):
                yield whole[i : i + 7]

        reply = await client.post(INFER, content=pieces())
        assert reply.status_code == 200

    async def test_control_bodies_are_bounded_too(self, client: httpx2.AsyncClient) -> None:
        reply = await client.post("/v2/repository/models/m/load", content=b" " * 100_001)
        assert reply.status_code == 400
        assert reply.json()["error"].startswith("request JSON size of 100001 bytes exceeds")


async def call(
    application: HttpApplication, receive: Any, headers: dict[bytes, bytes], state: dict[str, Any] | None = None
) -> tuple[int, bytes]:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": INFER, "headers": list(headers.items()), "state": state or {}}
    await application(scope, receive, send)
    if not sent:
        return 0, b""
    return sent[0]["status"], sent[1]["body"]


class TestLeaving:
    async def test_a_client_that_leaves_while_sending_gets_no_answer(self, application: HttpApplication) -> None:
        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.disconnect"}

        assert await call(application, receive, {}) == (0, b"")

    async def test_cancelling_the_call_cancels_the_inference(self, application: HttpApplication, handler: Any) -> None:
        handler.gate.clear()

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": json.dumps(document()).encode(), "more_body": False}

        task = asyncio.create_task(call(application, receive, {}, {"charonia.client_left": True}))
        await handler.waiting.wait()
        task.cancel()
        assert await task == (0, b"")
        assert handler.cancelled.is_set()


class TestHealth:
    async def test_live_and_ready(self, client: httpx2.AsyncClient, handler: Any) -> None:
        for url in ("/v2/health/live", "/v2/health/ready"):
            reply = await client.get(url)
            assert (reply.status_code, reply.content) == (200, b"")
        handler.is_ready = False
        assert (await client.get("/v2/health/ready")).status_code == 400
        assert (await client.get("/v2/health/live")).status_code == 200

    @pytest.mark.parametrize("url", ["/v2/models/simple/ready", "/v2/models/simple/versions/1/ready"])
    async def test_a_ready_model(self, client: httpx2.AsyncClient, url: str) -> None:
        reply = await client.get(url)
        assert (reply.status_code, reply.content) == (200, b"")

    @pytest.mark.parametrize("url", ["/v2/models/nope/ready", "/v2/models/simple/versions/9/ready"])
    async def test_a_model_that_is_not(self, client: httpx2.AsyncClient, url: str) -> None:
        reply = await client.get(url)
        assert (reply.status_code, reply.json()) == (400, {"error": "Model version not ready"})

    async def test_draining_turns_readiness_off_and_work_away(
        self, client: httpx2.AsyncClient, application: HttpApplication, handler: Any
    ) -> None:
        application.draining = True
        assert (await client.get("/v2/health/live")).status_code == 200
        assert (await client.get("/v2/health/ready")).status_code == 400
        for reply in (await client.post(INFER, json=document()), await client.get("/v2")):
            assert (reply.status_code, reply.json()) == (503, {"error": "Server exiting"})
            assert reply.headers["connection"] == "close"
        assert not handler.requests


async def test_the_control_application_is_made_once(
    client: httpx2.AsyncClient, application: HttpApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    load = application._load_control

    def counting() -> Any:
        nonlocal made
        made += 1
        if made == 1:
            raise MemoryError("not now")
        return load()

    monkeypatch.setattr(application, "_load_control", counting)
    assert {reply.status_code for reply in await asyncio.gather(*(client.get("/v2") for _ in range(20)))} == {500}
    assert made == 1
    assert {reply.status_code for reply in await asyncio.gather(*(client.get("/v2") for _ in range(20)))} == {200}
    assert made == 2, "one that failed is tried again, one that was made is kept"


class TestRestrictedApis:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return replace(settings, http_restricted_api=((("inference", "health", "model-repository"), "Key", "x"),))

    async def test_every_path_of_a_group(self, client: httpx2.AsyncClient) -> None:
        for method, url in (
            ("POST", INFER), ("GET", "/v2/health/live"), ("GET", "/v2/models/simple/ready"),
            ("POST", "/v2/repository/index"), ("POST", "/v2/models/simple/generate"),
        ):  # fmt: skip
            reply = await client.request(method, url)
            assert reply.status_code == 403
            assert reply.json() == {"error": "This API is restricted, expecting header 'Key'"}
            assert (await client.request(method, url, headers={"key": "x"})).status_code != 403
        assert (await client.get("/v2")).status_code == 200


class TestForwardedHeaders:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return replace(settings, http_header_forward_pattern="my_.*|timeout")

    async def test_they_become_parameters(self, client: httpx2.AsyncClient, handler: Any) -> None:
        await client.post(INFER, json=document(parameters={"own": 1}), headers={"my_key": "v", "other": "w"})
        assert handler.requests[0].parameters == {"own": 1, "my_key": "v"}

    async def test_reserved_names(self, client: httpx2.AsyncClient) -> None:
        reply = await client.post(INFER, json=document(), headers={"timeout": "1"})
        assert reply.status_code == 400
        assert reply.json() == {"error": "Header 'timeout' is reserved for Triton usage and cannot be forwarded."}
