"""The bytes of weights are counted from an ONNX file alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from executors.backends.onnxruntime.graph_weights import weight_bytes


def model(path: Path, initializers: list[TensorProto], nodes: list[onnx.NodeProto] | None = None) -> onnx.ModelProto:
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "ac")
    graph = helper.make_graph(nodes or [helper.make_node("Identity", ["a"], ["c"])], "g", [given], [made], initializers)
    found = helper.make_model(graph)
    onnx.save(found, path)
    return found


def test_tensors_of_every_kind_are_counted(tmp_path: Path) -> None:
    arrays = [np.zeros((3, 5), dtype) for dtype in ("f2", "f4", "f8", "i1", "u1", "i2", "i4", "i8", "?", "c16")]
    tensors = [numpy_helper.from_array(array, f"w{number}") for number, array in enumerate(arrays)]
    tensors.append(helper.make_tensor("four bits", TensorProto.INT4, (3,), [1, 2, 3]))
    tensors.append(helper.make_tensor("texts", TensorProto.STRING, (2,), [b"ab", b"cde"]))
    tensors.append(helper.make_tensor("scalar", TensorProto.FLOAT, (), [1.0]))
    model(tmp_path / "m.onnx", tensors)
    assert weight_bytes(tmp_path / "m.onnx") == sum(array.nbytes for array in arrays) + 2 + 5 + 4


def test_constants_and_subgraphs_are_counted(tmp_path: Path) -> None:
    value = numpy_helper.from_array(np.zeros(7, np.float32), "v")
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["i"], value=value)],
        "inner",
        [],
        [helper.make_tensor_value_info("i", TensorProto.FLOAT, [7])],
        [numpy_helper.from_array(np.zeros(2, np.int64), "w")],
    )
    nodes = [
        helper.make_node("Constant", [], ["k"], value=value),
        helper.make_node("If", ["b"], ["c"], then_branch=inner, else_branch=inner),
    ]
    model(tmp_path / "m.onnx", [], nodes)
    assert weight_bytes(tmp_path / "m.onnx") == 28 + 2 * (28 + 16)


def test_weights_beside_the_file_are_counted(tmp_path: Path) -> None:
    found = model(tmp_path / "m.onnx", [numpy_helper.from_array(np.zeros((100, 100), np.float32), "w")])
    onnx.save(found, tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin")
    assert (tmp_path / "m.onnx").stat().st_size < 1000
    assert weight_bytes(tmp_path / "m.onnx") == 40_000


def test_another_format_has_no_count(tmp_path: Path) -> None:
    (tmp_path / "m.ort").write_bytes(b"\0\0\0\0ORTM" + bytes(100))
    assert weight_bytes(tmp_path / "m.ort") is None


def test_bytes_that_are_no_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    whole = model(path, [numpy_helper.from_array(np.zeros(9, np.float32), "w")]).SerializeToString()
    for content in (b"", b"\x3f", b"\x3a\xff\x01", b"\xff" * 20, whole[:-3]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"file|field|number"):
            weight_bytes(path)


def test_graphs_in_graphs_end(tmp_path: Path) -> None:
    content = b""
    for _ in range(60):
        for key in (0x32, 0x2A, 0x0A):  # a graph in an attribute in a node
            content = bytes((key,)) + _varint(len(content)) + content
    (tmp_path / "m.onnx").write_bytes(b"\x3a" + _varint(len(content)) + content)
    with pytest.raises(ValueError, match="without end"):
        weight_bytes(tmp_path / "m.onnx")


def _varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found, value = found + bytes((value & 0x7F | 0x80,)), value >> 7
    return found + bytes((value,))
