"""The example of a tokenizer, a language model and a detokenizer: it says what the language model says by itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_server import Server, serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_ensemble"
SAMPLING = json.dumps({"temperature": 0, "max_tokens": 24, "ignore_eos": True})


@pytest.fixture(scope="module")
def server(model: Any, conversions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("ensemble") / "models"
    shutil.copytree(EXAMPLE, repository)
    for name in ("tokenize", "detokenize"):
        shutil.copy(model.directory / "tokenizer.json", repository / name / "1")
    flags = (f"--backend-config=llm,charonia.conversions={conversions}", f"--model-repository={repository}")
    with serving(model.repository, tmp_path_factory.mktemp("state"), *flags) as running:
        yield running


def generate(server: Server, model: str, **body: Any) -> dict[str, Any]:
    status, answer = server.request("POST", f"/v2/models/{model}/generate", json.dumps(body).encode())
    assert status == 200, answer
    return dict(json.loads(answer))


@pytest.mark.parametrize("prompt", ["The capital of France is", "Größe ist 大きさ, and é is"])
def test_the_ensemble_says_what_the_model_says(server: Server, prompt: str) -> None:
    alone = generate(server, "smollm2", text_input=prompt, sampling_parameters=SAMPLING, exclude_input_in_output=True)
    assert generate(server, "smollm2_text", PROMPT=prompt, SAMPLING=SAMPLING)["ANSWER"] == alone["text_output"]


def test_what_is_wrong_names_the_step(server: Server) -> None:
    body = json.dumps({"PROMPT": "x", "SAMPLING": '{"temperature": -1}'}).encode()
    status, answer = server.request("POST", "/v2/models/smollm2_text/generate", body)
    assert status == 400
    assert "in ensemble 'smollm2_text', " in json.loads(answer)["error"]
