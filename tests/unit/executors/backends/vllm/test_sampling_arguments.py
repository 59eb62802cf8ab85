"""Sampling parameters as clients write them, and as vLLM's class takes them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Optional

import pytest

from charonia.errors import InvalidArgument
from executors.backends.vllm.sampling_arguments import lora_number, sampling_arguments, scalar_kinds

ANNOTATIONS: dict[str, Any] = {
    "n": int,
    "temperature": float,
    "seed": int | None,
    "max_tokens": Optional[int],  # noqa: UP045
    "stop": str | list[str] | None,
    "ignore_eos": bool,
    "logit_bias": dict[int, float] | None,
    "budget": Annotated[int | None, "checked"],
    "whitespace": str | None,
    "output_kind": int,
    "extra_args": dict[str, Any] | None,
    "_eos_token_id": int | None,
}
KINDS = scalar_kinds(ANNOTATIONS)


def read(**written: Any) -> Any:
    return sampling_arguments(json.dumps(written), ANNOTATIONS.keys(), KINDS)


def test_only_fields_of_one_type_are_converted() -> None:
    found = {name: kind for name, kind in KINDS.items() if not name.startswith(("_", "output"))}
    assert found == {
        "n": int,
        "temperature": float,
        "seed": int,
        "max_tokens": int,
        "ignore_eos": bool,
        "whitespace": str,
    }


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"temperature": "0.5", "n": "2"}, {"temperature": 0.5, "n": 2}),
        ({"max_tokens": 7.0, "temperature": 1}, {"max_tokens": 7, "temperature": 1.0}),
        ({"ignore_eos": "True"}, {"ignore_eos": True}),
        ({"ignore_eos": "false"}, {"ignore_eos": False}),
        ({"seed": None, "whitespace": 5}, {"seed": None, "whitespace": "5"}),
        ({"stop": ["a"]}, {"stop": ["a"]}),
        ({"logit_bias": {"5": -1, "6": "2"}}, {"logit_bias": {5: -1.0, 6: 2.0}}),
        ({"logit_bias": None}, {"logit_bias": None}),
    ],
)
def test_values_get_the_types_of_the_class(written: dict[str, Any], expected: dict[str, Any]) -> None:
    arguments = read(**written).arguments
    assert arguments == expected
    assert [type(value) for value in arguments.values()] == [type(value) for value in expected.values()]


def test_nothing_written_is_no_argument() -> None:
    found = sampling_arguments("", ANNOTATIONS.keys(), KINDS)
    assert (dict(found.arguments), found.structured, found.lora) == ({}, None, "")


def test_structured_outputs_are_an_object_or_its_text() -> None:
    for written in ({"regex": "a+"}, '{"regex": "a+"}'):
        assert read(structured_outputs=written).structured == {"regex": "a+"}


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ({"wings": 1}, "Unexpected keyword argument 'wings'"),
        ({"output_kind": 1}, "Unexpected keyword argument 'output_kind'"),
        ({"_eos_token_id": 1}, "Unexpected keyword argument '_eos_token_id'"),
        ({"n": 1.5}, "'n' must be of type int, got 1.5"),
        ({"n": "many"}, "'n' must be of type int, got 'many'"),
        ({"temperature": []}, r"'temperature' must be of type float, got \[\]"),
        ({"ignore_eos": "perhaps"}, "'ignore_eos' must be of type bool, got 'perhaps'"),
        ({"logit_bias": [1]}, r"'logit_bias' must be a JSON object, got \[1\]"),
        ({"logit_bias": {"a": 1}}, "'logit_bias' must have token ids and numbers"),
        ({"structured_outputs": 3}, "'structured_outputs' must be a JSON object"),
        ({"structured_outputs": "["}, "'structured_outputs' is not valid JSON"),
        ({"lora_name": 3}, "'lora_name' must be a string, got 3"),
    ],
)
def test_what_the_class_does_not_take_is_refused(written: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        read(**written)


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 100_000])
def test_other_than_an_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="'sampling_parameters'"):
        sampling_arguments(text, ANNOTATIONS.keys(), KINDS)


def test_adapters_are_numbered_in_the_order_of_the_file() -> None:
    assert read(lora_name="b").lora == "b"
    loras = {"b": "/b", "a": "/a"}
    assert [lora_number(name, loras, enabled=True) for name in ("", "b", "a")] == [0, 1, 2]
    with pytest.raises(InvalidArgument, match=r"^LoRA c is not supported, we currently support \['b', 'a'\]$"):
        lora_number("c", loras, enabled=True)
    with pytest.raises(InvalidArgument, match=r"^LoRA feature is not enabled\.$"):
        lora_number("b", {}, enabled=False)


def test_keys_and_values_of_another_engine_go_to_the_connector() -> None:
    there = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[3, 4]]}
    found = read(seed=1, kv_transfer_params=there, extra_args={"mine": 2})
    assert found.arguments == {"seed": 1, "extra_args": {"mine": 2, "kv_transfer_params": there}}
    with pytest.raises(InvalidArgument, match="'kv_transfer_params' and 'extra_args' must be JSON objects"):
        read(kv_transfer_params="e")


def test_a_run_that_goes_on_computes_the_prompt_itself() -> None:
    """The blocks were taken by the run before; a first half, which makes blocks, goes on making them."""
    taken = read(seed=1, kv_transfer_params={"do_remote_prefill": True, "remote_engine_id": "e"})
    assert taken.computing_the_prompt().arguments == {"seed": 1, "extra_args": None}
    assert "kv_transfer_params" in taken.arguments["extra_args"], "the argument stays as it is"
    first = read(kv_transfer_params={"do_remote_decode": True})
    assert first.computing_the_prompt() is first
    assert read(seed=1).computing_the_prompt().arguments == {"seed": 1}
