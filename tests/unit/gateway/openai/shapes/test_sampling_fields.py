"""Fields of texts that ask for more than anybody gets."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.openai.shapes.api_errors import ApiError
from gateway.openai.shapes.chat_shapes import read_chat
from gateway.openai.shapes.completion_shapes import read_completion


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 10**9}, "n"),
        ({"n": 10**400}, "n"),
        ({"best_of": 10**9}, "best_of"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
        ({"prompt": ["x"] * 100, "n": 2}, "n"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": 1e308}, "temperature"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": "x" * 100_000}, "stop"),
        ({"stop_token_ids": [1] * 100_000}, "stop_token_ids"),
        ({"bad_words": ["x"] * 100_000}, "bad_words"),
        ({"logit_bias": {str(token): 1 for token in range(100_000)}}, "logit_bias"),
        ({"structured_outputs": {"regex": "(a" * 50_000}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= root root\n" * 10_000}}, "structured_outputs"),
    ],
)
def test_what_nobody_gets_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_completion({"model": "m", "prompt": "x", **fields})
    assert caught.value.param == param
    assert len(str(caught.value)) < 500


def test_a_chat_has_the_same_bounds_and_one_for_its_candidates() -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for fields, param in (
        ({"n": 10**9}, "n"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ({"chat_template_kwargs": {"a": "x" * 100_000}}, "chat_template_kwargs"),
        ({"documents": ["text"]}, "documents"),
    ):
        with pytest.raises(ApiError) as caught:
            read_chat({**chat, **fields})
        assert caught.value.param == param


def test_documents_are_for_the_chat_template() -> None:
    given = {"documents": [{"title": "t", "text": "x"}], "chat_template_kwargs": {"thinks": False}}
    found = read_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], **given})
    assert found.template_arguments == {"thinks": False, "documents": given["documents"]}
