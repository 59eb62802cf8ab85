"""Which models are routed by their prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from charonia.datatypes import DataType
from charonia.models.config_errors import InstanceError
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.models.scheduling import DynamicBatching
from charonia.models.text_routing import PREFIX_ROUTING, check_text_routing, is_routed
from protos.model_config_pb2 import ModelConfig

TEXT = TensorSpec("text_input", DataType.BYTES, (1,))
RESUMABLE = {"charonia.resumable": "true"}
MODEL = ModelInterface(
    "m", "llm", "", 0, {"text_input": TEXT}, {"text_output": TEXT}, decoupled=True, parameters=RESUMABLE
)


def test_models_that_give_text_piece_by_piece_are() -> None:
    assert is_routed(MODEL)
    assert is_routed(replace(MODEL, dynamic_batching=DynamicBatching(priority_levels=2)))
    assert is_routed(replace(MODEL, parameters={PREFIX_ROUTING: "true"}))


@pytest.mark.parametrize(
    "other",
    [
        {"decoupled": False},
        {"max_batch_size": 4},
        {"inputs": {"x": TEXT}},
        {"outputs": {"y": TEXT}},
        {"dynamic_batching": DynamicBatching(preserve_ordering=True)},
        {"parameters": {PREFIX_ROUTING: " False", **RESUMABLE}},
        {"parameters": {}},
    ],
)
def test_others_are_not(other: dict[str, object]) -> None:
    assert not is_routed(replace(MODEL, **other))


def test_the_parameter_is_yes_or_no() -> None:
    config = ModelConfig(name="m")
    check_text_routing(config)
    config.parameters[PREFIX_ROUTING].string_value = "sometimes"
    with pytest.raises(InstanceError, match="must be true or false, got 'sometimes'"):
        check_text_routing(config)
