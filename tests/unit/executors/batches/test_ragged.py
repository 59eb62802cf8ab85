"""Ragged batches: flat inputs, the tensors that say where each request begins, and outputs cut by shapes (C20-C22)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from backend_calls import instance_of, signature_of
from onnx import TensorProto, helper

from charonia.backend import InstanceSpec, ModelSource
from charonia.datatypes import DataType
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, pack_request, request_meta, unpack_request, unpack_response
from executors.backends.onnxruntime import OnnxRuntimeBackend
from executors.batches.assembly import Planner, Workspace, groups, join
from executors.batches.execution import Batch
from executors.batches.ragged import batch_inputs
from executors.configuration.autofill import from_graph
from executors.configuration.config import InstanceError, normalise, validate

CONFIG = """
name: "m" backend: "onnxruntime" max_batch_size: 16 dynamic_batching { }
input { name: "VALUES" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
input { name: "FACTOR" data_type: TYPE_FP32 dims: [ 1 ] reshape { } }
output { name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] reshape { } }
output { name: "SCALED" data_type: TYPE_FP32 dims: [ -1 ] }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ENDS" data_type: TYPE_INT32 source_input: "VALUES" }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "COUNTS" data_type: TYPE_INT32 source_input: "VALUES" }
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "SCALED" source_input: "VALUES" }
"""


def save_graph(path: Path) -> None:
    """SUM[i] = FACTOR[i] * the sum of request i's values; SCALED = 3 * VALUES, flat as it came."""

    def value(name: str, element: int = TensorProto.FLOAT, dims: tuple[str, ...] = ("n",)) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, element, dims)

    zero = helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0])
    first = helper.make_tensor("first", TensorProto.INT64, [1], [0])
    one = helper.make_tensor("one", TensorProto.INT32, [1], [1])
    three = helper.make_tensor("three", TensorProto.FLOAT, [1], [3.0])
    nodes = [
        # running sums with a leading zero, read at the ends of this request and of the one before
        helper.make_node("CumSum", ["VALUES", "axis"], ["running"]),
        helper.make_node("Concat", ["zero", "running"], ["marks"], axis=0),
        helper.make_node("Gather", ["marks", "ENDS"], ["upto"]),
        helper.make_node("Sub", ["ENDS", "COUNTS"], ["starts"]),
        helper.make_node("Gather", ["marks", "starts"], ["before"]),
        helper.make_node("Sub", ["upto", "before"], ["own"]),
        helper.make_node("Mul", ["own", "FACTOR"], ["SUM"]),
        helper.make_node("Mul", ["VALUES", "three"], ["SCALED"]),
    ]
    axis = helper.make_tensor("axis", TensorProto.INT32, [], [0])
    graph = helper.make_graph(
        nodes,
        "ragged",
        [
            value("VALUES"),
            value("FACTOR", dims=("b",)),
            value("ENDS", TensorProto.INT32, ("b",)),
            value("COUNTS", TensorProto.INT32, ("b",)),
        ],
        [value("SUM", dims=("b",)), value("SCALED")],
        [zero, first, one, three, axis],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path.parent.mkdir(parents=True)
    onnx.save(model, path)


def record(number: int, *tensors: Tensor, rows: int = 1, outputs: tuple[str, ...] = ()) -> RequestRecord:
    packed = pack_request(
        number.to_bytes(16, "big"),
        b"e",
        b"",
        request_meta(1, "h", tensors, outputs, {}),
        [t.data for t in tensors],
        rows=rows,
        signature=0,
        level=0,
        accepted_ns=0,
    )
    return unpack_request(packed)


def ragged(text: str) -> ModelInterface:
    config = normalise(parse(text))
    validate(config, "m")
    return ModelInterface.of(config)


async def test_a_real_graph_gives_each_request_what_it_gives_it_alone(tmp_path: Path) -> None:
    save_graph(tmp_path / "1" / "model.onnx")
    backend = OnnxRuntimeBackend()
    written = parse(CONFIG)
    source = ModelSource("m", 1, tmp_path, written)
    config = normalise(from_graph(written, await signature_of(backend, source)))
    validate(config, "m")
    assert [item.name for item in config.input] == ["VALUES", "FACTOR"]  # what the server makes is nobody's to send
    interface = ModelInterface.of(config)
    source = ModelSource("m", 1, tmp_path, config)
    instance = await instance_of(backend, InstanceSpec("m_0", "CPU", -1, source, interface))

    session = onnxruntime.InferenceSession(tmp_path / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(3)
    parts = [rng.integers(-8, 8, (1, size)).astype(np.float32) for size in (3, 4, 5, 1, 4)]
    factors = [np.array([[index + 1]], np.float32) for index in range(len(parts))]
    records = [
        record(index, Tensor.of("VALUES", part), Tensor.of("FACTOR", factor))
        for index, (part, factor) in enumerate(zip(parts, factors, strict=True))
    ]
    batch = Batch(Planner(interface), 1, records)
    executed = batch.run_on(instance, Workspace())
    assert not executed.failures
    assert [(e.indices, e.rows) for e in executed.executions] == [((0, 1, 2, 3, 4), 5)]  # one execution for all
    for part, factor, answer in zip(parts, factors, executed.answers, strict=True):
        count = np.array([part.size], np.int32)
        alone = session.run(None, {"VALUES": part[0], "FACTOR": factor[0], "ENDS": count, "COUNTS": count})
        outputs = {tensor.name: tensor for tensor in unpack_response(answer).outputs}
        assert outputs["SUM"].shape == (1, 1)
        assert outputs["SUM"].array().ravel().tolist() == alone[0].tolist()
        assert outputs["SCALED"].shape == part.shape
        assert outputs["SCALED"].array().tolist() == [alone[1].tolist()]
    instance.close()


KINDS = [
    ("BATCH_ELEMENT_COUNT", [6, 4, 5]),
    ("BATCH_ACCUMULATED_ELEMENT_COUNT", [6, 10, 15]),
    ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 10, 15]),
    ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 6),
    ("BATCH_ITEM_SHAPE", [[3, 1], [3, 1], [2, 2], [1, 5]]),
    ("BATCH_ITEM_SHAPE_FLATTEN", [3, 1, 3, 1, 2, 2, 1, 5]),
]


