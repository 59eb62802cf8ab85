"""Requests with several responses as the scheduler sees them: freed slots, visible responses, deaths in company."""

from __future__ import annotations

import pytest

from batcher.scheduling.decisions import CondemnRequest, Decision, DispatchBatch, RejectRequest, StopExecution
from batcher.scheduling.observations import (
    BatchDied,
    BatchFinished,
    BatchRunning,
    ExecutorLost,
    Observation,
    PolicyChanged,
    RequestCancelled,
    RequestQueued,
    RequestState,
    ResponsesBegun,
    ResponsesSeen,
    SlotFreed,
    VersionServed,
    VersionWithdrawn,
)
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.errors import ErrorCode
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching

CUT_SHORT = "STREAM_INTERRUPTED: {why}, and the model is not declared repeatable (charonia.repeatable)"
SECOND = 1_000_000_000


class Model:
    """A decoupled model with one slot on executor `a`; batches of up to 4, or of one."""

    def __init__(self, *, repeatable: bool = False, resumable: bool = False, batching: bool = False) -> None:
        self.scheduler = ModelScheduler("p")
        self.now_ns = 0
        interface = ModelInterface(
            name="m",
            backend="",
            platform="",
            max_batch_size=4 if batching else 0,
            inputs={},
            outputs={},
            decoupled=True,
            dynamic_batching=DynamicBatching() if batching else None,
            parameters={"charonia.repeatable": str(repeatable), "charonia.resumable": str(resumable)},
        )
        self.see(PolicyChanged(interface), VersionServed("a", 1, "h", 1))

    def see(self, *events: Observation) -> list[Decision]:
        return self.scheduler.observe_all(events, self.now_ns)

    def put(self, *numbers: int) -> list[DispatchBatch]:
        """The batches given out because of these requests."""
        made = [RequestQueued(ident(n), 1, 0, 1, 7, 0, 0, self.now_ns) for n in numbers]
        return [one for one in self.see(*made) if isinstance(one, DispatchBatch)]


def ident(number: int) -> bytes:
    return number.to_bytes(16, "little")


def freed(batch: DispatchBatch) -> SlotFreed:
    return SlotFreed(batch.batch_id, batch.executor)


def begun(batch: DispatchBatch, *numbers: int) -> ResponsesBegun:
    return ResponsesBegun(batch.batch_id, batch.executor, frozenset(map(ident, numbers)))


def died(batch: DispatchBatch, *numbers: int, blameless: bool = False, in_company: bool = False) -> BatchDied:
    ids = frozenset(map(ident, numbers))
    return BatchDied(batch.batch_id, batch.executor, ids, "it died.", "", blameless, in_company)


def kinds(decisions: list[Decision]) -> list[type]:
    return [type(decision) for decision in decisions]


def test_a_freed_slot_takes_the_next_batch_once() -> None:
    model = Model()
    (first,) = model.put(1)
    assert model.put(2, 3) == []
    (second,) = model.see(freed(first))
    assert isinstance(second, DispatchBatch)
    assert model.see(freed(first)) == [], "said again it frees nothing more"
    assert model.scheduler.outstanding() == {"a": 2}

    assert model.see(BatchFinished(first.batch_id, "a")) == [], "its slot was free before"
    (third,) = model.see(BatchFinished(second.batch_id, "a"))
    assert isinstance(third, DispatchBatch)
    assert model.scheduler.outstanding() == {"a": 1}


def test_a_slot_that_somebody_else_frees_stays_taken() -> None:
    model = Model()
    (first,) = model.put(1)
    assert model.put(2) == []
    assert model.see(SlotFreed(first.batch_id, "b"), SlotFreed("unknown", "a")) == []


def test_a_freed_batch_of_a_withdrawn_version_still_ends() -> None:
    model = Model()
    (first,) = model.put(1)
    model.see(freed(first), VersionWithdrawn("a", 1))
    assert model.see(BatchFinished(first.batch_id, "a")) == []
    assert model.scheduler.outstanding_requests() == 0


