"""Paths, keys, limits and errors of the OpenAI API, on its own port and beside `/v2`."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import httpx2
import pytest
import text_handler

from charonia.errors import InternalError, ResourceExhausted
from charonia.options.settings import GatewaySettings
from gateway.access.token_bounds import TokenBounds
from gateway.http.http_application import HttpApplication
from gateway.openai.openai_application import OpenAiApplication, OpenAiInterface

CHAT = "/v1/chat/completions"
BODY = {"model": "plain", "messages": [{"role": "user", "content": "say hi."}]}


def over(application: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=application), base_url="http://gateway")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v2/models/says", 404),
        ("GET", CHAT, 405),
        ("GET", "/v1/models/nothing", 404),
        ("GET", "/v1/models/numbers", 200),
        ("GET", "/health", 200),
        ("GET", "/health/ready", 200),
        ("GET", "/version", 200),
        ("GET", "/metrics", 404),
    ],
)
async def test_paths(client: httpx2.AsyncClient, method: str, path: str, status: int) -> None:
    reply = await client.request(method, path)
    assert reply.status_code == status
    if status >= 400:
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert reply.json()["detail"] == error["message"]


async def test_all_models_are_listed_first_those_that_write_text(client: httpx2.AsyncClient, handler: Any) -> None:
    data = (await client.get("/v1/models")).json()["data"]
    assert [(one["id"], one["parent"], one["max_model_len"]) for one in data] == [
        ("plain", None, None),
        ("says", None, 2048),
        ("says:red", "says", 2048),
        ("says:blue", "says", 2048),
        ("embeds", None, None),
        ("numbers", None, None),
        ("vectors", None, None),
    ]
    assert (await client.get("/v1/models/says:red")).json()["parent"] == "says"
    assert (await client.get("/v1/models/red")).json()["id"] == "red"
    assert handler.blobs_read == 1


async def test_a_tokenizer_that_is_not_there_yet(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.blobs, blobs = {}, handler.blobs
    assert (await client.post(CHAT, json={**BODY, "model": "says"})).status_code == 503
    handler.blobs = blobs
    assert (await client.post(CHAT, json={**BODY, "model": "says"})).status_code == 200


async def test_tokens_of_a_text(client: httpx2.AsyncClient) -> None:
    reply = await client.post("/tokenize", json={"model": "says", "prompt": "hé", "return_token_strs": True})
    assert reply.json()["tokens"] == [*"hé".encode()]
    assert (reply.json()["count"], reply.json()["max_model_len"]) == (3, 2048)
    assert reply.json()["token_strs"][0] == "h"
    reply = await client.post("/tokenize", json={**BODY, "model": "says"})
    assert reply.json()["tokens"][0] == 256
    reply = await client.post("/detokenize", json={"model": "says", "tokens": [*"hé".encode()]})
    assert reply.json() == {"prompt": "hé"}
    assert (await client.post("/detokenize", json={"model": "says", "tokens": [9999]})).status_code == 400
    assert (await client.post("/tokenize", json={"model": "plain", "prompt": "x"})).status_code == 400


async def test_what_is_known_of_a_tokenizer(client: httpx2.AsyncClient, handler: Any) -> None:
    for query in ("", "?model=says", "?model=says:red"):
        found = (await client.get(f"/tokenizer_info{query}")).json()
        assert (found["tokenizer_class"], found["model_max_length"]) == ("PreTrainedTokenizerFast", 2048)
        assert "add_generation_prompt" in found["chat_template"]
        assert found["eos_token"] == "<|im_end|>"
    assert (await client.get("/tokenizer_info?model=plain")).status_code == 400
    assert (await client.get("/tokenizer_info?model=none")).status_code == 404
    del handler.models["says"]
    reply = await client.get("/tokenizer_info")
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, "no model here has a tokenizer")


async def test_embeddings(client: httpx2.AsyncClient, handler: Any) -> None:
    body = {"model": "embeds", "input": ["aab", "d"]}
    document = (await client.post("/v1/embeddings", json=body)).json()
    assert [one["embedding"] for one in document["data"]] == [[2, 1, 0, 0], [0, 0, 0, 1]]
    assert [one["index"] for one in document["data"]] == [0, 1]
    assert (await client.post("/v1/embeddings", json={**body, "encoding_format": None})).json() == document
    coded = (await client.post("/v1/embeddings", json={**body, "encoding_format": "base64"})).json()
    assert coded["data"][1]["embedding"] == "AAAAAAAAAAAAAAAAAACAPw=="
    short = (await client.post("/v1/embeddings", json={**body, "dimensions": 2})).json()
    assert short["data"][0]["embedding"] == pytest.approx([2 / 5**0.5, 1 / 5**0.5])
    for more, param in (
        ({"dimensions": 5}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"input": [""]}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [[1, 2]]}, "input"),
        ({"model": "says"}, "model"),
    ):
        reply = await client.post("/v1/embeddings", json={**body, **more})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    missing = (await client.post("/v1/embeddings", json={"model": "embeds"})).json()["error"]
    assert (missing["param"], missing["code"]) == ("input", "missing_required_parameter")


async def test_embeddings_are_bounded_in_tokens(client: httpx2.AsyncClient, handler: Any) -> None:
    assets = {"charonia.text_assets": text_handler.DIGEST}
    known = handler.models["embeds"]
    handler.models["embeds"] = replace(known, parameters={**known.parameters, **assets})
    body = {"model": "embeds", "input": [[97, 97], [98]]}
    document = (await client.post("/v1/embeddings", json=body)).json()
    assert [one["embedding"] for one in document["data"]] == [[2, 0, 0, 0], [0, 1, 0, 0]]
    assert document["usage"]["prompt_tokens"] == 3
    many = (await client.post("/v1/embeddings", json={**body, "input": ["ab" * 5] * 2048})).json()
    assert (len(many["data"]), many["usage"]["prompt_tokens"]) == (2048, 20_480)
    for given in ([[97] * 100_000], ["a" * 100_000]):
        reply = await client.post("/v1/embeddings", json={**body, "input": given})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"model": NaN}', 400),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", 400),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (b'{"model": "plain", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    ],
)
async def test_bodies_that_are_no_request(client: httpx2.AsyncClient, body: bytes, status: int) -> None:
    started_s = time.process_time()
    reply = await client.post(CHAT, content=body)
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert time.process_time() - started_s < 5


async def test_brackets_in_strings_are_not_deep(client: httpx2.AsyncClient) -> None:
    messages = [{"role": "user", "content": "[{" * 1000 + "say hi."}]
    assert (await client.post(CHAT, json={**BODY, "messages": messages})).status_code == 200


async def test_bodies_that_are_too_large(settings: GatewaySettings, handler: Any) -> None:
    small = replace(settings, http_max_input_size=1000)
    async with over(OpenAiApplication(small, handler, OpenAiInterface(small, handler))) as client:
        reply = await client.post(CHAT, content=b"x" * 1001)
    assert (reply.status_code, reply.json()["error"]["type"]) == (413, "invalid_request_error")
    assert reply.json().keys() == {"error"}
    assert reply.json()["error"]["message"] == (
        "Request size of 1001 bytes exceeds the maximum allowed input size of 1000 bytes. "
        "Use --http-max-input-size to increase the limit."
    )


async def test_keys_are_needed_where_tenants_are(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.tenants = {"secret": "acme"}
    reply = await client.post(CHAT, json=BODY)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert reply.json().keys() == {"error"}
    assert "www-authenticate" in reply.headers
    assert (await client.get("/v1/models")).status_code == 401
    assert (await client.get("/health")).status_code == 200
    reply = await client.post(CHAT, json=BODY, headers={"authorization": "Bearer secret"})
    assert reply.status_code == 200
    assert handler.options[-1].caller.tenant == "acme"


async def test_tenants_see_their_bound(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.tenants, handler.bounds = {"one": "acme", "two": "free"}, {"acme": 7}
    headers = {"authorization": "Bearer one"}
    reply = await client.post(CHAT, json=BODY, headers=headers)
    assert reply.headers["x-ratelimit-limit-requests"] == "7"
    assert "x-ratelimit-remaining-requests" not in reply.headers
    handler.refusal = ResourceExhausted("the tenant has reached its limit")
    reply = await client.post(CHAT, json=BODY, headers=headers)
    assert (reply.status_code, reply.headers["x-ratelimit-remaining-requests"]) == (429, "0")
    reply = await client.get("/v1/models", headers={"authorization": "Bearer two"})
    assert "x-ratelimit-limit-requests" not in reply.headers


async def test_tokens_of_a_tenant_are_bounded(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.tenants, handler.tokens_of = {"one": "acme", "two": "free"}, {"acme": TokenBounds(60, 100)}
    headers = {"authorization": "Bearer one"}

    async def asked(text: str, **more: Any) -> httpx2.Response:
        body = {"model": "plain", "prompt": text, "max_tokens": 50, **more}
        return await client.post("/v1/completions", json=body, headers=headers)

    reply = await asked("say hi.")
    assert reply.status_code == 200
    assert (reply.headers["x-ratelimit-limit-tokens"], reply.headers["x-ratelimit-remaining-tokens"]) == ("100", "48")
    for refused, code in ((await asked("x" * 60), "context_length_exceeded"), (await asked("x", n=2), None)):
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
    chat = {"model": "says", "messages": [{"role": "user", "content": "x"}]}
    assert (await client.post(CHAT, json=chat, headers=headers)).status_code == 200
    sampling = next(t for t in handler.requests[-1].inputs if t.name == "sampling_parameters").array().item()
    prompt = next(t for t in handler.requests[-1].inputs if t.name == "prompt_token_ids").array().size
    assert json.loads(sampling)["max_tokens"] == 60 - prompt
    before = len(handler.requests)
    handler.gate.clear()
    waiting = asyncio.create_task(asked("wait say hello.", model="says", max_tokens=40, stream=True))
    while len(handler.requests) == before:
        await asyncio.sleep(0)
    refused = await asked("say hi.", model="says")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (refused.headers["retry-after"], refused.headers["x-ratelimit-remaining-tokens"]) == ("1", "0")
    assert "x-ratelimit-remaining-requests" not in refused.headers
    handler.gate.set()
    assert (await waiting).status_code == 200
    assert (await asked("say hi.", model="says")).status_code == 200
    free = {"authorization": "Bearer two"}
    reply = await client.post(CHAT, json=chat, headers=free)
    assert reply.status_code == 200
    assert "x-ratelimit-limit-tokens" not in reply.headers


async def test_restricted_groups(settings: GatewaySettings, handler: Any) -> None:
    held = replace(settings, http_restricted_api=((("inference",), "admin-key", "value"),))
    async with over(OpenAiApplication(held, handler, OpenAiInterface(held, handler))) as client:
        refused = await client.post(CHAT, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_auth")
        assert (await client.post(CHAT, json=BODY, headers={"admin-key": "value"})).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200


async def test_every_reply_has_an_id(client: httpx2.AsyncClient) -> None:
    first, second = [await client.get("/v1/models/plain") for _ in range(2)]
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert (await client.get("/v1/nothing")).headers["x-request-id"]


async def test_it_is_served_beside_v2(settings: GatewaySettings, handler: Any, interface: OpenAiInterface) -> None:
    application = HttpApplication(settings, handler)
    async with over(application) as client:
        assert (await client.post(CHAT, json=BODY)).json() == {"error": "Not Found"}
        application.beside = interface
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert (await client.get("/v1/nothing")).json()["error"]["type"] == "not_found_error"
        assert (await client.get("/v2")).json()["name"] == "triton"
        application.draining = True
        reply = await client.post(CHAT, json=BODY)
        assert (reply.status_code, reply.json()["error"]["message"]) == (503, "Server exiting")


async def test_what_nobody_foresaw_is_an_internal_error(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.refusal = ValueError("secret")
    reply = await client.post(CHAT, content=json.dumps(BODY))
    assert (reply.status_code, reply.json()["error"]["message"]) == (500, "internal server error")


@pytest.mark.parametrize(
    "refusal", [MemoryError(), TimeoutError(), OSError(24, "x"), RuntimeError("can't start new thread")]
)
async def test_what_the_machine_has_no_room_for_is_unavailable(
    client: httpx2.AsyncClient, handler: Any, caplog: pytest.LogCaptureFixture, refusal: Exception
) -> None:
    handler.refusal = refusal
    reply = await client.post(CHAT, content=json.dumps(BODY))
    assert (reply.status_code, "try again" in reply.json()["error"]["message"]) == (503, True)
    assert type(refusal).__name__ in caplog.text


@pytest.mark.parametrize("streams", [False, True])
async def test_the_log_says_why_the_server_failed(
    client: httpx2.AsyncClient, handler: Any, caplog: pytest.LogCaptureFixture, streams: bool
) -> None:
    handler.failure = handler.refusal = None if streams else InternalError("its process has ended")
    body = {"model": "says", "messages": [{"role": "user", "content": "say abc. fail"}], "stream": streams}
    reply = await client.post(CHAT, json=body)
    assert reply.status_code == (200 if streams else 500)
    if streams:  # the model's own error, which is none of the server's
        assert "the model failed" in reply.text
        assert not caplog.records
    else:
        (record,) = caplog.records
        assert (record.levelname, "its process has ended" in record.getMessage()) == ("ERROR", True)


async def test_metrics_that_name_tenants_are_for_those_who_may_read_them(
    settings: GatewaySettings, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def page() -> bytes:
        return b"a_total 1\n"

    restricted = replace(settings, http_restricted_api=((("statistics",), "admin-key", "secret"),))
    for identifies, chosen, headers, status in (
        (False, settings, {}, 200),
        (True, settings, {}, 403),
        (True, restricted, {}, 401),
        (True, restricted, {"admin-key": "secret"}, 200),
    ):
        monkeypatch.setattr(text_handler.TextHandler, "identifies", identifies)
        interface = OpenAiInterface(chosen, handler, page)
        async with over(OpenAiApplication(chosen, handler, interface)) as client:
            assert (await client.get("/metrics", headers=headers)).status_code == status
