"""Completing a written configuration from a model file's tensors (C70, C71), and settling its backend (R5, C73)."""

from __future__ import annotations

import pytest

from charonia.backend import GraphSignature, TensorSignature
from charonia.models.config_forms import parse
from executors.configuration import autofill
from executors.configuration.config import InstanceError, StructureError

BATCHABLE = GraphSignature(
    inputs=(TensorSignature("x", "FP32", (-1, 3)),), outputs=(TensorSignature("y", "BYTES", (-1, -1, 2)),)
)
FIXED = GraphSignature(inputs=(TensorSignature("x", "FP32", (1, 3)),), outputs=(TensorSignature("y", "FP32", (-1,)),))
HEAD = 'name: "m" backend: "onnxruntime" '


def test_nothing_written_and_every_first_dimension_dynamic() -> None:
    assert autofill.from_graph(parse(HEAD), BATCHABLE) == parse(
        HEAD + "max_batch_size: 4 dynamic_batching { }"
        "input { name: 'x' data_type: TYPE_FP32 dims: 3 } output { name: 'y' data_type: TYPE_STRING dims: [-1, 2] }"
    )


def test_nothing_written_and_a_fixed_first_dimension() -> None:
    assert autofill.from_graph(parse(HEAD), FIXED) == parse(
        HEAD + "input { name: 'x' data_type: TYPE_FP32 dims: [1, 3] }output { name: 'y' data_type: TYPE_FP32 dims: -1 }"
    )


@pytest.mark.parametrize(("default", "size", "dynamic"), [(0, 0, False), (1, 1, False), (16, 16, True)])
def test_default_max_batch_size(default: int, size: int, dynamic: bool) -> None:
    done = autofill.from_graph(parse(HEAD), BATCHABLE, default_max_batch=default)
    assert (done.max_batch_size, done.HasField("dynamic_batching")) == (size, dynamic)


@pytest.mark.parametrize(("options", "size"), [({}, 4), ({"default-max-batch-size": "9"}, 9)])
def test_default_max_batch_size_of_the_backend(options: dict[str, str], size: int) -> None:
    assert autofill.default_max_batch_size(options) == size


def test_bad_default_max_batch_size() -> None:
    with pytest.raises(InstanceError, match="must be an integer, got 'x'"):
        autofill.default_max_batch_size({"default-max-batch-size": "x"})


def test_written_fields_win() -> None:
    written = HEAD + "max_batch_size: 32 sequence_batching { } input { name: 'x' optional: true dims: 3 }"
    done = autofill.from_graph(parse(written), BATCHABLE)
    assert done.max_batch_size == 32
    assert done.WhichOneof("scheduling_choice") == "sequence_batching"
    assert done.input == parse("input { name: 'x' data_type: TYPE_FP32 dims: 3 optional: true }").input
    assert [output.name for output in done.output] == ["y"]


def test_tensors_written_with_full_rank_mean_no_batch_dimension() -> None:
    # A model whose first dimension is dynamic but not a batch, such as time.
    done = autofill.from_graph(parse(HEAD + "input { name: 'x' data_type: TYPE_FP32 dims: [-1, 3] }"), BATCHABLE)
    assert done.max_batch_size == 0
    assert not done.HasField("dynamic_batching")
    assert list(done.output[0].dims) == [-1, -1, 2]


def test_what_counts_is_the_rank_the_model_sees() -> None:
    written = HEAD + "input { name: 'x' data_type: TYPE_FP32 dims: [1, 3] reshape { shape: 3 } }"
    assert autofill.from_graph(parse(written), BATCHABLE).max_batch_size == 4


def test_a_scalar_for_each_item_is_reshaped() -> None:
    graph = GraphSignature((TensorSignature("x", "INT64", (-1,)),), (TensorSignature("y", "INT64", (-1,)),))
    done = autofill.from_graph(parse(HEAD), graph)
    assert list(done.input[0].dims) == [1]
    assert done.input[0].HasField("reshape")
    assert not done.input[0].reshape.shape
    assert autofill.from_graph(done, graph) == done


def test_a_written_list_of_outputs_is_left_at_that() -> None:
    graph = GraphSignature(BATCHABLE.inputs, (*BATCHABLE.outputs, TensorSignature("z", "FP32", (-1, 1))))
    done = autofill.from_graph(parse(HEAD + "output { name: 'z' }"), graph)
    assert [output.name for output in done.output] == ["z"]