def test_a_lost_executor_ends_what_was_seen_and_gives_out_the_rest() -> None:
    model = Model(batching=True)
    (batch,) = model.put(1)
    model.see(freed(batch))
    (other,) = model.put(2)
    model.see(begun(batch, 1))
    model.now_ns += SECOND
    decisions = model.see(ExecutorLost("a"), VersionServed("b", 1, "h", 4))
    assert sorted(kind.__name__ for kind in kinds(decisions)) == ["DispatchBatch", "RejectRequest"]
    rejected = next(one for one in decisions if isinstance(one, RejectRequest))
    again = next(one for one in decisions if isinstance(one, DispatchBatch))
    assert (rejected.request.id, rejected.code, rejected.reason) == (ident(1), ErrorCode.UNAVAILABLE, "BACKEND")
    assert rejected.message == CUT_SHORT.format(why="its executor was lost")
    assert [request.id for request in again.requests] == [ident(2)]
    assert again.attempts == (2,)
    assert other.executor == "a"


def test_a_repeatable_model_is_run_again() -> None:
    model = Model(repeatable=True)
    (batch,) = model.put(1)
    model.see(begun(batch, 1))
    (again,) = model.see(ExecutorLost("a"), VersionServed("b", 1, "h", 1))
    assert isinstance(again, DispatchBatch)
    assert again.attempts == (2,)


def lost(model: Model, number: int, *events: Observation) -> list[Decision]:
    """An executor is lost, long after the one before, and another comes."""
    model.now_ns += 60 * SECOND
    executor = chr(ord("a") + number)
    return model.see(*events, ExecutorLost(executor), VersionServed(chr(ord(executor) + 1), 1, "h", 1))


def test_a_resumable_request_that_goes_on_is_never_suspected() -> None:
    model = Model(resumable=True, batching=True)
    (batch,) = model.put(1)
    for number in range(20):
        (batch,) = lost(model, number, begun(batch, 1))
        assert isinstance(batch, DispatchBatch)
        assert (batch.suspects, batch.attempts) == ("", (number + 2,))


def test_a_resumable_request_that_does_not_go_on_is_condemned_alone() -> None:
    model = Model(resumable=True)
    model.put(1)
    said: list[str] = []
    for number in range(4):
        decisions = lost(model, number)
        said += [one.suspects for one in decisions if isinstance(one, DispatchBatch)]
        if condemned := [one for one in decisions if isinstance(one, CondemnRequest)]:
            assert condemned[0].request.id == ident(1)
            break
    assert said == ["group", "apart", "apart"]
    assert number == 3


def test_progress_in_an_earlier_run_does_not_count() -> None:
    model = Model(resumable=True)
    (batch,) = model.put(1)
    (batch,) = lost(model, 0, begun(batch, 1))
    assert isinstance(batch, DispatchBatch)
    assert batch.suspects == ""
    (batch,) = lost(model, 1)
    assert isinstance(batch, DispatchBatch)
    assert batch.suspects, "it had nothing new in this run"
    (batch,) = lost(model, 2, begun(batch, 1))
    assert isinstance(batch, DispatchBatch)
    assert batch.suspects == "", "it goes on again"


def test_only_those_that_gave_nothing_new_are_suspected_of_a_death() -> None:
    model = Model(resumable=True, batching=True)
    model.put(0)
    assert model.put(1, 2, 3) == []
    (first,) = model.scheduler.outstanding()
    assert first == "a"
    decisions = model.see(BatchFinished("p-1", "a"))
    (batch,) = [one for one in decisions if isinstance(one, DispatchBatch)]
    assert len(batch.requests) == 3
    model.see(begun(batch, 1, 3))
    (again,) = model.see(died(batch, 1, 2, 3))
    assert isinstance(again, DispatchBatch)
    rest = model.see(BatchFinished(again.batch_id, "a"))
    both = {tuple(r.id for r in one.requests): one.suspects for one in (again, *rest) if isinstance(one, DispatchBatch)}
    assert both.pop((ident(1), ident(3))) == ""
    assert list(both) == [(ident(2),)]
    assert both[(ident(2),)] != ""


