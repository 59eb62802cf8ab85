"""The planner of an ensemble, case by case: order, bounds, deadlines, versions. Random graphs are a property test's."""

from __future__ import annotations

from typing import Any

from batcher.scheduling.decisions import JoinEntries, RejectRequest
from batcher.scheduling.ensembles import ensemble_planner as plan
from batcher.scheduling.ensembles.ensemble_plan import plan_of
from batcher.scheduling.observations import QueueHeld, RequestQueued, VersionsAbandoned
from charonia.errors import ErrorCode, Unavailable
from charonia.models.ensemble import ROOT, EnsembleGraph, Step

STEPS = (
    Step(0, "a", -1, {"i": "x"}, {"o": "m"}),
    Step(1, "b", -1, {"i": "m"}, {"o": "y"}),
)
GRAPH = EnsembleGraph("e", STEPS, ("x",), ("y",), {"x": ROOT, "m": ROOT, "y": ROOT})


class Planner:
    def __init__(self, max_held_bytes: int = 100) -> None:
        self.scheduler = plan.EnsembleScheduler("e", bool, max_held_bytes)

    def see(self, *events: Any, now_ns: int = 0) -> list[str]:
        words: list[str] = []
        for decision in self.scheduler.observe_all(events, now_ns):
            name = decision.request.id[:1].decode()
            match decision:
                case plan.BeginRequest():
                    words.append(f"begin {name}")
                case plan.SubmitStep():
                    words.append(f"{name} {decision.step.model} {dict(decision.inputs)}")
                case plan.AnswerRequest():
                    words.append(f"answer {name} {dict(decision.outputs)}")
                case plan.FailRequest():
                    words.append(f"fail {name}: {decision.error.message}")
                case plan.CancelStep():
                    words.append(f"cancel {name} {decision.step.model}")
                case RejectRequest():
                    words.append(f"reject {name} {decision.code.name} {decision.reason}: {decision.message}")
        return words


def queued(name: str, version: int = 1, deadline_ns: int = 0) -> RequestQueued:
    return RequestQueued(name.encode() * 16, version, 0, 1, 0, 0, deadline_ns, 0)


def begun(name: str, size_bytes: int = 1) -> plan.RequestBegun:
    return plan.RequestBegun(name.encode() * 16, {"x": f"x{name}"}, (), size_bytes)


def answered(name: str, step: int, size_bytes: int = 1, **outputs: str) -> plan.StepAnswered:
    return plan.StepAnswered(name.encode() * 16, step, (), outputs, size_bytes)


def test_one_step_after_the_other() -> None:
    planner = Planner()
    assert planner.see(queued("p")) == []
    assert planner.see(plan.GraphKnown(1, GRAPH)) == ["begin p"]
    assert planner.see(begun("p")) == ["p a {'i': 'xp'}"]
    assert planner.see(answered("p", 0, o="mp")) == ["p b {'i': 'mp'}"]
    assert planner.see(answered("p", 0, o="again")) == []
    assert planner.see(answered("p", 1, o="yp")) == ["answer p {'y': 'yp'}"]
    assert planner.scheduler.held_bytes == planner.scheduler.outstanding_requests() == 0


def test_a_request_is_unbegun_until_its_beginning_is_carried_out() -> None:
    planner = Planner()
    assert planner.see(queued("p"), queued("q"), queued("r")) == []
    assert planner.scheduler.unbegun() == 3
    assert planner.see(plan.GraphKnown(1, GRAPH)) == ["begin p", "begin q", "begin r"]
    assert planner.scheduler.unbegun() == 3
    planner.see(begun("q"))
    assert planner.scheduler.unbegun() == 2
    planner.see(plan.BeginFailed(b"p" * 16, Unavailable("")))
    assert planner.scheduler.unbegun() == 1
    planner.see(begun("r"), answered("q", 0, o="m"), answered("q", 1, o="y"))
    assert planner.scheduler.unbegun() == 0


