"""Names of the interface that models may import but not use yet: model control and custom metrics (items P14, P16)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import not_supported_yet


class MetricFamily:
    """Custom metrics (P16)."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2

    def __init__(self, name: str, description: str, kind: int = COUNTER) -> None:
        not_supported_yet("MetricFamily")

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Any = None) -> Any:  # noqa: N802
        not_supported_yet("MetricFamily.Metric()")


def load_model(model_name: str, files: Mapping[str, bytes] | None = None, config: str = "") -> None:
    not_supported_yet("load_model()")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    not_supported_yet("unload_model()")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    not_supported_yet("is_model_ready()")
