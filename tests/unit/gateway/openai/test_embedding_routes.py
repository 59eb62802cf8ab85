"""Embeddings: how the texts of one call become requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from charonia.errors import ResourceExhausted
from charonia.inference import InferenceRequest, InferenceResponse
from gateway.openai.embedding_routes import MAX_RUNNING

TEXTS = ["a" * (1 + at % 3) for at in range(2048)]


async def test_a_part_of_many_texts_runs_at_a_time(client: httpx2.AsyncClient, handler: Any) -> None:
    running = most = 0
    infer = handler.infer

    async def counted(request: InferenceRequest, **more: Any) -> InferenceResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await infer(request, **more)  # type: ignore[no-any-return]

    handler.infer = counted
    reply = await client.post("/v1/embeddings", json={"model": "embeds", "input": TEXTS})
    assert [one["embedding"][0] for one in reply.json()["data"]] == [len(text) for text in TEXTS]
    assert most == MAX_RUNNING


async def test_few_are_made_when_the_first_is_refused(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.failure = ResourceExhausted("no room")
    reply = await client.post("/v1/embeddings", json={"model": "embeds", "input": TEXTS})
    assert reply.status_code == 429
    assert len(handler.requests) == MAX_RUNNING


@pytest.mark.parametrize("ends_bare", [False, True])
async def test_a_model_with_the_tensors_of_tritons_vllm_backend(
    client: httpx2.AsyncClient, handler: Any, ends_bare: bool
) -> None:
    handler.ends_bare = ends_bare
    for given, counts, tokens in (
        ("abba", [[2, 2, 0, 0]], 4),
        ([97, 98, 97], [[2, 1, 0, 0]], 3),
        (["a", "bb"], [[1, 0, 0, 0], [0, 2, 0, 0]], 3),
        ([[97], [98, 98]], [[1, 0, 0, 0], [0, 2, 0, 0]], 3),
    ):
        found = (await client.post("/v1/embeddings", json={"model": "vectors", "input": given})).json()
        assert [one["embedding"] for one in found["data"]] == counts
        assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_that_model_cuts_its_embeddings_itself(client: httpx2.AsyncClient) -> None:
    reply = await client.post("/v1/embeddings", json={"model": "vectors", "input": "abba", "dimensions": 2})
    assert reply.json()["data"][0]["embedding"] == [2, 2]


async def test_what_is_no_embedding(client: httpx2.AsyncClient) -> None:
    reply = await client.post("/v1/embeddings", json={"model": "vectors", "input": "a?"})
    assert (reply.status_code, "gave no embedding in text_output" in reply.text) == (500, True)


async def test_the_tokens_of_that_model_are_counted(client: httpx2.AsyncClient, interface: Any) -> None:
    await client.post("/v1/embeddings", json={"model": "vectors", "input": ["abba", "a"]})
    assert interface.serving.counts.tokens["vectors", "", "prompt"] == 5


async def test_adapters_do_not_embed(client: httpx2.AsyncClient, handler: Any) -> None:
    served = handler.models["vectors"]
    handler.models["vectors"] = replace(served, parameters={"charonia.adapters": "red"})
    reply = await client.post("/v1/embeddings", json={"model": "vectors:red", "input": "abba"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
    assert "without adapters" in reply.text
    assert not handler.requests
