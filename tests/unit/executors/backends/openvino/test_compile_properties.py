"""Parameters of a configuration as OpenVINO's properties, after the rules of Triton's backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument
from charonia.models.config_forms import parse
from executors.backends.openvino.compile_properties import compile_properties, is_virtual, target_device
from executors.configuration.config import normalise


def source(**parameters: str) -> ModelSource:
    said = "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items())
    return ModelSource("m", 1, Path("/m"), normalise(parse(f'name: "m" backend: "openvino" {said}')))


USUAL = {
    "INFERENCE_NUM_THREADS": "8",
    "ENABLE_CPU_PINNING": "NO",
    "INFERENCE_PRECISION_HINT": "f32",
    "NUM_STREAMS": "2",
}
NO_STREAMS = {key: value for key, value in USUAL.items() if key != "NUM_STREAMS"}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, USUAL),
        ({"INFERENCE_NUM_THREADS": "3"}, USUAL | {"INFERENCE_NUM_THREADS": "3"}),
        ({"TF_NUM_INTRA_THREADS": "3"}, USUAL | {"INFERENCE_NUM_THREADS": "3"}),
        ({"INFERENCE_NUM_THREADS": "0", "TF_NUM_INTRA_THREADS": "0"}, USUAL),
        ({"COMPILATION_NUM_THREADS": "1"}, USUAL | {"COMPILATION_NUM_THREADS": "1"}),
        ({"HINT_BF16": "yes"}, USUAL | {"INFERENCE_PRECISION_HINT": "bf16"}),
        ({"NUM_STREAMS": "auto"}, USUAL | {"NUM_STREAMS": "AUTO"}),
        ({"NUM_STREAMS": "NUMA"}, USUAL | {"NUM_STREAMS": "NUMA"}),
        ({"NUM_STREAMS": "5"}, USUAL | {"NUM_STREAMS": "5"}),
        ({"PERFORMANCE_HINT": "throughput"}, NO_STREAMS | {"PERFORMANCE_HINT": "THROUGHPUT"}),
        (
            {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"},
            USUAL | {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"},
        ),
    ],
)
def test_what_the_cpu_gets(parameters: dict[str, str], expected: dict[str, str]) -> None:
    assert compile_properties(source(**parameters), "CPU", streams=2, cores=8) == expected


def test_a_virtual_device_hands_the_cpus_properties_on() -> None:
    of = source(TARGET_DEVICE="auto:cpu", PERFORMANCE_HINT="LATENCY")
    device = target_device(of)
    assert device == "AUTO:CPU"
    assert is_virtual(device)
    assert compile_properties(of, device, streams=2, cores=8) == {
        "PERFORMANCE_HINT": "LATENCY",
        "DEVICE_PROPERTIES": {"CPU": NO_STREAMS | {"PERFORMANCE_HINT": "LATENCY"}},
    }
    assert target_device(source()) == "CPU"


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"PERFORMANCE_HINT": "FAST"}, "'PERFORMANCE_HINT' of 'm' must be one of LATENCY, THROUGHPUT, CUM"),
        ({"NUM_STREAMS": "many"}, "'NUM_STREAMS' of 'm' must be AUTO, NUMA or an integer of at least 0, got 'MANY'"),
        ({"INFERENCE_NUM_THREADS": "-1"}, "'INFERENCE_NUM_THREADS' of 'm' must be an integer of at least 0, got '-1'"),
        ({"HINT_BF16": "perhaps"}, "'HINT_BF16' of 'm' must be 0 or 1, got 'perhaps'"),
    ],
)
def test_what_makes_no_sense(parameters: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        compile_properties(source(**parameters), "CPU", 1, 1)