@pytest.mark.parametrize(("kind", "expected"), KINDS)
@pytest.mark.parametrize("datatype", [DataType.INT32, DataType.FP32])
def test_every_kind_of_batch_input(kind: str, expected: list[object], datatype: DataType) -> None:
    interface = ragged(
        'name: "m" backend: "b" max_batch_size: 8 '
        'input { name: "X" data_type: TYPE_INT8 dims: [ -1, -1 ] allow_ragged_batch: true } '
        'output { name: "Y" data_type: TYPE_INT8 dims: [ -1 ] } '
        f'batch_input {{ kind: {kind} target_name: "A" target_name: "B" data_type: {datatype.config_name} '
        'source_input: "X" }'
    )
    planner = Planner(interface)
    shapes = [(2, 3, 1), (1, 2, 2), (1, 1, 5)]
    plans = [planner.plan(record(0, Tensor.of("X", np.zeros(s, np.int8)), rows=s[0])) for s in shapes]
    made = batch_inputs(interface, plans)
    assert made["A"] is made["B"]
    assert made["A"].dtype == datatype.numpy
    assert made["A"].tolist() == expected


def test_only_a_ragged_input_lets_shapes_differ() -> None:
    text = (
        'name: "m" backend: "b" max_batch_size: 8 '
        'input {{ name: "X" data_type: TYPE_INT8 dims: [ -1 ] allow_ragged_batch: {ragged} }} '
        'input {{ name: "Z" data_type: TYPE_INT8 dims: [ -1 ] }} output {{ name: "Y" data_type: TYPE_INT8 dims: -1 }}'
    )

    def runs(allow: bool, sizes: list[tuple[int, int]]) -> list[int]:
        interface = ragged(text.format(ragged=str(allow).lower()))
        planner = Planner(interface)
        planned = [
            (
                i,
                planner.plan(
                    record(i, Tensor.of("X", np.zeros((1, x), np.int8)), Tensor.of("Z", np.zeros((1, z), np.int8)))
                ),
            )
            for i, (x, z) in enumerate(sizes)
        ]
        return [len(run) for run in groups(interface, planned)]

    assert runs(True, [(1, 2), (4, 2), (0, 2)]) == [3]
    assert runs(False, [(1, 2), (4, 2), (0, 2)]) == [1, 1, 1]
    assert runs(True, [(1, 2), (4, 3), (1, 3)]) == [1, 2]  # the other input is not ragged


def test_strings_are_joined_flat_too_and_a_single_request_is_flat_as_well() -> None:
    interface = ragged(
        'name: "m" backend: "b" max_batch_size: 8 '
        'input { name: "S" data_type: TYPE_STRING dims: [ -1 ] allow_ragged_batch: true } '
        'output { name: "Y" data_type: TYPE_INT8 dims: [ -1 ] }'
    )
    planner = Planner(interface)
    words = [[b"a", b"bc"], [b""], [b"d", b"e", b"f"]]
    records = [record(i, Tensor.of("S", np.array([own], np.object_))) for i, own in enumerate(words)]
    run = [(planner.plan(r), r) for r in records]
    assert join(interface, run, Workspace())["S"].tolist() == [w for own in words for w in own]
    assert join(interface, run[:1], Workspace())["S"].tolist() == words[0]


