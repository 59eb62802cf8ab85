"""Embeddings: how the texts of one call become requests."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2

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
