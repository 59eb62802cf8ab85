"""Which adapter (LoRA) lies in which slot of a decoder, and which may be replaced.

Pure. `executors.generation.step_scheduler` asks before it admits a request; the engine loads what a plan says.
"""

from __future__ import annotations


class AdapterSlots:
    """`count` slots, numbered from 0. An adapter that no running request uses stays until its slot is needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._slots: dict[str, int] = {}
        """Loaded adapters, the least recently used first."""
        self._users: dict[str, int] = {}
        self._free = list(range(count - 1, -1, -1))

    @property
    def loaded(self) -> dict[str, int]:
        """The adapters in their slots."""
        return dict(self._slots)

    @property
    def occupied(self) -> int:
        """How many slots have an adapter."""
        return len(self._slots)

    def can_hold(self, name: str) -> bool:
        return name in self._slots or bool(self._free) or len(self._users) < len(self._slots)

    def hold(self, name: str) -> tuple[int, bool]:
        """Use an adapter once more: its slot, and whether it has to be loaded. Only after `can_hold`."""
        slot = self._slots.pop(name, None)
        needs_load = slot is None
        if slot is None:
            if self._free:
                slot = self._free.pop()
            else:
                idle = next(one for one in self._slots if one not in self._users)
                slot = self._slots.pop(idle)
        self._slots[name] = slot
        self._users[name] = self._users.get(name, 0) + 1
        return slot, needs_load

    def release(self, name: str) -> None:
        """One request uses it no more."""
        left = self._users[name] - 1
        if left:
            self._users[name] = left
        else:
            del self._users[name]

    def forget(self, name: str) -> None:
        """Its slot does not hold it (any more). Only of an adapter that no request uses."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._free.append(slot)
