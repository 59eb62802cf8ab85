"""Names of the interface that models may import but not use yet: model control (item P14)."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import not_supported_yet


def load_model(model_name: str, files: Mapping[str, bytes] | None = None, config: str = "") -> None:
    not_supported_yet("load_model()")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    not_supported_yet("unload_model()")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    not_supported_yet("is_model_ready()")
