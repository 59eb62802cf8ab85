"""The state of one model's scheduler, and the operations that keep its parts consistent. Decides nothing. Pure.

It has the state of the model, of each version, its batches, and the executors that can take one. `dynamic_batching`
decides which requests go together, `recalls` what becomes of a lost executor's batches.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from msgspec import Struct

from batcher.scheduling.decisions import Decision
from batcher.scheduling.observations import RequestQueued, RequestState
from batcher.scheduling.poison.poison_isolation import Isolation, Suspects
from batcher.scheduling.queues.adaptive_batching import AdaptiveBatching
from batcher.scheduling.queues.dynamic_batching import BatchRules, Formation, ReleaseOrder
from batcher.scheduling.queues.fair_sharing import TurnRules
from batcher.scheduling.queues.ledger import CANCELLED, RequestLedger, cut_short
from batcher.scheduling.queues.queueing import VersionQueue
from batcher.scheduling.routing.prefix_routing import PrefixRouting

ROUTED_PREFETCH = 4
"""Batches of one request each that may wait at an executor of another process: an engine takes the next one at once,
but the owner hears of it later. They wait there in order, whatever their levels and time-outs.
"""
ENDED = RequestState.ENDED
SUSPECT = RequestState.SUSPECT


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
        """Instances that would start a batch at once; negative if batches wait there."""
        return self.slots - self.outstanding


class ServingExecutors:
    """The executors that can take a batch of one version.

    An executor takes at most its slots and `prefetch` batches that wait there. `kept` are executors that are kept free
    of ordinary batches; call `refresh` when it changed.
    """

    __slots__ = ("_kept", "_prefetch", "_uses", "best", "seats")

    def __init__(self, prefetch: int, kept: Container[str] = ()) -> None:
        self._prefetch = prefetch
        self._kept = kept
        self.seats: dict[str, Seat] = {}
        self._uses = 0
        self.best: Seat | None = None
        """The seat for the next batch: most free slots, then least recently used; None when all are full."""

    def serve(self, executor: str, content_hash: str, slots: int) -> None:
        """The executor serves the version, from now on in this incarnation."""
        seat = self.seats.setdefault(executor, Seat(executor))
        seat.content_hash = content_hash
        seat.slots = max(0, slots)
        self._choose()

    def withdraw(self, executor: str) -> None:
        """Send no more batches to the executor; unfinished ones count until they are released."""
        seat = self.seats.get(executor)
        if seat is not None:
            seat.slots = 0
            if not seat.outstanding:
                del self.seats[executor]
            self._choose()

    def lose(self, executor: str) -> None:
        """The executor and all its batches are lost."""
        if self.seats.pop(executor, None) is not None:
            self._choose()

    def occupy(self, executor: str) -> None:
        """The executor has one more batch; if it is not known to serve the version, it gets a seat without slots."""
        seat = self.seats.get(executor) or self.seats.setdefault(executor, Seat(executor))
        seat.outstanding += 1
        self._uses += 1
        seat.last_used = self._uses
        self._choose()

    def release(self, executor: str) -> None:
        """The executor has one batch less."""
        seat = self.seats.get(executor)
        if seat is not None and seat.outstanding:
            seat.outstanding -= 1
            if not seat.slots and not seat.outstanding:
                del self.seats[executor]
            self._choose()

    def change_prefetch(self, prefetch: int) -> None:
        """How many batches may wait at an executor from now on."""
        self._prefetch = prefetch
        self._choose()

    def takes(self, seat: Seat) -> bool:
        """Whether the executor can take a batch now."""
        return 0 < seat.slots > seat.outstanding - self._prefetch and seat.executor not in self._kept

    def refresh(self) -> bool:
        """Choose the best seat again; returns whether it changed."""
        before = self.best
        self._choose()
        return self.best is not before

    def _choose(self) -> None:
        best: Seat | None = None
        for seat in self.seats.values():
            # Without slots no instance could ever run a batch that waits there.
            if not seat.slots or seat.outstanding >= seat.slots + self._prefetch or seat.executor in self._kept:
                continue
            if (
                best is None
                or seat.free_slots > best.free_slots
                or (seat.free_slots == best.free_slots and seat.last_used < best.last_used)
            ):
                best = seat
        self.best = best


class Batch(Struct, eq=False):
    """A dispatched batch until it is finished, returned or lost; `first` is the order of its first request."""

    executor: str
    version: int
    requests: list[RequestQueued]
    dispatched_ns: int
    first: int
    via_owner: bool
    suspects: Suspects | None = None
    """The group that runs by itself (`poison_isolation`); None for an ordinary batch."""
    freed: bool = False
    """Its instance takes other batches although it is not finished."""
    started_ns: int = 0
    """When an instance became free for it, as far as is known here; 0: not yet, or not needed (`adaptive_batching`)."""

    @property
    def apart(self) -> bool:
        """Its executor has no other batch of the model."""
        return self.suspects is not None and self.suspects.apart


class ModelVersion:
    """The state of one version."""

    __slots__ = ("adaptive", "instances", "isolation", "number", "pause", "queue", "releases", "routing")

    def __init__(self, number: int, prefetch: int, kept: Container[str], turns: TurnRules) -> None:
        self.number = number
        self.queue = VersionQueue(turns)
        self.isolation = Isolation()
        self.instances = ServingExecutors(prefetch, kept)
        self.releases = ReleaseOrder()
        self.adaptive: AdaptiveBatching | None = None
        """Set while the configuration has a target."""
        self.routing: PrefixRouting | None = None
        """Set for a model that generates text (`routed_dispatch`)."""
        self.pause: Formation | None = None
        """The queue was checked, and no batch is due before one of these conditions holds."""

    def is_quiet(self) -> bool:
        """Whether a free instance makes no difference: no request waits, and the version is still served."""
        return bool(self.instances.seats) and not (self.queue.size or self.isolation.size or self.releases.firsts)

    def is_idle(self) -> bool:
        return not (self.queue.size or self.isolation.size or self.instances.seats or self.releases.firsts)

    def rules(self, configured: BatchRules, now_ns: int) -> BatchRules:
        """The current rules for batches: as configured, or as chosen to meet the configured target."""
        if not configured.target_p99_ns:
            self.adaptive = None
            return configured
        if self.adaptive is None:
            self.adaptive = AdaptiveBatching(configured)
        self.adaptive.adopt(configured)
        if self.adaptive.is_due(now_ns):
            self.adaptive.review(sum(seat.slots for seat in self.instances.seats.values()), now_ns)
        return self.adaptive.rules


class KeptExecutors(dict[str, int]):
    """Executors that the model keeps free of ordinary batches, to run a suspect alone there (`poison_isolation`).

    Each has the number of the version whose suspect it is kept for. An executor without batches of the model is used at
    once; otherwise the executor with the fewest batches gets no further ones until it is idle.
    """

    __slots__ = ()

    def choose(self, version: ModelVersion, batches: Iterable[Batch], *, fresh: bool) -> Seat | None:
        """A kept executor without batches of the model; if there is none, one is kept for later. `fresh`: only an
        executor that has run no batch of the version.
        """
        apart: dict[str, bool] = {}
        for batch in batches:
            apart[batch.executor] = apart.get(batch.executor, False) or batch.apart
        seats = [seat for seat in version.instances.seats.values() if seat.slots and not (fresh and seat.last_used)]
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
        """The executor takes ordinary batches again; returns whether it was kept."""
        return self.pop(executor, None) is not None

    def give_up_idle(self, version: ModelVersion, batches: Iterable[Batch]) -> bool:
        """No suspect of a version waits for an executor any more; returns whether one was kept for that."""
        used = {batch.executor for batch in batches if batch.apart}
        idle = [e for e, number in self.items() if number == version.number and e not in used]
        for executor in idle:
            del self[executor]
        return bool(idle)


class ModelState:
    """Requests (`ledger`), their queues by version, the dispatched batches, and the versions to process.

    `held` are finished batches whose answers wait for their order, `changed` the versions to process, `paused` those
    that delay a batch until an instant, `fresh_waits` those whose suspects wait for a fresh executor until then.
    """

    __slots__ = (
        "batches",
        "changed",
        "fresh_waits",
        "has_levels",
        "held",
        "kept",
        "ledger",
        "next_order",
        "paused",
        "prefetch",
        "turns",
        "versions",
    )

    def __init__(self, prefetch: int, lane_weights: Mapping[int, int]) -> None:
        self.prefetch = prefetch
        self.has_levels = False
        """Whether the model has priority levels or queue policies."""
        self.ledger = RequestLedger()
        self.turns = TurnRules(lane_weights)
        self.kept = KeptExecutors()
        self.versions: dict[int, ModelVersion] = {}
        self.batches: dict[str, Batch] = {}
        self.held: set[str] = set()
        self.changed: dict[int, None] = {}
        self.paused: dict[int, int] = {}
        self.fresh_waits: dict[int, int] = {}
        self.next_order = 0
        """The next position in the order of arrival."""

    def version(self, number: int) -> ModelVersion:
        version = self.versions.get(number)
        if version is None:
            version = self.versions[number] = ModelVersion(number, self.prefetch, self.kept, self.turns)
            self.route(version)
        return version

    def route(self, version: ModelVersion) -> None:
        """Have a version's requests placed by their prompts, or no longer."""
        shares = self.turns.shares
        if shares is None:
            version.routing = None
        elif version.routing is None:
            version.routing = PrefixRouting(shares.answers)
        ahead = ROUTED_PREFETCH if shares is not None and self.prefetch and not self.has_levels else self.prefetch
        version.instances.change_prefetch(ahead)

    def touch(self, number: int) -> None:
        """A version has changed: process its queue again."""
        self.changed[number] = None
        version = self.versions.get(number)
        if version is not None and version.pause is not None:
            version.pause = None
            self.paused.pop(number, None)

    def touch_due(self, now_ns: int) -> None:
        """Process the versions whose instant has come."""
        for waits in (self.paused, self.fresh_waits):
            for number in [number for number, until_ns in waits.items() if until_ns <= now_ns]:
                self.touch(number)

    def measure(self, adaptive: AdaptiveBatching, batch: Batch, was_freed: bool, now_ns: int) -> None:
        """Record the duration and lateness of a finished batch, if batching adapts to them."""
        requests = batch.requests
        if batch.started_ns and batch.suspects is None and not was_freed:
            adaptive.finished(sum(request.rows for request in requests), now_ns - batch.started_ns, now_ns)
        in_time_since_ns = now_ns - adaptive.target_ns
        adaptive.answered(len(requests), sum(request.enqueued_ns < in_time_since_ns for request in requests))
        for other in self.batches.values():
            # the instance begins the next of the batches that waited behind
            if not other.started_ns and other.executor == batch.executor and other.version == batch.version:
                other.started_ns = now_ns
                break

    def set_lane(self, request: RequestQueued) -> None:
        """No turns where answers keep the order of arrival (S6)."""
        if self.ledger.batching is not None and self.ledger.batching.preserve_ordering:
            request.lane = 0

    def recall(
        self, batch_id: str, why: str, now_ns: int, decisions: list[Decision], *, suspect: bool = False
    ) -> tuple[Batch, list[RequestQueued]]:
        """A batch will not finish, because of `why`: returns it with its unsettled requests. Waves are burst, perhaps
        as suspects. A request that had responses ends here, unless its model is repeatable.
        """
        batch = self.batches.pop(batch_id)
        version = self.free_slot(batch)
        if self.kept:
            self.released(batch)
        if batch.via_owner:
            version.releases.lose(batch.first)
        if version.routing is not None:
            self.returned_routed(version, batch)
        self.touch(batch.version)
        left: list[RequestQueued] = []
        for request in batch.requests:
            if request.wave:
                self.ledger.burst(request, decisions, suspect=suspect, executor=batch.executor)
                continue
            request.away_ns += now_ns - batch.dispatched_ns
            if request.due_ns:
                self.ledger.due.disarm(request)
            if request.responding and not request.settled and not self.ledger.repeatable:
                self.ledger.reject(request, *cut_short(why), decisions)
            elif request.cancelled and not request.settled:
                self.ledger.reject(request, *CANCELLED, decisions)
            elif self.ledger.admit(request, now_ns, decisions):
                left.append(request)
        return batch, left

    def returned_routed(self, version: ModelVersion, batch: Batch) -> None:
        """A batch of a routed version came back: its requests may be queued again beside the places that they left."""
        version.queue.sweep()
        for request in batch.requests:
            if version.routing is not None:
                version.routing.ended(request.id)
            if self.turns.shares is not None:
                self.turns.shares.returned(request.id)

    def free_slot(self, batch: Batch) -> ModelVersion:
        """The batch's instance is free, if it was not before."""
        version = self.version(batch.version)
        if not batch.freed:
            batch.freed = True
            version.instances.release(batch.executor)
        return version

    def remove(self, request: RequestQueued, state: RequestState = ENDED) -> None:
        """Remove a request from the queue; if that ends it, it is forgotten."""
        version = self.versions[request.version]
        (version.isolation if request.state is SUSPECT else version.queue).remove(request, state)
        self.ledger.uncount(request)
        if state is ENDED:
            del self.ledger.known[request.id]
        self.touch(request.version)

    def released(self, batch: Batch) -> None:
        """An executor has one batch less; it may be the one that it was kept free for."""
        if batch.apart and self.kept.give_up(batch.executor):
            self.refresh()
        elif (waiting := self.kept.get(batch.executor)) is not None:
            self.touch(waiting)

    def refresh(self) -> None:
        """The set of kept executors has changed."""
        for number, version in self.versions.items():
            if version.instances.refresh():
                self.touch(number)
