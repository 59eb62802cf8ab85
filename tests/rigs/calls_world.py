"""Models that call models, with the schedulers, the rate limiters and the judge of the real thing, and no time but what
is told: what is in nobody's way runs at once, and a batch ends when all calls of its requests are answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import text_format

from batcher.scheduling.deadlock.wait_cycles import StuckCall, stuck_calls
from batcher.scheduling.deadlock.waits import CalledRequest, Holder, Situation
from batcher.scheduling.decisions import CondemnRequest, DispatchBatch, RejectRequest
from batcher.scheduling.observations import (
    BatchFinished,
    CallRefused,
    Observation,
    PolicyChanged,
    RequestQueued,
    SlotFreed,
    VersionServed,
)
from batcher.scheduling.sequences.sequence_scheduler import SequenceScheduler
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.backend import InstanceSpec
from charonia.facts.resource_waits import TurnsNote
from charonia.models.interface import InstanceGroup, ModelInterface, ResourceNeed
from charonia.wire import SequenceMark
from executors.configuration.config import normalise
from executors.running.rate_limiter import RateLimiter
from executors.running.resource_grants import RateLimitedQueue, ResourceGrants
from protos.model_config_pb2 import ModelConfig


def interface(name: str, more: str) -> ModelInterface:
    return ModelInterface.of(normalise(text_format.Parse(f'name: "{name}" backend: "python" {more}', ModelConfig())))


@dataclass(eq=False)
class Asked:
    """A request: whose call it is, and what it has called."""

    model: str
    queued: RequestQueued
    parent: Asked | None
    children: list[Asked] = field(default_factory=list)
    answer: str = ""

    def ancestors(self) -> tuple[bytes, ...]:
        return () if self.parent is None else (*self.parent.ancestors(), self.parent.queued.id)


@dataclass(eq=False)
class Running:
    """A batch at an executor, with the fields of a `SubmittedBatch` that a `RateLimitedQueue` reads."""

    model: str
    batch: DispatchBatch
    asked: list[Asked]
    begun: bool = False
    freed: bool = False
    waves: tuple[()] = ()

    @property
    def records(self) -> list[RequestQueued]:
        return [one.queued for one in self.asked]


class Seat:
    """A worker: its batch has begun as soon as it has it."""

    passive = down = False

    def __init__(self, name: str, model: ModelInterface) -> None:
        self.spec = InstanceSpec(name, "CPU", -1, None, model)  # type: ignore[arg-type]

    def submit(self, batch: Any) -> None:
        batch.begun = True


class World:
    """`models` are served by all `executors`, each with `instances` of them; `needs` limits their rates."""

    def __init__(
        self,
        models: Sequence[ModelInterface],
        instances: Mapping[str, Mapping[str, int]],
        needs: Mapping[str, Sequence[Sequence[ResourceNeed]]] | None = None,
        prefetch: int = 0,
    ) -> None:
        """`needs` has a list for each instance of a model, repeated where there are more."""
        self.now = 1000
        self.instances = instances
        self.asked: dict[bytes, Asked] = {}
        self.batches: list[Running] = []
        self.schedulers: dict[str, ModelScheduler | SequenceScheduler] = {}
        self.limited = needs is not None
        self.turnstiles = {executor: ResourceGrants(RateLimiter()) for executor in instances}
        self.turns: dict[tuple[str, str], RateLimitedQueue] = {}
        for model in models:
            sequential = model.sequence_batching is not None
            for executor, counts in instances.items():
                if needs is not None:
                    self._limit(executor, model, counts[model.name], needs[model.name])
            prefix = f"{model.name}-"
            scheduler = SequenceScheduler(prefix) if sequential else ModelScheduler(prefix, prefetch)
            self.schedulers[model.name] = scheduler
            served = [VersionServed(executor, 1, "h", counts[model.name]) for executor, counts in instances.items()]
            self.see(model.name, PolicyChanged(model), *[one for one in served if one.slots])

    def _limit(self, executor: str, model: ModelInterface, count: int, needs: Sequence[Sequence[ResourceNeed]]) -> None:
        seats = [Seat(f"{model.name}_{index}", model) for index in range(count)]

        def bound(job: Any) -> Any:
            return seats[job.batch.sequences.instance]

        turns = RateLimitedQueue(self.turnstiles[executor], bound if model.sequence_batching is not None else None)
        for index, seat in enumerate(seats):
            group = InstanceGroup(model.name, 1, "KIND_CPU", resources=tuple(needs[index % len(needs)]))
            turns.add(seat, group)  # type: ignore[arg-type]
        self.turns[executor, model.name] = turns

    # -- what happens -------------------------------------------------------------------------------------------------

    def see(self, model: str, *events: Observation) -> None:
        for decision in self.schedulers[model].observe_all(list(events), self.now):
            if isinstance(decision, DispatchBatch):
                running = Running(model, decision, [self.asked[request.id] for request in decision.requests])
                self.batches.append(running)
                if self.limited:
                    self.turns[decision.executor, model].submit(running)  # type: ignore[arg-type]
                else:
                    running.begun = True
            elif isinstance(decision, RejectRequest):
                self.asked[decision.request.id].answer = decision.message or decision.code.name
            else:
                assert not isinstance(decision, CondemnRequest)

    def ask(self, model: str, parent: Asked | None = None, mark: SequenceMark | None = None) -> Asked:
        number = len(self.asked) + 1
        queued = RequestQueued(number.to_bytes(16, "big"), 1, 0, 1, 0, 0, 0, self.now, sequence=mark)
        asked = self.asked[queued.id] = Asked(model, queued, parent)
        if parent is not None:
            parent.children.append(asked)
        self.see(model, queued)
        return asked

    def callers(self) -> list[Asked]:
        return [one for batch in self.batches if batch.begun for one in batch.asked if not one.answer]

    def free(self, running: Running) -> None:
        """Its instance takes the next batch, while it goes on."""
        running.freed = True
        self._leave(running)
        self.see(running.model, SlotFreed(running.batch.batch_id, running.batch.executor))

    def finish_one(self) -> bool:
        """Let a batch end that waits for nothing; False when there is none."""
        for running in self.batches:
            if running.begun and all(call.answer for one in running.asked for call in one.children):
                self.batches.remove(running)
                for one in running.asked:
                    one.answer = one.answer or "ok"
                self.see(running.model, BatchFinished(running.batch.batch_id, running.batch.executor))
                if not running.freed:
                    self._leave(running)
                return True
        return False

    def rest(self) -> None:
        """Let everything happen that can, and all time pass that matters."""
        while self.finish_one() or self._wait():
            pass

    def _wait(self) -> bool:
        wakeups = {name: scheduler.next_wakeup() for name, scheduler in self.schedulers.items()}
        due = [(at, name) for name, at in wakeups.items() if at is not None]
        if not due:
            return False
        at, name = min(due)
        self.now = max(self.now, at)
        self.see(name)
        return True

    def _leave(self, running: Running) -> None:
        if self.limited:
            self.turns[running.batch.executor, running.model].finished(running, died=False)  # type: ignore[arg-type]

    # -- what is known ------------------------------------------------------------------------------------------------

    def situation(self) -> Situation:
        """As the batcher of all models knows it (`batcher.deadlock.deadlock_watch`)."""
        slots = {}
        calls: dict[bytes, CalledRequest] = {}
        holders: list[Holder] = []
        for name, scheduler in self.schedulers.items():
            for executor, version, requests in scheduler.holding():
                holders.append(Holder((name, version), executor, frozenset(request.id for request in requests)))
            sequential = isinstance(scheduler, SequenceScheduler)
            for one in self.asked.values():
                request = scheduler.find(one.queued.id)
                if one.model == name and one.parent is not None and request is not None and not request.settled:
                    step = scheduler.step(request.id) if sequential else None
                    calls[request.id] = CalledRequest(request.id, (name, 1), one.ancestors(), step)
            if sequential:
                slots[name, 1] = scheduler.slot_groups(1)
        plain = [name for name, scheduler in self.schedulers.items() if isinstance(scheduler, ModelScheduler)]
        instances = {(m, 1): {e: counts[m] for e, counts in self.instances.items()} for m in plain}
        return Situation(instances, tuple(holders), calls, slots, self.notes())

    def notes(self, number: int = 0) -> dict[str, TurnsNote]:
        """As executors tell it (`executors.running.limiter_reports`)."""
        found: dict[str, TurnsNote] = {}
        for executor, turnstile in self.turnstiles.items() if self.limited else ():
            told = [turns.snapshot(model, 1) for (where, model), turns in self.turns.items() if where == executor]
            found[executor] = TurnsNote(
                number,
                turnstile.limiter.counts(),
                tuple(turn for turns, _ in told for turn in turns),
                tuple(batch for _, batches in told for batch in batches),
            )
            assert TurnsNote.unpack(found[executor].pack()) == found[executor]
        return found

    def end_stuck(self) -> list[StuckCall]:
        """End calls as a batcher does, the youngest first, until none is stuck."""
        ended: list[StuckCall] = []
        situation = self.situation()
        while stuck := stuck_calls(situation):
            ended.append(max(stuck, key=lambda one: one.call.id))
            situation = situation.without(ended[-1].call.id)
        for one in ended:
            self.see(one.call.version[0], CallRefused(one.call.id, f"deadlock ({one.lack.name}) {one.resource}"))
        return ended

    def unanswered(self) -> list[Asked]:
        return [one for one in self.asked.values() if not one.answer]


__all__ = ["Asked", "Running", "World", "interface"]
