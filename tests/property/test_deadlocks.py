"""Calls between models: what is said to be stuck can never run, and what is not said to be stuck can.

The model is the machine itself: batches hold instances until all they wait for is answered; whatever may run, runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.deadlock.waiting import Suspicions, Waiting
from batcher.scheduling.deadlock.wait_cycles import stuck_calls
from batcher.scheduling.deadlock.waits import CalledRequest, Holder, Situation

MODELS = ("a", "b", "c")
EXECUTORS = ("e", "f")


@dataclass
class Request:
    """`place` is where its batch is, None while it waits in its queue."""

    number: int
    model: str
    parent: Request | None = None
    batch: Batch | None = None
    children: list[Request] = field(default_factory=list)
    answered: bool = False

    @property
    def id(self) -> bytes:
        return self.number.to_bytes(16, "little")

    def ancestors(self) -> tuple[bytes, ...]:
        return () if self.parent is None else (*self.parent.ancestors(), self.parent.id)


@dataclass
class Batch:
    model: str
    executor: str
    requests: list[Request]
    done: bool = False


@dataclass
class World:
    """Slots per model and executor; batches beyond them wait at their executor."""

    slots: dict[tuple[str, str], int]
    batches: list[Batch] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def running(self, place: tuple[str, str]) -> list[Batch]:
        """In order of arrival: instances take what waits there longest."""
        here = [b for b in self.batches if (b.model, b.executor) == place and not b.done]
        return here[: self.slots[place]]

    def runs(self, batch: Batch) -> bool:
        return any(batch is other for other in self.running((batch.model, batch.executor)))

    def step(self) -> bool:
        """Let something happen that can; False when nothing can."""
        for batch in self.batches:
            if not batch.done and self.runs(batch) and all(c.answered for r in batch.requests for c in r.children):
                batch.done = True
                for request in batch.requests:
                    request.answered = True
                return True
        for request in self.requests:
            if request.batch is None:
                for model, executor in self.slots:
                    place = (model, executor)
                    if model == request.model and len(self.running(place)) < self.slots[place]:
                        request.batch = Batch(model, executor, [request])
                        self.batches.append(request.batch)
                        return True
        return False


@st.composite
def worlds(draw: st.DrawFn) -> World:
    slots = {
        (model, executor): draw(st.integers(0, 2), label=f"slots of {model} at {executor}")
        for model in MODELS
        for executor in EXECUTORS
    }
    world = World(slots)
    for number in range(draw(st.integers(1, 10))):
        callers = [r for b in world.batches if world.runs(b) for r in b.requests]
        parent = draw(st.sampled_from([None, *callers])) if callers else None
        request = Request(number, draw(st.sampled_from(MODELS)), parent)
        world.requests.append(request)
        if parent is not None:
            parent.children.append(request)
        # into its queue, into a batch of its own, or into one that has not begun
        executor = draw(st.sampled_from(["", *EXECUTORS]))
        place = (request.model, executor)
        there = [b for b in world.batches if (b.model, b.executor) == place]
        if executor and slots[place] and len(there) <= slots[place]:
            joinable = [b for b in there if not any(r.children for r in b.requests)]
            if joinable and draw(st.booleans()):
                request.batch = joinable[-1]
                request.batch.requests.append(request)
            else:
                request.batch = Batch(request.model, executor, [request])
                world.batches.append(request.batch)
    return world


@settings(max_examples=examples(400), deadline=None)
@given(worlds())
def test_what_is_stuck_never_runs_and_all_else_does(world: World) -> None:
    instances: dict[tuple[str, int], dict[str, int]] = {}
    for (model, executor), count in world.slots.items():
        instances.setdefault((model, 1), {})[executor] = count
    holders = [Holder((b.model, 1), b.executor, frozenset(r.id for r in b.requests)) for b in world.batches]
    called = {r.id: CalledRequest(r.id, (r.model, 1), r.ancestors()) for r in world.requests if r.parent is not None}
    found = {one.call.id for one in stuck_calls(Situation(instances, tuple(holders), called))}

    while world.step():
        pass
    unserved = {model for model in MODELS if not any(world.slots[(model, executor)] for executor in EXECUTORS)}
    for request in world.requests:
        if request.id in found:
            assert not request.answered, "it was said to be stuck"
    left = [r for r in world.requests if not r.answered]
    if left and not any(r.model in unserved for r in left):
        # nobody's executor is missing: then a deadlock is all that can be the reason, and it is found
        assert found


OWNERS = {"a": "one", "b": "two", "c": "two"}
"""The models of two batchers."""


def told(world: World, owner: str, number: int) -> Waiting:
    """What a batcher knows at this moment."""
    calls = [r for r in world.requests if r.parent is not None and not r.answered and OWNERS[r.model] == owner]
    instances: dict[tuple[str, int], dict[str, int]] = {}
    for (model, executor), count in world.slots.items():
        if OWNERS[model] == owner:
            instances.setdefault((model, 1), {})[executor] = count
    waiting = Waiting(
        number,
        Situation(
            instances,
            tuple(
                Holder((b.model, 1), b.executor, frozenset(r.id for r in b.requests))
                for b in world.batches
                if not b.done and OWNERS[b.model] == owner
            ),
            {r.id: CalledRequest(r.id, (r.model, 1), r.ancestors()) for r in calls},
        ),
        {r.id: r.number for r in calls},
    )
    assert Waiting.unpack(waiting.pack()) == waiting
    return waiting


@settings(max_examples=examples(300), deadline=None)
@given(worlds(), st.lists(st.integers(0, 2), min_size=4, max_size=4), st.booleans())
def test_what_several_batchers_end_is_stuck_whenever_each_of_them_looked(
    world: World, steps: list[int], stale: bool
) -> None:
    """The world goes on between any two looks, so no two are of one moment."""
    suspicions, chosen = Suspicions(), list[bytes]()
    other = told(world, "two", 0)
    for number, count in enumerate(steps):
        if not stale or number % 2 == 0:
            other = told(world, "two", number)
        for _ in range(count):
            world.step()
        chosen += [one.call.id for one in suspicions.judge(told(world, "one", number), {"two": other})]
        for _ in range(count):
            world.step()
    while world.step():
        pass
    for request in world.requests:
        if request.id in chosen:
            assert not request.answered, "it was said to be stuck"
    unserved = {m for m in MODELS if not any(world.slots[(m, executor)] for executor in EXECUTORS)}
    left = [r for r in world.requests if not r.answered]
    if left and not any(r.model in unserved for r in left):
        at_rest = Suspicions()
        found = [at_rest.judge(told(world, "one", n), {"two": told(world, "two", n)}) for n in (10, 11)]
        assert found[0] == []
        if told(world, "one", 0).situation.calls:
            assert found[1], "a deadlock at rest is found by the second look"


def test_a_crossing_of_two_batchers_needs_two_looks_at_each() -> None:
    world = World({(m, e): int(e == "e") for m in MODELS for e in EXECUTORS})
    first, second = Request(1, "a"), Request(2, "b")
    for request in (first, second):
        request.batch = Batch(request.model, "e", [request])
        world.batches.append(request.batch)
    to_b, to_a = Request(3, "b", first), Request(4, "a", second)
    first.children, second.children = [to_b], [to_a]
    world.requests = [first, second, to_b, to_a]
    alone, suspicions = Suspicions(), Suspicions()
    for number in (1, 2, 3):
        assert alone.judge(told(world, "one", number), {}) == []
    other = told(world, "two", 1)
    assert suspicions.judge(told(world, "one", 1), {"two": other}) == []
    assert suspicions.judge(told(world, "one", 2), {"two": other}) == []
    (found,) = suspicions.judge(told(world, "one", 3), {"two": told(world, "two", 2)})
    assert found.call.id == to_a.id
