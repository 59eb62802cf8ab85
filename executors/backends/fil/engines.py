"""What sums the leaves of trees: onnxruntime, or treelite itself for what an ONNX graph cannot say."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import numpy as np

from charonia.backend import Array
from charonia.errors import InternalError

from .model_reader import ForestSummary

_INPUT, _OUTPUT = "input", ["output"]


class Engine(Protocol):
    """Runs from several threads at once."""

    def margins(self, rows: Array) -> Array:
        """FP64 of [rows, classes] from FP32 of [rows, features]."""


def has_onnxruntime() -> bool:
    """Whether models can be run by it; else treelite runs them, which takes five times as long."""
    return importlib.util.find_spec("onnxruntime") is not None


def engine_of(forest: ForestSummary, content: bytes, threads: int) -> Engine:
    """Return the engine for what `model_reader` returned."""
    return (OnnxEngine if forest.content == "onnx" else TreeliteEngine)(forest, content, threads)


class OnnxEngine:
    """Sums leaves with onnxruntime."""

    def __init__(self, forest: ForestSummary, content: bytes, threads: int) -> None:
        """Raises `InternalError` with onnxruntime's message."""
        import onnxruntime as ort

        options: Any = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session: Any = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise InternalError(f"onnx runtime error: {error}") from None
        self._dtype = np.float64 if forest.double else np.float32
        self._divisor = forest.divisor
        self._bases = np.array(forest.base_scores)

    def margins(self, rows: Array) -> Array:
        (sums,) = self._session.run(_OUTPUT, {_INPUT: rows.astype(self._dtype, copy=False)})
        margins: Array = sums / self._divisor + self._bases
        return margins


class TreeliteEngine:
    """Sums leaves with treelite's own interpreter."""

    def __init__(self, forest: ForestSummary, content: bytes, threads: int) -> None:
        import treelite

        self._library: Any = treelite
        self._model: Any = treelite.Model.deserialize_bytes(content)
        self._threads = threads
        self._classes = forest.classes

    def margins(self, rows: Array) -> Array:
        found = self._library.gtil.predict(self._model, rows, nthread=self._threads, pred_margin=True)
        margins: Array = found.reshape(len(rows), self._classes).astype(np.float64)
        return margins
