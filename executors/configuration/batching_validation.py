"""Validates the `dynamic_batching` block (C32), and preferred batch sizes wherever they occur."""

from __future__ import annotations

from collections.abc import Iterable

from charonia.models.config_errors import StructureError
from protos.model_config_pb2 import ModelConfig, ModelQueuePolicy


def check_dynamic_batching(config: ModelConfig, name: str) -> None:
    """Raise `StructureError` with C32's text for the first rule that the block breaks."""
    block = config.dynamic_batching
    check_preferred_sizes(
        block.preferred_batch_size, config.max_batch_size, name, subject="dynamic batching preferred size"
    )
    levels = block.priority_levels
    if levels:
        if not 1 <= block.default_priority_level <= levels:
            raise StructureError(f"default priority level must be in range [1, {levels}] for {name}")
        if any(not 1 <= level <= levels for level in block.priority_queue_policy):
            raise StructureError(f"priority queue policy must have priority level in range [1, {levels}] for {name}")
    if block.preserve_ordering:
        if levels > 1:
            raise StructureError(f"Only one priority level is allowed when 'preserve_ordering' is true for {name}")
        policies = [block.default_queue_policy, *block.priority_queue_policy.values()]
        if any(_delays(policy) for policy in policies):
            raise StructureError(
                f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"
            )


def check_preferred_sizes(sizes: Iterable[int], max_batch_size: int, name: str, *, subject: str) -> None:
    """Raise `StructureError` unless all sizes are in 1..`max_batch_size`. The message begins with `subject`."""
    for size in sizes:
        if size <= 0:
            raise StructureError(f"{subject} must be positive for {name}")
        if size > max_batch_size:
            raise StructureError(f"{subject} must be <= max batch size for {name}")


def _delays(policy: ModelQueuePolicy) -> bool:
    # without a time-out the action never happens, so it cannot break the order
    return policy.timeout_action == ModelQueuePolicy.DELAY and policy.default_timeout_microseconds != 0
