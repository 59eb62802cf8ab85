"""The examples of several frameworks, as their pages serve them: each answer as of its libraries without a server."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import build_digit_models
import build_torch_models
import client
import digits
import expected
import inputs
import numpy as np
import pytest
import sentences
import torch
import treelite
from e2e_server import serving
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

OPENAI = "--openai-on-http-port=true"
EXAMPLES = Path(build_torch_models.__file__).parent


@pytest.fixture(scope="module")
def repositories() -> tuple[Path, Path]:
    return build_torch_models.ensure(), build_digit_models.ensure()


@pytest.fixture(scope="module")
def server(repositories: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    of_torch, of_digits = repositories
    with serving(of_torch, tmp_path_factory.mktemp("state"), f"--model-repository={of_digits}", OPENAI) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def asked(server: Any, request: pytest.FixtureRequest) -> Iterator[client.Server]:
    asked = client.Server(request.param, getattr(server, request.param))
    yield asked
    asked.close()


def loaded(repository: Path, model: str, name: str) -> torch.nn.Module:
    """A class of an example with its weights, as anybody would load it."""
    version = repository / model / "1"
    module: torch.nn.Module = getattr(build_digit_models.module_of(version / "model.py"), name)()
    module.load_state_dict(load_file(version / "model.safetensors"))
    return module.eval()


def embedded(repository: Path, texts: list[str]) -> np.ndarray:
    """The vectors of torch and tokenizers alone; each text by itself, without padding."""
    tokenizer = Tokenizer.from_file(str(repository / "sentence_tokens" / "1" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    model = loaded(repository, "minilm", "Embedder")
    found = []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.inference_mode():
            found.append(model(ids, torch.ones_like(ids)).numpy()[0])
    return np.stack(found)


def test_sentences_are_as_near_as_torch_says(asked: client.Server, repositories: tuple[Path, Path]) -> None:
    found = asked.infer("sentence_embeddings", {"TEXT": sentences.texts(sentences.SENTENCES)})["EMBEDDING"]
    np.testing.assert_allclose(found, embedded(repositories[0], list(sentences.SENTENCES)), atol=2e-6)
    np.testing.assert_allclose(list(sentences.cosines(found).values()), sentences.COSINES, atol=6e-5)


def test_documents_are_ranked_by_the_model_of_sentences(server: Any) -> None:
    query, *documents = sentences.SENTENCES
    body = {"model": "sentence_embeddings", "query": query, "documents": documents[::-1]}
    status, answer = server.request("POST", "/v1/rerank", json.dumps(body).encode())
    assert status == 200, answer
    found = json.loads(answer)["results"]
    assert [one["document"]["text"] for one in found] == documents
    np.testing.assert_allclose([one["relevance_score"] for one in found], sentences.COSINES[:2], atol=6e-5)


def test_sentences_of_several_lengths_and_clients(
    asked: client.Server, server: Any, repositories: tuple[Path, Path]
) -> None:
    """Padding changes nothing; what is longer than the model reads is cut; what is no text fails alone."""
    texts = [
        "Ja.",
        "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich",
        "the sea and the shell " * 20,
        "word " * 400,
    ]
    wanted = embedded(repositories[0], texts)

    def one(text: str) -> np.ndarray:
        connection = client.Server("grpc", server.grpc)
        try:
            return connection.infer("sentence_embeddings", {"TEXT": sentences.texts([text])})["EMBEDDING"][0]
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        alone = np.stack(list(pool.map(one, texts)))
    np.testing.assert_allclose(alone, wanted, atol=2e-6)
    together = asked.infer("sentence_embeddings", {"TEXT": sentences.texts(texts)})["EMBEDDING"]
    np.testing.assert_allclose(together, wanted, atol=2e-6)
    with pytest.raises(InferenceServerException, match="TEXT must be UTF-8"):
        asked.infer("sentence_embeddings", {"TEXT": np.array([[b"\xff"]], np.object_)})


def test_digits_are_what_the_three_models_say_one_after_the_other(
    asked: client.Server, repositories: tuple[Path, Path]
) -> None:
    images, truth = (array[-build_digit_models.HELD_OUT :] for array in build_digit_models.pictures())
    features = loaded(repositories[1], "digit_features", "DigitFeatures")
    with torch.inference_mode():
        seen = features(torch.tensor(images[:, np.newaxis].astype(np.float32) / 255)).numpy()
    trees = treelite.Model.deserialize(str(repositories[1] / "digit_trees" / "1" / "checkpoint.tl"))
    wanted = treelite.gtil.predict(trees, seen).reshape(-1, 10)
    found = []
    for at in range(0, len(images), 60):
        files = [digits.png_file(image) for image in images[at : at + 60]]
        found.append(asked.infer("digits", {"IMAGE": digits.images(files)})["PROBABILITIES"])
    np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-6)
    assert (np.concatenate(found).argmax(axis=1) == truth).mean() > 0.9


def test_a_digit_may_be_of_any_size(asked: client.Server) -> None:
    image = build_digit_models.pictures()[0][-1]
    sizes = [image, image.repeat(4, 0).repeat(4, 1), image.repeat(9, 0).repeat(5, 1)]
    files = digits.images([digits.png_file(np.ascontiguousarray(one)) for one in sizes])
    rows = asked.infer("digits", {"IMAGE": files})["PROBABILITIES"]
    np.testing.assert_allclose(rows, rows[:1].repeat(3, 0), atol=1e-6)
    for content, text in ((b"no picture", "IMAGE is not a PNG file"), (digits.png_file(image[:5]), "at least 8 x 8")):
        with pytest.raises(InferenceServerException, match=f"the picture cannot be read: .*{text}"):
            asked.infer("digits", {"IMAGE": digits.images([content])})


def heard(repository: Path, windows: np.ndarray) -> np.ndarray:
    """What the wheel's own TorchScript file says of a recording, window by window: it keeps its state itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.load(str(repository / "silero_vad_torch" / "1" / "model.pt"))
    with torch.inference_mode():
        return np.array([model(torch.tensor(window[64:])[None], 16000).item() for window in windows], np.float32)


