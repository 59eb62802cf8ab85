"""An instance of a model of trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from charonia.backend import Array, Interrupted
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from charonia.tensors import shape_text

from .contributions import Contributions
from .engines import Engine
from .predictions import Predictions

INPUT, OUTPUT, SHAP_OUTPUT = "input__0", "output__0", "treeshap_output"
_WORK = 1_000_000
"""Rows times trees of one step, some 50 ms, or half as much more: an engine cannot be interrupted within one."""


class FilInstance:
    """An `InterruptibleInstance` over an engine that others share."""

    stateless = True

    def __init__(
        self,
        name: str,
        features: int,
        trees: int,
        engine: Engine,
        predictions: Predictions,
        contributions: Contributions | None,
        shape: tuple[int, ...],
    ) -> None:
        """`shape` is that of a row's contributions."""
        self._name = name
        self._features = features
        self._step = max(1, _WORK // max(1, trees))
        self._engine: Engine | None = engine
        self._predictions = predictions
        self._contributions = contributions
        self._shape = shape
        self._is_interrupted = False

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Answer rows of features.

        Raises `InvalidArgument` for another width and an unknown output, `Interrupted` after `interrupt`.
        """
        self._is_interrupted = False
        for name in outputs:
            if name != OUTPUT and (name != SHAP_OUTPUT or self._contributions is None):
                raise InvalidArgument(f"model '{self._name}' has no output '{name}'")
        rows = inputs[INPUT]
        if rows.ndim != 2 or rows.shape[1] != self._features:
            raise InvalidArgument(
                f"model '{self._name}' expects input '{INPUT}' of shape [-1,{self._features}], "
                f"got {shape_text(rows.shape)}"
            )
        try:
            return {name: self._in_steps(rows, shap=name == SHAP_OUTPUT) for name in outputs}
        except (CharoniaError, Interrupted):
            raise
        except Exception as error:
            raise InternalError(f"fil error: {str(error).strip()}") from None

    def interrupt(self) -> None:
        """End the running execution after its step."""
        self._is_interrupted = True

    def close(self) -> None:
        """Release the engine. Its memory is freed when no other instance uses it."""
        self._engine = self._contributions = None

    def _in_steps(self, rows: Array, *, shap: bool) -> Array:
        one = self._shap if shap else self._predict
        size = max(1, self._step // 100) if shap else self._step
        # of about that size, and equal: a rest of a few rows would cost as much as many rows do
        steps = max(1, round(len(rows) / size))
        if steps == 1:
            return one(rows)
        parts = []
        for some in np.array_split(rows, steps):
            if self._is_interrupted:
                raise Interrupted(f"an execution of model '{self._name}' was interrupted", blameless=True)
            parts.append(one(some))
        return np.concatenate(parts)

    def _predict(self, rows: Array) -> Array:
        assert self._engine is not None
        return self._predictions.of(self._engine.margins(rows))

    def _shap(self, rows: Array) -> Array:
        assert self._contributions is not None
        return self._contributions(rows).reshape(len(rows), *self._shape)
