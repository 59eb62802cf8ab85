from __future__ import annotations

import gzip
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from echo_handler import EchoHandler

from charonia.errors import StartupError
from charonia.options.settings import GatewaySettings, VertexAiSettings
from gateway.clouds.vertex_ai import VertexAiApplication
from gateway.handler import ModelIndexEntry

MIME = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
VALUE = struct.pack("<16f", *range(16))
TENSOR = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32"}
JSON = {"inputs": [{**TENSOR, "data": list(range(16))}]}
PREDICT, HEALTH = "/v1/endpoints/1/deployedModels/2:predict", "/v1/endpoints/1/deployedModels/2"


class OfModels(EchoHandler):
    """Its index has these models."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def repository_index(self, *, ready: bool) -> list[ModelIndexEntry]:
        return [ModelIndexEntry(name, version, "READY") for name in self.names for version in ("1", "2")]


def application(handler: EchoHandler, model: str = "", page: bytes | None = b"nv_x 1\n") -> VertexAiApplication:
    async def metrics() -> bytes | None:
        return page

    return VertexAiApplication(
        GatewaySettings("test"), handler, VertexAiSettings(PREDICT, HEALTH, "", 0, model), metrics
    )


@asynccontextmanager
async def front(made: VertexAiApplication) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(made), base_url="http://server") as client:
        yield client


async def test_health() -> None:
    handler = EchoHandler()
    async with front(application(handler)) as client:
        assert (await client.get(HEALTH)).status_code == 200
        assert (await client.post(HEALTH)).status_code == 405
        handler.is_ready = False
        assert (await client.get(HEALTH)).status_code == 400


async def test_predictions() -> None:
    head = json.dumps(
        {"inputs": [{**TENSOR, "parameters": {"binary_data_size": 64}}], "parameters": {"binary_data_output": True}}
    ).encode()
    async with front(application(EchoHandler(), "identity")) as client:
        reply = await client.post(PREDICT, json=JSON)
        assert reply.json()["outputs"][0]["data"] == list(range(16))
        reply = await client.post(PREDICT, content=head + VALUE, headers={"content-type": MIME + str(len(head))})
        # only requests have the content type of this front
        assert reply.headers["content-type"] == "application/octet-stream"
        assert reply.content[int(reply.headers["inference-header-content-length"]) :] == VALUE
        assert (await client.get(PREDICT)).status_code == 405
        assert (await client.post(PREDICT, content=head, headers={"content-type": MIME})).status_code == 400


async def test_there_is_no_compression() -> None:
    async with front(application(EchoHandler(), "identity")) as client:
        packed = gzip.compress(json.dumps(JSON).encode())
        assert (await client.post(PREDICT, content=packed, headers={"content-encoding": "gzip"})).status_code == 500
        reply = await client.post(PREDICT, json=JSON, headers={"accept-encoding": "gzip"})
        assert "content-encoding" not in reply.headers


async def test_the_only_model_is_the_default_and_stays_it() -> None:
    handler = OfModels("identity")
    made = application(handler)
    made.check_model()
    handler.names = ("identity", "text")
    async with front(made) as client:
        assert (await client.post(PREDICT, json=JSON)).status_code == 200


@pytest.mark.parametrize(
    ("names", "model", "sentence"),
    [
        ((), "", "Expect the model repository contains only a single model if default model is not specified"),
        (("a", "b"), "", "Expect the model repository contains only a single model if default model is not specified"),
        (("a", "b"), "c", "Expect the default model 'c' is loaded"),
    ],
)
async def test_a_default_model_that_is_not_there(names: tuple[str, ...], model: str, sentence: str) -> None:
    made = application(OfModels(*names), model)
    with pytest.raises(StartupError, match=sentence):
        made.check_model()
    async with front(made) as client:
        reply = await client.post(PREDICT, json=JSON)
        assert reply.status_code == (404 if model else 400)
        assert model or reply.json() == {"error": sentence}


@pytest.mark.parametrize(
    ("redirect", "status", "text"),
    [
        ("v2", 200, '"extensions"'),
        ("v2/health/live", 200, ""),
        ("v2/health/ready", 200, ""),
        ("v2/models/simple", 200, '"name":"simple"'),
        ("v2/models/simple/versions/1", 200, '"name":"simple"'),
        ("v2/models/simple/ready", 200, ""),
        ("v2/models/none/ready", 400, ""),
        ("v2/models/simple/config", 200, ""),
        ("v2/models/simple/stats", 200, '"model_stats"'),
        ("v2/models/stats", 200, '"model_stats"'),
        ("v2/models/identity/infer", 200, '"outputs"'),
        ("v2/repository/index", 200, "["),
        ("v2/systemsharedmemory/status", 200, "[]"),
        ("v2/cudasharedmemory/region/r/status", 404, "cuda"),
        ("metrics", 200, "nv_x 1"),
        ("v2/systemsharedmemory/region/r/register", 403, ""),
        ("v2/cudasharedmemory/unregister", 403, ""),
        ("v2/repository/models/simple/load", 403, ""),
        ("v2/repository/models/simple/unload", 403, ""),
        ("v2/models/text/generate", 400, ""),
        ("v2/trace/setting", 400, ""),
        ("v2/logging", 400, ""),
        ("v2/jobs", 400, ""),
        ("/v2", 400, ""),
        ("v2/models/..%2f..", 400, ""),
        ("", 400, ""),
    ],
)
async def test_redirects(redirect: str, status: int, text: str) -> None:
    handler = EchoHandler()
    async with front(application(handler)) as client:
        body = b"" if redirect.endswith("index") else json.dumps(JSON).encode()
        reply = await client.post(PREDICT, content=body, headers={"X-Vertex-Ai-Triton-Redirect": redirect})
        assert reply.status_code == status, reply.text
        assert text in reply.text
        assert (await client.get(PREDICT, headers={"X-Vertex-Ai-Triton-Redirect": redirect})).status_code == 405


async def test_without_metrics() -> None:
    async with front(application(EchoHandler(), page=None)) as client:
        reply = await client.post(PREDICT, headers={"X-Vertex-Ai-Triton-Redirect": "metrics"})
        assert (reply.status_code, reply.content) == (400, b"")


async def test_nothing_else_is_here() -> None:
    async with front(application(EchoHandler(), "identity")) as client:
        for path in ("/", "/v2", "/v2/models/identity/infer", "/ping", "/metrics"):
            assert (await client.post(path, json=JSON)).status_code == 400
            assert (await client.get(path)).content == b""
