"""Whether a model says that it may be run again, and that other words keep it from loading."""

from __future__ import annotations

import pytest

from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from executors.configuration.config import InstanceError, normalise, validate_instances

TENSORS = "input { name: 'a' data_type: TYPE_FP32 dims: 3 } output { name: 'b' data_type: TYPE_FP32 dims: 3 } "
MODEL = "name: 'm' backend: 'python' model_transaction_policy { decoupled: true } " + TENSORS


SINGLE = "name: 'm' backend: 'python' " + TENSORS


def parameter(text: str, key: str = "charonia.repeatable") -> str:
    return f"parameters {{ key: '{key}' value {{ string_value: '{text}' }} }} "


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


def test_a_resumable_model_is_repeatable() -> None:
    config = normalise(parse(MODEL + parameter("true", "charonia.resumable")))
    validate_instances(config)
    interface = ModelInterface.of(config)
    assert (interface.resumable, interface.repeatable) == (True, True)
    plain = ModelInterface.of(normalise(parse(MODEL + parameter("true"))))
    assert (plain.resumable, plain.repeatable) == (False, True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (MODEL + parameter("perhaps", "charonia.resumable"), "must be true or false, got 'perhaps'"),
        (SINGLE + parameter("true", "charonia.resumable"), "is for decoupled models without a sequence batcher"),
        (
            MODEL + "sequence_batching { } " + parameter("true", "charonia.resumable"),
            "is for decoupled models without a sequence batcher",
        ),
    ],
)
def test_what_cannot_be_resumable(text: str, complaint: str) -> None:
    with pytest.raises(InstanceError, match=r"parameter 'charonia\.resumable' " + complaint):
        validate_instances(normalise(parse(text)))


def test_another_word_keeps_the_model_from_loading() -> None:
    with pytest.raises(InstanceError, match=r"parameter 'charonia\.repeatable' must be true or false, got 'perhaps'"):
        validate_instances(normalise(parse(MODEL + parameter("perhaps"))))
