"""A model's configuration of its metrics: `metric_tags` (C13) and `model_metrics` (C26)."""

from __future__ import annotations

import re
from itertools import pairwise

from protos.model_config_pb2 import ModelConfig

from .config_errors import StructureError

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
"""The only family whose buckets a model can choose."""

_DEFAULT_BUCKETS = (100.0, 500.0, 2000.0, 5000.0)
_LABEL = re.compile(r"[a-zA-Z0-9_]+")


def check_metrics(config: ModelConfig, name: str) -> None:
    """Raises `StructureError` with C26's text, or for a tag that cannot be a label."""
    for control in config.model_metrics.metric_control:
        if not control.HasField("metric_identifier"):
            raise StructureError("metric control must specify 'metric_identifier'")
        if not control.metric_identifier.family:
            raise StructureError("metric identifier must specify non-empty 'family'")
        if not control.HasField("histogram_options"):
            raise StructureError("metric control must specify 'histogram_options'")
        buckets = control.histogram_options.buckets
        if not buckets:
            raise StructureError("histogram options must specify non-empty 'buckets'")
        if not all(low < high for low, high in pairwise(buckets)):
            raise StructureError(f"histogram options must specify 'buckets' in increasing order for {name}")
    for tag in config.metric_tags:
        if not _LABEL.fullmatch(tag):
            raise StructureError(f"metric tag '{tag}' cannot be a label of the metrics of {name}")


def tag_labels(config: ModelConfig) -> dict[str, str]:
    """The labels of a model's series for its tags, sorted. As in Triton each begins with "_": none is one of ours."""
    return {f"_{tag}": value for tag, value in sorted(config.metric_tags.items())}


def first_response_buckets(config: ModelConfig) -> tuple[float, ...]:
    """The upper bounds of the histogram's buckets in ms, ascending, without the infinite one."""
    chosen: tuple[float, ...] = _DEFAULT_BUCKETS
    for control in config.model_metrics.metric_control:
        if control.metric_identifier.family == FIRST_RESPONSE:
            chosen = tuple(control.histogram_options.buckets)
    return chosen


def unknown_families(config: ModelConfig) -> list[str]:
    """Families in `model_metrics` without any choice: worth a warning, as in Triton."""
    families = [control.metric_identifier.family for control in config.model_metrics.metric_control]
    return [family for family in families if family != FIRST_RESPONSE]
