"""Whether a model says that it may be run again, and that other words keep it from loading."""

from __future__ import annotations

import pytest

from charonia.models.interface import ModelInterface
from executors.configuration.config import InstanceError, normalise, validate_instances
from executors.repository.pbtxt import parse

TENSORS = "input { name: 'a' data_type: TYPE_FP32 dims: 3 } output { name: 'b' data_type: TYPE_FP32 dims: 3 } "
MODEL = "name: 'm' backend: 'python' model_transaction_policy { decoupled: true } " + TENSORS


def parameter(text: str) -> str:
    return f"parameters {{ key: 'charonia.repeatable' value {{ string_value: '{text}' }} }} "


@pytest.mark.parametrize(
    ("text", "declared"),
    [("true", True), (" True", True), ("1", True), ("yes", True), ("false", False), ("0", False), ("", False)],
)
def test_what_a_model_declares(text: str, declared: bool) -> None:
    config = normalise(parse(MODEL + parameter(text)))
    validate_instances(config)
    assert ModelInterface.of(config).repeatable is declared


def test_without_a_word_a_model_is_not_run_again() -> None:
    assert not ModelInterface.of(normalise(parse(MODEL))).repeatable


def test_another_word_keeps_the_model_from_loading() -> None:
    with pytest.raises(InstanceError, match=r"parameter 'charonia\.repeatable' must be true or false, got 'perhaps'"):
        validate_instances(normalise(parse(MODEL + parameter("perhaps"))))
