"""How margins become answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.errors import Unsupported
from executors.backends.fil.fil_settings import FilSettings
from executors.backends.fil.model_reader import ForestSummary
from executors.backends.fil.predictions import Predictions

SETTINGS = {"is_classifier": None, "predict_proba": False, "threshold": 0.5, "threads": 0, "allow_unknown_field": False}


def predicted(postprocessor: str, task: str, margins: list[list[float]], *, wide: bool = False, **said: Any) -> Any:
    forest = ForestSummary(1, 1, len(margins[0]), task, postprocessor, 2.0, 4.0, (0.0,), 1.0, False, "onnx")
    settings = FilSettings(Path("m"), "xgboost_json", **{**SETTINGS, **said})
    predictions = Predictions("m", forest, settings, wide=wide)
    found = predictions.of(np.array(margins))
    assert found.dtype == np.float32
    assert found.shape == (len(margins), predictions.width)
    return found.tolist()


@pytest.mark.parametrize(
    ("postprocessor", "margin", "value"),
    [
        ("identity", -3.0, -3.0),
        ("signed_square", -3.0, -9.0),
        ("hinge", 0.0, 0.0),
        ("hinge", 0.1, 1.0),
        ("sigmoid", 0.5, 0.7310586),  # alpha is 2
        ("sigmoid", -2000.0, 0.0),
        ("exponential", 1.0, 2.7182817),
        ("exponential_standard_ratio", 4.0, 0.5),
        ("logarithm_one_plus_exp", 0.0, 0.6931472),
    ],
)
def test_steps(postprocessor: str, margin: float, value: float) -> None:
    assert predicted(postprocessor, "regression", [[margin]]) == [[pytest.approx(value, rel=1e-6)]]


def test_classes() -> None:
    assert predicted("softmax", "multiclass", [[1, 3, 2], [9, 0, 0]]) == [[1], [0]]
    assert predicted("sigmoid", "binary", [[1], [-1], [0]]) == [[1], [0], [0]]
    assert predicted("sigmoid", "binary", [[0.5]], threshold=0.8) == [[0]]


def test_probabilities() -> None:
    (row,) = predicted("softmax", "multiclass", [[1000.0, 1000.0]], predict_proba=True)
    assert row == [0.5, 0.5]
    assert predicted("sigmoid", "binary", [[0]], predict_proba=True) == [[0.5]]
    assert predicted("sigmoid", "binary", [[0]], predict_proba=True, wide=True) == [[0.5, 0.5]]


def test_what_is_said_of_a_model_counts() -> None:
    assert predicted("sigmoid", "binary", [[0]], is_classifier=False) == [[0.5]]
    assert predicted("identity", "regression", [[0.7]], is_classifier=True) == [[1]]


def test_an_unknown_step_is_refused() -> None:
    with pytest.raises(Unsupported, match="model 'm': unsupported postprocessor 'cubed' of its margins"):
        predicted("cubed", "regression", [[1]])
