"""The example repository's real models, run by onnxruntime alone, answer the example inputs as `expected` says.

Builds the repository first (needs the package index once). No server takes part: servers are compared with this.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import build_models
import decode
import expected
import inputs
import numpy as np
import onnxruntime
import pytest
from google.protobuf import text_format

from protos.model_config_pb2 import DataType, ModelConfig

pytestmark = pytest.mark.integration

GRAPHS = ["magika", "silero_vad", "ocr_det", "ocr_rec", "identity"]


@pytest.fixture(scope="module")
def models() -> Path:
    return build_models.ensure()


@pytest.mark.parametrize("model", GRAPHS)
def test_the_expected_answer(models: Path, model: str) -> None:
    outputs = expected.onnxruntime_outputs(models, model, inputs.REQUESTS[model]())
    shapes = {name: ("FP32", array.shape) for name, array in outputs.items()}
    assert {name: shapes[name] for name in expected.OUTPUTS[model]} == expected.OUTPUTS[model]
    assert all(array.dtype == np.float32 for array in outputs.values())
    expected.check(model, outputs, models)


@pytest.mark.parametrize("model", GRAPHS)
def test_a_wrong_answer_is_noticed(models: Path, model: str) -> None:
    outputs = expected.onnxruntime_outputs(models, model, inputs.REQUESTS[model]())
    reversed_outputs = {name: array[..., ::-1] for name, array in outputs.items()}
    with pytest.raises(AssertionError):
        expected.check(model, reversed_outputs, models)


@pytest.mark.parametrize("name", list(expected.FILE_TYPES))
def test_each_sample_file_gets_its_type(models: Path, name: str) -> None:
    outputs = expected.onnxruntime_outputs(models, "magika", inputs.magika(inputs.INPUTS / name))
    (label, _), *_ = decode.best_labels(outputs["target_label"][0], decode.read_labels(models / "magika/labels.txt"))
    assert label == expected.FILE_TYPES[name]


def test_the_features_are_those_of_the_models_own_package(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = build_models.fetch([build_models.MAGIKA])[build_models.MAGIKA]
    monkeypatch.syspath_prepend(str(wheel))  # pure python, importable from the archive
    from magika import Magika
    from magika.types import Seekable

    rng = np.random.default_rng(5)
    contents = [path.read_bytes() for path in sorted(inputs.INPUTS.iterdir())]
    contents += [b" \t\r\n\x0b\x0c" * size + rng.bytes(size) + b" \n" * size for size in (0, 1, 7, 600, 1500, 5000)]
    for content in contents:
        theirs = Magika._extract_features_from_seekable(Seekable(io.BytesIO(content)), 1024, 0, 1024, 256, 4096, False)
        assert inputs.file_features(content).tolist() == theirs.beg + theirs.end
    for name in [name for name in sys.modules if name == "magika" or name.startswith("magika.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(("model", "count"), [("magika", 5), ("ocr_rec", 3), ("ocr_det", 2), ("identity", 64)])
def test_models_that_batch_answer_each_row_as_if_alone(models: Path, model: str, count: int) -> None:
    """What makes their max_batch_size in config.pbtxt honest."""
    one = inputs.REQUESTS[model]()
    (name, array), *_ = one.items()
    rows = [np.roll(array, 37 * row, axis=-1) for row in range(count)]
    (alone_name, _), *_ = expected.OUTPUTS[model].items()
    together = expected.onnxruntime_outputs(models, model, {name: np.concatenate(rows)})[alone_name]
    for row, tensor in enumerate(rows):
        alone = expected.onnxruntime_outputs(models, model, {name: tensor})[alone_name]
        np.testing.assert_allclose(together[row], alone[0], atol=1e-5)


def test_a_clip_in_pieces_with_the_states_equals_the_whole(models: Path) -> None:
    """Time is the first dimension: pieces must run in order, each with the states of the piece before."""
    whole = inputs.silero_vad()
    wanted = expected.onnxruntime_outputs(models, "silero_vad", whole)["speech_probs"]
    states: dict[str, np.ndarray] = {}
    said = []
    for at in range(0, len(whole["input"]), 10):
        piece = expected.onnxruntime_outputs(models, "silero_vad", {"input": whole["input"][at : at + 10], **states})
        said.append(piece["speech_probs"])
        states = {"h": piece["hn"], "c": piece["cn"]}
    np.testing.assert_allclose(np.concatenate(said), wanted, atol=1e-5)


def test_a_page_is_read_line_by_line(models: Path) -> None:
    image = inputs.read_png(inputs.PAGE)
    found = expected.onnxruntime_outputs(models, "ocr_det", inputs.ocr_det())["fetch_name_0"][0, 0]
    labels = decode.read_labels(models / "ocr_rec/labels.txt")
    said = []
    for left, top, right, bottom in decode.text_boxes(found):
        tensor = inputs.line_tensor(image[top:bottom, left:right])[np.newaxis]
        scores = expected.onnxruntime_outputs(models, "ocr_rec", {"x": tensor})["fetch_name_0"][0]
        said.append(decode.read_text(scores, labels)[0])
    assert said == [text for _, _, text in expected.PAGE_LINES]


@pytest.mark.parametrize("model", GRAPHS)
def test_the_configuration_fits_the_graph(models: Path, model: str) -> None:
    config = text_format.Parse((models / model / "config.pbtxt").read_text(), ModelConfig())
    session = onnxruntime.InferenceSession(models / model / "1/model.onnx", providers=["CPUExecutionProvider"])
    types = {"tensor(float)": "TYPE_FP32", "tensor(int32)": "TYPE_INT32"}
    assert (config.name, config.backend) == (model, "onnxruntime")
    kept = {state.input_name for state in config.sequence_batching.state}
    kept |= {state.output_name for state in config.sequence_batching.state}
    for declared, found_all in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        actual = [node for node in found_all if node.name not in kept]
        assert [tensor.name for tensor in declared] == [tensor.name for tensor in actual]
        for tensor, found in zip(declared, actual, strict=True):
            dims = [size if isinstance(size, int) else -1 for size in found.shape]
            assert ([-1] if config.max_batch_size else []) + list(tensor.dims) == dims
            assert DataType.Name(tensor.data_type) == types[found.type]


def test_the_python_models_configuration_is_valid(models: Path) -> None:
    config = text_format.Parse((models / "magika_features/config.pbtxt").read_text(), ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("magika_features", "python", 64)
    assert config.HasField("dynamic_batching")


def test_labels_have_one_line_for_each_score(models: Path) -> None:
    labels = decode.read_labels(models / "magika/labels.txt")
    assert len(labels) == len(set(labels)) == 214
    characters = decode.read_labels(models / "ocr_rec/labels.txt")
    session = onnxruntime.InferenceSession(models / "ocr_rec/1/model.onnx", providers=["CPUExecutionProvider"])
    own = session.get_modelmeta().custom_metadata_map["character"].split("\n")
    assert characters == ["<blank>", *own, " "]
    assert len(characters) == session.get_outputs()[0].shape[2]
