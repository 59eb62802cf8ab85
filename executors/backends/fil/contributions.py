"""What each feature added to an answer (SHAP values, `treeshap_output`), by the library that made the model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from charonia.backend import Array
from charonia.errors import InternalError, Unsupported

from .fil_settings import FilSettings

Contributions = Callable[[Array], Array]
"""FP32 rows of features to rows of classes x (features + 1): margins are the sums over features."""


def contributions_of(name: str, settings: FilSettings, threads: int) -> Contributions:
    """Return what computes them. Blocks for the library's import.

    Raises `Unsupported` for formats without such a library, and when it is not installed; `InternalError` when it
    cannot read the model.
    """
    library = "lightgbm" if settings.format == "lightgbm" else "xgboost"
    if settings.format == "treelite_checkpoint":
        raise Unsupported(
            f"model '{name}' asks for 'treeshap_output', which a treelite checkpoint cannot give: only models of "
            "XGBoost and LightGBM in their own formats can"
        )
    if importlib.util.find_spec(library) is None:
        raise Unsupported(
            f"model '{name}' asks for 'treeshap_output', which {library} computes, and {library} is not installed"
        )
    try:
        return (_lightgbm if library == "lightgbm" else _xgboost)(settings, threads)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise InternalError(f"model '{name}': {library} cannot load '{settings.path.name}': {reason}") from None


def _xgboost(settings: FilSettings, threads: int) -> Contributions:
    import xgboost

    booster: Any = xgboost.Booster({"nthread": threads})
    booster.load_model(bytearray(settings.path.read_bytes()))
    types = booster.feature_types

    def contributions(rows: Array) -> Array:
        matrix: Any = xgboost.DMatrix(rows, nthread=threads, feature_types=types, enable_categorical=True)
        found: Array = booster.predict(matrix, pred_contribs=True, validate_features=False)
        return found

    return contributions


def _lightgbm(settings: FilSettings, threads: int) -> Contributions:
    import lightgbm

    booster: Any = lightgbm.Booster(model_str=settings.path.read_text())

    def contributions(rows: Array) -> Array:
        found: Array = np.asarray(booster.predict(rows, pred_contrib=True, num_threads=threads))
        return found.astype(np.float32)

    return contributions
