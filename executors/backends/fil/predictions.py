"""What a model of trees answers, made from the sums of its leaves: probabilities, values or classes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from charonia.backend import Array
from charonia.errors import Unsupported

from .fil_settings import FilSettings
from .model_reader import ForestSummary

_CLASSIFYING = frozenset(("binary", "multiclass"))


class Predictions:
    """Rows of margins to rows of `output__0`, of `width` numbers each.

    A classifier without `predict_proba` answers the number of a class: of several the most probable one, of one
    whether its probability is above the threshold. `wide` binary classifiers answer two probabilities.
    """

    def __init__(self, name: str, forest: ForestSummary, settings: FilSettings, *, wide: bool) -> None:
        """Raises `Unsupported` for a model whose margins become answers in an unknown way."""
        said = settings.is_classifier
        is_classifier = forest.task in _CLASSIFYING if said is None else said
        self._decides = is_classifier and not settings.predict_proba
        self._is_single = forest.classes == 1
        self._is_wide = wide and self._is_single and is_classifier and settings.predict_proba
        self._threshold = settings.threshold
        steps = _steps(forest.sigmoid_alpha, forest.ratio_c)
        if forest.postprocessor not in steps:
            raise Unsupported(f"model '{name}': unsupported postprocessor '{forest.postprocessor}' of its margins")
        self._step = steps[forest.postprocessor]
        self.width = 1 if self._decides else 2 if self._is_wide else forest.classes

    def of(self, margins: Array) -> Array:
        """FP32 of [rows, width] from FP64 margins of [rows, classes]."""
        with np.errstate(over="ignore"):
            values: Array = self._step(margins).astype(np.float32)
        if not self._decides:
            return np.concatenate([1 - values, values], axis=1) if self._is_wide else values
        if self._is_single:
            return (values > self._threshold).astype(np.float32)
        best: Array = values.argmax(axis=1)
        return best[:, None].astype(np.float32)


def _steps(alpha: float, ratio_c: float) -> dict[str, Callable[[Array], Array]]:
    """Treelite's post-processing by its names."""

    def sigmoid(margins: Array) -> Array:
        answer: Array = 1 / (1 + np.exp(-alpha * margins))
        return answer

    steps: dict[str, Callable[[Array], Array]] = {
        "identity": lambda margins: margins,
        "identity_multiclass": lambda margins: margins,
        "signed_square": lambda margins: np.copysign(margins * margins, margins),
        "hinge": lambda margins: (margins > 0).astype(np.float64),
        "sigmoid": sigmoid,
        "multiclass_ova": sigmoid,
        "exponential": np.exp,
        "exponential_standard_ratio": lambda margins: np.exp2(-margins / ratio_c),
        "logarithm_one_plus_exp": lambda margins: np.logaddexp(0, margins),
        "softmax": _softmax,
    }
    return steps


def _softmax(margins: Array) -> Array:
    powers = np.exp(margins - margins.max(axis=1, keepdims=True))
    shares: Array = powers / powers.sum(axis=1, keepdims=True)
    return shares
