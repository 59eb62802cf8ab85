"""The typed form of `sequence_batching`, and which tensors of a model file are its own."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from charonia.backend import GraphSignature, TensorSignature
from charonia.datatypes import DataType
from charonia.models.config_errors import InstanceError
from charonia.models.sequence_batcher import Control, SequenceBatching
from executors.configuration.autofill import check_against_graph, from_graph
from executors.configuration.config import normalise, validate_instances
from protos.model_config_pb2 import ModelConfig

STATE = 'state { input_name: "h" output_name: "hn" data_type: TYPE_FP32 dims: [ 2 ] }'
CONTROL = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 2 ] } }'


def parse(block: str, more: str = "max_batch_size: 4") -> ModelConfig:
    head = 'name: "m" backend: "onnxruntime" platform: "onnxruntime_onnx"'
    return text_format.Parse(f"{head} {more} sequence_batching {{ {block} }}", ModelConfig())


def typed(block: str, more: str = "max_batch_size: 4") -> SequenceBatching:
    return SequenceBatching.of(normalise(parse(block, more)))


def test_defaults() -> None:
    block = typed("")
    assert (block.direct, block.max_idle_us, block.checkpoint_every, block.states) == (True, 1_000_000, 1, ())
    assert (block.slots(4), block.slots(0)) == (4, 1)
    assert typed("oldest { max_candidate_sequences: 9 }").slots(4) == 9
    assert typed("oldest { }").slots(4) == 4


def test_controls_and_states() -> None:
    corrid = 'control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }'
    block = typed(CONTROL + corrid + STATE)
    assert block.controls == (
        Control("START", "START", DataType.FP32, (0.0, 2.0)),
        Control("ID", "CORRID", DataType.BYTES),
    )
    assert block.correlation_control is block.controls[1]
    assert (block.states[0].dims, block.states[0].initial.dims) == ((2,), (2,))
    variable = typed(STATE.replace("[ 2 ]", "[ -1, 3 ]"))
    assert variable.states[0].initial.dims == (1, 3), "zeros of dims with -1 as 1 (S39)"


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("7", 7)])
def test_checkpoints(text: str, number: int) -> None:
    parameter = f'parameters {{ key: "charonia.checkpoint_every" value {{ string_value: "{text}" }} }}'
    assert typed("", parameter).checkpoint_every == number


@pytest.mark.parametrize(
    ("block", "more", "text"),
    [
        ("", 'parameters { key: "charonia.checkpoint_every" value { string_value: "x" } }', "must be an integer >= 0"),
        (CONTROL, 'input { name: "START" data_type: TYPE_FP32 dims: 1 }', "'START' must not be an input"),
        (STATE, 'input { name: "h" data_type: TYPE_FP32 dims: 1 }', "State input name 'h' must not be an input"),
        ('state { input_name: "h" data_type: TYPE_FP32 dims: 1 }', "", "must have 'input_name' and 'output_name'"),
        ('state { input_name: "h" output_name: "o" dims: 1 }', "", "'h' must specify 'data_type'"),
        ('state { input_name: "h" output_name: "o" data_type: TYPE_FP32 dims: 0 }', "", "dimension must be integer"),
    ],
)
def test_what_cannot_be_is_refused(block: str, more: str, text: str) -> None:
    more += ' output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    with pytest.raises(InstanceError, match=text):
        validate_instances(normalise(parse(block, more)))


def tensor(name: str, *dims: int, datatype: str = "FP32") -> TensorSignature:
    return TensorSignature(name, datatype, dims)


GRAPH = GraphSignature(
    (tensor("x", -1, 3), tensor("START", -1, 1), tensor("h", -1, 2)), (tensor("y", -1, 3), tensor("hn", -1, 2))
)


def test_the_servers_tensors_are_not_the_models() -> None:
    done = from_graph(parse(CONTROL + STATE), GRAPH)
    assert [item.name for item in done.input] == ["x"]
    assert [item.name for item in done.output] == ["y"]
    check_against_graph(done, GRAPH)
    listed = parse(CONTROL + STATE, 'max_batch_size: 4 output { name: "hn" data_type: TYPE_FP32 dims: 2 }')
    assert [item.name for item in from_graph(listed, GRAPH).output] == ["hn"], "a listed state is told as well"


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            CONTROL.replace('"START"', '"BEGIN"'),
            "specified sequence batching control tensor 'BEGIN', but model does not",
        ),
        (CONTROL.replace("fp32", "int32"), "expects datatype TYPE_INT32 for control tensor 'START', model provides"),
        (STATE.replace("[ 2 ]", "[ 5 ]"), r"expects shape \[-1, 5\] for state input 'h', model provides \[-1, 2\]"),
        (STATE.replace('"hn"', '"ho"'), "specified sequence batching state output 'ho', but model does not"),
    ],
)
def test_a_file_that_lacks_them_is_refused(block: str, text: str) -> None:
    with pytest.raises(InstanceError, match=text):
        from_graph(parse(block), GRAPH)
