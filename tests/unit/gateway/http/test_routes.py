from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from memory_objects import MemoryObjects

from charonia.errors import InternalError
from charonia.options.settings import EXTENSIONS, GatewaySettings
from gateway.http.http_application import HttpApplication
from gateway.regions.client_regions import ClientRegions


async def test_server_metadata(client: httpx2.AsyncClient) -> None:
    reply = await client.get("/v2")
    assert reply.json() == {"name": "triton", "version": "2.73.0", "extensions": list(EXTENSIONS)}
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize("url", ["/v2/models/identity", "/v2/models/identity/versions/1"])
async def test_model_metadata(client: httpx2.AsyncClient, url: str) -> None:
    assert (await client.get(url)).json() == {
        "name": "identity", "versions": ["1"], "platform": "onnxruntime_onnx",
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 16]}],
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 16]}],
    }  # fmt: skip


@pytest.mark.parametrize("url", ["/v2/models/identity/config", "/v2/models/identity/versions/1/config"])
async def test_model_config(client: httpx2.AsyncClient, url: str) -> None:
    config = (await client.get(url)).json()
    assert (config["name"], config["max_batch_size"]) == ("identity", 64)


@pytest.mark.parametrize("url", ["/v2/models/stats", "/v2/models/simple/stats", "/v2/models/simple/versions/1/stats"])
async def test_statistics(client: httpx2.AsyncClient, url: str) -> None:
    zero, some = {"count": 0, "ns": 0}, {"count": 2, "ns": 3000}
    assert (await client.get(url)).json() == {
        "model_stats": [
            {
                "name": "simple", "version": "1", "last_inference": 5, "inference_count": 2, "execution_count": 1,
                "inference_stats": {
                    "success": some, "fail": zero, "queue": zero, "compute_input": zero, "compute_infer": zero,
                    "compute_output": zero, "cache_hit": zero, "cache_miss": zero,
                },
                "response_stats": {},
                "batch_stats": [
                    {"batch_size": 2, "compute_input": some, "compute_infer": some, "compute_output": some}
                ],
                "memory_usage": [{"type": "GPU", "id": 0, "byte_size": 2**33}],
            }
        ]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "url", "status", "error"),
    [
        ("GET", "/v2/models/nope", 404, "Request for unknown model: 'nope' is not found"),
        ("GET", "/v2/models/nope/config", 404, "Request for unknown model: 'nope' is not found"),
        ("GET", "/v2/models/simple/versions/99", 404, "Request for unknown model: 'simple' version 99 is not found"),
        ("GET", "/v2/models/simple/versions/99/config", 404,
         "Request for unknown model: 'simple' version 99 is not found"),
        ("GET", "/v2/models/simple/versions/99/stats", 400,
         "requested model version is not available for model 'simple'"),
        ("GET", "/v2/models/nope/stats", 400, "requested model 'nope' is not available"),
        ("GET", "/v2/models/simple/versions/abc", 404, "Not Found"),
        ("GET", "/v2/models/simple/versions/abc/stats", 404, "Not Found"),
        ("GET", "/v2/", 404, "Not Found"),
        ("GET", "/", 404, "Not Found"),
        ("POST", "/v2/repository/mine/models/m/load", 501, "'repository_name' specification is not supported"),
        ("POST", "/v2/repository/mine/models/m/unload", 501, "'repository_name' specification is not supported"),
        ("POST", "/v2/systemsharedmemory/region/r/register", 501,
         "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."),
        ("POST", "/v2/cudasharedmemory/unregister", 501,
         "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."),
        ("GET", "/v2/systemsharedmemory/region/r/status", 404, "Unable to find system shared memory region: 'r'"),
    ],
)  # fmt: skip
async def test_refusals(client: httpx2.AsyncClient, method: str, url: str, status: int, error: str) -> None:
    reply = await client.request(method, url)
    assert (reply.status_code, reply.json()) == (status, {"error": error})
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("method", "url"), [("POST", "/v2"), ("GET", "/v2/repository/index"), ("DELETE", "/v2/models/simple")]
)
async def test_wrong_methods(client: httpx2.AsyncClient, method: str, url: str) -> None:
    reply = await client.request(method, url)
    assert (reply.status_code, reply.headers["content-type"]) == (405, "text/plain")
    assert reply.content == b'{"error":"Method Not Allowed"}'


