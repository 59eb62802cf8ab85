"""Embeddings by a real engine (`make test-vllm`): SmolLM2 as a pooling model, asked as Triton's OpenAI front does.

Documents are ranked by them, too.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from e2e_server import start
from vllm_calls import generate, grpc_responses
from vllm_engine import ENGINE, ENVIRONMENT, START_S


def test_a_pooling_model_embeds_and_does_not_generate(tmp_path: Path, weights: Path) -> None:
    version = tmp_path / "models" / "embed" / "1"
    version.mkdir(parents=True)
    # without a configuration: the file alone says whose model it is
    (version / "model.json").write_text(
        json.dumps({**ENGINE, "model": str(weights / "smollm2"), "runner": "pooling", "convert": "embed"})
    )
    options = ("--allow-webhooks=false", "--openai-on-http-port=true")
    server = start(tmp_path / "models", tmp_path / "state", *options, environment=ENVIRONMENT)
    try:
        server.wait_ready(START_S)
        vectors = []
        for given in ("The capital of France is", [504, 3575, 282, 4649, 314]):
            (answer,) = grpc_responses(
                server,
                {
                    "embedding_request": json.dumps({"input": given}),
                    "return_num_input_tokens": True,
                    "return_num_output_tokens": True,
                },
                model="embed",
            )
            vectors.append(json.loads(answer.as_numpy("text_output")[0]))
            assert answer.as_numpy("num_input_tokens").tolist() == [5]
            assert answer.as_numpy("num_output_tokens").tolist() == [0]
        assert len(vectors[0]) == 576
        assert vectors[0] == pytest.approx(vectors[1], abs=1e-5)
        assert math.isclose(sum(one * one for one in vectors[0]), 1.0, rel_tol=1e-3), "normalised, as vLLM's default"
        documents = ["The capital of France is", "7 + 9 = 16"]
        asked = json.dumps({"model": "embed", "query": documents[0], "documents": documents[::-1]})
        status, answer = server.request("POST", "/v1/rerank", asked.encode())
        assert status == 200, answer
        found = json.loads(answer)
        assert [one["index"] for one in found["results"]] == [1, 0]
        scores = [one["relevance_score"] for one in found["results"]]
        assert scores[0] == pytest.approx(1.0, abs=1e-5)
        assert -1.0 <= scores[1] < scores[0]
        assert found["usage"]["prompt_tokens"] > 5
        code, refused = generate(server, "x", model="embed")
        assert code == 400
        assert refused["error"] == "Error generating stream: Model embed does not support 'generate' request"
    finally:
        code = server.stop(90)
    assert code == 0
