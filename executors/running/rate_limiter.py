"""Which instances may execute now, when models share limited resources (items Q1-Q4). Pure.

The counts and the order only; what waits and how an execution begins is `executors.running.resource_grants`'s. One limiter
decides for all models of an executor.

Of the instances that wait, the one with the smallest executions x priority is first (Q2). One that must wait for a
resource keeps what it needs from those behind it, so that a large need is never starved by many small ones; those that
need nothing of that go ahead. An instance that was idle or has just come does not make up for more than `_CREDIT`
executions: it would keep all others from running for as long.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from charonia.errors import InvalidArgument
from charonia.models.interface import ResourceNeed
from charonia.options.settings import EVERY_DEVICE

GLOBAL = -1
"""The device of a resource that all devices share."""

_CREDIT = 32

Resource = tuple[int, str]
"""A device and a resource's name."""
Limits = Mapping[Resource, int]


@dataclass(slots=True, eq=False)
class _Instance:
    needs: dict[Resource, int]
    priority: int
    executions: int = 0
    asked: int = 0
    """When it began to wait, as a count of requests; 0 when it does not wait."""
    running: bool = False
    resources: frozenset[Resource] = field(init=False)

    def __post_init__(self) -> None:
        self.resources = frozenset(self.needs)

    @property
    def scaled(self) -> int:
        return self.executions * self.priority


class RateLimiter:
    """`limits` are the counts an operator set; without any, a resource has as many as the largest need of it (Q1)."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = dict(limits or {})
        self._instances: dict[Hashable, _Instance] = {}
        self._counts: dict[Resource, int] = {}
        self._used: dict[Resource, int] = {}
        self._asked = 0
        self._reached = 0

    def register(self, key: Hashable, needs: Iterable[ResourceNeed], priority: int, device: int) -> None:
        """An instance on `device` (0 on a CPU). Raises `InvalidArgument` when it could never run (Q3); then nothing
        is changed."""
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
        """The instance is gone, and what it held is free."""
        instance = self._instances.get(key)
        if instance is not None:
            if instance.running:
                self._free_resources(instance)
            del self._instances[key]
            self._counts = self._count()

    def ask(self, key: Hashable) -> None:
        """The instance has something to execute; nothing happens when it waits or runs already."""
        instance = self._instances[key]
        if not instance.asked and not instance.running:
            self._asked += 1
            instance.asked = self._asked
            self._lift(instance)

    def withdraw(self, key: Hashable) -> None:
        """The instance has nothing to execute after all."""
        self._instances[key].asked = 0

    def scaled_executions(self, key: Hashable) -> int:
        """Executions x priority: who is behind by this goes first (Q2)."""
        return self._instances[key].scaled

    def needs(self, key: Hashable) -> dict[Resource, int]:
        """What the instance must have to execute."""
        return self._instances[key].needs

    def order(self, key: Hashable) -> tuple[int, int] | None:
        """Of two that wait the one with the smaller comes first; None when it does not wait."""
        instance = self._instances[key]
        return (instance.scaled, instance.asked) if instance.asked else None

    def grant(self) -> list[Hashable]:
        """The instances that begin to execute now, in order; they hold their resources until `release`."""
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
        """An execution ended (Q4); not `executed`: it did not come about, and is not counted."""
        instance = self._instances.get(key)
        if instance is not None and instance.running:
            self._free_resources(instance)
            instance.executions += executed

    def used(self) -> dict[Resource, int]:
        """What is held now, by device and name."""
        return {resource: count for resource, count in self._used.items() if count}

    def counts(self) -> dict[Resource, int]:
        """How many there are of each resource anybody needs."""
        return dict(self._counts)

    def _lift(self, instance: _Instance) -> None:
        instance.executions = max(instance.executions, self._reached // instance.priority - _CREDIT)

    def _has(self, instance: _Instance) -> bool:
        return all(
            self._used.get(resource, 0) + count <= self._counts[resource] for resource, count in instance.needs.items()
        )

    def _free_resources(self, instance: _Instance) -> None:
        instance.running = False
        for resource, count in instance.needs.items():
            self._used[resource] -= count

    def _count(self) -> dict[Resource, int]:
        """How many there are of each resource. Raises `InvalidArgument` (Q3)."""
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
        """What the operator set; of a global resource the device does not matter. What is not named is not there."""
        counts = [
            count
            for (of, resource), count in self._limits.items()
            if resource == name and (device == GLOBAL or of in (device, EVERY_DEVICE))
        ]
        return max(counts, default=0)
