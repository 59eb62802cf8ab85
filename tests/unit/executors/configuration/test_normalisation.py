"""The defaults clients read back (C8, C60)."""

from __future__ import annotations

import pytest

from charonia.errors import ConfigError
from charonia.models.config_forms import parse
from executors.configuration.config import normalise, to_json, validate_instances


def test_onnx_model_on_a_cpu() -> None:
    done = normalise(parse("name: 'm' backend: 'onnxruntime' max_batch_size: 8 dynamic_batching { }"))
    assert done == parse(
        "name: 'm' backend: 'onnxruntime' max_batch_size: 8 version_policy { latest { num_versions: 1 } }"
        "optimization { input_pinned_memory { enable: true } output_pinned_memory { enable: true } }"
        "dynamic_batching { preferred_batch_size: 8 } default_model_filename: 'model.onnx'"
        "instance_group { name: 'm' count: 2 kind: KIND_CPU }"
    )


@pytest.mark.parametrize(
    "text",
    [
        "name: 'm' backend: 'python'",
        "name: 'm' backend: 'onnxruntime' max_batch_size: 4 sequence_batching { oldest { } }",
        "name: 'm' platform: 'ensemble' ensemble_scheduling { }",
        "name: 'm' backend: 'python' instance_group { } instance_group { kind: KIND_GPU }",
    ],
)
def test_twice_is_once(text: str) -> None:
    once = normalise(parse(text), gpus=2)
    assert normalise(once, gpus=2) == once


def test_the_argument_is_not_changed() -> None:
    config = parse("name: 'm' backend: 'python' dynamic_batching { }")
    before = config.SerializeToString(deterministic=True)
    normalise(config)
    assert config.SerializeToString(deterministic=True) == before


def test_written_values_stay() -> None:
    text = (
        "name: 'm' backend: 'onnxruntime' max_batch_size: 8 version_policy { all { } }"
        "optimization { input_pinned_memory { enable: false } output_pinned_memory { enable: false } }"
        "dynamic_batching { preferred_batch_size: 2 } default_model_filename: 'other.onnx'"
        "instance_group { name: 'g' count: 5 kind: KIND_MODEL }"
    )
    assert normalise(parse(text)) == parse(text)


GROUPS = [
    # backend, group, gpus, prefers -> kind, count, devices
    ("onnxruntime", "", 0, True, "KIND_CPU", 2, []),
    ("python", "", 0, True, "KIND_CPU", 1, []),
    ("onnxruntime", "", 2, True, "KIND_GPU", 1, [0, 1]),
    ("python", "", 2, False, "KIND_CPU", 1, []),
    ("onnxruntime", "instance_group { kind: KIND_GPU }", 1, True, "KIND_GPU", 1, [0]),
    ("onnxruntime", "instance_group { gpus: 1 }", 2, False, "KIND_GPU", 1, [1]),
    ("onnxruntime", "instance_group { count: 3 }", 0, True, "KIND_CPU", 3, []),
    ("onnxruntime", "instance_group { kind: KIND_MODEL }", 2, True, "KIND_MODEL", 1, []),
]


@pytest.mark.parametrize(("backend", "group", "gpus", "prefers", "kind", "count", "devices"), GROUPS)
def test_instance_groups(
    backend: str, group: str, gpus: int, prefers: bool, kind: str, count: int, devices: list[int]
) -> None:
    config = parse(f"name: 'm' backend: '{backend}' " + group)
    (found,) = to_json(normalise(config, gpus=gpus, backend_prefers_gpu=prefers))["instance_group"]
    assert (found["kind"], found["count"], found["gpus"]) == (kind, count, devices)


def test_names_of_written_groups() -> None:
    done = normalise(parse("name: 'm' backend: 'python' instance_group { } instance_group { name: 'g' }"))
    assert [group.name for group in done.instance_group] == ["m_0", "g"]


def test_sequence_defaults() -> None:
    direct = normalise(parse("name: 'm' backend: 'python' max_batch_size: 4 sequence_batching { }"))
    assert (
        direct.sequence_batching
        == parse("sequence_batching { max_sequence_idle_microseconds: 1000000 }").sequence_batching
    )
    oldest = normalise(parse("name: 'm' backend: 'python' max_batch_size: 4 sequence_batching { oldest { } }"))
    assert list(oldest.sequence_batching.oldest.preferred_batch_size) == [4]


def test_an_ensemble_gets_no_instances() -> None:
    done = normalise(parse("name: 'm' platform: 'ensemble' ensemble_scheduling { }"))
    assert not done.instance_group
    assert not done.HasField("optimization")


@pytest.mark.parametrize(
    ("backend", "platform", "filename"),
    [
        ("python", "", "model.py"),
        ("tensorflow", "tensorflow_graphdef", "model.graphdef"),
        ("openvino", "", "model.xml"),
        ("mine", "", ""),
    ],
)
def test_default_filename(backend: str, platform: str, filename: str) -> None:
    config = parse(f"name: 'm' backend: '{backend}' platform: '{platform}'")
    assert normalise(config).default_model_filename == filename


def test_an_output_that_is_written_twice_is_one() -> None:
    """TensorRT-LLM's template of an ensemble has one. Another type or other dims are still refused."""
    head = "name: 'm' max_batch_size: 4 backend: 'python' "
    outputs = "output { name: 'a' data_type: TYPE_INT32 dims: 1 } output { name: 'b' data_type: TYPE_INT32 dims: 1 } "
    again = normalise(parse(head + outputs + "output { name: 'a' data_type: TYPE_INT32 dims: 1 }"))
    assert again == normalise(parse(head + outputs))
    other = normalise(parse(head + outputs + "output { name: 'a' data_type: TYPE_INT64 dims: 1 }"))
    with pytest.raises(ConfigError, match="output 'a' is specified more than once for model 'm'"):
        validate_instances(other)
