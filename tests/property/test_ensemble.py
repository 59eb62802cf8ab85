"""The planner of ensembles over random graphs: every request ends once, with what the graph says, however it goes on.

A step's output is named after what it was made of, so an answer shows the whole way it came.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.decisions import RejectRequest
from batcher.scheduling.ensembles import ensemble_planner as plan
from batcher.scheduling.observations import RequestCancelled, RequestQueued, RequestSettled
from charonia.errors import InternalError
from charonia.models.ensemble import ROOT, EnsembleGraph, Step

INPUT = "in"
FLAG = "flag"


@st.composite
def graphs(draw: st.DrawFn, *, decoupled: bool) -> EnsembleGraph:
    """Steps that each take up to three earlier tensors; perhaps one of them is decoupled; some hang on a condition."""
    scopes = {INPUT: ROOT, FLAG: ROOT}
    steps: list[Step] = []
    begins = draw(st.integers(0, 2)) if decoupled else -1
    for index in range(draw(st.integers(max(1, begins + 1), 6))):
        earlier = [tensor for tensor in scopes if tensor != FLAG]
        taken = draw(st.lists(st.sampled_from(earlier), min_size=1, max_size=3, unique=True))
        if index == begins:
            taken = [tensor for tensor in taken if scopes[tensor] == ROOT] or [INPUT]
        scope = next((scopes[tensor] for tensor in taken if scopes[tensor] != ROOT), ROOT)
        inputs = {f"i{number}": tensor for number, tensor in enumerate(taken)}
        optional = frozenset(name for name in inputs if draw(st.integers(0, 3)) == 0)
        condition = FLAG if draw(st.integers(0, 4)) == 0 else ""
        outputs = {f"o{number}": f"t{index}_{number}" for number in range(draw(st.integers(1, 2)))}
        steps.append(Step(index, f"m{index}", -1, inputs, outputs, condition, optional, index == begins, scope))
        scopes |= dict.fromkeys(outputs.values(), index if index == begins else scope)
    made = [tensor for tensor in scopes if tensor not in (INPUT, FLAG)]
    outputs_ = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    limit = draw(st.integers(0, 2)) if decoupled else 0
    return EnsembleGraph("e", tuple(steps), (INPUT, FLAG), tuple(outputs_), scopes, limit)


@dataclass
class World:
    """Models that answer by what they were given. `leaves_out` are (step, output) that a model does not give."""

    responses: int = 2
    leaves_out: frozenset[tuple[int, str]] = frozenset()
    ends_bare: bool = False
    """Whether decoupled models end with a response without outputs, not only with the flag."""
    asked: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def answers(self, step: Step, path: tuple[int, ...], inputs: dict[str, Any], outputs: tuple[str, ...]) -> list[Any]:
        """(index, outputs, final, is_flag) of each response."""
        place = (step.index, path)
        self.asked[place] = self.asked.get(place, 0) + 1
        text = ",".join(f"{name}={inputs[name]}" for name in sorted(inputs))
        given = [name for name in outputs if (step.index, name) not in self.leaves_out]
        if not step.decoupled:
            return [(0, {name: f"{step.index}.{name}({text})" for name in given}, True, False)]
        found: list[Any] = [
            (index, {name: f"{step.index}.{name}#{index}({text})" for name in given}, False, False)
            for index in range(self.responses)
        ]
        return [*found, (len(found), {}, True, not self.ends_bare)]


class Course:
    """One request on its way through a planner; `pending` are the answers that have not been told yet."""

    def __init__(
        self,
        graph: EnsembleGraph,
        world: World,
        flag: bool,
        wanted: tuple[str, ...] = (),
        window: int = 0,
        *,
        resumed: bool = False,
    ) -> None:
        self.graph = graph
        self.resumed = resumed
        self.window = window
        self.unsent: dict[tuple[int, tuple[int, ...]], list[plan.StepAnswered]] = {}
        """What decoupled steps may not send yet (S55)."""
        self.world = world
        self.flag = flag
        self.wanted = wanted
        self.scheduler = plan.EnsembleScheduler("e", bool, 1 << 30)
        self.request = RequestQueued(b"r" * 16, 1, 0, 1, 0, 0, 0, 0)
        self.pending: list[plan.StepAnswered] = []
        self.told: list[plan.StepAnswered] = []
        self.results: list[plan.AnswerRequest] = []
        self.failures: list[str] = []
        self.cancelled: list[tuple[int, tuple[int, ...]]] = []
        self.do(self.scheduler.observe(plan.GraphKnown(1, graph), 0))
        self.do(self.scheduler.observe(self.request, 0))

    def do(self, decisions: list[Any]) -> None:
        for decision in decisions:
            if isinstance(decision, plan.BeginRequest):
                inputs = {INPUT: "x", FLAG: self.flag}
                self.do(self.scheduler.observe(self.begun(inputs), 0))
            elif isinstance(decision, plan.SubmitStep):
                answers = self.world.answers(decision.step, decision.path, dict(decision.inputs), decision.outputs)
                place = (decision.step.index, decision.path)
                self.unsent[place] = [
                    plan.StepAnswered(self.request.id, *place, outputs, 1, index, final, is_flag)
                    for index, outputs, final, is_flag in answers
                ]
                self.send(place, decision.window)
            elif isinstance(decision, plan.WantResponses):
                self.send((decision.step.index, decision.path), decision.count)
            elif isinstance(decision, plan.AnswerRequest):
                self.results.append(decision)
            elif isinstance(decision, plan.FailRequest):
                self.failures.append(decision.error.message)
            elif isinstance(decision, plan.CancelStep):
                self.cancelled.append((decision.step.index, decision.path))
            elif isinstance(decision, RejectRequest):
                self.failures.append(f"rejected {decision.reason}")

    def begun(self, inputs: dict[str, Any]) -> plan.RequestBegun:
        return plan.RequestBegun(self.request.id, inputs, self.wanted, 1, self.window, self.resumed)

    def send(self, place: tuple[int, tuple[int, ...]], count: int) -> None:
        """A step sends what is wanted; a final flag alone needs no leave."""
        unsent = self.unsent[place]
        while unsent and (not count or unsent[0].index < count or unsent[0].final):
            self.pending.append(unsent.pop(0))

    def tell(self, event: plan.StepAnswered) -> None:
        self.told.append(event)
        decisions = self.scheduler.observe(event, 0)
        answers = [decision for decision in decisions if isinstance(decision, plan.AnswerRequest)]
        if not self.resumed:
            at_once = len(answers) > 1 and answers[-1].is_flag
            assert not at_once, "the flag goes with the last response"
        self.do(decisions)

    def tell_any(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.pending) - 1), label="next")
        self.tell(self.pending.pop(at))

    @property
    def ends(self) -> int:
        return len(self.failures) + sum(result.final for result in self.results)

    def seen(self) -> tuple[list[Any], list[str]]:
        return [(r.index, dict(r.outputs), r.final) for r in self.results], self.failures

    def given(self) -> tuple[list[Any], list[str]]:
        """What was answered; whether the end came with the last response is a matter of time."""
        return [(r.index, dict(r.outputs)) for r in self.results if not r.is_flag], self.failures


def straight(
    graph: EnsembleGraph, world: World, flag: bool, wanted: tuple[str, ...] = (), *, resumed: bool = False
) -> Course:
    """The request with every answer told as soon as it is there."""
    course = Course(graph, world, flag, wanted, resumed=resumed)
    while course.pending:
        course.tell(course.pending.pop(0))
    return course


LEFT_OUT = st.frozensets(st.tuples(st.integers(0, 5), st.sampled_from(["o0", "o1"])), max_size=2)
WORLDS = st.tuples(st.integers(0, 3), LEFT_OUT, st.booleans())


@settings(max_examples=examples(500), deadline=None)
@given(st.data(), st.booleans(), st.booleans(), WORLDS)
def test_every_request_ends_once_in_any_order(data: st.DataObject, decoupled: bool, flag: bool, how: Any) -> None:
    graph = data.draw(graphs(decoupled=decoupled))
    world = World(*how)
    course = Course(graph, world, flag)
    while course.pending:
        assert course.ends <= 1
        course.tell_any(data)
    assert course.ends == 1
    assert all(count == 1 for count in world.asked.values())
    assert course.scheduler.find(course.request.id) is None
    assert course.scheduler.held_bytes == 0
    assert [result.index for result in course.results] == list(range(len(course.results)))
    assert all(not result.final for result in course.results[:-1])
    assert not course.failures


@settings(max_examples=examples(500), deadline=None)
@given(st.data(), st.booleans(), st.booleans(), WORLDS)
def test_the_order_of_answers_changes_nothing(data: st.DataObject, decoupled: bool, flag: bool, how: Any) -> None:
    graph = data.draw(graphs(decoupled=decoupled))
    expected = straight(graph, World(*how), flag).given()
    course = Course(graph, World(*how), flag)
    while course.pending:
        course.tell_any(data)
    assert course.given() == expected


@settings(max_examples=examples(500), deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.integers(0, 3))
def test_a_new_owner_goes_on_where_the_last_one_was(
    data: st.DataObject, decoupled: bool, flag: bool, responses: int
) -> None:
    graph = data.draw(graphs(decoupled=decoupled))
    world = World(responses)
    first = Course(graph, world, flag)
    for _ in range(data.draw(st.integers(0, 12), label="answers told before")):
        if first.pending:
            first.tell_any(data)
    given_ = [*first.told, *first.pending, *(event for unsent in first.unsent.values() for event in unsent)]
    known = {(event.step, event.path): [] for event in given_}
    for event in given_:
        known[(event.step, event.path)].append(event)

    class Resumed(World):
        def answers(self, step: Step, path: tuple[int, ...], inputs: Any, outputs: Any) -> list[Any]:
            place = (step.index, path)
            if place in known:  # asked for before: not again
                return [(event.index, event.outputs, event.final, event.is_flag) for event in known[place]]
            return super().answers(step, path, inputs, outputs)

    second = straight(graph, Resumed(responses, asked=world.asked), flag, resumed=True)
    assert all(count == 1 for count in world.asked.values())
    assert second.given() == straight(graph, World(responses), flag).given()
    if not first.ends:
        # what the first owner sent is sent again as it was, flag and all
        assert first.seen()[0] == second.seen()[0][: len(first.results)]


@settings(max_examples=examples(100), deadline=None)
@given(st.data(), st.booleans(), st.integers(0, 3))
def test_what_ends_a_request_early_cancels_its_steps(data: st.DataObject, decoupled: bool, how: int) -> None:
    graph = data.draw(graphs(decoupled=decoupled))
    course = Course(graph, World(), True)
    for _ in range(data.draw(st.integers(0, 6), label="answers told before")):
        if course.pending:
            course.tell_any(data)
    if course.ends or not course.pending:
        return
    flying = {(event.step, event.path) for event in course.pending}
    flying |= {place for place, unsent in course.unsent.items() if unsent}
    failing = course.pending[0]
    now_ns = 0
    events: list[Any] = [
        RequestCancelled(course.request.id),
        RequestSettled(course.request.id),
        plan.StepFailed(course.request.id, failing.step, failing.path, InternalError("it broke")),
    ]
    if how == 3:
        return
    course.do(course.scheduler.observe(events[how], now_ns))
    expected = flying - {(failing.step, failing.path)} if how == 2 else flying
    assert set(course.cancelled) == expected
    assert course.failures == [["rejected CANCELED"], [], ["in ensemble 'e', it broke"]][how]
    assert course.scheduler.find(course.request.id) is None
    for event in course.pending:
        assert course.scheduler.observe(event, now_ns) == []


@settings(max_examples=examples(100), deadline=None)
@given(st.data(), st.booleans())
def test_only_what_is_wanted_is_asked_for(data: st.DataObject, flag: bool) -> None:
    graph = data.draw(graphs(decoupled=False))
    wanted = (data.draw(st.sampled_from(graph.outputs)),)
    world = World()
    course = straight(graph, world, flag, wanted)
    needed = set(wanted)
    for step in reversed(graph.steps):
        if not needed.isdisjoint(step.outputs.values()):
            needed |= set(step.inputs.values())
    for step, _ in world.asked:
        assert not needed.isdisjoint(graph.steps[step].outputs.values())
    assert all(set(result.outputs) <= set(wanted) for result in course.results)


@settings(max_examples=examples(60), deadline=None)
@given(st.data(), st.integers(1, 2))
def test_no_more_responses_are_followed_up_than_allowed(data: st.DataObject, limit: int) -> None:
    """S55: with `max_inflight_requests`, so many responses of a decoupled step are under way in what follows."""
    steps = (
        Step(0, "m0", -1, {"i0": INPUT}, {"o0": "a"}, decoupled=True),
        Step(1, "m1", -1, {"i0": "a"}, {"o0": "b"}, scope=0),
        Step(2, "m2", -1, {"i0": "b"}, {"o0": "c"}, scope=0),
    )
    graph = EnsembleGraph("e", steps, (INPUT, FLAG), ("c",), {INPUT: ROOT, FLAG: ROOT, "a": 0, "b": 0, "c": 0}, limit)
    course = Course(graph, World(4), True)
    while course.pending:
        assert len({event.path for event in course.pending if event.step != 0}) <= limit
        ahead = {event.index for event in course.pending if event.step == 0 and not event.final}
        ahead |= {event.path[0] for event in course.pending if event.step != 0}
        assert len(ahead) <= limit, "the producer is blocked beyond it"
        course.tell_any(data)
    assert [dict(r.outputs) for r in course.results if r.outputs] == [
        {"c": f"2.o0(i0=1.o0(i0=0.o0#{index}(i0=x)))"} for index in range(4)
    ]


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), st.booleans(), st.integers(1, 3), st.integers(0, 5))
def test_a_window_holds_answers_back_and_changes_none(
    data: st.DataObject, flag: bool, window: int, responses: int
) -> None:
    """As a step of another ensemble: no more responses than are wanted, and no deadlock."""
    graph = data.draw(graphs(decoupled=True))
    expected = straight(graph, World(responses), flag).given()
    course = Course(graph, World(responses), flag, window=window)
    allowed = window
    while course.pending or (not course.ends and allowed < 20):
        if course.pending and data.draw(st.booleans(), label="an answer first"):
            course.tell_any(data)
        elif allowed < 20:
            allowed += data.draw(st.integers(1, 3), label="more are wanted")
            course.do(course.scheduler.observe(plan.ResponsesAllowed(course.request.id, allowed), 0))
        elif course.pending:
            course.tell_any(data)
        assert len([result for result in course.results if result.outputs]) <= allowed
    assert course.given() == expected


def test_an_answered_response_does_not_hold_up_the_next() -> None:
    """Its answer can be complete while a step that is not needed for it still waits for another."""
    scopes = {INPUT: ROOT, FLAG: ROOT, "a": 0, "b": ROOT, "c": 0, "d": 0}
    steps = (
        Step(0, "m0", -1, {"i0": INPUT}, {"o0": "a"}, decoupled=True),
        Step(1, "m1", -1, {"i0": INPUT}, {"o0": "b"}),
        Step(2, "m2", -1, {"i0": "a", "i1": "b"}, {"o0": "c"}, scope=0),
        Step(3, "m3", -1, {"i0": "c"}, {"o0": "d"}, FLAG, scope=0),
    )
    graph = EnsembleGraph("e", steps, (INPUT, FLAG), ("d",), scopes, 1)
    assert straight(graph, World(2), False).seen() == ([(0, {}, True)], [])


def test_what_a_model_leaves_out_is_left_out_further_on() -> None:
    """S50: consumers get no such input, the answer no such output; one that is decoupled as well."""
    scopes = {INPUT: ROOT, FLAG: ROOT, "a": ROOT, "b": 1, "c": 1, "d": 1}
    steps = (
        Step(0, "m0", -1, {"i0": INPUT}, {"o0": "a"}),
        Step(1, "m1", -1, {"i0": "a", "i1": INPUT}, {"o0": "b", "o1": "d"}, decoupled=True),
        Step(2, "m2", -1, {"i0": "b"}, {"o0": "c"}, scope=1),
    )
    graph = EnsembleGraph("e", steps, (INPUT, FLAG), ("c", "d"), scopes)
    left_out = frozenset({(0, "o0"), (1, "o0")})
    made = [(index, {"c": "2.o0()", "d": f"1.o1#{index}(i1=x)"}) for index in range(2)]
    assert straight(graph, World(2, left_out), True).given() == (made, [])


def test_responses_without_any_output_are_followed_up_too() -> None:
    left_out = frozenset({(0, "o0")})
    made = [(index, {"b": "1.o0()"}) for index in range(2)]
    assert straight(producer_and_one_step(), World(2, left_out), True).given() == (made, [])
    left_out = frozenset({(0, "o0"), (1, "o0")})
    assert straight(producer_and_one_step(), World(2, left_out), True).given() == ([(0, {}), (1, {})], [])


def producer_and_one_step() -> EnsembleGraph:
    steps = (
        Step(0, "m0", -1, {"i0": INPUT}, {"o0": "a"}, decoupled=True),
        Step(1, "m1", -1, {"i0": "a"}, {"o0": "b"}, scope=0),
    )
    return EnsembleGraph("e", steps, (INPUT, FLAG), ("b",), {INPUT: ROOT, FLAG: ROOT, "a": 0, "b": 0})


def test_the_last_response_says_so_when_nothing_is_under_way_any_more() -> None:
    """S54: only a stream whose last response has gone already ends with an empty one."""
    made = [(index, {"b": f"1.o0(i0=0.o0#{index}(i0=x))"}) for index in range(2)]
    course = Course(producer_and_one_step(), World(2), True)
    while course.pending:  # all that the producer says comes before what is made of it
        course.tell(min(course.pending, key=lambda event: event.step))
        course.pending.remove(course.told[-1])
    assert course.seen() == ([(*made[0], False), (*made[1], True)], [])
    course = Course(producer_and_one_step(), World(2), True)
    while course.pending:  # the producer's end comes last
        course.tell(max(course.pending, key=lambda event: event.step))
        course.pending.remove(course.told[-1])
    assert course.seen() == ([(*made[0], False), (*made[1], False), (2, {}, True)], [])


def test_the_end_of_a_request_that_has_a_new_owner_is_a_response_of_its_own() -> None:
    """The former owner may have sent the last one as one that others follow, and no reader takes it twice."""
    course = Course(producer_and_one_step(), World(1), True, resumed=True)
    while course.pending:
        course.tell(min(course.pending, key=lambda event: event.step))
        course.pending.remove(course.told[-1])
    assert [(index, final) for index, _, final in course.seen()[0]] == [(0, False), (1, True)]


def test_a_bare_last_response_of_a_step_is_a_response() -> None:
    """S54: what follows runs for it, without the outputs; the flag alone only ends the step."""
    scopes = {INPUT: ROOT, FLAG: ROOT, "a": 0, "b": 0}
    steps = (
        Step(0, "m0", -1, {"i0": INPUT}, {"o0": "a"}, decoupled=True),
        Step(1, "m1", -1, {"i0": "a"}, {"o0": "b"}, optional=frozenset({"i0"}), scope=0),
    )
    graph = EnsembleGraph("e", steps, (INPUT, FLAG), ("a", "b"), scopes)
    for bare, expected in ((True, [({"b": "1.o0()"}, True, False)]), (False, [({}, True, True)])):
        course = straight(graph, World(0, ends_bare=bare), True)
        assert [(dict(r.outputs), r.final, r.is_flag) for r in course.results] == expected
    alone = EnsembleGraph("e", steps[:1], (INPUT, FLAG), ("a",), {INPUT: ROOT, FLAG: ROOT, "a": 0})
    course = straight(alone, World(0, ends_bare=True), True)
    assert [(dict(r.outputs), r.final, r.is_flag) for r in course.results] == [({}, True, False)]
