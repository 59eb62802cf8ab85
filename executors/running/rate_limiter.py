"""Decides which instances may execute when models share limited resources (Q1-Q4). Pure.

It keeps the counts and the order. `executors.running.resource_grants` keeps the waiting batches and starts executions.
One limiter serves all models of an executor.

Of the waiting instances, the one with the smallest executions x priority comes first (Q2). An instance that waits for a
resource reserves what it needs, so that many small needs do not starve a large one. Instances behind it go ahead when
they need nothing of that. An instance that was idle or is new catches up on at most `_MAX_CREDIT` executions, because
it keeps the others from running for that long.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from charonia.errors import InvalidArgument
from charonia.models.interface import ResourceNeed
from charonia.options.settings import EVERY_DEVICE

GLOBAL = -1
"""The device of a resource that all devices share."""

_MAX_CREDIT = 32

Resource = tuple[int, str]
"""A device and a resource's name."""
Limits = Mapping[Resource, int]


@dataclass(slots=True, eq=False)
class _Instance:
    needs: dict[Resource, int]
    priority: int
    executions: int = 0
    asked: int = 0
    """The sequence number of its request for resources; 0 when it does not wait."""
    running: bool = False
    resources: frozenset[Resource] = field(init=False)

    def __post_init__(self) -> None:
        self.resources = frozenset(self.needs)

    @property
    def scaled(self) -> int:
        return self.executions * self.priority


class RateLimiter:
    """Grants resources to instances. `limits` are the operator's counts; without any, a resource has as many as the
    largest need of it (Q1)."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = dict(limits or {})
        self._instances: dict[Hashable, _Instance] = {}
        self._counts: dict[Resource, int] = {}
        self._used: dict[Resource, int] = {}
        self._asked = 0
        self._reached = 0

    def register(self, key: Hashable, needs: Iterable[ResourceNeed], priority: int, device: int) -> None:
        """Add an instance on `device` (0 on a CPU). Raises `InvalidArgument`, with nothing changed, when it could never
        run (Q3)."""
        own: dict[Resource, int] = {}
        for need in needs:
            resource = (GLOBAL if need.is_global else max(0, device), need.name)
            own[resource] = max(need.count, own.get(resource, 0))
        instance = _Instance(own, max(1, priority))
        self._instances[key] = instance
        try:
            self._counts = self._count()
        except InvalidArgument:
            del self._instances[key]
            raise
        self._lift(instance)

    def unregister(self, key: Hashable) -> None:
        """Remove an instance and free what it holds."""
        instance = self._instances.get(key)
        if instance is not None:
            if instance.running:
                self._free_resources(instance)
            del self._instances[key]
            self._counts = self._count()

    def ask(self, key: Hashable) -> None:
        """Request resources for an instance. Does nothing when it waits or runs already."""
        instance = self._instances[key]
        if not instance.asked and not instance.running:
            self._asked += 1
            instance.asked = self._asked
            self._lift(instance)

    def withdraw(self, key: Hashable) -> None:
        """Withdraw an instance's request."""
        self._instances[key].asked = 0

    def scaled_executions(self, key: Hashable) -> int:
        """Executions x priority of an instance: the smallest goes first (Q2)."""
        return self._instances[key].scaled

    def needs(self, key: Hashable) -> dict[Resource, int]:
        """The resources that an instance needs to execute."""
        return self._instances[key].needs

    def order(self, key: Hashable) -> tuple[int, int] | None:
        """The sort key of a waiting instance, smallest first; None when it does not wait."""
        instance = self._instances[key]
        return (instance.scaled, instance.asked) if instance.asked else None

    def grant(self) -> list[Hashable]:
        """Return the instances that may execute now, in order. They hold their resources until `release`."""
        waiting = [(i.scaled, i.asked, key, i) for key, i in self._instances.items() if i.asked]
        waiting.sort(key=lambda entry: entry[:2])
        granted: list[Hashable] = []
        kept: set[Resource] = set()
        for scaled, _, key, instance in waiting:
            if instance.resources.isdisjoint(kept) and self._has(instance):
                for resource, count in instance.needs.items():
                    self._used[resource] = self._used.get(resource, 0) + count
                instance.asked = 0
                instance.running = True
                self._reached = max(self._reached, scaled)
                granted.append(key)
            else:
                kept |= instance.resources
        return granted

    def release(self, key: Hashable, *, executed: bool = True) -> None:
        """Free an instance's resources after an execution (Q4). With `executed` False, do not count it."""
        instance = self._instances.get(key)
        if instance is not None and instance.running:
            self._free_resources(instance)
            instance.executions += executed

    def used(self) -> dict[Resource, int]:
        """The resources that are held now."""
        return {resource: count for resource, count in self._used.items() if count}

    def counts(self) -> dict[Resource, int]:
        """How many there are of each resource that some instance needs."""
        return dict(self._counts)

    def _lift(self, instance: _Instance) -> None:
        instance.executions = max(instance.executions, self._reached // instance.priority - _MAX_CREDIT)

    def _has(self, instance: _Instance) -> bool:
        return all(
            self._used.get(resource, 0) + count <= self._counts[resource] for resource, count in instance.needs.items()
        )

    def _free_resources(self, instance: _Instance) -> None:
        instance.running = False
        for resource, count in instance.needs.items():
            self._used[resource] -= count

    def _count(self) -> dict[Resource, int]:
        """Count each resource. Raises `InvalidArgument` when an instance could never run (Q3)."""
        counts: dict[Resource, int] = {}
        for instance in self._instances.values():
            for resource, count in instance.needs.items():
                counts[resource] = max(count, counts.get(resource, 0))
        if self._limits:
            for (device, name), needed in counts.items():
                set_count = self._set_count(device, name)
                if set_count < needed:
                    raise InvalidArgument(
                        f'Resource count for "{name}" is limited to {set_count} which will prevent scheduling of one '
                        f"or more model instances, the minimum required count is {needed}"
                    )
                counts[(device, name)] = set_count
        shared = {name for device, name in counts if device == GLOBAL}
        for device, name in sorted(counts):
            if device != GLOBAL and name in shared:
                raise InvalidArgument(
                    f'Resource "{name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )
        return counts

    def _set_count(self, device: int, name: str) -> int:
        """The operator's count of a resource, 0 when it is not named. The device of a global resource is ignored."""
        counts = [
            count
            for (of, resource), count in self._limits.items()
            if resource == name and (device == GLOBAL or of in (device, EVERY_DEVICE))
        ]
        return max(counts, default=0)