def test_a_single_request_that_gave_something_new_outlives_the_death_of_its_instance() -> None:
    model = Model(resumable=True)
    (batch,) = model.put(1)
    (again,) = model.see(begun(batch, 1), died(batch, 1))
    assert isinstance(again, DispatchBatch)
    decisions = model.see(died(again, 1))
    assert [type(one) for one in decisions] == [CondemnRequest]


def test_a_silent_neighbour_of_a_stream_that_goes_on_is_run_apart() -> None:
    """The stream is spared, but it ran there: the neighbour is not condemned as if it had been alone."""
    model = Model(resumable=True)
    (stream,) = model.put(1)
    assert model.put(2) == []
    (silent,) = model.see(freed(stream))
    assert isinstance(silent, DispatchBatch)
    decisions = model.see(
        begun(stream, 1), freed(silent), died(stream, 1, in_company=True), died(silent, 2, in_company=True)
    )
    assert kinds(decisions) == [DispatchBatch]
    (again,) = decisions
    assert isinstance(again, DispatchBatch)
    more = model.see(BatchFinished(again.batch_id, "a"))
    said = [(one.requests[0].id, one.suspects) for one in (again, *more) if isinstance(one, DispatchBatch)]
    assert sorted(said) == [(ident(1), ""), (ident(2), "apart")]


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (lambda batch: ExecutorLost("a", drained=True), "its executor was stopped"),
        (lambda batch: died(batch, 1, blameless=True), "it died"),
        (lambda batch: died(batch, 1), "it died"),
        (lambda batch: died(batch, 1, in_company=True), "it died"),
    ],
)
def test_whatever_ends_a_run_that_was_seen_ends_the_request(event: object, why: str) -> None:
    model = Model()
    (batch,) = model.put(1)
    model.see(begun(batch, 1))
    assert callable(event)
    (rejected,) = model.see(event(batch))
    assert isinstance(rejected, RejectRequest)
    assert rejected.message == CUT_SHORT.format(why=why)
    assert model.scheduler.outstanding_requests() == 0


def test_what_was_settled_meanwhile_is_not_told_of_an_interruption() -> None:
    model = Model()
    (batch,) = model.put(1)
    model.see(begun(batch, 1))
    assert kinds(model.see(RequestCancelled(ident(1)))) == [RejectRequest, StopExecution]
    assert model.see(ExecutorLost("a")) == []


def test_a_gentle_cancel_is_for_the_model_that_runs_the_request() -> None:
    model = Model()
    (batch,) = model.put(1)
    assert model.put(2) == []
    stopped = model.see(RequestCancelled(ident(1), gentle=True), RequestCancelled(ident(2), gentle=True))
    assert stopped == [
        StopExecution(batch.requests[0], batch.batch_id, "a", gentle=True),
        RejectRequest(stopped[1].request, ErrorCode.CANCELLED, "", "CANCELED"),
    ]
    assert model.scheduler.outstanding_requests() == 1
    # its caller may leave after all
    assert kinds(model.see(RequestCancelled(ident(1)))) == [RejectRequest, StopExecution]
    assert model.see(RequestCancelled(ident(1), gentle=True)) == []


@pytest.mark.parametrize("repeatable", [False, True])
def test_what_was_cancelled_gently_is_not_run_a_second_time(repeatable: bool) -> None:
    model = Model(repeatable=repeatable)
    (batch,) = model.put(1)
    if repeatable:
        model.see(begun(batch, 1))
    model.see(RequestCancelled(ident(1), gentle=True))
    (rejected,) = model.see(ExecutorLost("a"))
    assert rejected == RejectRequest(batch.requests[0], ErrorCode.CANCELLED, "", "CANCELED")
    assert model.scheduler.unended() == []


