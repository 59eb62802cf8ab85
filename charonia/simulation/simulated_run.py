"""Runs recorded arrivals through the real scheduler (`batcher.scheduling`) under a made-up clock.

Pure, but for the random numbers of its seed. Each executor has as many instances as the model has there, and takes a
batch when one is free, in the order in which batches were dispatched to it. How long a batch takes is drawn from the
fit (`service_times`), and longer where instances share cores (`shared_cores`).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from batcher.scheduling.decisions import (
    CondemnRequest,
    DispatchBatch,
    RejectRequest,
    ReleaseReplies,
)
from batcher.scheduling.observations import (
    BatchFinished,
    Observation,
    PolicyChanged,
    RequestQueued,
    VersionServed,
)
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.errors import InternalError, InvalidArgument
from charonia.keys import lane_of
from charonia.models.interface import ModelInterface

from .recorded_requests import Outcome, RecordedRequest
from .service_times import Draws, Fit
from .shared_cores import SharedCores

_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Setting:
    """A model and what it runs on: `executors` with `instances` each, which may hold `prefetch` further batches. All
    instances share `cores`; 0: none is slowed by the others.
    """

    interface: ModelInterface
    executors: int
    instances: int
    prefetch: int = 0
    lane_weights: dict[int, int] = field(default_factory=dict)
    cores: float = 0.0


@dataclass(slots=True)
class _Executor:
    free: int
    waiting: deque[DispatchBatch] = field(default_factory=deque)


@dataclass(slots=True)
class _Running:
    """A dispatched batch: its requests' numbers, when it began, and when it ends by its last `plan`."""

    order: DispatchBatch
    numbers: list[int]
    rows: int
    started_ns: int = 0
    computed_ns: int = 0
    plan: int = 0

    @property
    def executor(self) -> str:
        return self.order.executor


@dataclass(frozen=True, slots=True)
class _Computed:
    """A batch ends at its executor; the scheduler hears of it a little later. Of several plans for one batch the last
    one counts."""

    batch: DispatchBatch
    plan: int


def simulated(arrivals: Sequence[RecordedRequest], setting: Setting, fit: Fit, seed: int) -> list[RecordedRequest]:
    """What becomes of these requests, in their order: their arrivals, priorities, tenants and time-outs count, what
    was recorded of their batches does not. Raises `InvalidArgument` for a model that the simulation cannot drive."""
    return SimulatedRun(arrivals, setting, fit, seed).run()


