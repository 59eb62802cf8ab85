"""Executors that a model keeps free of ordinary batches, so that a suspect runs there apart (`poison_isolation`). Pure.

One that has nothing of the model is used at once; else the one that has least takes no more until it has nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from .instance_group import Seat
from .model_version import Batch, ModelVersion


class KeptExecutors(dict[str, int]):
    """Executor to the number of the version whose suspect it is kept for."""

    __slots__ = ()

    def choose(self, version: ModelVersion, batches: Iterable[Batch], *, fresh: bool) -> Seat | None:
        """An executor with nothing of the model, kept from now on; without one, one is kept for later.

        `fresh`: only one that has run nothing of the version.
        """
        apart: dict[str, bool] = {}
        for batch in batches:
            apart[batch.executor] = apart.get(batch.executor, False) or batch.apart
        seats = [seat for seat in version.instances.seats() if seat.slots and not (fresh and seat.last_used)]
        idle = [seat for seat in seats if seat.executor not in apart]
        if idle:
            seat = min(idle, key=lambda seat: seat.last_used)
            self[seat.executor] = version.number
            return seat
        if not any(seat.executor in self and not apart[seat.executor] for seat in seats):
            others = [seat for seat in seats if seat.executor not in self]
            if others:
                self[min(others, key=lambda seat: seat.outstanding).executor] = version.number
        return None

    def give_up(self, executor: str) -> bool:
        """The executor takes ordinary batches again; whether it did not."""
        return self.pop(executor, None) is not None

    def give_up_idle(self, version: ModelVersion, batches: Iterable[Batch]) -> bool:
        """No suspect of a version waits for an executor any more; whether one was kept for that."""
        used = {batch.executor for batch in batches if batch.apart}
        idle = [e for e, number in self.items() if number == version.number and e not in used]
        for executor in idle:
            del self[executor]
        return bool(idle)