CONTRADICTIONS = [
    (
        "input { name: 'x' data_type: TYPE_INT8 dims: 3 }",
        BATCHABLE,
        "unable to load model 'm', configuration expects datatype TYPE_INT8 for input 'x', model provides TYPE_FP32",
    ),
    (
        "output { name: 'y' data_type: TYPE_INT8 dims: [2, 2] }",
        BATCHABLE,
        "unable to load model 'm', configuration expects datatype TYPE_INT8 for output 'y', model provides TYPE_STRING",
    ),
    (
        "max_batch_size: 2",
        FIXED,
        "model 'm', tensor 'x': for the model to support batching the shape should have at least 1 dimension and the "
        "first dimension must be -1; but shape expected by the model is [1,3]",
    ),
    (
        "max_batch_size: 2 input { name: 'x' dims: [4] }",
        BATCHABLE,
        "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,3]) but the model configuration specifies 2 "
        "dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
        "making complete shape [-1,4])",
    ),
    (
        "input { name: 'x' dims: 3 }",
        FIXED,
        "model 'm', tensor 'x': the model expects 2 dimensions (shape [1,3]) but the model configuration specifies 1 "
        "dimensions (shape [3])",
    ),
    ("input { name: 'q' dims: 3 }", BATCHABLE, "unexpected inference input 'q', allowed inputs are: x"),
    (
        "",
        GraphSignature((TensorSignature("x", "FP32", ()),), ()),
        "model 'm', tensor 'x': a tensor of rank 0 is not supported",
    ),
]


@pytest.mark.parametrize(("written", "graph", "message"), CONTRADICTIONS)
def test_contradictions(written: str, graph: GraphSignature, message: str) -> None:
    with pytest.raises(InstanceError) as caught:
        autofill.from_graph(parse(HEAD + written), graph)
    assert caught.value.message == message


def test_check_without_autofill() -> None:
    whole = autofill.from_graph(parse(HEAD), BATCHABLE)
    autofill.check_against_graph(whole, BATCHABLE)
    with pytest.raises(InstanceError, match="configuration expects 0 inputs, model provides 1"):
        autofill.check_against_graph(parse(HEAD), BATCHABLE)
    with pytest.raises(InstanceError, match="first dimension must be -1"):
        autofill.check_against_graph(whole, FIXED)


BACKENDS = [
    # written, model name, files -> backend, platform
    ('platform: "onnxruntime_onnx"', "m", [], "onnxruntime", "onnxruntime_onnx"),
    ('platform: "tensorflow_graphdef"', "m", ["model.savedmodel"], "tensorflow", "tensorflow_graphdef"),
    ('backend: "onnxruntime"', "m", [], "onnxruntime", "onnxruntime_onnx"),
    ('backend: "tensorflow"', "m", ["model.graphdef"], "tensorflow", "tensorflow_graphdef"),
    ('backend: "python"', "m", ["model.onnx"], "python", ""),
    ('backend: "mine"', "m", ["model.onnx"], "mine", ""),
    ('platform: "python" backend: "python"', "m", ["model.py"], "python", "python"),
    ('platform: "onnxruntime_onnx" backend: "python"', "m", [], "python", "onnxruntime_onnx"),
    ('platform: "any" backend: "mine"', "m", [], "mine", "any"),
    ("", "m", ["model.onnx"], "onnxruntime", "onnxruntime_onnx"),
    ("", "m", ["README", "model.py"], "python", ""),
    ("", "m", ["model.xml", "model.bin"], "openvino", ""),
    ("", "m", ["xgboost.ubj"], "fil", ""),
    ("", "m.python", [], "python", ""),
    ("", "m.onnxruntime", ["other.onnx"], "onnxruntime", "onnxruntime_onnx"),
    ("max_batch_size: 1 ensemble_scheduling { step { model_name: 'a' input_map { key: 'i' value: 'x' }"
     " output_map { key: 'o' value: 'y' } } } input { name: 'x' } output { name: 'y' }", "m", [], "", "ensemble"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "files", "backend", "platform"), BACKENDS)
def test_backend_detection(text: str, name: str, files: list[str], backend: str, platform: str) -> None:
    done = autofill.prepare(parse(text), name, files)
    assert (done.backend, done.platform, done.name) == (backend, platform, name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must specify 'platform' or 'backend' for 'm'"),
        ('platform: "nope"', "unexpected platform type 'nope' for m"),
        (
            'platform: "pytorch_libtorch" backend: "onnxruntime"',
            "unexpected 'platform' and 'backend' pair, got:pytorch_libtorch, onnxruntime",
        ),
        ('platform: "nope" backend: "pytorch"', "unexpected 'platform' and 'backend' pair, got:nope, pytorch"),
        ('platform: "ensemble" backend: "python"', "unexpected 'platform' and 'backend' pair, got:ensemble, python"),
    ],
)
def test_backend_errors(text: str, message: str) -> None:
    with pytest.raises(StructureError) as caught:
        autofill.prepare(parse(text), "m", ["unknown.bin"])
    assert caught.value.message == message
