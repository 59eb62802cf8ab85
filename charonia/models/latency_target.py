"""The parameter `charonia.target_p99_ms`: its value, and the settings that exclude it.

`batcher.scheduling.queues.adaptive_batching` implements it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from protos.model_config_pb2 import ModelConfig

from .config_errors import InstanceError

PARAMETER = "charonia.target_p99_ms"
_LONGEST_MS = 3_600_000.0


def check_adaptive_batching(config: ModelConfig) -> None:
    """Raises `InstanceError` for an invalid target, or beside a setting that it would choose itself."""
    if PARAMETER not in config.parameters:
        return
    subject = f"parameter '{PARAMETER}' of model '{config.name}'"
    text = config.parameters[PARAMETER].string_value
    if not 0 < _milliseconds(text) <= _LONGEST_MS:
        raise InstanceError(f"{subject} must be a number of milliseconds above 0, got '{text}'")
    if not config.HasField("dynamic_batching") or config.max_batch_size < 1:
        raise InstanceError(f"{subject} needs 'dynamic_batching' and a 'max_batch_size' of at least 1")
    block = config.dynamic_batching
    if block.max_queue_delay_microseconds or list(block.preferred_batch_size) not in ([], [config.max_batch_size]):
        raise InstanceError(
            f"{subject} chooses delay and batch size itself: 'max_queue_delay_microseconds' and "
            "'preferred_batch_size' cannot be set beside it"
        )


def target_p99_ns(parameters: Mapping[str, str]) -> int:
    """The target in a validated configuration in ns; 0 for none."""
    text = parameters.get(PARAMETER)
    return 0 if text is None else max(1, int(_milliseconds(text) * 1e6))


def _milliseconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if isfinite(number) else 0.0
