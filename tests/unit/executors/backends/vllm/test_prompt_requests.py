"""Requests to a vLLM model as it gets them."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from charonia.backend import ModelRequest
from charonia.errors import InvalidArgument
from charonia.tensors import Tensor
from executors.backends.vllm.prompt_requests import (
    EmbeddingRequest,
    PromptRequest,
    embedding_request,
    is_embedding,
    prompt_request,
)


def request(parameters: dict[str, Any] | None = None, **inputs: Any) -> ModelRequest:
    tensors = []
    for name, value in inputs.items():
        if isinstance(value, bool):
            array: Any = np.array([value])
        elif isinstance(value, list) and not (value and isinstance(value[0], bytes)):
            array = np.array(value, np.int32)
        else:
            array = np.array(value if isinstance(value, list) else [value], np.object_)
        tensors.append(Tensor.of(name, array))
    return ModelRequest("", 0, tensors, (), parameters or {})


def test_a_prompt_alone_is_prepended_to_its_text() -> None:
    assert prompt_request(request(text_input=b"Hi")) == PromptRequest("Hi", (), (), False, True, "", frozenset())


@pytest.mark.parametrize(
    ("inputs", "streams", "prepends"),
    [
        ({}, False, True),
        ({"stream": True}, True, False),
        ({"stream": False, "exclude_input_in_output": True}, False, False),
        ({"exclude_input_in_output": False}, False, True),
        ({"stream": True, "exclude_input_in_output": True}, True, False),
    ],
)
def test_when_the_prompt_is_in_the_output(inputs: dict[str, bool], streams: bool, prepends: bool) -> None:
    found = prompt_request(request(text_input=b"x", **inputs))
    assert (found.streams, found.prepends_prompt) == (streams, prepends)


def test_parameters_come_as_a_tensor_or_with_the_request() -> None:
    of_tensor = prompt_request(request({"top_k": 1}, text_input=b"x", sampling_parameters=b'{"temperature": 0}'))
    assert of_tensor.parameters == '{"temperature": 0}', "the tensor wins"
    assert json.loads(prompt_request(request({"top_k": 1}, text_input=b"x")).parameters) == {"top_k": 1}


def test_what_a_request_wants_back() -> None:
    found = prompt_request(
        request(text_input=b"x", return_logprobs=True, return_token_ids=True, return_finish_reason=False)
    )
    assert found.returns == {"logprobs", "token_ids"}


def test_token_ids_in_place_of_text() -> None:
    assert prompt_request(request(prompt_token_ids=[5, 6])).token_ids == (5, 6)


def test_images_are_decoded() -> None:
    encoded = [base64.b64encode(one) for one in (b"one", b"two")]
    assert prompt_request(request(text_input=b"x", image=encoded)).images == (b"one", b"two")


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({}, "'text_input' or 'prompt_token_ids' must be given"),
        ({"text_input": b"x", "prompt_token_ids": [1]}, "must not both be given"),
        ({"text_input": b"\xff"}, "'text_input' is not UTF-8"),
        ({"text_input": b"x", "image": [b"!"]}, "'image' is not base64"),
        (
            {"text_input": b"x", "stream": True, "exclude_input_in_output": False},
            "When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(inputs: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        prompt_request(request(**inputs))
    assert text in caught.value.message


def test_an_empty_tensor_is_refused() -> None:
    empty = ModelRequest("", 0, [Tensor.of("text_input", np.array([], np.object_))], (), {})
    with pytest.raises(InvalidArgument, match="'text_input' must have an element"):
        prompt_request(empty)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"input": "a"}, EmbeddingRequest("a", (), 0, frozenset())),
        ({"input": [1, 2]}, EmbeddingRequest("", (1, 2), 0, frozenset())),
        ({"input": "a", "pooling_params": {"dimensions": [64]}}, EmbeddingRequest("a", (), 64, frozenset())),
        ({"input": "a", "pooling_params": {"dimensions": 8}}, EmbeddingRequest("a", (), 8, frozenset())),
    ],
)
def test_an_embedding_is_asked_for_as_json(written: dict[str, Any], expected: EmbeddingRequest) -> None:
    asked = request(embedding_request=json.dumps(written).encode(), return_logprobs=True)
    assert is_embedding(asked)
    assert embedding_request(asked) == expected


@pytest.mark.parametrize(
    "written",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"input": []}',
        b'{"input": [true]}',
        b'{"input": "a", "pooling_params": {"dimensions": "x"}}',
    ],
)
def test_other_embeddings_are_refused(written: bytes) -> None:
    with pytest.raises(InvalidArgument):
        embedding_request(request(embedding_request=written))
    assert not is_embedding(request(text_input=b"x"))
