"""Circles of calls over slots of sequences and over resources of a rate limiter, with the real schedulers and turns.

What is said to be stuck never runs, and where nothing moves something is said to be stuck; once that is ended all else
is answered.
"""

from __future__ import annotations

from dataclasses import replace

from calls_world import World, interface
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.deadlock.waiting import Suspicions, Waiting
from batcher.scheduling.deadlock.wait_cycles import Lack, StuckCall, stuck_calls
from batcher.scheduling.deadlock.waits import CalledRequest, Situation
from charonia.facts.resource_waits import Turn, TurnsNote, WaitingBatch
from charonia.models.interface import ResourceNeed
from charonia.wire import SequenceMark

IDLE = "max_sequence_idle_microseconds: 50"
SEQUENTIAL = (
    f"max_batch_size: 2 sequence_batching {{ {IDLE} direct {{ }} }}",
    f"max_batch_size: 0 sequence_batching {{ {IDLE} }}",
    f"max_batch_size: 2 sequence_batching {{ {IDLE} oldest {{ max_candidate_sequences: 2 }} }}",
)
PLAIN = ("max_batch_size: 0", "max_batch_size: 2 dynamic_batching { }")


@st.composite
def worlds(draw: st.DrawFn, *, limited: bool) -> World:
    models = [
        interface("s", draw(st.sampled_from(SEQUENTIAL))),
        interface("t", draw(st.sampled_from([*SEQUENTIAL, *PLAIN]))),
        interface("p", draw(st.sampled_from(PLAIN))),
    ]
    instances = {
        executor: {model.name: draw(st.integers(least, 2), label=f"{model.name} at {executor}") for model in models}
        for executor, least in (("e", 1), ("f", 0))
    }
    need = st.lists(
        st.builds(ResourceNeed, st.sampled_from(["x", "y"]), st.integers(1, 2)), max_size=2, unique_by=lambda n: n.name
    )
    needs = {model.name: draw(st.lists(need, min_size=1, max_size=2), label=model.name) for model in models}
    # what waits at an executor is only known here where it waits for its turn
    prefetch = draw(st.integers(0, 1)) if limited else 0
    world = World(models, instances, needs if limited else None, prefetch)
    for _ in range(draw(st.integers(1, 14))):
        what = draw(st.sampled_from(["ask", "ask", "ask", "ask", "finish", "free", "idle"]))
        if what == "finish":
            world.finish_one()
        elif what == "free":
            begun = [batch for batch in world.batches if batch.begun and not batch.freed]
            if begun:
                world.free(draw(st.sampled_from(begun)))
        elif what == "idle":
            world.now += 30_000
        else:
            model = draw(st.sampled_from(models))
            mark = None
            if model.sequence_batching is not None:
                which = draw(st.sampled_from(["1", "2", "3"]))
                mark = SequenceMark(which, start=draw(st.booleans()), end=draw(st.booleans()))
            callers = world.callers()
            parent = draw(st.sampled_from([None, *callers, *callers[-1:] * 3]))
            world.ask(model.name, parent, mark)
    return world


def check(world: World) -> None:
    # what rests or is put off for a while is no deadlock, and must not be taken for one
    said = {one.call.id for one in stuck_calls(world.situation())}
    world.rest()
    for request_id in said:
        assert not world.asked[request_id].answer, "it was said to be stuck"
    while left := world.unanswered():
        ended = world.end_stuck()
        assert ended, left
        world.rest()


@settings(max_examples=examples(300), deadline=None)
@given(worlds(limited=False))
def test_sequences(world: World) -> None:
    check(world)


def test_a_sequence_whose_last_request_runs_needs_its_instance_no_more() -> None:
    """Found once in 50,000 worlds: the next one of its id goes to another instance, whatever its own has begun."""
    models = [interface("t", SEQUENTIAL[0])]
    world = World(models, {"e": {"t": 1}, "f": {"t": 1}})
    first = world.ask("t", None, SequenceMark("1", start=True, end=True))
    elsewhere = world.ask("t", first, SequenceMark("2", start=True, end=True))
    world.free(next(batch for batch in world.batches if first in batch.asked))
    caller = world.ask("t", None, SequenceMark("3", start=True))
    assert world.finish_one()
    assert (elsewhere.answer, [batch.asked for batch in world.batches]) == ("ok", [[first], [caller]])
    world.ask("t", caller, SequenceMark("1", start=True))
    check(world)


@settings(max_examples=examples(300), deadline=None)
@given(worlds(limited=True))
def test_resources(world: World) -> None:
    check(world)


@settings(max_examples=examples(200), deadline=None)
@given(worlds(limited=True), st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_what_was_told_at_several_moments_is_judged_as_if_it_were_one(world: World, steps: list[int]) -> None:
    suspicions, chosen = Suspicions(), list[bytes]()
    for number, count in enumerate(steps):
        mine = replace(world.situation(), turns={})
        for _ in range(count):
            world.finish_one()
        notes = world.notes(number)
        chosen += [one.call.id for one in suspicions.judge(waiting(world, number, mine), {}, notes)]
        for _ in range(count):
            world.finish_one()
    world.rest()
    for request_id in chosen:
        assert not world.asked[request_id].answer, "it was said to be stuck"
    if world.unanswered():
        at_rest = Suspicions()
        mine = replace(world.situation(), turns={})
        assert at_rest.judge(waiting(world, 10, mine), {}, world.notes(10)) == []
        assert at_rest.judge(waiting(world, 11, mine), {}, world.notes(10)) == [], "it tells nothing new"
        assert at_rest.judge(waiting(world, 12, mine), {}, world.notes(11)), "found by the second look"


def waiting(world: World, number: int, situation: Situation) -> Waiting:
    told = Waiting(number, situation, {call_id: world.asked[call_id].queued.enqueued_ns for call_id in situation.calls})
    assert Waiting.unpack(told.pack()) == told
    return told


def test_who_keeps_a_resource_from_those_behind_it_is_in_their_way_unless_another_can_do_its_work() -> None:
    """`r` executes with one of two x and calls `s`, which needs one; before it waits `w`, which needs both."""
    x = (0, "x")
    caller = Turn("r_0", ("r", 1, -1), {x: 1}, (b"r",))
    large = Turn("w_0", ("w", 1, -1), {x: 2}, order=(0, 1))
    small = Turn("s_0", ("s", 1, -1), {x: 1}, order=(0, 2))
    batches = (WaitingBatch(large.room, (b"w",)), WaitingBatch(small.room, (b"s",)))
    call = CalledRequest(b"s", ("s", 1), (b"r",))

    def judged(*turns: Turn) -> list[StuckCall]:
        return stuck_calls(Situation(calls={b"s": call}, turns={"e": TurnsNote(1, {x: 2}, turns, batches)}))

    assert judged(caller, large, small) == [StuckCall(call, Lack.RESOURCE, "x")]
    assert judged(caller, small) == []
    # an instance that needs nothing of it will take what waits
    assert judged(caller, large, Turn("w_1", large.room, {(0, "y"): 1}, (b"other",)), small) == []
    # one that is busy for ever will not
    both = judged(replace(caller, running=(b"r", b"q")), large, Turn("w_1", large.room, {}, (b"q",)), small)
    assert both == [StuckCall(call, Lack.RESOURCE, "x")]
