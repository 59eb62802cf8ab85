"""The requests that are made for texts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from memory_log.log import MemoryLog

from charonia.generation.prompt_keys import route_of_tokens
from charonia.options.settings import GatewaySettings
from gateway.openai.openai_application import OpenAiApplication, OpenAiInterface
from gateway.openai.shapes.api_errors import ApiError
from gateway.openai.stored.response_requests import read_response_request
from gateway.openai.stored.response_routes import StoredResponses
from gateway.requests.delivery import ANYONE


async def test_a_prompt_that_was_tokenised_has_its_route(client: httpx2.AsyncClient, handler: Any) -> None:
    messages = [{"role": "user", "content": "a long question " * 8 + "say yes."}]
    reply = await client.post(
        "/v1/chat/completions", json={"model": "says", "messages": messages, "max_tokens": 9, "n": 2}
    )
    assert reply.status_code == 200
    assert len(handler.requests) == 2
    for request in handler.requests:
        ids = next(t for t in request.inputs if t.name == "prompt_token_ids").array().tolist()
        assert request.prompt == route_of_tokens(ids, "", 9)
        assert len(request.prompt.names()) >= 4


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v1/completions", {"prompt": "é" * 20_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "é" * 20_000}]}),
    ],
)
async def test_a_prompt_is_not_copied_beyond_the_bound_of_a_body(
    handler: Any, settings: GatewaySettings, path: str, text: dict[str, Any]
) -> None:
    bounded = replace(settings, http_max_input_size=1_000_000)
    transport = httpx2.ASGITransport(app=OpenAiApplication(bounded, handler, OpenAiInterface(bounded, handler)))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        reply = await client.post(path, json={"model": "plain", "n": 26, **text})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "n")
        assert "1000000" in error["message"]
        assert not handler.requests
        assert (await client.post(path, json={"model": "plain", "n": 2, **text})).status_code == 200
    assert len(handler.requests) == 2


@pytest.mark.parametrize(
    ("path", "body", "candidates"),
    [
        ("/v1/completions", {"prompt": "x" * 100, "prompt_logprobs": 20}, 21),
        ("/v1/completions", {"prompt": ["x" * 60, "x" * 40], "echo": True, "logprobs": 5}, 6),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 400}], "prompt_logprobs": 0}, 1),
    ],
)
async def test_log_probabilities_of_prompts_have_a_bound_for_all_choices(
    client: httpx2.AsyncClient, handler: Any, path: str, body: dict[str, Any], candidates: int
) -> None:
    body = {"model": "says", "max_tokens": 1, **body}
    tokens = (await client.post(path, json=body)).json()["usage"]["prompt_tokens"]
    most = 32_768 // (candidates * tokens)
    handler.requests.clear()
    reply = await client.post(path, json={**body, "n": most + 1})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "n")
    assert "more than 32768 candidates" in error["message"]
    assert not handler.requests
    assert (await client.post(path, json={**body, "n": most})).status_code == 200


async def test_log_probabilities_of_prompts_have_a_bound_for_all_prompts(client: httpx2.AsyncClient) -> None:
    body = {"model": "says", "max_tokens": 1, "prompt_logprobs": 20}
    for count, status in ((15, 200), (16, 400)):
        reply = await client.post("/v1/completions", json={**body, "prompt": ["x" * 100] * count})
        assert reply.status_code == status
    assert reply.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_last_response_without_outputs_adds_nothing(
    client: httpx2.AsyncClient, handler: Any, stream: bool
) -> None:
    """Models that end so are common; the reason why the text ended is in the response before."""
    found = []
    for handler.ends_bare in (False, True):
        body = {"model": "says", "prompt": "say abc.", "max_tokens": 2, "stream": stream}
        reply = await client.post("/v1/completions", json=body)
        lines = reply.text.split("\n\n")[:-2] if stream else [reply.text]
        documents = [json.loads(line.removeprefix("data: ")) for line in lines]
        found.append([(one["choices"][0]["text"], one["choices"][0]["finish_reason"]) for one in documents])
    assert found[0] == found[1]
    assert [reason for _, reason in found[0] if reason] == ["length"]


async def test_an_input_of_a_response_that_is_too_long_names_its_field(
    handler: Any, interface: OpenAiInterface
) -> None:
    responses = StoredResponses(handler, MemoryLog(), interface.serving)
    with pytest.raises(ApiError) as refused:
        await responses.prepare(read_response_request({"model": "says", "input": "x" * 5000}), ANYONE)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
