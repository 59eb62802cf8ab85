"""The engine's outputs as tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from charonia.backend import ModelResponse
from executors.backends.vllm.prompt_requests import RETURNS
from executors.backends.vllm.text_responses import Gained, embedding_response, gained_by, text_response


@dataclass
class Candidate:
    logprob: float
    rank: int
    decoded_token: str | None


@dataclass
class Output:
    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: Any = None
    finish_reason: str | None = None


def tensors(response: ModelResponse) -> dict[str, Any]:
    return {tensor.name: tensor.array() for tensor in response.outputs}


def gained(*outputs: Output, texts: int = 1) -> list[Gained]:
    found = [Gained()] * texts
    for one in outputs:
        found[one.index] = gained_by(one, with_logprobs=True)
    return found


def test_only_text_unless_more_is_wanted() -> None:
    found = tensors(text_response(gained(Output(0, " Paris", (7,))), frozenset(), prompt="It is"))
    assert {name: list(array) for name, array in found.items()} == {"text_output": [b"It is Paris"]}


def test_what_the_connector_says_is_json() -> None:
    there = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]], "remote_host": "10.0.0.1"}
    wants = frozenset({"kv_transfer_params"})
    found = tensors(text_response(gained(Output(0, "a", (7,))), wants, transfer=there))
    assert json.loads(found["kv_transfer_params"][0]) == there
    found = tensors(text_response(gained(Output(0, "a", (7,))), wants))
    assert found["kv_transfer_params"].tolist() == [b"null"]


def test_everything_that_can_be_wanted() -> None:
    logprobs = [{7: Candidate(-0.5, 1, " Paris"), 8: Candidate(float("-inf"), 9, None)}]
    one = Output(0, " Paris", (7,), -0.5, logprobs, "length")
    found = tensors(text_response(gained(one), frozenset(RETURNS), input_tokens=3))
    assert found.keys() == {"text_output", *RETURNS}
    assert found["finish_reason"].tolist() == [b"length"]
    assert found["cumulative_logprob"].tolist() == [-0.5]
    assert (found["num_input_tokens"].tolist(), found["num_output_tokens"].tolist()) == ([3], [1])
    assert found["num_input_tokens"].dtype == np.uint32
    assert (found["token_ids"].tolist(), found["token_ids"].dtype) == ([7], np.int32)
    assert json.loads(found["logprobs"][0]) == [
        {
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": " Paris"},
            "8": {"logprob": -9999.0, "rank": 9, "decoded_token": None},
        }
    ]


def test_log_probabilities_are_kept_only_where_they_are_wanted() -> None:
    one = Output(0, "a", (1,), logprobs=[{1: Candidate(-1.0, 1, "a")}])
    assert gained_by(one, with_logprobs=False).logprobs is None
    assert gained_by(one, with_logprobs=True).logprobs == [{"1": {"logprob": -1.0, "rank": 1, "decoded_token": "a"}}]


def test_without_log_probabilities_there_is_null() -> None:
    found = tensors(text_response(gained(Output(0, "a", (1,))), frozenset({"logprobs", "cumulative_logprob"})))
    assert found["logprobs"].tolist() == [b"null"]
    assert np.isnan(found["cumulative_logprob"]).tolist() == [True]


def test_each_of_several_texts_has_its_place() -> None:
    returns = frozenset({"finish_reason", "num_output_tokens", "token_ids"})
    found = tensors(
        text_response(gained(Output(2, "c", (5, 6), finish_reason="stop"), Output(0, "a", (4,)), texts=3), returns)
    )
    assert found["text_output"].tolist() == [b"a", b"", b"c"]
    assert found["finish_reason"].tolist() == [b"None", b"None", b"stop"]
    assert found["num_output_tokens"].tolist() == [1, 0, 2]
    assert found["token_ids"].tolist() == [4, 5, 6]


def test_only_requested_outputs_are_sent() -> None:
    found = text_response(gained(Output(0, "a", (1,))), frozenset({"token_ids"}), outputs=("token_ids",))
    assert [tensor.name for tensor in found.outputs] == ["token_ids"]


def test_half_a_character_of_a_prompt_is_no_failure() -> None:
    assert tensors(text_response(gained(Output(0, "\ud83d", ())), frozenset()))["text_output"].tolist() == [b"?"]


def test_an_embedding_is_json() -> None:
    found = tensors(
        embedding_response([0.5, -1.0], frozenset({"num_input_tokens", "num_output_tokens"}), input_tokens=4)
    )
    assert json.loads(found["text_output"][0]) == [0.5, -1.0]
    assert (found["num_input_tokens"].tolist(), found["num_output_tokens"].tolist()) == ([4], [0])