def batch_of(text: str, inputs: list[list[Tensor]], results: dict[str, np.ndarray]) -> Batch:
    class Answering:
        def execute(self, arrays: object, outputs: object) -> dict[str, np.ndarray]:
            return results

        def close(self) -> None:
            pass

    batch = Batch(Planner(ragged(text)), 1, [record(i, *tensors) for i, tensors in enumerate(inputs)])
    batch.run_on(Answering(), Workspace())
    return batch


SCATTERED = (
    'name: "m" backend: "b" max_batch_size: 8 '
    'input { name: "X" data_type: TYPE_INT8 dims: [ -1, 2 ] allow_ragged_batch: true optional: true } '
    'output { name: "Y" data_type: TYPE_INT16 dims: [ -1, 3 ] } '
    'batch_output { target_name: "Y" source_input: "X" }'
)


def test_varying_sizes_of_an_output_are_those_of_its_source_in_the_same_place() -> None:
    inputs = [[Tensor.of("X", np.zeros((1, n, 2), np.int8))] for n in (2, 1, 4)]
    batch = batch_of(SCATTERED, inputs, {"Y": np.arange(21, dtype=np.int16)})
    cut = [unpack_response(answer).outputs[0] for answer in batch.executed.answers]
    assert [t.shape for t in cut] == [(1, 2, 3), (1, 1, 3), (1, 4, 3)]
    assert [t.array().ravel().tolist() for t in cut] == [list(range(6)), list(range(6, 9)), list(range(9, 21))]


@pytest.mark.parametrize("size", [20, 22])
def test_an_output_of_another_size_is_nobodys(size: int) -> None:
    inputs = [[Tensor.of("X", np.zeros((1, n, 2), np.int8))] for n in (2, 1, 4)]
    batch = batch_of(SCATTERED, inputs, {"Y": np.zeros(size, np.int16)})
    assert len(batch.executed.failures) == 3
    assert "expecting 21 elements by the shapes of input 'X'" in batch.executed.failures[0].error.message


def test_a_request_without_the_source_fails_alone() -> None:
    inputs = [[Tensor.of("X", np.zeros((1, 1, 2), np.int8))], []]
    batch = batch_of(SCATTERED, inputs, {"Y": np.zeros(3, np.int16)})
    (failure,) = batch.executed.failures
    assert (failure.index, failure.error.message) == (
        1,
        "input 'X' is needed to make the batch inputs or cut the batch outputs of model 'm'",
    )


REFUSED = [
    ('input { name: "FACTOR" data_type: TYPE_FP32 dims: 1 } batch_input { kind: BATCH_ELEMENT_COUNT target_name: "NO" '
     'data_type: TYPE_INT32 source_input: "VALUES" }', "unexpected batch input 'NO', allowed inputs are: "),
    ('batch_input { kind: BATCH_ELEMENT_COUNT target_name: "ENDS" data_type: TYPE_FP32 source_input: "VALUES" }',
     "configuration expects datatype TYPE_FP32 for batch input 'ENDS', model provides TYPE_INT32"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), REFUSED)
async def test_batch_inputs_must_be_the_files(tmp_path: Path, text: str, reason: str) -> None:
    save_graph(tmp_path / "1" / "model.onnx")
    written = parse(
        'name: "m" backend: "onnxruntime" max_batch_size: 4 '
        'input { name: "VALUES" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }' + text
    )
    found = await signature_of(OnnxRuntimeBackend(), ModelSource("m", 1, tmp_path, written))
    with pytest.raises(InstanceError) as raised:
        from_graph(written, found)
    assert reason in raised.value.message


def test_a_ragged_input_must_be_flat_in_the_file() -> None:
    from charonia.backend import GraphSignature, TensorSignature

    graph = GraphSignature((TensorSignature("X", "FP32", (-1, 3)),), (TensorSignature("Y", "FP32", (-1,)),))
    text = 'name: "m" max_batch_size: 4 input { name: "X" data_type: TYPE_FP32 dims: 3 allow_ragged_batch: true }'
    with pytest.raises(InstanceError) as raised:
        from_graph(parse(text), graph)
    assert "model provides input with shape [-1]  for ragged input 'X', model provides [-1,3]" in raised.value.message