def test_one_that_died_in_company_is_not_the_culprit_yet() -> None:
    """Alone with the executor it is tried again; then its death names it."""
    model = Model()
    (first,) = model.put(1)
    model.see(freed(first))
    (second,) = model.put(2)
    assert not [d for d in model.see(died(first, 1, in_company=True)) if isinstance(d, CondemnRequest)]
    decisions = model.see(died(second, 2, in_company=True))
    (apart,) = [one for one in decisions if isinstance(one, DispatchBatch)]
    assert (apart.suspects, [r.id for r in apart.requests]) == ("apart", [ident(1)])

    assert model.see(freed(apart)) == [], "it has the executor for itself until it has ended"
    decisions = model.see(BatchFinished(apart.batch_id, "a"))
    (apart,) = [one for one in decisions if isinstance(one, DispatchBatch)]
    assert [r.id for r in apart.requests] == [ident(2)]
    (condemned,) = model.see(died(apart, 2))
    assert isinstance(condemned, CondemnRequest)
    assert condemned.request.id == ident(2)


def test_one_that_dies_in_company_of_nothing_is_the_culprit_the_second_time() -> None:
    """As where something outside ends an instance, such as a kernel without memory."""
    model = Model()
    (first,) = model.put(1)
    (again,) = [one for one in model.see(died(first, 1, in_company=True)) if isinstance(one, DispatchBatch)]
    assert (again.suspects, [r.id for r in again.requests]) == ("apart", [ident(1)])
    (condemned,) = model.see(died(again, 1, in_company=True))
    assert isinstance(condemned, CondemnRequest)


def test_what_a_new_owner_is_told_again_frees_the_slot_it_found_taken() -> None:
    model = Model()
    running = RequestQueued(ident(9), 1, 0, 1, 7, 0, 0, 0, 1)
    model.see(BatchRunning("old-1", "a", 1, [running]))
    assert model.put(1) == []
    (batch,) = model.see(SlotFreed("old-1", "a"), ResponsesBegun("old-1", "a", frozenset([ident(9)])))
    assert isinstance(batch, DispatchBatch)
    model.now_ns += SECOND
    rejected = [one for one in model.see(ExecutorLost("a")) if isinstance(one, RejectRequest)]
    assert [one.request.id for one in rejected] == [ident(9)]
    assert running.state is RequestState.ENDED


@pytest.mark.parametrize("serve", [True, False])
def test_what_a_predecessor_left_half_seen_ends_whoever_serves(serve: bool) -> None:
    """It was marked, of a model that is not repeatable; whether this owner knows the model yet does not matter."""
    scheduler = ModelScheduler("p")
    seen, unseen = (RequestQueued(ident(n), 1, 0, 1, 7, 0, 0, 0, attempt=1) for n in (1, 2))
    scheduler.observe_all([seen, unseen], 0)
    if serve:
        running = RequestQueued(ident(3), 1, 0, 1, 7, 0, 0, 0, attempt=1)
        scheduler.observe(running, 0)
        scheduler.observe(BatchRunning("b", "a", 1, [running]), 0)
    (refused,) = scheduler.observe(ResponsesSeen(frozenset({seen.id, ident(3), ident(9)})), 0)
    assert isinstance(refused, RejectRequest)
    assert (refused.request, refused.code) == (seen, ErrorCode.UNAVAILABLE)
    assert refused.message == CUT_SHORT.format(why="its executor was lost")
    assert scheduler.find(unseen.id) is unseen
    if serve:
        (lost,) = scheduler.observe(ExecutorLost("a"), 0)
        assert isinstance(lost, RejectRequest)
        assert lost.request is running


def test_a_model_that_keeps_the_order_of_responses_runs_one_batch_at_a_time() -> None:
    """S6 of decoupled models: a freed slot is not taken before the last response."""
    model = Model(batching=True)
    interface = ModelInterface(
        *("m", "", "", 4, {}, {}), decoupled=True, dynamic_batching=DynamicBatching(preserve_ordering=True)
    )
    model.see(PolicyChanged(interface), VersionServed("b", 1, "h", 1))
    (first,) = model.put(1, 2)
    assert not first.via_owner
    assert model.put(3) == []
    assert model.see(SlotFreed(first.batch_id, first.executor)) == []
    (second,) = model.see(BatchFinished(first.batch_id, first.executor))
    assert isinstance(second, DispatchBatch)
    assert [request.id for request in second.requests] == [ident(3)]
