"""The requests that are made for texts."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from charonia.generation.prompt_keys import route_of_tokens

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
