"""What the example models should answer to the inputs of ``inputs.py``, and what onnxruntime itself answers.

`check` states the meaning of an answer (the file is Python, the line says this); `onnxruntime_outputs` gives the
numbers that a server's must equal. Needs numpy; onnxruntime only where `onnxruntime_outputs` is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import decode
import inputs
import numpy as np
from numpy.typing import NDArray

FILE_TYPES = {"sample.py": "python", "sample.rs": "rust", "sample.json": "json", "voice.wav": "wav", "line.png": "png"}
"""File under ``examples/inputs`` -> the label that ``magika`` gives it."""

SPEECH_S = (0.50, 2.62)
"""When the sentence in ``voice.wav`` starts and ends, in seconds; the model sees it a window or so late."""

LINE_TEXT = "Charonia tritonis, 3 shells"
"""What ``line.png`` says."""

PAGE_LINES = (
    (40, 40, "The trumpet of Triton"),
    (40, 120, "A record laid down turn by turn"),
    (40, 176, "and never rewritten."),
    (300, 280, "Invoice 20417"),
)
"""What ``page.png`` says, with the left and top of each line in pixels, top to bottom."""

OUTPUTS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "magika": {"target_label": ("FP32", (1, 214))},
    "magika_features": {"bytes": ("INT32", (1, 2048))},
    "silero_vad": {"speech_probs": ("FP32", (94,))},
    "ocr_det": {"fetch_name_0": ("FP32", (1, 1, 352, 640))},
    "ocr_rec": {"fetch_name_0": ("FP32", (1, 56, 18710))},
    "ocr": {"TEXT": ("BYTES", (4,)), "CONFIDENCE": ("FP32", (4,)), "BOXES": ("INT32", (4, 4))},
    "identity": {"OUTPUT0": ("FP32", (1, 16))},
}
"""Datatype and shape of each output of each model for the request that `inputs.REQUESTS` makes."""

STATES = {"silero_vad": ("h", "c")}
"""Inputs of graphs that the server keeps between the requests of a sequence."""

Outputs = Mapping[str, NDArray[np.generic]]


def onnxruntime_outputs(models: Path, model: str, tensors: Mapping[str, NDArray[np.generic]]) -> dict[str, np.ndarray]:
    """All outputs of the model's graph under the repository `models`, run on the CPU without a server.

    States that are not given are those of a beginning.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(models / model / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    states = [node for node in session.get_inputs() if node.name in STATES.get(model, ())]
    beginning = {node.name: np.zeros(node.shape, np.float32) for node in states}
    return dict(zip(names, session.run(names, {**beginning, **tensors}), strict=True))


def check(model: str, outputs: Outputs, models: Path) -> None:
    """Raise AssertionError unless `outputs` is right for `inputs.REQUESTS[model]()`; label files come from `models`."""
    _CHECKS[model](outputs, models)


def _magika(outputs: Outputs, models: Path) -> None:
    (label, score), *_ = decode.best_labels(
        outputs["target_label"][0], decode.read_labels(models / "magika/labels.txt")
    )
    assert label == "python", label
    assert score > 0.99, score


def _magika_features(outputs: Outputs, _models: Path) -> None:
    assert outputs["bytes"].dtype == np.int32, outputs["bytes"].dtype
    np.testing.assert_array_equal(outputs["bytes"], inputs.magika()["bytes"])


def _silero_vad(outputs: Outputs, _models: Path) -> None:
    probabilities = outputs["speech_probs"]
    segments = decode.speech_segments(probabilities)
    assert len(segments) == 1, segments
    np.testing.assert_allclose(segments[0], SPEECH_S, atol=0.1)
    quiet = np.arange(len(probabilities)) * decode.WINDOW_S
    silent = probabilities[(quiet < SPEECH_S[0] - 0.1) | (quiet > SPEECH_S[1] + 0.15)]
    assert silent.max() < 0.1, silent


def _ocr_rec(outputs: Outputs, models: Path) -> None:
    text, confidence = decode.read_text(outputs["fetch_name_0"][0], decode.read_labels(models / "ocr_rec/labels.txt"))
    assert text == LINE_TEXT, text
    assert confidence > 0.95, confidence


def _ocr_det(outputs: Outputs, _models: Path) -> None:
    _check_boxes(decode.text_boxes(outputs["fetch_name_0"][0, 0]))


def _ocr(outputs: Outputs, _models: Path) -> None:
    assert [str(text, "utf-8") for text in outputs["TEXT"]] == [text for _, _, text in PAGE_LINES], outputs["TEXT"]
    assert outputs["CONFIDENCE"].min() > 0.9, outputs["CONFIDENCE"]
    _check_boxes([(left, top, right, bottom) for left, top, right, bottom in outputs["BOXES"].tolist()])


def _check_boxes(boxes: list[tuple[int, int, int, int]]) -> None:
    assert len(boxes) == len(PAGE_LINES), boxes
    for (left, top, right, bottom), (x, y, text) in zip(boxes, PAGE_LINES, strict=True):
        # A font starts a few pixels below the point where it is placed; letters are over 8 pixels wide on average.
        assert abs(left - x) < 12, (text, left)
        assert -8 < top - y < 16, (text, top)
        assert right - left > 8 * len(text), (text, right)
        assert 16 < bottom - top < 60, (text, bottom)


def _identity(outputs: Outputs, _models: Path) -> None:
    np.testing.assert_array_equal(outputs["OUTPUT0"], inputs.identity()["INPUT0"])


_CHECKS = {
    "magika": _magika,
    "magika_features": _magika_features,
    "silero_vad": _silero_vad,
    "ocr_rec": _ocr_rec,
    "ocr_det": _ocr_det,
    "ocr": _ocr,
    "identity": _identity,
}
