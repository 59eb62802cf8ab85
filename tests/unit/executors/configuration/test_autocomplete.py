"""What a python model's auto_complete_config may change, and its complaints word for word (P2)."""

from __future__ import annotations

from typing import Any

import pytest

from charonia.models.config_forms import parse
from executors.configuration import autocomplete
from executors.configuration.config import InstanceError, to_json

WRITTEN = "name: 'm' backend: 'python' "


def _document(text: str = "") -> dict[str, Any]:
    return to_json(parse(WRITTEN + text))


def test_an_empty_configuration_takes_everything() -> None:
    document = _document()
    autocomplete.set_max_batch_size(document, 8)
    autocomplete.add_input(document, {"name": "x", "data_type": "TYPE_FP32", "dims": [3], "optional": True})
    autocomplete.add_output(document, {"name": "y", "data_type": "TYPE_STRING", "dims": [-1]})
    autocomplete.set_dynamic_batching(document)
    autocomplete.set_model_transaction_policy(document, {"decoupled": True})
    assert autocomplete.merge(parse(WRITTEN), document) == parse(
        WRITTEN + "max_batch_size: 8 dynamic_batching { } model_transaction_policy { decoupled: true }"
        "input { name: 'x' data_type: TYPE_FP32 dims: 3 optional: true }"
        "output { name: 'y' data_type: TYPE_STRING dims: -1 }"
    )


def test_written_tensors_are_completed_and_kept() -> None:
    text = "max_batch_size: 2 input { name: 'x' dims: 3 allow_ragged_batch: true } dynamic_batching { }"
    document = _document(text)
    autocomplete.add_input(document, {"name": "x", "data_type": "TYPE_INT8", "dims": [3]})
    autocomplete.set_max_batch_size(document, 2)
    autocomplete.set_dynamic_batching(document)
    assert autocomplete.merge(parse(WRITTEN + text), document) == parse(
        WRITTEN + text.replace("'x'", "'x' data_type: TYPE_INT8")
    )


def test_other_changes_of_the_document_have_no_effect() -> None:
    document = _document("metric_tags { key: 'a' value: 'b' }")
    document["metric_tags"] = {}
    document["backend"] = "onnxruntime"
    written = parse(WRITTEN + "metric_tags { key: 'a' value: 'b' }")
    assert autocomplete.merge(written, document) == written


def test_a_message_may_be_merged_too() -> None:
    assert autocomplete.merge(parse(WRITTEN), parse(WRITTEN + "max_batch_size: 3")).max_batch_size == 3


COMPLAINTS = [
    (
        "max_batch_size: 2",
        lambda c: autocomplete.set_max_batch_size(c, 1),
        "configuration specified max_batch_size 2, but in auto-complete-config function for model 'm' specified "
        "max_batch_size 1",
    ),
    (
        "",
        lambda c: autocomplete.add_input(c, {"name": "x", "data_type": "TYPE_FP32", "dims": [1], "extra": 1}),
        "input 'x' in auto-complete-config function for model 'm' contains property other than 'name', 'data_type', "
        "'dims' and 'optional'.",
    ),
    (
        "",
        lambda c: autocomplete.add_output(c, {"name": "x", "dims": [1], "optional": True}),
        "output 'x' in auto-complete-config function for model 'm' contains property other than 'name', 'data_type' "
        "and 'dims'.",
    ),
    (
        "",
        lambda c: autocomplete.add_input(c, {"data_type": "TYPE_FP32", "dims": [1]}),
        "input in auto-complete-config function for model 'm' is missing 'name' property.",
    ),
    ("", lambda c: autocomplete.add_input(c, {"name": "x", "data_type": "FP32"}), "input 'x' has the unknown data type "
     "'FP32'"),
    (
        "input { name: 'x' data_type: TYPE_FP32 }",
        lambda c: autocomplete.add_input(c, {"name": "x", "data_type": "TYPE_INT8", "dims": [1]}),
        "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'x', model provides TYPE_INT8",
    ),
    (
        "output { name: 'x' dims: [1, 2] }",
        lambda c: autocomplete.add_output(c, {"name": "x", "data_type": "TYPE_INT8", "dims": [1]}),
        "model 'm', tensor 'x': the model expects dims [1] but the model configuration specifies dims [1, 2]",
    ),
    (
        "input { name: 'x' }",
        lambda c: autocomplete.add_input(c, {"name": "x", "optional": True}),
        "model 'm', tensor 'x': the model expects optional True but the model configuration specifies optional False",
    ),
    (
        "input { name: 'x' optional: true }",
        lambda c: autocomplete.add_input(c, {"name": "x", "optional": False}),
        "model 'm', tensor 'x': the model expects optional False but the model configuration specifies optional True",
    ),
    (
        "model_transaction_policy { decoupled: true }",
        lambda c: autocomplete.set_model_transaction_policy(c, {"decoupled": False}),
        "trying to change decoupled property in auto-complete-config for model 'm', which is already set to 'True'.",
    ),
    (
        "",
        lambda c: autocomplete.set_model_transaction_policy(c, {"coupled": False}),
        "model transaction property in auto-complete-config function for model 'm' contains property other than "
        "'decoupled'.",
    ),
    (
        "sequence_batching { }",
        autocomplete.set_dynamic_batching,
        "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config function for model "
        "'m' tries to set scheduling_choice as 'dynamic_batching'",
    ),
]  # fmt: skip


def test_a_larger_batch_size_and_an_empty_policy_are_taken() -> None:
    document = _document("max_batch_size: 2")
    autocomplete.set_max_batch_size(document, 8)
    autocomplete.set_model_transaction_policy(document, {})
    assert autocomplete.merge(parse(WRITTEN + "max_batch_size: 2"), document).max_batch_size == 8
    autocomplete.set_model_transaction_policy(document, {"decoupled": True})
    autocomplete.set_model_transaction_policy(document, {})
    assert document["model_transaction_policy"] == {"decoupled": True}


@pytest.mark.parametrize(("text", "change", "message"), COMPLAINTS)
def test_complaints(text: str, change: Any, message: str) -> None:
    document = _document(text)
    before = _document(text)
    with pytest.raises(ValueError) as caught:
        change(document)
    assert str(caught.value) == message
    assert document == before


@pytest.mark.parametrize("result", [None, 5, "x"])
def test_a_result_that_is_no_configuration(result: Any) -> None:
    with pytest.raises(InstanceError) as caught:
        autocomplete.merge(parse(WRITTEN), result)
    assert caught.value.message == (
        "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."
    )


def test_a_contradiction_smuggled_into_the_document() -> None:
    document = _document("max_batch_size: 2")
    document["max_batch_size"] = 1
    with pytest.raises(InstanceError, match="configuration specified max_batch_size 2"):
        autocomplete.merge(parse(WRITTEN + "max_batch_size: 2"), document)
