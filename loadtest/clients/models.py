"""The models that Triton's client examples ask for by name: real graphs and Python models with the same tensors.

`write_simple` makes the seven that the examples of model control count, `write_others` what the rest asks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

WIDTH = 16
CLASSES = 1000
OPSET = 18
IR = 9

_PAIR = (
    'input [ {{ name: "INPUT0" data_type: TYPE_{kind} dims: [ 16 ] }}, '
    '{{ name: "INPUT1" data_type: TYPE_{kind} dims: [ 16 ] }} ]\n'
    'output [ {{ name: "OUTPUT0" data_type: TYPE_{kind} dims: [ 16 ] }}, '
    '{{ name: "OUTPUT1" data_type: TYPE_{kind} dims: [ 16 ] }} ]\n'
)
_IDENTITY = (
    'input [ {{ name: "INPUT0" data_type: TYPE_{kind} dims: [ -1 ] }} ]\n'
    'output [ {{ name: "OUTPUT0" data_type: TYPE_{kind} dims: [ -1 ] }} ]\n'
)
_SEQUENCE = """
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
_CONTROL = """  control_input [ {{ name: "{name}"
    control [ {{ kind: CONTROL_SEQUENCE_{name} int32_false_true: [ 0, 1 ] }} ] }} ]
"""
_CORRELATION = (
    '  control_input [ {{ name: "CORRID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{kind} }} ] }} ]\n'
)
_STATE = '  state [ { input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'

_REPEAT = """
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            values, delays, wait = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY", "WAIT")
            )
            threading.Thread(target=self.answer, args=(request.get_response_sender(), values, delays)).start()
            time.sleep(int(wait[0]) / 1000)

    def answer(self, sender, values, delays):
        for at, (value, delay) in enumerate(zip(values, delays)):
            time.sleep(int(delay) / 1000)
            sender.send(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", np.array([value], np.int32)),
                pb_utils.Tensor("IDX", np.array([at], np.uint32)),
            ]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_REPEAT_CONFIG = """
max_batch_size: 0
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""
_DECODER = """
import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            files = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().reshape(-1)
            pictures = [Image.open(io.BytesIO(file)).convert("RGB").resize((224, 224)) for file in files]
            tensor = np.stack([np.asarray(picture, np.float32).transpose(2, 0, 1) / 127.5 - 1 for picture in pictures])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", tensor)]))
        return responses
"""
_DECODER_CONFIG = """
max_batch_size: 8
input [ { name: "INPUT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
"""
_IMAGE_ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "INPUT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 1000 ] label_filename: "labels.txt" } ]
ensemble_scheduling { step [
  { model_name: "image_decoder" model_version: -1
    input_map { key: "INPUT" value: "INPUT" } output_map { key: "OUTPUT" value: "PICTURE" } },
  { model_name: "classifier" model_version: -1
    input_map { key: "PICTURE" value: "PICTURE" } output_map { key: "CLASSES" value: "OUTPUT" } }
] }
"""
_CLASSIFIER_CONFIG = """
max_batch_size: 8
input [ { name: "PICTURE" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ] } ]
output [ { name: "CLASSES" data_type: TYPE_FP32 dims: [ 1000 ] label_filename: "labels.txt" } ]
"""
_DENSENET_CONFIG = """
max_batch_size: 0
input [ { name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ]
  reshape { shape: [ 1, 3, 224, 224 ] } } ]
output [ { name: "fc6_1" data_type: TYPE_FP32 dims: [ 1000 ] reshape { shape: [ 1, 1000, 1, 1 ] }
  label_filename: "labels.txt" } ]
