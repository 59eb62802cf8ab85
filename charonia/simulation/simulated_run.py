"""Runs recorded arrivals through the real scheduler (`batcher.scheduling`) under a made-up clock.

Pure, but for the random numbers of its seed. Each executor has as many instances as the model has there, and takes a
batch when one is free, in the order in which batches were dispatched to it. How long a batch takes is drawn from the
fit (`service_times`). It takes longer where instances share cores (`shared_cores`), and by the pauses that it meets
(`machine_pauses`).
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
    instances share `cores`; with 0 none is slowed by the others.
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
    """A dispatched batch: its requests' numbers, when it began and ended, and what pauses took of that."""

    order: DispatchBatch
    numbers: list[int]
    rows: int
    started_ns: int = 0
    computed_ns: int = 0
    paused_ns: int = 0

    @property
    def executor(self) -> str:
        return self.order.executor


@dataclass(frozen=True, slots=True)
class _Computed:
    """A batch has ended at its executor; the scheduler hears of it a little later."""

    batch: DispatchBatch


@dataclass(frozen=True, slots=True)
class _CoreLeft:
    """One of the executions that share cores ends. It counts if `plan` is the latest."""

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
        self._cores = SharedCores(setting.cores) if setting.cores else None
        self._plan_of_cores = 0
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
                    self._computed(event.batch, now_ns)
                elif isinstance(event, _CoreLeft):
                    self._core_left(event, now_ns)
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
            deadline_ns=0,  # no recording has deadlines
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
        work_ns, about.paused_ns = self._draws.service_ns(about.rows, now_ns)
        if self._cores is None:
            self._plan(now_ns + work_ns + about.paused_ns, _Computed(batch))
        else:
            self._cores.begin(batch.batch_id, work_ns, now_ns)
            self._plan_of_next_end(self._cores)

    def _plan_of_next_end(self, cores: SharedCores) -> None:
        self._plan_of_cores += 1
        at_ns = cores.next_end_ns()
        if at_ns is not None:
            self._plan(at_ns, _CoreLeft(self._plan_of_cores))

    def _core_left(self, event: _CoreLeft, now_ns: int) -> None:
        if self._cores is None or event.plan != self._plan_of_cores:
            return
        about = self._batches[self._cores.end_next(now_ns)]
        self._plan(now_ns + about.paused_ns, _Computed(about.order))
        self._plan_of_next_end(self._cores)

    def _computed(self, batch: DispatchBatch, now_ns: int) -> None:
        executor = self._executors[batch.executor]
        executor.free += 1
        about = self._batches.pop(batch.batch_id)
        about.computed_ns = now_ns
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
