"""What the scheduler keeps for one version of a model, and for one batch it gave out. State only, no rules."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from batcher.scheduling.observations import QueuedRequest
from batcher.scheduling.poison.poison_isolation import Isolation, Suspects
from batcher.scheduling.queues.adaptive_batching import AdaptiveBatching
from batcher.scheduling.queues.dynamic_batching import BatchRules, Formation
from batcher.scheduling.queues.fair_sharing import TurnRules
from batcher.scheduling.queues.preserve_ordering import ReleaseOrder
from batcher.scheduling.queues.queueing import VersionQueue

from .instance_group import InstanceGroup


@dataclass(slots=True)
class Batch:
    """A dispatched batch until it is finished, returned or lost; `first` is the order of its first request."""

    executor: str
    version: int
    requests: list[QueuedRequest]
    dispatched_ns: int
    first: int
    via_owner: bool
    suspects: Suspects | None = None
    """The group that runs by itself (`poison_isolation`); None for an ordinary batch."""
    freed: bool = False
    """Its instance takes other batches although it is not finished."""
    started_ns: int = 0
    """When an instance was free for it, as far as is known here; 0: not yet, or not needed (`adaptive_batching`)."""

    @property
    def apart(self) -> bool:
        """Its executor has nothing else of the model."""
        return self.suspects is not None and self.suspects.apart


class ModelVersion:
    """What is kept for one version of the model."""

    __slots__ = ("adaptive", "instances", "isolation", "number", "pause", "queue", "releases")

    def __init__(self, number: int, prefetch: int, kept: Container[str], turns: TurnRules) -> None:
        self.number = number
        self.queue = VersionQueue(turns)
        self.isolation = Isolation()
        self.instances = InstanceGroup(prefetch, kept)
        self.releases = ReleaseOrder()
        self.adaptive: AdaptiveBatching | None = None
        """Set while the configuration has a target."""
        self.pause: Formation | None = None
        """The queue was looked at and nothing is to be done before one of these conditions holds."""

    def is_quiet(self) -> bool:
        """Whether a free instance changes nothing: nothing waits, and the version is still served."""
        return bool(self.instances) and not (self.queue.size or self.isolation.size or self.releases)

    def is_idle(self) -> bool:
        return not (self.queue.size or self.isolation.size or self.instances or self.releases)

    def rules(self, configured: BatchRules, now_ns: int) -> BatchRules:
        """What batches are made by now: as configured, or as chosen to meet the configured target."""
        if not configured.target_p99_ns:
            self.adaptive = None
            return configured
        if self.adaptive is None:
            self.adaptive = AdaptiveBatching(configured)
        self.adaptive.adopt(configured)
        if self.adaptive.is_due(now_ns):
            self.adaptive.review(sum(seat.slots for seat in self.instances.seats()), now_ns)
        return self.adaptive.rules
