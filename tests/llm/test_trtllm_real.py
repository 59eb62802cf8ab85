"""TensorRT-LLM's tensors over the real model, whole and in streams, and the page about them followed as a reader would.

`tests/e2e/test_trtllm_tensors.py` has the rules of each tensor, over a decoder without weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_server import Server, serving
from page_commands import OF_LANGUAGE_MODELS, ROOT, Reader
from trtllm_models import BACKENDS, Asker, write_example

BLS, IDS, ENSEMBLE = "tensorrt_llm_bls", "tensorrt_llm", "ensemble"
PROMPT = "The capital of France is"
PLAIN = {"text_input": PROMPT, "max_tokens": 24}
FACES = (BLS, ENSEMBLE)


@pytest.fixture(scope="module")
def server(model: Any, conversions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("trtllm") / "models"
    write_example(repository, "smollm2", model.directory)
    flags = (
        f"--backend-config=llm,charonia.conversions={conversions}",
        f"--backend-directory={BACKENDS}",
        f"--model-repository={repository}",
    )
    with serving(model.repository, tmp_path_factory.mktemp("state"), *flags) as running:
        yield running


@pytest.fixture
def asker(server: Server) -> Iterator[Asker]:
    made = Asker(server.grpc)
    yield made
    made.close()


def alone(server: Server, **sampling: Any) -> str:
    """What the language model itself says."""
    said = {"temperature": 0, "max_tokens": 24} | sampling
    body = {"text_input": PROMPT, "sampling_parameters": json.dumps(said)}
    status, answer = server.request("POST", "/v2/models/smollm2/generate", json.dumps(body).encode())
    assert status == 200, answer
    return str(json.loads(answer)["text_output"])


@pytest.mark.parametrize("face", FACES)
def test_texts_are_those_of_the_model(server: Server, asker: Asker, face: str) -> None:
    text = alone(server)
    assert text.startswith(PROMPT)
    assert asker.texts(face, **PLAIN) == [text]
    parts = asker.texts(face, **PLAIN, stream=True)
    assert len(parts) > 5
    assert PROMPT + "".join(parts) == text


@pytest.mark.parametrize("face", FACES)
def test_words_end_texts_and_stay_out_of_them(server: Server, asker: Asker, face: str) -> None:
    text = alone(server)
    word = text.removeprefix(PROMPT).split()[2]
    assert asker.texts(face, **PLAIN, stop_words=[f" {word}"])[0] == text[: text.index(word) + len(word)]
    assert word not in asker.texts(face, **PLAIN, bad_words=[f" {word}", word], exclude_input_in_output=True)[0]


@pytest.mark.parametrize("face", FACES)
def test_seeds_repeat(server: Server, asker: Asker, face: str) -> None:
    drawn = {"top_k": 40, "top_p": 0.95, "temperature": 1.2}
    texts = [asker.texts(face, **PLAIN, **drawn, seed=seed)[0] for seed in (1, 2)]
    assert texts[0] != texts[1]
    assert asker.texts(face, **PLAIN, **drawn, seed=1) == texts[:1]
    same = {"temperature": float(np.float32(1.2)), "top_p": float(np.float32(0.95)), "top_k": 40, "seed": 1}
    assert texts[0] == alone(server, **same)


@pytest.mark.parametrize("face", FACES)
def test_log_probabilities_are_those_of_the_tokens(asker: Asker, face: str) -> None:
    found = asker.ask(face, **PLAIN, return_log_probs=True, return_num_output_tokens=True)[0]
    count = found.as_numpy("num_output_tokens").item()
    each = found.as_numpy("output_log_probs")
    assert each.shape == (1, 1, count)
    assert found.as_numpy("cum_log_probs").item() == pytest.approx(each.sum(), rel=1e-4)


@pytest.mark.parametrize("face", FACES)
def test_guides_hold(asker: Asker, face: str) -> None:
    year = {"year": {"type": "integer", "minimum": 1900, "maximum": 2100}}
    schema = {"type": "object", "properties": year, "required": ["year"], "additionalProperties": False}
    asked = {"text_input": "The year after 2024 as JSON:", "max_tokens": 24, "exclude_input_in_output": True}
    guide = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(schema)}
    assert isinstance(json.loads(asker.texts(face, **asked, **guide)[0])["year"], int)
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{4}"}
    assert len(asker.texts(face, **asked, **guide)[0]) == 4


def test_a_reader_sees_what_the_page_shows(server: Server, tmp_path: Path) -> None:
    places = {"http": server.http, "grpc": server.grpc, "metrics": server.metrics, "log_url": server.log_url}
    for page in OF_LANGUAGE_MODELS:
        wrong = Reader.of_server(tmp_path / "reader", **places).follow((ROOT / page).read_text())
        assert not wrong, "\n\n".join(wrong)
