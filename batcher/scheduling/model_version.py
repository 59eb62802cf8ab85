"""What the scheduler keeps for one version of a model, and for one batch it gave out. State only, no rules."""

from __future__ import annotations

from dataclasses import dataclass

from .dynamic_batching import Formation
from .instance_group import InstanceGroup
from .observations import QueuedRequest
from .preserve_ordering import ReleaseOrder
from .queueing import VersionQueue


@dataclass(slots=True)
class Batch:
    """A dispatched batch until it is finished, returned or lost; `first` is the order of its first request."""

    executor: str
    version: int
    requests: list[QueuedRequest]
    dispatched_ns: int
    first: int
    via_owner: bool


class ModelVersion:
    """What is kept for one version of the model."""

    __slots__ = ("instances", "number", "pause", "queue", "releases")

    def __init__(self, number: int, prefetch: int) -> None:
        self.number = number
        self.queue = VersionQueue()
        self.instances = InstanceGroup(prefetch)
        self.releases = ReleaseOrder()
        self.pause: Formation | None = None
        """The queue was looked at and nothing is to be done before one of these conditions holds."""

    def is_idle(self) -> bool:
        return not (self.queue.size or self.instances or self.releases)
