"""Runs recorded arrivals through the real scheduler (`batcher.scheduling`) under a made-up clock.

Pure, but for the random numbers of its seed. Each executor has as many instances as the model has there, and takes a
batch when one is free, in the order in which batches were dispatched to it. How long a batch takes is drawn from the
fit (`service_times`). It takes longer where processors are shared (`shared_cores`), and by the pauses that it meets
(`machine_pauses`).

Where it is known what the processors did (`processor_shares`), requests on their way use them as well, and what else
the server does for a batch follows its answer. That work comes by batch, not by request: a batch of eight wakes each
process of the server about as often as a batch of one. Of the times on the way, that part is such work which the server
used of the processors; the rest is waiting.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import mean
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

from .processor_shares import ProcessorShares
from .recorded_requests import Outcome, RecordedRequest
from .service_times import Draws, Fit
from .shared_cores import SharedCores

_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Setting:
    """A model and what it runs on: `executors` with `instances` each, which may hold `prefetch` further batches. With
    `keeps_apart` a single executor, too, has its batcher in another process, and is given a batch ahead. All
    instances share `cores`; with 0, those of each of `machines`, on which the executors are in turn. Without either
    none is slowed by the others.
    """

    interface: ModelInterface
    executors: int
    instances: int
    prefetch: int = 0
    lane_weights: dict[int, int] = field(default_factory=dict)
    cores: float = 0.0
    machines: tuple[ProcessorShares, ...] = ()
    keeps_apart: bool = False


def rearranged(before: Setting, after: Setting, fit: Fit) -> tuple[Setting, Fit]:
    """`after`, and the fit to a recording of `before`, as they are with the batcher where `after` has it: at the
    executor if that is given no batch ahead, otherwise in a process of its own. Then ways between the two take longer,
    and the server uses more of the processors for a batch.
    """
    if bool(after.prefetch) == bool(before.prefetch):
        return after, fit
    in_service_ns = mean([_in_service_ns(one, fit) for one in before.machines] or [0.0])
    factor = fit.apart if after.prefetch else 1 / fit.apart
    way = fit.way.with_batcher(factor, in_service_ns)
    machines = tuple(replace(one, batch_ns=one.batch_ns * factor) for one in after.machines)
    return replace(after, machines=machines), replace(fit, way=way)


def _in_service_ns(shares: ProcessorShares, fit: Fit) -> float:
    """How much of a recorded execution is on the way: in a journal it lasts from its dispatch to its settlement."""
    return min(max(0.0, fit.service.mean_ns - shares.run_ns), shares.batch_ns) if shares.run_ns else 0.0


class _Machine:
    """Processors that are shared, and what is planned for when work on them ends."""

    def __init__(self, shares: ProcessorShares, fit: Fit) -> None:
        self.share = shares.share
        """How many processors an execution uses."""
        self.cores = SharedCores(shares.left)
        self.plan = 0
        self.then: dict[str, tuple[int, Any]] = {}
        """By the name of a piece of work: what happens after it, and how much later."""
        way = fit.way
        self._lead_ns, turn_ns, tail_ns = (max(0.0, mean(of)) for of in (way.lead_ns, way.turn_ns, way.tail_ns))
        self._in_service_ns = round(_in_service_ns(shares, fit))
        self._end_ns = turn_ns + tail_ns + self._in_service_ns
        on_the_way_ns = self._on_the_way_ns(fit.requests_per_batch)
        self.way_share = min(1.0, shares.batch_ns / on_the_way_ns) if on_the_way_ns else 0.0
        """The part of the time on the way that uses a processor."""
        self._batch_ns = shares.batch_ns

    def computes_ns(self, work_ns: int) -> int:
        """What of an execution uses a processor, or as many as `share` says."""
        on_the_way_ns = min(self._in_service_ns, work_ns)
        return round((work_ns - on_the_way_ns) * min(1.0, self.share) + on_the_way_ns * self.way_share)

    def rest_ns(self, requests: int) -> int:
        """What the server uses of a processor for a batch of so many requests, once it is answered."""
        return max(0, round(self._batch_ns - self.way_share * self._on_the_way_ns(requests)))

    def _on_the_way_ns(self, requests: float) -> float:
        return requests * self._lead_ns + self._end_ns


@dataclass(slots=True)
class _Executor:
    machine: _Machine | None
    free: int
    waiting: deque[DispatchBatch] = field(default_factory=deque)


@dataclass(slots=True)
class _Running:
    """A dispatched batch: its requests' numbers, and when it began and ended."""

    order: DispatchBatch
    numbers: list[int]
    rows: int
    started_ns: int = 0
    computed_ns: int = 0

    @property
    def executor(self) -> str:
        return self.order.executor


@dataclass(frozen=True, slots=True)
class _Computed:
    """A batch has ended at its executor; the scheduler hears of it a little later."""

    batch: DispatchBatch


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A request begins its way to the scheduler."""

    number: int


@dataclass(frozen=True, slots=True)
class _Led:
    """A request is at the scheduler's queue, which takes it after those that arrived before it."""

    number: int