def test_a_recording_is_heard_as_by_the_torchscript_file_and_by_onnx(
    asked: client.Server, repositories: tuple[Path, Path]
) -> None:
    found = client.hear(asked, inputs.VOICE, "silero_vad_stream")
    windows = inputs.windows(inputs.samples(inputs.VOICE))
    np.testing.assert_allclose(found["speech_probs"], heard(repositories[0], windows), atol=1e-5)
    onnx = expected.onnxruntime_outputs(EXAMPLES / "models", "silero_vad", {"input": windows})
    np.testing.assert_allclose(found["speech_probs"], onnx["speech_probs"], atol=1e-4)
    expected.check("silero_vad", found, EXAMPLES / "models")


def test_recordings_that_come_at_the_same_time_do_not_mix(server: Any, repositories: tuple[Path, Path]) -> None:
    voice = inputs.windows(inputs.samples(inputs.VOICE))
    recordings = [voice, inputs.windows(inputs.samples(inputs.VOICE)[::-1].copy()), voice * 0.05]
    asked = client.Server("grpc", server.grpc)
    found: list[list[np.ndarray]] = [[], [], []]
    for at in range(len(voice)):
        for number, windows in enumerate(recordings):
            sequence = {"sequence_id": number + 1, "sequence_start": at == 0, "sequence_end": at == len(voice) - 1}
            piece = {"input": windows[at : at + 1]}
            found[number].append(asked.infer("silero_vad_stream", piece, sequence=sequence)["speech_probs"])
    asked.close()
    for answers, windows in zip(found, recordings, strict=True):
        np.testing.assert_allclose(np.concatenate(answers), heard(repositories[0], windows), atol=1e-5)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_scripts_of_the_page(server: Any, protocol: str) -> None:
    def said(script: str, *arguments: str) -> str:
        where = ("--protocol", protocol, "--url", getattr(server, protocol))
        command = [sys.executable, str(EXAMPLES / script), *where, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    lines = said("sentences.py").splitlines()
    assert lines[0] == " 0.7553  A man is eating food.  |  A man is eating a piece of bread."
    assert len(lines) == 3
    named = said("digits.py").splitlines()
    assert len(named) == 10
    assert sum(line.split(", a ")[1][0] == line.split(": ")[1][0] for line in named) >= 9
    assert "speech from 0.5" in said("client.py", "--model", "voice_torch")
