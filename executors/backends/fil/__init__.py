"""The `fil` backend: tree ensembles of XGBoost, LightGBM and scikit-learn, on CPUs, named as Triton's backend names it.

A process of its own reads a model's file with treelite (`reader_process`: `forest`, `tree_ensemble`, `onnx_encoding`),
because broken files crash that library. The executor's side (`fil_backend`, `fil_instance`, `engines`, `predictions`,
`contributions`, `fil_settings`) gets a checked ONNX graph. May import `configuration` and `host`. Begin reading at
`fil_backend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fil_backend import FilBackend

__all__ = ["FilBackend"]


def __getattr__(name: str) -> Any:
    if name == "FilBackend":
        from .fil_backend import FilBackend

        return FilBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
