"""The requests that are made for texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx2
import pytest

from charonia.generation.prompt_keys import route_of_tokens
from charonia.options.settings import GatewaySettings
from gateway.openai.openai_application import OpenAiApplication, OpenAiInterface

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


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
