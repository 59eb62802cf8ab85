"""Poison isolation: whatever dies or is lost, innocents succeed, culprits are condemned, and it costs few restarts."""

from __future__ import annotations

from math import ceil, log2

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.decisions import CondemnRequest, Decision, DispatchBatch
from batcher.scheduling.observations import (
    BatchDied,
    BatchFinished,
    BatchReturned,
    ExecutorLost,
    PolicyChanged,
    RequestQueued,
    VersionServed,
)
from batcher.scheduling.poison.poison_isolation import TOGETHER_NS
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching


class World:
    """Executors that run batches one after the other; a batch with a culprit ends its instance or its executor."""

    def __init__(self, max_batch_size: int, *, slots: int, prefetch: int, executors: int, ordered: bool) -> None:
        self.scheduler = ModelScheduler("p", prefetch)
        self.slots = slots
        self.running: dict[str, DispatchBatch] = {}
        self.condemned: list[int] = []
        self.succeeded: list[int] = []
        self.restarts = 0
        self.executors = 0
        self.now_ns = 0
        self.waited = False
        self.interface = ModelInterface(
            name="m",
            backend="",
            platform="",
            max_batch_size=max_batch_size,
            inputs={},
            outputs={},
            dynamic_batching=DynamicBatching(preserve_ordering=ordered),
        )
        self.see(PolicyChanged(self.interface))
        for _ in range(executors):
            self.start()

    def start(self) -> None:
        self.executors += 1
        self.see(VersionServed(f"e{self.executors}", 1, "h", self.slots))

    def see(self, event: object) -> None:
        self.take(self.scheduler.observe(event, self.now_ns))  # type: ignore[arg-type]

    def wait(self) -> bool:
        """Let time pass until something happens; whether it did."""
        wakeup_ns = self.scheduler.next_wakeup()
        if wakeup_ns is not None:
            self.now_ns = wakeup_ns
            self.waited = True
            self.take(self.scheduler.advance(self.now_ns))
        return wakeup_ns is not None

    def ask(self, numbers: range) -> None:
        requests = [RequestQueued(n.to_bytes(16, "little"), 1, 0, 1, 7, 0, 0, 0, 0, n) for n in numbers]
        self.take(self.scheduler.observe_all(requests, self.now_ns))

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, DispatchBatch):
                self.running[decision.batch_id] = decision
                self.check_apart(decision)
            elif isinstance(decision, CondemnRequest):
                self.condemned.append(number_of(decision.request))

    def check_apart(self, batch: DispatchBatch) -> None:
        mine = [b for b in self.scheduler._state.batches.values() if b.executor == batch.executor]
        assert len(mine) == 1 or not any(b.apart for b in mine), "a suspect shares its executor"

    def finish(self, batch: DispatchBatch) -> None:
        del self.running[batch.batch_id]
        self.succeeded += [number_of(request) for request in batch.requests]
        self.see(BatchFinished(batch.batch_id, batch.executor, batch.via_owner))

    def die(self, batch: DispatchBatch, *, blameless: bool = False) -> None:
        del self.running[batch.batch_id]
        self.restarts += not blameless
        ids = frozenset(request.id for request in batch.requests)
        self.see(BatchDied(batch.batch_id, batch.executor, ids, "not healthy", blameless=blameless))

    def give_back(self, batch: DispatchBatch) -> None:
        del self.running[batch.batch_id]
        self.see(BatchReturned(batch.batch_id, batch.executor))

    def lose(self, executor: str) -> None:
        self.restarts += 1
        self.now_ns += TOGETHER_NS + 1  # one after the other: several at once count for nobody
        self.running = {i: b for i, b in self.running.items() if b.executor != executor}
        self.see(ExecutorLost(executor))
        self.start()


def number_of(request: RequestQueued) -> int:
    assert isinstance(request.carrier, int)
    return request.carrier


worlds = st.builds(
    World,
    st.integers(1, 16),
    slots=st.integers(1, 3),
    prefetch=st.integers(0, 1),
    executors=st.integers(1, 3),
    ordered=st.booleans(),
)


@settings(max_examples=examples(300), deadline=None)
@given(world=worlds, count=st.integers(1, 60), data=st.data())
def test_deaths_find_the_culprits(world: World, count: int, data: st.DataObject) -> None:
    culprits = data.draw(st.sets(st.integers(0, count - 1), max_size=4))
    world.ask(range(count))
    trouble = 10
    while world.running:
        batch = world.running[data.draw(st.sampled_from(sorted(world.running)))]
        members = {number_of(request) for request in batch.requests}
        if trouble and data.draw(st.integers(0, 4)) == 0:
            trouble -= 1
            if data.draw(st.booleans()):
                world.give_back(batch)
            else:
                world.die(batch, blameless=True)
        elif members & culprits:
            world.die(batch)
        else:
            world.finish(batch)
    assert sorted(world.condemned) == sorted(culprits)
    assert sorted(world.succeeded) == sorted(set(range(count)) - culprits)
    assert world.restarts <= len(culprits) * (ceil(log2(world.interface.max_batch_size)) + 1)
    assert world.scheduler.pending_count() == world.scheduler.outstanding_requests() == 0


@settings(max_examples=examples(300), deadline=None)
@given(world=worlds, count=st.integers(1, 40), data=st.data())
def test_losses_find_the_culprit_and_condemn_nobody_else(world: World, count: int, data: st.DataObject) -> None:
    """A culprit takes the executor down the moment its batch runs; with it goes whatever else is there."""
    culprit = data.draw(st.integers(0, count - 1))
    world.ask(range(count))
    while world.running or world.wait():
        guilty = [b for b in world.running.values() if culprit in {number_of(r) for r in b.requests}]
        batch = world.running[data.draw(st.sampled_from(sorted(world.running)))]
        if batch in guilty:
            world.lose(batch.executor)
        else:
            world.finish(batch)
    assert world.condemned == [culprit]
    assert sorted(world.succeeded) == sorted(set(range(count)) - {culprit})
    assert world.restarts <= (4 if world.interface.max_batch_size <= 8 else 5)


@settings(max_examples=examples(300), deadline=None)
@given(world=worlds, count=st.integers(1, 40), data=st.data())
def test_executors_killed_again_and_again_condemn_nobody(world: World, count: int, data: st.DataObject) -> None:
    """Each executor finishes the first batch it is given before it may be killed: work shorter than the interval."""
    begun: set[str] = set()
    world.ask(range(count))
    kills = 30
    while world.running or world.wait():
        if world.waited:  # long enough for the storm to be over or the next kill to be far
            world.waited = False
            begun.clear()
        batch = world.running[data.draw(st.sampled_from(sorted(world.running)))]
        if kills and batch.executor in begun and data.draw(st.booleans()):
            kills -= 1
            world.lose(batch.executor)
        else:
            first = next(b for b in world.running.values() if b.executor == batch.executor)
            begun.add(first.executor)
            world.finish(first)
    assert world.condemned == []
    assert sorted(world.succeeded) == list(range(count))
