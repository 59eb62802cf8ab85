"""Who can take a batch of one model version: the executors that serve it, their slots and what each of them has.

Counts only. Which requests go is `dynamic_batching`'s; what becomes of a lost executor's batches, the scheduler's.
"""

from __future__ import annotations

from collections.abc import Container


class Seat:
    """One executor's share of a version: it runs `slots` batches at once and has `outstanding` of them."""

    __slots__ = ("content_hash", "executor", "last_used", "outstanding", "slots")

    def __init__(self, executor: str) -> None:
        self.executor = executor
        self.content_hash = ""
        self.slots = 0
        self.outstanding = 0
        self.last_used = 0

    @property
    def free_slots(self) -> int:
        """Instances that would start a batch at once; negative by the batches that wait there."""
        return self.slots - self.outstanding


class InstanceGroup:
    """The seats of one version. An executor takes at most its slots and `prefetch` batches that wait there.

    `kept` are executors that are kept free of ordinary batches; `refresh` when it changed.
    """

    __slots__ = ("_best", "_kept", "_prefetch", "_seats", "_uses")

    def __init__(self, prefetch: int, kept: Container[str] = ()) -> None:
        self._prefetch = prefetch
        self._kept = kept
        self._seats: dict[str, Seat] = {}
        self._uses = 0
        self._best: Seat | None = None

    def __bool__(self) -> bool:
        return bool(self._seats)

    def best(self) -> Seat | None:
        """The seat for the next batch: most free slots, then least recently used; None when all are full."""
        return self._best

    def serve(self, executor: str, content_hash: str, slots: int) -> None:
        """The executor serves the version, from now on in this incarnation."""
        seat = self._seats.setdefault(executor, Seat(executor))
        seat.content_hash = content_hash
        seat.slots = max(0, slots)
        self._choose()

    def withdraw(self, executor: str) -> None:
        """No more batches for the executor; what it has still counts until it is released."""
        seat = self._seats.get(executor)
        if seat is not None:
            seat.slots = 0
            self._drop_if_done(seat)
            self._choose()

    def lose(self, executor: str) -> None:
        """The executor and all it had are gone."""
        if self._seats.pop(executor, None) is not None:
            self._choose()

    def occupy(self, executor: str) -> None:
        """The executor has one more batch; one that is not known to serve the version gets a seat without slots."""
        seat = self._seats.setdefault(executor, Seat(executor))
        seat.outstanding += 1
        self._uses += 1
        seat.last_used = self._uses
        self._choose()

    def release(self, executor: str) -> None:
        """The executor has one batch less."""
        seat = self._seats.get(executor)
        if seat is not None and seat.outstanding:
            seat.outstanding -= 1
            self._drop_if_done(seat)
            self._choose()

    def refresh(self) -> bool:
        """Choose again; whether the choice is another one."""
        before = self._best
        self._choose()
        return self._best is not before

    def seats(self) -> list[Seat]:
        """All seats."""
        return list(self._seats.values())

    def _drop_if_done(self, seat: Seat) -> None:
        if not seat.slots and not seat.outstanding:
            del self._seats[seat.executor]

    def _choose(self) -> None:
        best: Seat | None = None
        for seat in self._seats.values():
            # Without slots there is no instance that could ever get to a batch that waits there.
            if not seat.slots or seat.outstanding >= seat.slots + self._prefetch or seat.executor in self._kept:
                continue
            if (
                best is None
                or seat.free_slots > best.free_slots
                or (seat.free_slots == best.free_slots and seat.last_used < best.last_used)
            ):
                best = seat
        self._best = best
