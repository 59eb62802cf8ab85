"""Accelerators and their parameters as onnxruntime's providers and options, after the rules of Triton's backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument, Unsupported
from charonia.models.config_forms import parse
from executors.backends.onnxruntime.execution_providers import (
    CPU,
    CUDA,
    OPENVINO,
    TENSORRT,
    cuda_options,
    execution_providers,
    tensorrt_options,
)
from executors.configuration.config import normalise

EVERYTHING = [TENSORRT, CUDA, OPENVINO, CPU]
INPUT = 'input {{ name: "{}" data_type: TYPE_FP32 dims: [{}] }}'


def source(text: str = "", backend_config: dict[str, str] | None = None, **parameters: str) -> ModelSource:
    said = "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items())
    config = normalise(parse(f'name: "m" backend: "onnxruntime" {text} {said}'))
    return ModelSource("m", 3, Path("/m"), config, backend_config or {})


def accelerated(*entries: tuple[str, str, dict[str, str]]) -> str:
    """The text of accelerators, each its kind ("gpu", "cpu"), name and parameters."""
    said = ""
    for kind, name, parameters in entries:
        keys = "".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
        said += f'{kind}_execution_accelerator {{ name: "{name}" {keys} }} '
    return f"optimization {{ execution_accelerators {{ {said} }} }}"


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("", "CPU", [(CPU, {})]),
        ("", "GPU", [(CUDA, {"device_id": "1"}), (CPU, {})]),
        ("", "MODEL", [(CUDA, {"device_id": "1"}), (CPU, {})]),
        (accelerated(("cpu", "openvino", {})), "CPU", [(OPENVINO, {"device_type": "CPU"}), (CPU, {})]),
        (
            accelerated(("cpu", "openvino", {"num_of_threads": "2"})),
            "CPU",
            [(OPENVINO, {"device_type": "CPU", "num_of_threads": "2"}), (CPU, {})],
        ),
        # those for the other kind do not count
        (accelerated(("cpu", "openvino", {})), "GPU", [(CUDA, {"device_id": "1"}), (CPU, {})]),
        (accelerated(("gpu", "tensorrt", {})), "CPU", [(CPU, {})]),
        (
            accelerated(("gpu", "cuda", {"use_ep_level_unified_stream": "true", "tunable_op_enable": "1"})),
            "GPU",
            [(CUDA, {"use_ep_level_unified_stream": "1", "tunable_op_enable": "1", "device_id": "1"}), (CPU, {})],
        ),
        # CUDA is what TensorRT leaves to it, in whatever order they stand
        (
            accelerated(("gpu", "cuda", {"use_tf32": "0"}), ("gpu", "tensorrt", {"precision_mode": "FP16"})),
            "GPU",
            [
                (TENSORRT, {"trt_fp16_enable": "1", "device_id": "1"}),
                (CUDA, {"use_tf32": "0", "device_id": "1"}),
                (CPU, {}),
            ],
        ),
    ],
)
def test_the_providers_of_an_instance(text: str, kind: str, expected: list[tuple[str, dict[str, str]]]) -> None:
    assert execution_providers(source(text), kind, 1, EVERYTHING) == expected


def test_a_model_of_kind_model_needs_no_gpu() -> None:
    assert execution_providers(source(), "MODEL", 0, [CPU]) == [(CPU, {})]


@pytest.mark.parametrize(
    ("text", "kind", "available", "error", "message"),
    [
        (
            accelerated(("cpu", "tensorrt", {})),
            "CPU",
            EVERYTHING,
            InvalidArgument,
            "unknown Execution Accelerator 'tensorrt' is requested",
        ),
        (
            accelerated(("gpu", "openvino", {})),
            "GPU",
            EVERYTHING,
            InvalidArgument,
            "^unknown Execution Accelerator 'openvino' is requested$",
        ),
        (
            accelerated(("cpu", "openvino", {})),
            "CPU",
            [CPU],
            Unsupported,
            "no OpenVINOExecutionProvider: install onnxruntime-openvino",
        ),
        (
            accelerated(("gpu", "tensorrt", {})),
            "GPU",
            [CUDA, CPU],
            Unsupported,
            r"no TensorrtExecutionProvider: install charonia\[gpu\] .*tensorrt",
        ),
        (
            accelerated(("gpu", "cuda", {})),
            "GPU",
            [CPU],
            Unsupported,
            r"'cuda'.* no CUDAExecutionProvider: install charonia\[gpu\]",
        ),
        ("", "GPU", [CPU], Unsupported, r"a GPU instance.* no CUDAExecutionProvider: install charonia\[gpu\]"),
    ],
)
def test_what_there_is_not(text: str, kind: str, available: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        execution_providers(source(text), kind, 0, available)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, {}),
        ({"precision_mode": "FP32"}, {}),
        ({"precision_mode": "FP16"}, {"trt_fp16_enable": "1"}),
        ({"precision_mode": "BF16"}, {"trt_bf16_enable": "1"}),
        (
            {
                "precision_mode": "INT8",
                "int8_calibration_table_name": "calibration.flatbuffers",
                "int8_use_native_calibration_table": "false",
            },
            {
                "trt_int8_enable": "1",
                "trt_int8_calibration_table_name": "calibration.flatbuffers",
                "trt_int8_use_native_calibration_table": "0",
            },
        ),
        ({"max_workspace_size_bytes": "1073741824"}, {"trt_max_workspace_size": "1073741824"}),
        (
            {"trt_auxiliary_streams": "-1", "trt_sparsity_enable": "On"},
            {"trt_auxiliary_streams": "-1", "trt_sparsity_enable": "1"},
        ),
        (
            {"trt_tactic_sources": "-CUDNN,+CUBLAS", "trt_engine_cache_path": ""},
            {"trt_tactic_sources": "-CUDNN,+CUBLAS"},
        ),
    ],
)
def test_parameters_of_tensorrt(parameters: dict[str, str], expected: dict[str, str]) -> None:
    assert tensorrt_options(source(), 2, parameters) == expected | {"device_id": "2"}


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"precision_mode": "FP4"}, "^unsupported precision mode 'FP4' is requested$"),
        ({"profile": "1"}, "^unknown parameter 'profile' is provided for TensorRT Execution Accelerator$"),
        (
            {"max_workspace_size_bytes": "much"},
            "'max_workspace_size_bytes' of 'm' must be an integer of at least 0, got 'much'",
        ),
        ({"trt_dla_core": "-1"}, "'trt_dla_core' of 'm' must be an integer of at least 0, got '-1'"),
        ({"trt_auxiliary_streams": "-2"}, "'trt_auxiliary_streams' of 'm' must be an integer of at least -1, got '-2'"),
        ({"trt_dla_enable": "2"}, "'trt_dla_enable' of 'm' must be 0 or 1, got '2'"),
    ],
)
def test_parameters_of_tensorrt_that_make_no_sense(parameters: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        tensorrt_options(source(), 0, parameters)


def test_engines_are_made_for_every_batch_size_at_once() -> None:
    text = "max_batch_size: 8 " + INPUT.format("b", "2, 3") + INPUT.format("a", "4")
    assert tensorrt_options(source(text), 0, {}) == {
        "trt_profile_min_shapes": "a:1x4,b:1x2x3",
        "trt_profile_opt_shapes": "a:8x4,b:8x2x3",
        "trt_profile_max_shapes": "a:8x4,b:8x2x3",
        "device_id": "0",
    }
    assert tensorrt_options(source(text.replace("2, 3", "2, -1")), 0, {}) == {"device_id": "0"}
    own = {"trt_profile_min_shapes": "a:1x4", "trt_profile_max_shapes": "a:2x4", "trt_profile_opt_shapes": "a:2x4"}
    assert tensorrt_options(source(text), 0, own) == own | {"device_id": "0"}


def test_engines_are_kept_where_the_server_says() -> None:
    of = source(backend_config={"trt_engine_cache_path": "/engines"})
    kept = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": "/engines/m/3",
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": "/engines/m/3",
    }
    assert tensorrt_options(of, 0, {}) == kept | {"device_id": "0"}
    own = {"trt_engine_cache_path": "/mine"}
    assert tensorrt_options(of, 0, own) == own | {"device_id": "0"}
    assert tensorrt_options(of, 0, {"trt_engine_cache_enable": "0"})["trt_engine_cache_enable"] == "0"


def test_cuda_takes_what_parameters_say_and_the_accelerator_wins() -> None:
    of = source(gpu_mem_limit="1024", arena_extend_strategy="1", cudnn_conv_algo_search="0")
    assert cuda_options(of, 0, {"cudnn_conv_algo_search": "HEURISTIC", "enable_cuda_graph": "true"}) == {
        "gpu_mem_limit": "1024",
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "enable_cuda_graph": "1",
        "device_id": "0",
    }
    for parameters, text in (
        ({"cudnn_conv_algo_search": "3"}, "^unsupported cudnn_conv_algo_search value '3' is requested$"),
        ({"gpu_mem_limit": "all"}, "'gpu_mem_limit' of 'm' must be an integer of at least 0, got 'all'"),
        ({"gpu_mem_limit": "-1"}, "'gpu_mem_limit' of 'm' must be an integer of at least 0, got '-1'"),
        ({"do_copy_in_default_stream": "maybe"}, "'do_copy_in_default_stream' of 'm' must be 0 or 1, got 'maybe'"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            cuda_options(source(**parameters), 0, {})