class TestRepository:
    async def test_index(self, client: httpx2.AsyncClient) -> None:
        ready = {"name": "simple", "version": "1", "state": "READY"}
        every = [ready, {"name": "never"}]
        assert (await client.post("/v2/repository/index")).json() == every
        assert (await client.post("/v2/repository/mine/index")).json() == every, "the name is not read"
        for other in (b"[]", b"null", b"3", b'{"other": 1}'):
            assert (await client.post("/v2/repository/index", content=other)).json() == every
        assert (await client.post("/v2/repository/index", json={"ready": True})).json() == [ready]
        deep = b'{"ready": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
        reply = await client.post("/v2/repository/index", content=deep)
        assert (reply.status_code, reply.json()) == (400, {"error": "Invalid value for 'ready': expected a boolean"})
        reply = await client.post("/v2/repository/index", json={"ready": 1})
        assert (reply.status_code, reply.json()) == (400, {"error": "Invalid value for 'ready': expected a boolean"})

    async def test_load_with_nothing_and_with_overrides(self, client: httpx2.AsyncClient, handler: Any) -> None:
        assert (await client.post("/v2/repository/models/m n/load")).content == b""
        parameters = {"config": '{"a":1}', "file:1/model.onnx": base64.b64encode(b"\0\1").decode()}
        reply = await client.post("/v2/repository/models/m/load", json={"parameters": parameters})
        assert (reply.status_code, reply.content) == (200, b"")
        assert handler.loads == [("m n", None, {}), ("m", '{"a":1}', {"1/model.onnx": b"\0\1"})]

    @pytest.mark.parametrize(
        ("content", "status", "error"),
        [
            (b'{"parameters":{"other":"x"}}', 500, "unexpected error on creating Triton parameter"),
            (b'{"parameters":{"config":5}}', 500, "attempt to access JSON non-string as string"),
            (b'{"parameters":[]}', 500, "attempt to get members for non-object"),
            (b'{"parameters":{"file:1/m":"%%%"}}', 400, "load parameter 'file:1/m' is not valid base64"),
            (b"x", 500, "failed to parse the request JSON buffer: Invalid value. at 0"),
        ],
    )
    async def test_bad_load_requests(
        self, client: httpx2.AsyncClient, handler: Any, content: bytes, status: int, error: str
    ) -> None:
        reply = await client.post("/v2/repository/models/m/load", content=content)
        assert (reply.status_code, reply.json()) == (status, {"error": error})
        assert not handler.loads

    async def test_a_failed_load(self, client: httpx2.AsyncClient, handler: Any) -> None:
        handler.failure = InternalError("failed to load 'm', failed to poll from model repository")
        reply = await client.post("/v2/repository/models/m/load")
        assert (reply.status_code, reply.json()) == (500, {"error": handler.failure.message})

    async def test_an_unexpected_failure_tells_nothing(self, client: httpx2.AsyncClient, handler: Any) -> None:
        handler.failure = RuntimeError("internals")
        reply = await client.post("/v2/repository/models/m/load")
        assert (reply.status_code, reply.json()) == (500, {"error": "internal server error"})

    async def test_unload(self, client: httpx2.AsyncClient, handler: Any) -> None:
        await client.post("/v2/repository/models/m/unload")
        await client.post("/v2/repository/models/m/unload", json={"parameters": {"unload_dependents": True}})
        for other in (b"[]", b'{"parameters":3}', b'{"parameters":null}'):
            assert (await client.post("/v2/repository/models/m/unload", content=other)).status_code == 200
        assert handler.unloads == [("m", False), ("m", True), *[("m", False)] * 3]


class TestSettings:
    @pytest.fixture(autouse=True)
    def root_level(self) -> Iterator[None]:
        level = logging.getLogger().level
        yield
        logging.getLogger().setLevel(level)

    async def test_a_partial_change_is_effective_and_answered_in_full(self, client: httpx2.AsyncClient) -> None:
        reply = await client.post(
            "/v2/logging", json={"log_info": False, "unknown": 1, "log_verbose_level": 0, "log_file": None}
        )
        assert reply.json() == (await client.get("/v2/logging")).json()
        assert reply.json() == {
            "log_file": "", "log_info": False, "log_warning": True, "log_error": True, "log_verbose_level": 0,
            "log_format": "default",
        }  # fmt: skip
        assert logging.getLogger().level == logging.WARNING

    @pytest.mark.parametrize(
        ("wanted", "status", "error"),
        [
            ({"log_file": "x"}, 501, "log file location can not be updated through network protocol"),
            ({"log_warning": 1}, 500, "attempt to access JSON non-boolean as boolean"),
            ({"log_format": 1}, 500, "attempt to access JSON non-string as string"),
            ({"log_file": 5}, 501, "log file location can not be updated through network protocol"),
            *(
                (
                    {"log_verbose_level": value},
                    500,
                    "attempt to access JSON non-unsigned-integer as unsigned-integer",
                )
                for value in (True, -1, "1")
            ),
            ({"log_format": "odd"}, 503, "invalid argument for --log_format, got: odd"),
        ],
    )
    async def test_all_or_nothing(
        self, client: httpx2.AsyncClient, wanted: dict[str, Any], status: int, error: str
    ) -> None:
        before = (await client.get("/v2/logging")).json()
        reply = await client.post("/v2/logging", json={"log_error": False, **wanted})
        assert (reply.status_code, reply.json()) == (status, {"error": error})
        assert (await client.get("/v2/logging")).json() == before

    async def test_tenants_have_regions_of_their_own(self, handler: Any, objects: MemoryObjects) -> None:
        handler.tenants = {"key-a": "a", "key-b": "b"}
        handler.regions = ClientRegions(allowed=True)
        application = HttpApplication(GatewaySettings(incarnation="test"), handler)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=application), base_url="http://g") as client:
            path, body = "/v2/systemsharedmemory/region/r/register", {"key": objects.make(b"1"), "byte_size": 1}
            for key, status in (("none", 401), ("key-a", 200), ("key-a", 400), ("key-b", 200)):
                reply = await client.post(path, json=body, headers={"x-api-key": key})
                assert reply.status_code == status
            await client.post("/v2/systemsharedmemory/unregister", headers={"x-api-key": "key-b"})
            for key, count in (("key-a", 1), ("key-b", 0)):
                reply = await client.get("/v2/systemsharedmemory/status", headers={"x-api-key": key})
                assert len(reply.json()) == count
        handler.regions.close()

    @pytest.mark.parametrize("kind", ["system", "cuda"])
    async def test_no_shared_memory_regions(self, client: httpx2.AsyncClient, kind: str) -> None:
        assert (await client.get(f"/v2/{kind}sharedmemory/status")).json() == []


async def test_the_api_is_described(client: httpx2.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"/v2", "/v2/repository/index", "/v2/models/{model}/config"} <= set(paths)
    assert (await client.get("/docs")).status_code == 200