class SimulatedRun:
    """One run. `most_running` is the greatest number of batches that ran at once, by executor."""

    def __init__(self, arrivals: Sequence[RecordedRequest], setting: Setting, fit: Fit, seed: int) -> None:
        interface = setting.interface
        if interface.scheduling in ("sequence_batching", "ensemble_scheduling"):
            word = "sequences" if interface.scheduling == "sequence_batching" else "an ensemble"
            raise InvalidArgument(f"'{interface.name}' has {word}: only models without them are simulated")
        self._arrivals = arrivals
        self._setting = setting
        self._draws = Draws(fit, random.Random(seed), arrivals)
        self._scheduler = ModelScheduler("simulated", setting.prefetch, setting.lane_weights)
        self._executors = {
            f"executor-{number}": _Executor(setting.instances) for number in range(1, setting.executors + 1)
        }
        self._agenda: list[tuple[int, int, Any]] = []
        self._numbers = count()
        self._batches: dict[str, _Running] = {}
        self._cores = SharedCores(setting.cores)
        self._ended: list[RecordedRequest | None] = [None] * len(arrivals)
        self._held: dict[str, _Running] = {}
        self.most_running = dict.fromkeys(self._executors, 0)

    def run(self) -> list[RecordedRequest]:
        """The requests as they ended, in the order of their arrivals; each has ended once."""
        self._begin()
        agenda, scheduler = self._agenda, self._scheduler
        while True:
            wakeup_ns = scheduler.next_wakeup()
            if agenda and (wakeup_ns is None or agenda[0][0] <= wakeup_ns):
                now_ns = agenda[0][0]
            elif wakeup_ns is not None:
                now_ns = wakeup_ns
            else:
                break
            events: list[Observation] = []
            while agenda and agenda[0][0] <= now_ns:
                event = heapq.heappop(agenda)[2]
                if isinstance(event, _Computed):
                    self._computed(event, now_ns)
                elif isinstance(event, DispatchBatch):
                    self._received(event, now_ns)
                else:
                    events.append(event)
            if events or (wakeup_ns is not None and wakeup_ns <= now_ns):
                self._carry_out(scheduler.observe_all(events, now_ns), now_ns)
        left = sum(one is None for one in self._ended)
        if left:
            raise InternalError(f"{left} simulated requests have no end")
        return [one for one in self._ended if one is not None]

    def _begin(self) -> None:
        versions = sorted({one.version for one in self._arrivals})
        start: list[Observation] = [PolicyChanged(self._setting.interface)]
        for name in self._executors:
            start += [VersionServed(name, version, "", self._setting.instances) for version in versions]
        first_ns = min((one.arrived_ns for one in self._arrivals), default=0)
        self._carry_out(self._scheduler.observe_all(start, first_ns), first_ns)
        observed_ns = first_ns
        for number, one in enumerate(self._arrivals):
            # one queue keeps the order in which it took the requests
            observed_ns = max(observed_ns, one.arrived_ns + self._draws.lead_ns())
            self._plan(observed_ns, self._queued(number, one))

    def _queued(self, number: int, one: RecordedRequest) -> RequestQueued:
        return RequestQueued(
            id=number.to_bytes(_ID_BYTES, "big"),
            version=one.version,
            level=one.level,
            rows=one.rows,
            signature=0,
            timeout_us=one.timeout_us,
            deadline_ns=one.arrived_ns + one.deadline_ns if one.deadline_ns else 0,
            enqueued_ns=one.arrived_ns,
            carrier=number,
            lane=lane_of(one.tenant),
        )

    def _plan(self, at_ns: int, event: Any) -> None:
        heapq.heappush(self._agenda, (at_ns, next(self._numbers), event))

    def _carry_out(self, decisions: Sequence[Any], now_ns: int) -> None:
        for decision in decisions:
            match decision:
                case DispatchBatch():
                    numbers = [request.carrier for request in decision.requests]
                    rows = sum(request.rows for request in decision.requests)
                    self._batches[decision.batch_id] = _Running(decision, numbers, rows)
                    self._plan(now_ns + self._draws.half_turn_ns(), decision)
                case RejectRequest() | CondemnRequest():
                    self._end(decision.request.carrier, now_ns, Outcome.REFUSED)
                case ReleaseReplies():
                    self._answer(self._held.pop(decision.batch_id), decision.batch_id, now_ns)
                case _:  # a stop of one that runs: its batch goes on to its end here
                    pass

    # -- executors -----------------------------------------------------------------------------------------------------

    def _received(self, batch: DispatchBatch, now_ns: int) -> None:
        executor = self._executors[batch.executor]
        if executor.free:
            self._start(executor, batch, now_ns)
        else:
            executor.waiting.append(batch)

    def _start(self, executor: _Executor, batch: DispatchBatch, now_ns: int) -> None:
        executor.free -= 1
        running = self._setting.instances - executor.free
        self.most_running[batch.executor] = max(self.most_running[batch.executor], running)
        about = self._batches[batch.batch_id]
        about.started_ns = now_ns
        self._cores.begin(batch.batch_id, self._draws.service_ns(about.rows, now_ns), now_ns)
        self._plan_ends(() if self._cores.are_short else (batch.batch_id,))

    def _plan_ends(self, names: Sequence[str]) -> None:
        """Plans when these batches end; without names, all that run."""
        for name, at_ns in self._cores.ends_ns(names):
            about = self._batches[name]
            about.computed_ns, about.plan = at_ns, about.plan + 1
            self._plan(at_ns, _Computed(about.order, about.plan))

    def _computed(self, event: _Computed, now_ns: int) -> None:
        batch = event.batch
        about = self._batches.get(batch.batch_id)
        if about is None or about.plan != event.plan:
            return  # a later plan says otherwise
        executor = self._executors[batch.executor]
        executor.free += 1
        del self._batches[batch.batch_id]
        shared = self._cores.are_short
        self._cores.end(batch.batch_id, now_ns)
        if shared:
            self._plan_ends(())
        if batch.via_owner:
            self._held[batch.batch_id] = about
        else:
            self._answer(about, batch.batch_id, now_ns)
        finished = BatchFinished(batch.batch_id, batch.executor, replies_held=batch.via_owner)
        self._plan(now_ns + self._draws.half_turn_ns(), finished)
        if executor.waiting:
            self._start(executor, executor.waiting.popleft(), now_ns)

    def _answer(self, batch: _Running, name: str, at_ns: int) -> None:
        for number in batch.numbers:
            ended_ns = at_ns + self._draws.tail_ns()
            if self._ended[number] is None:  # the first settlement wins
                self._ended[number] = replace(
                    self._arrivals[number],
                    batch=name,
                    executor=batch.executor,
                    started_ns=batch.started_ns,
                    computed_ns=batch.computed_ns,
                    ended_ns=ended_ns,
                    outcome=Outcome.ANSWERED,
                )

    def _end(self, number: int, now_ns: int, outcome: Outcome) -> None:
        if self._ended[number] is None:
            self._ended[number] = replace(
                self._arrivals[number], batch="", executor="", started_ns=0, computed_ns=0, ended_ns=now_ns,
                outcome=outcome,
            )  # fmt: skip
