"""Rankings and scores: what one small body may become, and models with the tensors of Triton's vLLM backend."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from charonia.datatypes import DataType
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.options.settings import GatewaySettings, OpenAiSettings

LIMIT = 4096


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(incarnation="test", openai=OpenAiSettings(), http_max_input_size=LIMIT)


@pytest.fixture
def handler(handler: Any) -> Any:
    handler.models["scores"] = ModelInterface(
        *("scores", "python", "", 8),
        {name: TensorSpec(name, DataType.BYTES, (1,)) for name in ("query", "document")},
        {"score": TensorSpec("score", DataType.FP32, (4,))},
        parameters={"charonia.openai_task": "score"},
    )
    return handler


@pytest.mark.parametrize(
    ("path", "names"), [("/v1/rerank", ("query", "documents")), ("/v1/score", ("text_1", "text_2"))]
)
@pytest.mark.parametrize("query", ["q" * 1023, "é" * 511 + "q"])
async def test_a_query_is_not_copied_beyond_the_bound_of_a_body(
    client: httpx2.AsyncClient, handler: Any, path: str, names: tuple[str, str], query: str
) -> None:
    def body(count: int) -> bytes:
        given = {"model": "scores", names[0]: query, names[1]: ["d"] * count}
        return json.dumps(given, ensure_ascii=False).encode()

    reply = await client.post(path, content=body(5))
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", names[0])
    assert "5 pairs" in error["message"]
    assert "5120 bytes" in error["message"]
    assert f"bound is {LIMIT}" in error["message"]
    assert not handler.requests
    await client.post(path, content=body(4))
    assert len(handler.requests) == 4


@pytest.mark.parametrize("task", [{}, {"charonia.openai_task": "embed"}])
@pytest.mark.parametrize("ends_bare", [False, True])
async def test_a_model_with_the_tensors_of_tritons_vllm_backend_is_compared(
    client: httpx2.AsyncClient, handler: Any, interface: Any, task: dict[str, str], ends_bare: bool
) -> None:
    handler.ends_bare = ends_bare
    handler.models["vectors"] = replace(handler.models["vectors"], parameters=task)
    given = {"model": "vectors", "query": "aab", "documents": ["h", "a", "aabaab", "a"]}
    found = (await client.post("/v1/rerank", json=given)).json()
    ranked = [(one["index"], one["relevance_score"]) for one in found["results"]]
    assert ranked == [(2, pytest.approx(1.0)), (1, pytest.approx(2 / 5**0.5)), (3, ranked[1][1]), (0, 0.0)]
    assert len(handler.requests) == 4, "one for each different text"
    assert found["usage"] == {"prompt_tokens": 11, "total_tokens": 11}
    given = {"model": "vectors", "text_1": ["a", "b"], "text_2": ["b", "bb"]}
    found = (await client.post("/v1/score", json=given)).json()
    assert [one["score"] for one in found["data"]] == [0.0, pytest.approx(1.0)]
    assert found["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}
    assert interface.serving.counts.tokens["vectors", "", "prompt"] == 15
    assert interface.serving.counts.calls["score", "vectors", "finished"] == 1


async def test_what_that_model_gives_is_no_embedding(client: httpx2.AsyncClient) -> None:
    reply = await client.post("/v1/rerank", json={"model": "vectors", "query": "a", "documents": ["b", "a?"]})
    assert (reply.status_code, "gave no embedding in text_output" in reply.text) == (500, True)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("vectors", {}), ("embeds", {}), ("scores", {"charonia.openai_task": "score"})],
)
async def test_adapters_do_not_score(
    client: httpx2.AsyncClient, handler: Any, model: str, parameters: dict[str, str]
) -> None:
    listed = {**parameters, "charonia.adapters": "red"}
    handler.models[model] = replace(handler.models[model], parameters=listed)
    reply = await client.post("/v1/score", json={"model": f"{model}:red", "text_1": "a", "text_2": "b"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
    assert "without adapters" in reply.text
    assert not handler.requests


@pytest.mark.parametrize("task", ["score", "moderate"])
async def test_a_model_of_another_task_is_not_asked_to_embed(
    client: httpx2.AsyncClient, handler: Any, task: str
) -> None:
    handler.models["vectors"] = replace(handler.models["vectors"], parameters={"charonia.openai_task": task})
    reply = await client.post("/v1/rerank", json={"model": "vectors", "query": "a", "documents": ["b"]})
    assert (reply.status_code, "cannot score" in reply.text) == (400, True)
    assert not handler.requests
