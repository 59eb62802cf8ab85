from __future__ import annotations

import json

import pytest

from executors.backends.python import api
from executors.backends.python.api import ModelConfig

WRITTEN = {
    "name": "m",
    "max_batch_size": 0,
    "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [4]}],
    "output": [],
}


def test_configurations_of_tensors_are_found() -> None:
    assert api.get_input_config_by_name(WRITTEN, "A") == WRITTEN["input"][0]  # type: ignore[index]
    assert api.get_input_config_by_name(WRITTEN, "B") is None
    assert api.get_output_config_by_name({}, "A") is None


def test_the_transaction_policy_is_read() -> None:
    assert not api.using_decoupled_model_transaction_policy(WRITTEN)
    assert api.using_decoupled_model_transaction_policy({"model_transaction_policy": {"decoupled": True}})


def test_completing_changes_the_document() -> None:
    config = ModelConfig(json.dumps(WRITTEN))
    config.set_max_batch_size(4)
    config.add_output({"name": "O", "data_type": "TYPE_INT8", "dims": [1]})
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": True})
    document = config.as_dict()
    assert document["max_batch_size"] == 4
    assert document["output"] == [{"name": "O", "data_type": "TYPE_INT8", "dims": [1]}]
    assert document["dynamic_batching"] == {}
    assert document["model_transaction_policy"] == {"decoupled": True}


@pytest.mark.parametrize("missing", ["data_type", "dims"])
def test_a_model_must_describe_tensors_wholly(missing: str) -> None:
    tensor = {"name": "A", "data_type": "TYPE_FP32", "dims": [4]}
    del tensor[missing]
    with pytest.raises(ValueError) as raised:
        ModelConfig(json.dumps(WRITTEN)).add_input(tensor)
    text = f"input 'A' in auto-complete-config function for model 'm' is missing '{missing}' property."
    assert str(raised.value) == text


def test_conflicts_read_as_models_expect() -> None:
    with pytest.raises(
        ValueError, match="configuration expects datatype TYPE_FP32 for input 'A', model provides TYPE_INT8"
    ):
        ModelConfig(json.dumps(WRITTEN)).add_input({"name": "A", "data_type": "TYPE_INT8", "dims": [4]})
