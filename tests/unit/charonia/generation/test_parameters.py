"""Parameters of sampling: vLLM's names, defaults and ranges, and refusals that say what was expected and what came."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from charonia.errors import InvalidArgument
from charonia.generation.parameters import (
    MAX_STRUCTURED_BYTES,
    SamplingParameters,
    StructuredOutput,
    check_vocabulary,
    parse_sampling,
)


def parse(given: dict[str, Any] | str | bytes, context: int = 100, prompt: int = 10) -> SamplingParameters:
    return parse_sampling(given, context=context, prompt_tokens=prompt, seed=lambda: 77)


@pytest.mark.parametrize("text", [b"", "", "{}", b"{}", {}])
def test_without_parameters_all_are_the_defaults(text: Any) -> None:
    assert parse(text) == SamplingParameters(seed=77)
    assert parse(text).max_tokens == 16


def test_all_parameters_are_read() -> None:
    given = {
        "n": 1,
        "max_tokens": 50,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 1,
        "frequency_penalty": -2,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": 300, "6": -1.5},
        "allowed_token_ids": [1, 2],
        "stop": "end",
        "include_stop_str_in_output": True,
        "stop_token_ids": [4, 4, 5],
        "ignore_eos": True,
        "seed": -5,
        "logprobs": 3,
        "logprob_token_ids": [7, 7, 8],
        "prompt_logprobs": 0,
        "bad_words": ["a", "b", "a"],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "structured_outputs": {"choice": ["yes", "no"]},
        "lora_name": "doll",
    }
    expected = SamplingParameters(
        seed=-5,
        max_tokens=50,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=1.0,
        frequency_penalty=-2.0,
        repetition_penalty=1.2,
        logit_bias={5: 100.0, 6: -1.5},
        allowed_token_ids=(1, 2),
        stop=("end",),
        include_stop_str_in_output=True,
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logprobs=3,
        logprob_token_ids=(7, 8),
        prompt_logprobs=0,
        bad_words=("a", "b"),
        skip_special_tokens=False,
        structured=StructuredOutput("choice", '["yes","no"]'),
        lora_name="doll",
    )
    assert parse(given) == expected
    assert parse(json.dumps(given)) == expected
    assert parse(json.dumps(given).encode()) == expected


def test_null_means_the_default_and_for_max_tokens_what_is_left() -> None:
    names = (
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "logit_bias",
        "logprobs",
        "structured_outputs",
        "lora_name",
    )
    assert parse(dict.fromkeys(names)) == SamplingParameters(seed=77)
    assert parse({"max_tokens": None}).max_tokens == 90


def test_max_tokens_is_cut_to_what_the_context_has_left() -> None:
    assert parse({"max_tokens": 10**6}).max_tokens == 90
    assert parse({"max_tokens": 10**6, "min_tokens": 500}).min_tokens == 90
    assert parse({"max_tokens": 90}, 100, 99).max_tokens == 1
    with pytest.raises(InvalidArgument, match="100 tokens, but the model's context of 100"):
        parse({}, 100, 100)


def test_strings_may_stand_for_numbers_as_in_tritons_backend() -> None:
    found = parse({"temperature": "0", "top_k": "4", "ignore_eos": "true", "max_tokens": "7", "top_p": "0.95"})
    assert (found.temperature, found.ignore_eos, found.max_tokens) == (0.0, True, 7)


def test_temperature_zero_is_greedy_and_a_tiny_one_is_raised() -> None:
    greedy = parse({"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.5})
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.min_p) == (0.0, 1.0, 0, 0.0)
    assert parse({"temperature": 1e-7}).temperature == 0.01


def test_a_seed_of_minus_one_is_no_seed() -> None:
    assert parse({"seed": -1}).seed == 77
    assert parse({"seed": 0}).seed == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -0.1}, r"temperature must be in \[0, 2\], got -0.1"),
        ({"temperature": 2.1}, r"temperature must be in \[0, 2\], got 2.1"),
        ({"temperature": float("nan")}, r"temperature must be in \[0, 2\], got nan"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 10**400}, "temperature must be a number, got an integer of more than 64 bits"),
        ({"temperature": True}, "temperature must be a number, got bool"),
        ({"temperature": [1]}, "temperature must be a number, got list"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.0001}, "top_p"),
        ({"top_k": -2}, "top_k must be 0 \\(disable\\), or at least 1, got -2"),
        ({"top_k": 1.5}, "top_k must be an integer, got float"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\], got 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number greater than zero, got 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -5}, "max_tokens must be at least 1, got -5"),
        ({"max_tokens": "many"}, "max_tokens must be an integer, got 'many'"),
        ({"max_tokens": "9" * 5000}, "max_tokens must be an integer, got str"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
        ({"min_tokens": 20}, "min_tokens must be less than or equal to max_tokens=16, got 20"),
        ({"n": 10**9}, "n must be at most 16384, got 1000000000"),
        ({"n": 2}, "n must be 1, got 2"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"seed": 1 << 63}, "seed must fit in 64 bits"),
        ({"seed": 1 << 9000}, "seed must fit in 64 bits, got an integer of more than 64 bits"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"logprobs": 21}, r"logprobs must be in \[0, 20\], got 21"),
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids must have at most 128"),
        ({"logprobs": -1}, r"logprobs must be in \[0, 20\], got -1"),
        ({"prompt_logprobs": 10**9}, "prompt_logprobs must be in"),
        ({"stop": ["x"] * 10**5}, "stop must have at most 64 strings, got 100000"),
        ({"stop": [""]}, "stop cannot contain an empty string"),
        ({"stop": ""}, "stop cannot contain an empty string"),
        ({"stop": [1]}, "stop must have strings, got int"),
        ({"stop": {"a": 1}}, "stop must be a string or a list of strings, got dict"),
        ({"stop": "x" * 2000}, "stop must have strings of at most 1024 characters, got 2000"),
        ({"stop_token_ids": list(range(10**5))}, "stop_token_ids must have at most 1024 token ids, got 100000"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must have token ids that are non-negative integers, got -1"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list of token ids, got str"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        ({"bad_words": ["x"] * 1000}, "bad_words must have at most 256 strings, got 1000"),
        ({"bad_words": [""]}, "bad_words cannot contain an empty string"),
        ({"logit_bias": {str(i): 1 for i in range(10**5)}}, "logit_bias must have at most 1024 tokens, got 100000"),
        ({"logit_bias": {"x": 1}}, "logit_bias must have token ids that are non-negative integers, got 'x'"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias must have numbers as values, got nan"),
        ({"logit_bias": {"1": None}}, "logit_bias must be a number, got null"),
        ({"logit_bias": [1]}, "logit_bias must be a JSON object, got list"),
        ({"ignore_eos": "maybe"}, "ignore_eos must be true or false, got 'maybe'"),
        ({"ignore_eos": 2}, "ignore_eos must be true or false, got 2"),
        ({"detokenize": False}, "detokenize must be true"),
        ({"lora_name": 5}, "lora_name must be a string"),
        ({"use_beam_search": True}, "unknown sampling parameter 'use_beam_search'; known are allowed_token_ids"),
        ({"x" * 10**6: 1}, "unknown sampling parameter"),
        ({"structured_outputs": {}}, "exactly one kind of constraint, got none"),
        ({"structured_outputs": {"json": "{}", "regex": "a"}}, "exactly one kind of constraint, got json, regex"),
        ({"structured_outputs": {"json": ""}}, "json must not be empty"),
        ({"structured_outputs": {"json": 4}}, "json must be a JSON schema"),
        ({"structured_outputs": {"regex": ["a"]}}, "regex must be a string, got list"),
        ({"structured_outputs": {"choice": []}}, "choice must be a list of strings that are not empty"),
        ({"structured_outputs": {"choice": "a"}}, "choice must be a list of strings, got str"),
        ({"structured_outputs": {"json_object": False}}, "json_object must be true"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not supported"),
        ({"structured_outputs": {"other": "x"}}, "got 'other'"),
        ({"structured_outputs": {"regex": "a" * (MAX_STRUCTURED_BYTES + 1)}}, "regex must have at most"),
        ({"structured_outputs": "{"}, "structured_outputs must be a JSON object"),
        ({"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}}, "give one of them"),
    ],
)
def test_a_wrong_value_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    begin = time.process_time()
    with pytest.raises(InvalidArgument, match=words) as caught:
        parse(given)
    assert time.process_time() - begin < 1.0
    assert len(caught.value.message) < 800


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[]", "must be a JSON object, got list"),
        (b"{", "must be a JSON object"),
        (b"\xff\xfe", "must be a JSON object"),
        (b'{"temperature": NaN}', "must be a JSON object"),
        (b"[" * 10**5, "must be a JSON object"),
        (b'{"stop":' + b"[" * 3000 + b"]" * 3000 + b"}", "must"),
        (b" " * (1 << 21), "must have at most 1048576 bytes, got 2097152"),
    ],
)
def test_bytes_that_are_no_object_are_refused(text: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse(text)


def test_structured_outputs_of_every_kind() -> None:
    schema = {"type": "object"}
    assert parse({"structured_outputs": {"json": schema}}).structured == StructuredOutput("json", '{"type":"object"}')
    assert parse({"structured_outputs": {"json": json.dumps(schema)}}).structured == StructuredOutput(
        "json", '{"type": "object"}'
    )
    assert parse({"guided_decoding": '{"regex": "a+"}'}).structured == StructuredOutput("regex", "a+")
    assert parse({"structured_outputs": {"grammar": "start: A"}}).structured == StructuredOutput("grammar", "start: A")
    assert parse({"structured_outputs": {"json_object": True}}).structured == StructuredOutput("json_object")
    assert parse({"structured_outputs": {"regex": None, "choice": ["a"]}}).structured == StructuredOutput(
        "choice", '["a"]'
    )


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_token_ids_are_compared_with_the_vocabulary(name: str) -> None:
    found = parse({name: {"9": 1.0} if name == "logit_bias" else [9]})
    check_vocabulary(found, 10)
    with pytest.raises(InvalidArgument, match=f"{name} contains token id 9, .* the model has 9 tokens"):
        check_vocabulary(found, 9)


def test_log_probabilities_of_prompts_have_a_bound() -> None:
    """By candidates, the token itself among them."""
    asked = {"prompt_logprobs": 7}
    found = parse_sampling(asked, context=10_000, prompt_tokens=4096, seed=lambda: 1)
    assert found.prompt_logprobs == 7
    with pytest.raises(InvalidArgument, match="prompt_logprobs=7 of 4097 tokens are more than 32768 candidates"):
        parse_sampling(asked, context=10_000, prompt_tokens=4097, seed=lambda: 1)
