"""vLLM's fields about tokens: what is read of them, how prompts are cut, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.openai.shapes.api_errors import ApiError
from gateway.openai.shapes.token_options import NO_OPTIONS, chosen_ids, token_options


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"truncate_prompt_tokens": 4}, [2, 3, 4, 5]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, [2, 3, 4, 5]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, [0, 1, 2, 3]),
        ({"truncate_prompt_tokens": -1}, [1, 2, 3, 4, 5]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, [0, 1, 2, 3, 4]),
        ({"truncation_side": "right"}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_cut(fields: dict[str, Any], left: list[int]) -> None:
    assert token_options(fields).cut([0, 1, 2, 3, 4, 5], 5) == left


def test_a_short_prompt_stays_as_it_is() -> None:
    assert token_options({"truncate_prompt_tokens": 3}).cut([7, 8], 5) == [7, 8]


def test_more_than_there_is_room_for() -> None:
    with pytest.raises(ApiError) as caught:
        token_options({"truncate_prompt_tokens": 6}).cut([1], 5)
    assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "4"}, "truncate_prompt_tokens"),
        ({"truncation_side": "both"}, "truncation_side"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"return_tokens_as_token_ids": "yes"}, "return_tokens_as_token_ids"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        token_options(fields)
    assert caught.value.param == param


def test_ids_are_null_unless_they_are_asked_for() -> None:
    assert NO_OPTIONS.shown(token_ids=[1], prompt_token_ids=None) == {"token_ids": None, "prompt_token_ids": None}
    asked = token_options({"return_token_ids": True})
    assert asked.shown(token_ids=(1, 2), prompt_token_ids=None) == {"token_ids": [1, 2], "prompt_token_ids": None}


def test_names_of_tokens() -> None:
    assert token_options({}).names(None) is None
    name = token_options({"return_tokens_as_token_ids": True}).names(None)
    assert name is not None
    assert name(42) == b"token_id:42"


def test_chosen_tokens() -> None:
    assert chosen_ids({}, has_logprobs=False) == []
    assert chosen_ids({"logprob_token_ids": [5, 7]}, has_logprobs=True) == [5, 7]
    for fields, has in (({"logprob_token_ids": [5]}, False), ({"logprob_token_ids": [1] * 129}, True)):
        with pytest.raises(ApiError) as caught:
            chosen_ids(fields, has_logprobs=has)
        assert caught.value.param == "logprob_token_ids"
