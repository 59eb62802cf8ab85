"""The typed form of the `dynamic_batching` block and its queue policies (interface items C30, C31).

Only values, and the lookup of a level or policy; `batcher.scheduling` implements them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from charonia.inference import LOWEST_PRIORITY
from protos import model_config_pb2 as pb


class TimeoutAction(Enum):
    """What happens to a request whose queue time-out has passed (S21, S22)."""

    REJECT = "REJECT"
    DELAY = "DELAY"


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """One level's queue: `default_timeout_us` 0 means never, `max_queue_size` 0 means no limit (C31)."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0

    def timeout_us(self, requested_us: int) -> int:
        """The queue time-out of a request that asks for `requested_us` (0: none); an override only shortens (S20)."""
        if self.allow_timeout_override and 0 < requested_us < self.default_timeout_us:
            return requested_us
        return self.default_timeout_us

    @staticmethod
    def of(policy: pb.ModelQueuePolicy) -> QueuePolicy:
        return QueuePolicy(
            timeout_action=TimeoutAction(pb.ModelQueuePolicy.TimeoutAction.Name(policy.timeout_action)),
            default_timeout_us=policy.default_timeout_microseconds,
            allow_timeout_override=policy.allow_timeout_override,
            max_queue_size=policy.max_queue_size,
        )


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """The block as written; `preferred_batch_sizes` ascend, without repeats. `priority_levels` may be 2^64-1 (S8)."""

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policies: dict[int, QueuePolicy] = field(default_factory=dict)

    def level(self, priority: int) -> int:
        """The level of a request's `priority` (S8): the default level for 0 and for a number above the levels, except
        `LOWEST_PRIORITY`, which is the last level.
        """
        if self.priority_levels == 0:
            return 0
        if priority == LOWEST_PRIORITY:
            return min(priority, self.priority_levels)
        return priority if 0 < priority <= self.priority_levels else self.default_priority_level

    def queue_policy(self, level: int) -> QueuePolicy:
        """The policy of a level: its own, or the default one."""
        return self.priority_queue_policies.get(level, self.default_queue_policy)

    @staticmethod
    def of(block: pb.ModelDynamicBatching) -> DynamicBatching:
        policies = block.priority_queue_policy
        return DynamicBatching(
            preferred_batch_sizes=tuple(sorted(set(block.preferred_batch_size))),
            max_queue_delay_us=block.max_queue_delay_microseconds,
            preserve_ordering=block.preserve_ordering,
            priority_levels=block.priority_levels,
            default_priority_level=block.default_priority_level,
            default_queue_policy=QueuePolicy.of(block.default_queue_policy),
            priority_queue_policies={level: QueuePolicy.of(policies[level]) for level in sorted(policies)},
        )
