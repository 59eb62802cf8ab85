"""Rankings and scores: what one small body may become."""

from __future__ import annotations

import json
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