def test_a_step_that_is_refused_fails_its_request_alone() -> None:
    planner = Planner()
    assert planner.see(plan.GraphKnown(1, GRAPH), queued("p"), queued("q")) == ["begin p", "begin q"]
    planner.see(begun("p"), begun("q"))
    failure = plan.StepFailed(b"p" * 16, 0, (), Unavailable("Exceeds maximum queue size"))
    assert planner.see(failure) == ["fail p: in ensemble 'e', Exceeds maximum queue size"]
    assert planner.see(failure) == []
    assert planner.see(answered("q", 0, o="mq")) == ["q b {'i': 'mq'}"]


def test_what_is_held_bounds_what_is_begun() -> None:
    planner = Planner(max_held_bytes=10)
    planner.see(plan.GraphKnown(1, GRAPH), queued("p"))
    planner.see(begun("p", 9))
    assert planner.see(queued("q")) == ["begin q"]
    planner.see(begun("q", 2))
    assert planner.see(queued("r"), queued("s")) == []
    assert planner.scheduler.unbegun() == 2
    assert planner.see(answered("p", 0, size_bytes=5, o="m")) == ["p b {'i': 'm'}"]
    assert planner.see(answered("p", 1, o="y")) == ["answer p {'y': 'y'}", "begin r", "begin s"]


def test_one_that_is_larger_than_the_bound_is_let_in_alone() -> None:
    planner = Planner(max_held_bytes=1)
    assert planner.see(plan.GraphKnown(1, GRAPH), queued("p")) == ["begin p"]
    planner.see(begun("p", 1000))
    assert planner.see(queued("q")) == []


def test_deadlines_before_and_after_the_beginning() -> None:
    planner = Planner(max_held_bytes=1)
    planner.see(plan.GraphKnown(1, GRAPH), queued("p", deadline_ns=50))
    planner.see(begun("p"))
    planner.see(queued("q", deadline_ns=40))
    assert planner.scheduler.next_wakeup() == 40
    assert planner.see(now_ns=40) == ["reject q DEADLINE_EXCEEDED REJECTED: Deadline exceeded before execution"]
    assert planner.scheduler.next_wakeup() == 50
    assert planner.see(now_ns=60) == [
        "reject p DEADLINE_EXCEEDED OTHER: Deadline exceeded during execution",
        "cancel p a",
    ]
    assert planner.scheduler.next_wakeup() is None


def test_a_version_without_a_graph_holds_nobody_up_and_one_that_is_gone_is_refused() -> None:
    planner = Planner()
    assert planner.see(plan.GraphKnown(1, GRAPH), queued("p", version=2), queued("q")) == ["begin q"]
    code = ErrorCode.UNAVAILABLE.name
    assert planner.see(VersionsAbandoned(frozenset({1}))) == [
        f"reject p {code} REJECTED: Request for unknown model: 'e' version 2 is not at ready state"
    ]
    # what was begun goes on
    assert planner.see(VersionsAbandoned(frozenset())) == []
    assert planner.see(begun("q")) == ["q a {'i': 'xq'}"]


def test_a_queue_that_is_held_back_begins_nothing() -> None:
    planner = Planner()
    planner.see(plan.GraphKnown(1, GRAPH), QueueHeld(True))
    assert planner.see(queued("p")) == []
    assert planner.see(QueueHeld(False)) == ["begin p"]


def test_what_cannot_be_begun_fails() -> None:
    planner = Planner()
    planner.see(plan.GraphKnown(1, GRAPH), queued("p"))
    assert planner.see(plan.BeginFailed(b"p" * 16, Unavailable("gone"))) == ["fail p: gone"]
    assert planner.see(begun("p")) == []


def test_outputs_are_in_the_ensembles_order_whatever_the_requests() -> None:
    graph = EnsembleGraph("e", STEPS, ("x",), ("y", "m"), {"x": ROOT, "m": ROOT, "y": ROOT})
    assert plan_of(graph, ("m", "y")).wanted == plan_of(graph, ()).wanted == ("y", "m")
    assert plan_of(graph, ("m",)).wanted == ("m",)


def test_a_request_that_is_read_again_is_joined_with_the_known_one() -> None:
    planner = Planner()
    known, again = queued("p"), queued("p")
    planner.see(known, plan.GraphKnown(1, GRAPH))
    assert planner.see(known) == []
    assert planner.scheduler.observe(again, 0) == [JoinEntries(known, again)]
    assert planner.scheduler.unended() == [known]