@dataclass(frozen=True, slots=True)
class _Answered:
    """The answers of a batch, which left at `left_ns`, have arrived; they take `tails_ns`, the longest by now."""

    batch: _Running
    name: str
    left_ns: int
    tails_ns: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class _CoreLeft:
    """A piece of work that shares cores ends. It counts if `plan` is the machine's latest."""

    machine: _Machine
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
        shares = (ProcessorShares("", setting.cores),) if setting.cores else setting.machines
        machines = [_Machine(one, fit) for one in shares]
        self._executors = {
            f"executor-{number + 1}": _Executor(
                machines[number % len(machines)] if machines else None, setting.instances
            )
            for number in range(setting.executors)
        }
        # of several machines it is not known which one the gateway is on
        self._gateway = machines[0] if len(machines) == 1 else None
        self._agenda: list[tuple[int, int, Any]] = []
        self._numbers = count()
        self._batches: dict[str, _Running] = {}
        self._led: set[int] = set()
        self._next = 0
        """The first request that is not queued."""
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
                match event:
                    case _Computed():
                        self._computed(event.batch, now_ns)
                    case _CoreLeft():
                        self._core_left(event, now_ns)
                    case _Arrived():
                        self._arrived(event, now_ns)
                    case _Led():
                        events += self._queued(event)
                    case DispatchBatch():
                        self._received(event, now_ns)
                    case _Answered():
                        self._answered(event, now_ns)
                    case _:
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
        for number, one in enumerate(self._arrivals):
            self._plan(one.arrived_ns, _Arrived(number))

    def _arrived(self, event: _Arrived, now_ns: int) -> None:
        self._travel(self._gateway, self._draws.lead_ns(), _Led(event.number), now_ns)

    def _queued(self, event: _Led) -> list[Observation]:
        """What the scheduler is to observe: one queue keeps the order in which it took the requests."""
        self._led.add(event.number)
        found: list[Observation] = []
        while self._next in self._led:
            self._led.remove(self._next)
            found.append(self._request(self._next))
            self._next += 1
        return found

    def _request(self, number: int) -> RequestQueued:
        one = self._arrivals[number]
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
                    machine = self._executors[decision.executor].machine
                    self._travel(machine, self._draws.half_turn_ns(), decision, now_ns)
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
        work_ns, paused_ns = self._draws.service_ns(about.rows, now_ns)
        machine = executor.machine
        if machine is None:
            self._plan(now_ns + work_ns + paused_ns, _Computed(batch))
            return
        # what it waits for comes after what it computes
        computes_ns = machine.computes_ns(work_ns)
        uses = max(1.0, machine.share)
        self._work(machine, computes_ns, uses, work_ns - computes_ns + paused_ns, _Computed(batch), now_ns)

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
        self._travel(executor.machine, self._draws.half_turn_ns(), finished, now_ns)
        if executor.waiting:
            self._start(executor, executor.waiting.popleft(), now_ns)

    def _answer(self, batch: _Running, name: str, at_ns: int) -> None:
        tails_ns = [self._draws.tail_ns() for _ in batch.numbers]
        # they come together: the way of the longest one is that of all
        self._travel(
            self._executors[batch.executor].machine, max(tails_ns), _Answered(batch, name, at_ns, tails_ns), at_ns
        )

    def _answered(self, event: _Answered, now_ns: int) -> None:
        batch = event.batch
        longest_ns = max(event.tails_ns)
        slower = (now_ns - event.left_ns) / longest_ns if longest_ns else 1.0
        for number, tail_ns in zip(batch.numbers, event.tails_ns, strict=True):
            if self._ended[number] is None:  # the first settlement wins
                self._ended[number] = replace(
                    self._arrivals[number],
                    batch=event.name,
                    executor=batch.executor,
                    started_ns=batch.started_ns,
                    computed_ns=batch.computed_ns,
                    ended_ns=event.left_ns + round(tail_ns * slower),
                    outcome=Outcome.ANSWERED,
                )
        machine = self._executors[batch.executor].machine
        if machine is not None:
            self._work(machine, machine.rest_ns(len(batch.numbers)), 1.0, 0, None, now_ns)

    def _end(self, number: int, now_ns: int, outcome: Outcome) -> None:
        if self._ended[number] is None:
            self._ended[number] = replace(
                self._arrivals[number], batch="", executor="", started_ns=0, computed_ns=0, ended_ns=now_ns,
                outcome=outcome,
            )  # fmt: skip

    # -- processors ----------------------------------------------------------------------------------------------------

    def _travel(self, machine: _Machine | None, way_ns: int, then: Any, now_ns: int) -> None:
        """Plans `then` for the end of a way of so long, which takes longer where processors are short."""
        works_ns = round(way_ns * machine.way_share) if machine is not None else 0
        if machine is None or not works_ns:
            self._plan(now_ns + way_ns, then)
        else:
            self._work(machine, works_ns, 1.0, way_ns - works_ns, then, now_ns)

    def _work(self, machine: _Machine, work_ns: int, uses: float, later_ns: int, then: Any, now_ns: int) -> None:
        """Begins work that uses so many processors for `work_ns`; `then` is planned for `later_ns` after its end."""
        if not work_ns:
            if then is not None:
                self._plan(now_ns + later_ns, then)
            return
        name = str(next(self._numbers))
        machine.then[name] = later_ns, then
        machine.cores.begin(name, work_ns, now_ns, uses)
        self._plan_next_end(machine)

    def _plan_next_end(self, machine: _Machine) -> None:
        machine.plan += 1
        at_ns = machine.cores.next_end_ns()
        if at_ns is not None:
            self._plan(at_ns, _CoreLeft(machine, machine.plan))

    def _core_left(self, event: _CoreLeft, now_ns: int) -> None:
        machine = event.machine
        if event.plan != machine.plan:
            return
        later_ns, then = machine.then.pop(machine.cores.end_next(now_ns))
        if then is not None:
            self._plan(now_ns + later_ns, then)
        self._plan_next_end(machine)