"""


def _node(kind: str, takes: str, gives: str, **attributes: Any) -> Any:
    from onnx import helper

    return helper.make_node(kind, takes.split(), [gives], **attributes)


def _graph(
    repository: Path,
    name: str,
    config: str,
    nodes: list[Any],
    inputs: dict[str, tuple[str, list[Any]]],
    outputs: dict[str, tuple[str, list[Any]]],
    weights: list[Any] = [],  # noqa: B006
) -> None:
    """An ONNX model and its configuration; tensors are (type, shape) by name."""
    from onnx import TensorProto, helper

    def tensors(described: dict[str, tuple[str, list[Any]]]) -> list[Any]:
        return [
            helper.make_tensor_value_info(tensor, getattr(TensorProto, kind), shape)
            for tensor, (kind, shape) in described.items()
        ]

    graph = helper.make_graph(nodes, name, tensors(inputs), tensors(outputs), weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.onnx").write_bytes(model.SerializeToString())
    (repository / name / "config.pbtxt").write_text(config)


def _python(repository: Path, name: str, code: str, config: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.py").write_text(code)
    (repository / name / "config.pbtxt").write_text(f'backend: "python"\n{config}')


def _cast(takes: str, gives: str, kind: str) -> Any:
    from onnx import TensorProto

    return _node("Cast", takes, gives, to=getattr(TensorProto, kind))


def _sum_and_difference(repository: Path, name: str, kind: str) -> None:
    """OUTPUT0 is the sum and OUTPUT1 the difference of the inputs, computed as INT32 whatever their type."""
    nodes = [_cast("INPUT0", "first", "INT32"), _cast("INPUT1", "second", "INT32")]
    for way, kernel in enumerate(("Add", "Sub")):
        nodes += [_node(kernel, "first second", f"wide{way}"), _cast(f"wide{way}", f"OUTPUT{way}", kind)]
    tensor = (kind, ["rows", WIDTH])
    config = "max_batch_size: 8\ndynamic_batching { }\n" + _PAIR.format(kind=kind)
    _graph(
        repository, name, config, nodes,
        {"INPUT0": tensor, "INPUT1": tensor}, {"OUTPUT0": tensor, "OUTPUT1": tensor},
    )  # fmt: skip


def _identity(repository: Path, name: str, kind: str) -> None:
    tensor = (kind, ["rows", "width"])
    nodes = [_node("Identity", "INPUT0", "OUTPUT0")]
    config = "max_batch_size: 8\n" + _IDENTITY.format(kind=kind)
    _graph(repository, name, config, nodes, {"INPUT0": tensor}, {"OUTPUT0": tensor})


def _sequence(repository: Path, name: str, kind: str = "") -> None:
    """OUTPUT is INPUT, plus 1 at the start.

    With a `kind` of correlation id it is added at the end; a model of string ids sums its inputs and has no 1.
    """
    one = ("INT32", ["rows", 1])
    inputs, outputs = {"INPUT": one, "START": one, "READY": one}, {"OUTPUT": one}
    first = "START"
    if kind == "STRING":
        inputs["BEFORE"], outputs["AFTER"], first = one, one, "BEFORE"
    nodes = [_node("Add", f"INPUT {first}", "value")]
    batching = _CONTROL.format(name="START") + _CONTROL.format(name="READY")
    if kind:
        inputs |= {"END": one, "CORRID": (kind, ["rows", 1])}
        nodes += [_cast("CORRID", "id", "INT32"), _node("Mul", "id END", "last"), _node("Add", "value last", "OUTPUT")]
        batching += _CONTROL.format(name="END") + _CORRELATION.format(kind=kind) + "  oldest { }\n"
    else:
        nodes.append(_node("Identity", "value", "OUTPUT"))
    if kind == "STRING":
        nodes.append(_node("Identity", "OUTPUT", "AFTER"))
        batching += _STATE
    config = (
        "max_batch_size: 8\n" + _SEQUENCE
        + "sequence_batching {\n  max_sequence_idle_microseconds: 5000000\n" + batching + "}\n"
    )  # fmt: skip
    _graph(repository, name, config, nodes, inputs, outputs)


def _classifier(repository: Path, name: str, config: str, rows: int | str, given: str, answer: str, rank: int) -> None:
    """A linear classifier over the mean colour of a picture, with made-up weights and labels."""
    import numpy as np
    from onnx import numpy_helper

    weights = np.random.default_rng(7).standard_normal((CLASSES, 3, 1, 1)).astype(np.float32)
    nodes = [_node("GlobalAveragePool", given, "colour"), _node("Conv", "colour weights", "scores")]
    nodes.append(_node("Identity" if rank == 4 else "Flatten", "scores", answer))
    shape = [rows, CLASSES] if rank == 2 else [rows, CLASSES, 1, 1]
    _graph(
        repository, name, config, nodes,
        {given: ("FLOAT", [rows, 3, 224, 224])}, {answer: ("FLOAT", shape)},
        [numpy_helper.from_array(weights, "weights")],
    )  # fmt: skip
    _labels(repository / name)


def _labels(model: Path) -> None:
    (model / "labels.txt").write_text("".join(f"class {at}\n" for at in range(CLASSES)))


def write_simple(repository: Path) -> None:
    """The seven models that `simple_http_model_control.py` counts."""
    _sum_and_difference(repository, "simple", "INT32")
    _sum_and_difference(repository, "simple_int8", "INT8")
    _sum_and_difference(repository, "simple_string", "STRING")
    _identity(repository, "simple_identity", "STRING")
    _sequence(repository, "simple_sequence")
    _sequence(repository, "simple_dyna_sequence", "UINT64")
    _classifier(repository, "densenet_onnx", _DENSENET_CONFIG, 1, "data_0", "fc6_1", 4)


def write_one_more(repository: Path) -> None:
    """The eighth, which `simple_grpc_model_control.py` counts."""
    _sequence(repository, "simple_string_dyna_sequence", "STRING")


def write_others(repository: Path) -> None:
    """What other examples ask: an identity, a decoupled model, and an ensemble for pictures."""
    _identity(repository, "custom_identity_int32", "INT32")
    _python(repository, "repeat_int32", _REPEAT, _REPEAT_CONFIG)
    _classifier(repository, "classifier", _CLASSIFIER_CONFIG, "rows", "PICTURE", "CLASSES", 2)
    _python(repository, "image_decoder", _DECODER, _DECODER_CONFIG)
    ensemble = repository / "preprocess_inception_ensemble"
    (ensemble / "1").mkdir(parents=True)
    (ensemble / "config.pbtxt").write_text(_IMAGE_ENSEMBLE)
    _labels(ensemble)
