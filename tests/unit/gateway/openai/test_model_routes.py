"""Models that are loaded and unloaded as with Triton's OpenAI frontend."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from charonia.errors import InternalError


@pytest.fixture
def handler(handler: Any) -> Any:
    """One that does what it is asked to."""
    handler.absent = {"says": handler.models.pop("says")}

    async def load(name: str, config: str | None, files: dict[str, bytes]) -> None:
        handler.loads.append((name, config, files))
        await asyncio.sleep(0)
        if name not in handler.absent:
            raise InternalError(f"failed to load '{name}', failed to poll from model repository")
        handler.models[name] = handler.absent.pop(name)

    async def unload(name: str, *, unload_dependents: bool) -> None:
        handler.unloads.append((name, unload_dependents))
        await asyncio.sleep(0)
        handler.absent[name] = handler.models.pop(name)

    handler.load_model, handler.unload_model = load, unload
    return handler


async def test_load_and_unload(client: httpx2.AsyncClient, handler: Any) -> None:
    reply = await client.post("/v1/models/says/load")
    assert (reply.status_code, reply.json()["id"], reply.json()["max_model_len"]) == (200, "says", 2048)
    assert (await client.get("/v1/models/says")).status_code == 200
    again = await client.post("/v1/models/says/load")
    assert (again.status_code, again.json()["detail"]) == (400, "Model 'says' is already loaded")
    gone = await client.post("/v1/models/says/unload")
    assert (gone.status_code, gone.json()) == (200, {"status": "success", "model": "says"})
    assert (await client.get("/v1/models/says")).status_code == 404
    again = await client.post("/v1/models/says/unload")
    assert (again.status_code, again.json()["detail"]) == (400, "Unknown model: says")
    assert (handler.loads, handler.unloads) == ([("says", None, {})], [("says", False)])


async def test_one_call_at_a_time_changes_a_model(client: httpx2.AsyncClient, handler: Any) -> None:
    for path, done in (("/v1/models/says/load", handler.loads), ("/v1/models/says/unload", handler.unloads)):
        replies = await asyncio.gather(*(client.post(path) for _ in range(5)))
        assert sorted(reply.status_code for reply in replies) == [200, 400, 400, 400, 400]
        assert len(done) == 1


async def test_a_failed_load_may_be_tried_again(client: httpx2.AsyncClient, handler: Any) -> None:
    for _ in range(2):
        reply = await client.post("/v1/models/none/load")
        assert (reply.status_code, "failed to poll" in reply.json()["detail"]) == (500, True)


async def test_models_that_are_not_loaded_by_calls(client: httpx2.AsyncClient, handler: Any) -> None:
    for mode, status, text in (
        ("none", 400, "Model load/unload requires --model-control-mode=explicit"),
        ("", 503, "no executor is connected to load or unload models"),
    ):
        handler.control_mode = mode
        for path in ("/v1/models/plain/load", "/v1/models/plain/unload"):
            reply = await client.post(path)
            assert (reply.status_code, reply.json()["detail"]) == (status, text)
    assert not handler.loads
    assert not handler.unloads
