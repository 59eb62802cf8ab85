"""The configuration of a vLLM model, completed as Triton's backend does."""

from __future__ import annotations

from pathlib import Path

import pytest

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument, NotFound
from charonia.generation.text_tensors import INPUTS, OUTPUTS
from charonia.models.config_errors import InstanceError
from charonia.models.config_forms import parse
from executors.backends.vllm import VllmBackend
from executors.backends.vllm.completed_tensors import check_policy, completed
from executors.configuration.config import normalise, validate
from protos.model_config_pb2 import ModelConfig, ModelInstanceGroup


def test_an_empty_configuration_has_all_tensors() -> None:
    done = completed(parse('name: "m" backend: "vllm"'))
    more = ["image", "embedding_request", "return_kv_transfer_params"]
    assert [item.name for item in done.input] == [one.name for one in INPUTS] + more
    assert [item.name for item in done.output] == [one.name for one in OUTPUTS] + ["kv_transfer_params"]
    assert all(item.optional for item in done.input)
    assert done.model_transaction_policy.decoupled
    assert [(group.kind, group.count) for group in done.instance_group] == [(ModelInstanceGroup.KIND_MODEL, 1)]
    assert done.parameters["charonia.resumable"].string_value == "true"
    check_policy(done)
    validate(normalise(done), "m")


def test_adapters_are_named() -> None:
    config = parse('name: "m" backend: "vllm"')
    assert "charonia.adapters" not in completed(config).parameters
    done = completed(config, {"red": "/red", "blue": "/blue"})
    assert done.parameters["charonia.adapters"].string_value == '["red", "blue"]'
    assert completed(done, ["red"]) == done


async def test_the_adapters_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.json").write_text('{"model": "x", "enable_lora": true}')
    model = await VllmBackend().load(ModelSource("m", 1, tmp_path, parse('name: "m" backend: "vllm"')))
    with pytest.raises(NotFound, match=r"cannot find .*multi_lora.json"):
        await model.signature()
    (tmp_path / "1" / "multi_lora.json").write_text('{"red": "/adapters/red"}')
    assert (await model.signature()).parameters["charonia.adapters"].string_value == '["red"]'


def test_what_is_written_stays() -> None:
    text = """
    name: "m" backend: "vllm" instance_group { kind: KIND_GPU count: 2 }
    parameters { key: "charonia.resumable" value { string_value: "false" } }
    input { name: "text_input" data_type: TYPE_STRING dims: -1 }
    output { name: "text_output" data_type: TYPE_STRING dims: 1 }
    """
    done = completed(parse(text))
    assert (list(done.input[0].dims), done.input[0].optional) == ([-1], False)
    assert list(done.output[0].dims) == [1]
    assert done.parameters["charonia.resumable"].string_value == "false"
    assert len(done.input) == len(INPUTS) + 3
    assert [(group.kind, group.count) for group in done.instance_group] == [(ModelInstanceGroup.KIND_GPU, 2)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_batch_size: 4", "configuration specified max_batch_size 4, but in auto-complete-config function for"),
        ("model_transaction_policy { decoupled: false }", "trying to change decoupled property in auto-complete-"),
    ],
)
def test_contradictions_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InstanceError, match=reason):
        completed(parse(f'name: "m" backend: "vllm" {text}'))


def test_without_auto_complete_the_policy_has_to_be_written() -> None:
    with pytest.raises(InvalidArgument, match="must be configured to use decoupled model transaction policy"):
        check_policy(ModelConfig(name="m"))
    with pytest.raises(InvalidArgument, match="'max_batch_size' must be 0"):
        check_policy(parse('name: "m" max_batch_size: 2 model_transaction_policy { decoupled: true }'))
