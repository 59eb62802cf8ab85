"""Rankings, scores, moderations and transcriptions of a whole server; by OpenAI's own client where it has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import scripted_texts
import task_models
from e2e_server import Server, serving

FRUITS = ["a red apple", "a city in the north", {"text": "the city"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("openai-tasks")
    models = directory / "models"
    task_models.write(models)
    scripted_texts.embedding(models, "embeds")
    with serving(models, directory / "state", "--openai-on-http-port=true") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(server: Server, path: str, **body: Any) -> tuple[int, Any]:
    status, answer = server.request("POST", path, json.dumps(body).encode())
    return status, json.loads(answer)


def test_documents_are_ranked_by_a_model_that_scores(server: Server) -> None:
    for path in ("/v1/rerank", "/v2/rerank"):
        status, found = post(server, path, model="scores", query="the city", documents=FRUITS)
        assert status == 200, found
        assert [one["index"] for one in found["results"]] == [2, 1, 0]
        assert found["results"][0] == {"index": 2, "document": {"text": "the city"}, "relevance_score": 1.0}
    _, found = post(server, path, model="scores", query="the city", documents=FRUITS, top_n=1, return_documents=False)
    assert found["results"] == [{"index": 2, "relevance_score": 1.0}]


def test_embeddings_are_compared(server: Server) -> None:
    _, found = post(server, "/v1/rerank", model="embeds", query="aab", documents=["h", "a", "aabaab", ""])
    scores = {one["index"]: one["relevance_score"] for one in found["results"]}
    assert [one["index"] for one in found["results"]] == [2, 1, 0, 3]
    assert scores == pytest.approx({0: 0.0, 1: 2 / 5**0.5, 2: 1.0, 3: 0.0}, abs=1e-6)


def test_a_model_with_the_tensors_of_tritons_vllm_backend_embeds(client: Any) -> None:
    for given, counts in (("abba", [2, 2, 0, 0]), ([97, 98, 97], [2, 1, 0, 0])):
        found = client.embeddings.create(model="vectors", input=given)
        assert ([one.embedding for one in found.data], found.usage.prompt_tokens) == ([counts], len(given))
    found = client.embeddings.create(model="vectors", input=["ab", "b"], dimensions=2)
    assert [one.embedding for one in found.data] == [[1, 1], [0, 1]]


def test_a_model_with_the_tensors_of_tritons_vllm_backend_ranks(server: Server) -> None:
    status, found = post(server, "/v1/rerank", model="vectors", query="aab", documents=["c", "a", "aabaab"])
    assert status == 200, found
    assert [one["index"] for one in found["results"]] == [2, 1, 0]
    assert [one["relevance_score"] for one in found["results"]] == pytest.approx([1.0, 2 / 5**0.5, 0.0], abs=1e-6)
    assert found["usage"]["prompt_tokens"] == 11
    _, found = post(server, "/v1/score", model="vectors", text_1="ab", text_2=["ab", "b"])
    assert [one["score"] for one in found["data"]] == pytest.approx([1.0, 0.5**0.5], abs=1e-6)


def test_pairs_are_scored(server: Server) -> None:
    one_to_many: dict[str, Any] = {"text_1": "a city", "text_2": ["a city", "a village", "x"]}
    for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
        given = dict(zip(names, one_to_many.values(), strict=True))
        status, found = post(server, "/v1/score", model="scores", **given)
        assert status == 200, found
        assert [one["score"] for one in found["data"]] == pytest.approx([1.0, 1 / 3, 0.0])
    _, found = post(server, "/v1/score", model="scores", text_1=["a", "b"], text_2=["b", "b"])
    assert [(one["index"], one["score"]) for one in found["data"]] == [(0, 0.0), (1, 1.0)]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/rerank", {"model": "none", "query": "a", "documents": ["b"]}, 404, "model"),
        ("/v1/rerank", {"model": "tones", "query": "a", "documents": ["b"]}, 400, "model"),
        ("/v1/rerank", {"model": "scores", "query": "a", "documents": []}, 400, "documents"),
        ("/v1/rerank", {"model": "scores", "query": "a", "documents": [1]}, 400, "documents"),
        ("/v1/rerank", {"model": "scores", "query": "", "documents": ["b"]}, 400, "query"),
        ("/v1/rerank", {"model": "scores", "query": "a", "documents": ["b"] * 2049}, 400, "documents"),
        ("/v1/score", {"model": "scores", "text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_1"),
        ("/v1/score", {"model": "scores", "text_1": "a"}, 400, "text_2"),
        ("/v1/moderations", {"model": "scores", "input": "a"}, 400, "model"),
        ("/v1/moderations", {"input": []}, 400, "input"),
        ("/v1/moderations", {"input": [{"type": "image_url", "image_url": {"url": "x"}}]}, 400, "input"),
    ],
)
def test_what_is_wrong_is_said(server: Server, path: str, body: dict[str, Any], status: int, param: str) -> None:
    found, answer = post(server, path, **body)
    assert (found, answer["error"]["param"]) == (status, param), answer


def test_moderations(client: Any) -> None:
    found = client.moderations.create(input=["a quiet day", "hit and kill"])
    assert (found.model, [one.flagged for one in found.results]) == ("moderates", [False, True])
    second = found.results[1].to_dict()
    assert second["categories"] == {"violence": True, "spam": False}
    assert second["category_scores"] == {"violence": 0.75, "spam": 0.0}
    parts: list[Any] = [{"type": "text", "text": "buy"}, {"type": "text", "text": "offer"}]
    (only,) = client.moderations.create(model="moderates", input=parts).results
    assert only.to_dict()["category_scores"]["spam"] == 0.75


def test_transcriptions(client: Any) -> None:
    sound = ("call.wav", task_models.recording("0441#7"))
    assert client.audio.transcriptions.create(model="tones", file=sound).text == "0441#7"
    assert client.audio.transcriptions.create(model="tones", file=sound, response_format="text") == "0441#7\n"
    events = [*client.audio.transcriptions.create(model="tones", file=sound, stream=True)]
    assert [one.type for one in events] == ["transcript.text.delta"] * 6 + ["transcript.text.done"]
    assert "".join(one.delta for one in events[:-1]) == events[-1].text == "0441#7"


def test_recordings_that_cannot_be_transcribed(client: Any) -> None:
    with pytest.raises(openai.APIStatusError, match="no WAV file"):
        client.audio.transcriptions.create(model="tones", file=("call.wav", b"nothing"))
    with pytest.raises(openai.BadRequestError, match="does not transcribe"):
        client.audio.transcriptions.create(model="scores", file=("call.wav", b"nothing"))
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.audio.transcriptions.create(model="tones", file=("call.wav", b"x"), response_format="srt")


def test_the_models_are_listed_and_adapters_are_for_others(server: Server, client: Any) -> None:
    assert {one.id for one in client.models.list()} == {"embeds", "moderates", "scores", "tones", "vectors"}
    status, answer = post(server, "/v1/load_lora_adapter", lora_name="red", lora_path="adapters/red")
    assert (status, answer["error"]["message"]) == (404, "no model here takes adapters")
    status, answer = post(server, "/v1/load_lora_adapter", model="scores", lora_name="red", lora_path="adapters/red")
    assert (status, answer["error"]["param"]) == (400, "model")
