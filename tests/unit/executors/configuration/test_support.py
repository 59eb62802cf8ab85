"""What is not built yet is said, never ignored."""

from __future__ import annotations

import pytest

from charonia.models.config_forms import parse
from executors.configuration.config import normalise, unsupported_features

CASES = [
    (
        "instance_group { name: 'g' secondary_devices { } }",
        "'secondary_devices' (instance group 'g') is not supported yet",
    ),
    (
        "optimization { execution_accelerators { cpu_execution_accelerator { name: 'openvino' } } }",
        "the execution accelerator 'openvino' is not supported yet",
    ),
    (
        "model_operations { op_library_filename: 'l' }",
        "'model_operations.op_library_filename' of the backend 'python' is not supported yet",
    ),
    (
        "instance_group { kind: KIND_GPU } cc_model_filenames { key: '7.5' value: 'f' }",
        "'cc_model_filenames' of a GPU instance is not supported yet",
    ),
    (
        "parameters { key: 'TRITON_BATCH_STRATEGY_PATH' value { string_value: '/s.so' } }",
        "custom batching by a C++ library ('TRITON_BATCH_STRATEGY_PATH'; see 'charonia.batch_strategy') is not "
        "supported yet",
    ),
    ("runtime: 'other.so'", "the runtime 'other.so' is not supported yet"),
]


@pytest.mark.parametrize(("text", "sentence"), CASES)
def test_missing_features_are_named(text: str, sentence: str) -> None:
    assert unsupported_features(normalise(parse("name: 'm' backend: 'python' " + text))) == [sentence]


def test_a_group_without_a_name_has_the_one_that_it_will_get() -> None:
    written = parse("name: 'm' backend: 'python' instance_group [ { }, { secondary_devices { } } ]")
    assert unsupported_features(written) == ["'secondary_devices' (instance group 'm_1') is not supported yet"]


def test_what_is_built_is_not_named() -> None:
    config = parse(
        "name: 'm' backend: 'onnxruntime' max_batch_size: 4 runtime: 'libtriton_onnxruntime.so'"
        "input { name: 'x' dims: 2 reshape { shape: [1, 2] } optional: true } output { label_filename: 'l' }"
        "dynamic_batching { priority_levels: 3 default_priority_level: 1 default_queue_policy { max_queue_size: 4 } }"
        "instance_group { count: 2 passive: true } model_warmup { name: 'w' } version_policy { all { } }"
        "parameters { key: 'a' value { string_value: 'b' } } metric_tags { key: 'a' value: 'b' }"
        "optimization { priority: PRIORITY_MAX graph { level: 1 } eager_batching: true cuda { graphs: true } "
        "execution_accelerators { gpu_execution_accelerator { name: 'tensorrt' } } }"
        "instance_group { kind: KIND_CPU } cc_model_filenames { key: '7.5' value: 'f' }"
        "model_repository_agents { agents { name: 'checksum' } }"
        "model_operations { op_library_filename: 'lib.so' }"
        "model_metrics { metric_control { } }"
        "response_cache { enable: true } model_transaction_policy { decoupled: false }"
    )
    assert unsupported_features(normalise(config)) == []


def test_what_only_tensorrt_has_is_built() -> None:
    config = parse(
        "name: 'm' platform: 'tensorrt_plan' input { name: 'x' is_shape_tensor: true } "
        "output { name: 'y' is_non_linear_format_io: true } instance_group { kind: KIND_GPU profile: '1' } "
        "cc_model_filenames { key: '7.5' value: 'f' } optimization { cuda { graphs: true graph_spec { } } }"
    )
    assert unsupported_features(normalise(config)) == []
