"""The rules of sequences one by one (S30-S43); everything together is in tests/property."""

from __future__ import annotations

from msgspec import structs
from sequence_bench import Bench, batch, names

from batcher.scheduling.deadlock.waits import Step
from batcher.scheduling.decisions import (
    CondemnRequest,
    DispatchBatch,
    ForgetSequences,
    JoinEntries,
    RejectRequest,
    StopExecution,
)
from batcher.scheduling.observations import (
    BatchDied,
    BatchFinished,
    BatchReturned,
    BatchRunning,
    BatchTooLarge,
    ExecutorLost,
    ExecutorReturned,
    QueueHeld,
    RequestCancelled,
    RequestSettled,
    RequestsRescheduled,
    SequenceFound,
    SlotFreed,
    VersionsAbandoned,
    VersionServed,
    VersionWithdrawn,
)
from batcher.scheduling.sequences.sequence_dispatch import Delays
from batcher.scheduling.sequences.sequence_instances import LiveSequence, SequenceInstance
from charonia.errors import ErrorCode
from charonia.facts.sequence_states import SequenceAbout, sequence_key
from charonia.wire import SequenceMark

MS = 1_000_000


def test_direct_batches_have_slots_and_cover_those_between() -> None:
    bench = Bench()
    first = batch(bench.send("a", "s"))
    assert first.sequences is not None
    assert (first.sequences.instance, first.sequences.rows, first.sequences.places[0].slot) == (0, 1, 0)
    assert bench.see(bench.request("b", "s"), bench.request("c", "s")) == []
    second = batch(bench.finish(first))
    assert second.sequences is not None
    assert ([place.slot for place in second.sequences.places], second.sequences.rows) == ([1, 2], 3)
    assert bench.finish(second) == []
    third = batch(bench.send("c"))
    assert third.sequences is not None
    assert ([place.slot for place in third.sequences.places], third.sequences.rows) == ([2], 3)
    assert third.sequences.places[0].run == second.requests[1].id
    bench.finish(third)
    bench.finish(batch(bench.send("c", "e")))
    assert batch(bench.send("a")).sequences.rows == 2, "the highest slot in use is b's"  # type: ignore[union-attr]


def test_without_batching_an_instance_has_one_slot() -> None:
    bench = Bench(rows=0)
    first = batch(bench.send("a", "s"))
    assert first.sequences is not None
    assert first.sequences.rows == 0
    assert bench.send("b", "s") == []
    assert bench.finish(first) == [], "a has the slot until it ends"
    last = batch(bench.send("a", "e"))
    assert names(batch(bench.finish(last))) == ["b"]


def test_a_batch_waits_for_its_share_of_slots_or_the_delay() -> None:
    """S35."""
    bench = Bench("direct { max_queue_delay_microseconds: 5000 minimum_slot_utilization: 0.6 }")
    assert bench.send("a", "s") == bench.send("b", "s") == []
    assert bench.scheduler.next_wakeup() == 5 * MS
    assert names(batch(bench.at(5 * MS))) == ["a", "b"]
    bench = Bench("direct { max_queue_delay_microseconds: 5000 minimum_slot_utilization: 0.6 }")
    assert bench.send("a", "s") == bench.send("b", "s") == []
    assert names(batch(bench.send("c", "s"))) == ["a", "b", "c"], "three of four slots are enough"


def test_oldest_makes_dynamic_batches_of_different_sequences() -> None:
    """S36."""
    bench = Bench("oldest { max_candidate_sequences: 3 preferred_batch_size: 2 max_queue_delay_microseconds: 5000 }")
    assert bench.see(bench.request("a", "s"), bench.request("a")) == []
    first = batch(bench.send("b", "s"))
    assert names(first) == ["a", "b"]
    assert first.sequences is not None
    assert first.sequences.rows == 0
    bench.send("c", "s", signature=9)
    assert bench.send("d", "s") == [], "the fourth waits for a slot"
    assert names(batch(bench.finish(first))) == ["a"], "another shape closes the batch (S5)"


def test_who_waits_is_served_in_order_and_not_for_ever() -> None:
    """S37."""
    bench = Bench(rows=1)
    first = batch(bench.send("a", "se"))
    assert bench.send("b", "s", timeout_us=3000) == bench.send("b", "e") == bench.send("c", "se") == []
    refused = bench.at(3 * MS)
    assert [type(one) for one in refused] == [RejectRequest, RejectRequest]
    assert {(one.code, one.message) for one in refused if isinstance(one, RejectRequest)} == {
        (ErrorCode.UNAVAILABLE, "timeout of the corresponding sequence has been expired")
    }
    second = batch(bench.finish(first))
    assert names(second) == ["c"]
    assert bench.send("d", "s", timeout_us=3000) == []
    third = batch(bench.finish(second))
    bench.send("d", timeout_us=1)
    assert bench.at(100 * MS) == [], "with a slot there is no such time-out"
    bench.finish(third)


def test_rest_frees_a_slot() -> None:
    """S38."""
    bench = Bench("max_sequence_idle_microseconds: 1000", rows=1)
    first = batch(bench.send("a", "s"))
    bench.send("b", "se")
    assert bench.at(50 * MS) == [], "what runs does not rest"
    assert bench.finish(first) == []
    freed = bench.at(51 * MS)
    assert [type(one) for one in freed] == [ForgetSequences, DispatchBatch]
    assert isinstance(freed[0], ForgetSequences)
    assert freed[0].runs == {sequence_key(1, SequenceMark("a").key): first.requests[0].id}
    (refused,) = bench.send("a")
    assert isinstance(refused, RejectRequest)
    assert refused.message.startswith("inference request for sequence a to model 'm' must specify the START flag")


def test_a_start_on_a_live_sequence_keeps_the_slot() -> None:
    """S33."""
    bench = Bench()
    first = batch(bench.send("a", "s"))
    again = bench.request("a", "s")
    conflicts: list[str] = []
    bench.scheduler.on_conflict = conflicts.append
    bench.see(again, bench.request("a"))
    assert conflicts == [
        "sequence a for model 'm' has a conflict. The previous sequence did not end before this sequence start. "
        "Previous sequence will be terminated early."
    ]
    second = batch(bench.finish(first))
    assert second.sequences is not None
    assert first.sequences is not None
    assert second.sequences.places[0].run == again.id
    assert second.sequences.places[0].binding == first.sequences.places[0].binding
    third = batch(bench.finish(second))
    assert third.sequences is not None
    assert third.sequences.places[0].run == again.id


def test_a_cancelled_request_takes_what_follows_with_it() -> None:
    """I10; what runs goes on, and so does what a later START begins."""
    bench = Bench()
    first = batch(bench.send("a", "s"))
    requests = [bench.request("a"), bench.request("a"), bench.request("a", "s")]
    bench.see(*requests)
    cut = bench.see(RequestCancelled(requests[0].id))
    assert [(one.request, one.code, one.message) for one in cut if isinstance(one, RejectRequest)] == [
        (requests[0], ErrorCode.CANCELLED, ""),
        (requests[1], ErrorCode.CANCELLED, ""),
    ]
    stopped = bench.see(RequestCancelled(first.requests[0].id))
    assert [type(one) for one in stopped] == [RejectRequest, StopExecution]
    assert batch(bench.finish(first)).requests == [requests[2]]


def test_a_gentle_cancel_leaves_the_step_that_runs_and_what_follows() -> None:
    bench = Bench()
    first = batch(bench.send("a", "s"))
    after = bench.request("a")
    bench.see(after)
    (stopped,) = bench.see(RequestCancelled(first.requests[0].id, gentle=True))
    assert stopped == StopExecution(first.requests[0], first.batch_id, first.executor, gentle=True)
    second = batch(bench.finish(first))
    assert second.requests == [after]
    # where its executor is lost it ends, and what follows with it
    bench.see(RequestCancelled(after.id, gentle=True))
    lost = bench.see(ExecutorLost(second.executor))
    assert [(one.request, one.code) for one in lost if isinstance(one, RejectRequest)] == [(after, ErrorCode.CANCELLED)]


def test_a_deadline_and_another_settlement_cut_too() -> None:
    bench = Bench()
    first = batch(bench.send("a", "s"))
    late, after = bench.request("a", deadline_ns=2 * MS), bench.request("a")
    bench.see(late, after)
    cut = [one for one in bench.at(2 * MS) if isinstance(one, RejectRequest)]
    assert [(one.request, one.code) for one in cut] == [
        (late, ErrorCode.DEADLINE_EXCEEDED),
        (after, ErrorCode.CANCELLED),
    ]
    ended, last = bench.request("a"), bench.request("a", "e")
    bench.see(ended, last)
    cut = [one for one in bench.see(RequestSettled(ended.id)) if isinstance(one, RejectRequest)]
    assert [one.request for one in cut] == [last]
    forgotten = bench.finish(first)
    assert [type(one) for one in forgotten] == [ForgetSequences], "its END will not come"
    assert bench.scheduler.live_sequences() == 0


def test_a_lost_executor_moves_its_sequences_first() -> None:
    bench = Bench(rows=1)
    first = batch(bench.send("a", "s"))
    bench.see(VersionServed("f", 1, "h", 1))
    second = batch(bench.send("b", "s"))
    assert second.executor == "f"
    assert bench.send("c", "s") == []
    assert bench.see(ExecutorLost("e")) == []
    bench.finish(second)
    moved = batch(bench.send("b", "e"))
    assert names(moved) == ["b"]
    moved = batch(bench.finish(moved))
    assert (names(moved), moved.executor, moved.attempts) == (["a"], "f", (2,)), "before c, which has had no slot"
    assert moved.sequences is not None
    assert first.sequences is not None
    assert moved.sequences.places[0].binding > first.sequences.places[0].binding


def test_the_culprit_of_a_death_is_found_alone() -> None:
    bench = Bench()
    bench.see(QueueHeld(True), bench.request("a", "s"), bench.request("b", "s"), bench.request("b"))
    both = batch(bench.see(QueueHeld(False)))
    assert names(both) == ["a", "b"]
    died = BatchDied(both.batch_id, "e", frozenset(r.id for r in both.requests), "it died")
    alone = batch(bench.see(died))
    assert (names(alone), alone.suspects) == (["a"], "group")
    alone = batch(bench.finish(alone))
    assert names(alone) == ["b"]
    ended = bench.see(BatchDied(alone.batch_id, "e", frozenset({alone.requests[0].id}), "it died"))
    assert [type(one) for one in ended] == [CondemnRequest, RejectRequest, ForgetSequences]
    assert bench.scheduler.live_sequences() == 1, "b has not begun"


def test_who_ends_one_executor_after_the_other_is_the_culprit() -> None:
    bench = Bench(serve=False)
    bench.send("a", "s")
    for number in range(5):
        one = batch(bench.see(VersionServed(f"e{number}", 1, "h", 1)))
        ended = bench.see(ExecutorLost(one.executor))
    assert [type(one) for one in ended] == [CondemnRequest, ForgetSequences]
    assert bench.scheduler.live_sequences() == 0


def test_executors_that_are_heard_of_again_end_no_sequence() -> None:
    bench = Bench(serve=False)
    bench.send("a", "s")
    for _ in range(8):
        one = batch(bench.see(VersionServed("e", 1, "h", 1)))
        assert bench.see(ExecutorLost(one.executor)) == []
        assert bench.see(ExecutorReturned(one.executor)) == []


def test_a_batch_that_comes_back_runs_again_as_it_was() -> None:
    bench = Bench()
    first = batch(bench.send("a", "s"))
    again = batch(bench.see(BatchReturned(first.batch_id, "e")))
    assert (again.requests, again.suspects) == (first.requests, "")
    stopped = bench.see(VersionWithdrawn("e", 1), ExecutorLost("e", drained=True))
    assert stopped == []
    assert batch(bench.see(VersionServed("f", 1, "h", 1))).suspects == ""


def test_another_turn_is_the_same_attempt() -> None:
    """S41."""
    bench = Bench("iterative_sequence: true oldest { max_candidate_sequences: 4 }")
    first = batch(bench.send("a", "se"))
    bench.send("b", "se")
    bench.see(RequestsRescheduled(first.batch_id, "e", frozenset({first.requests[0].id})))
    second = batch(bench.finish(first))
    assert names(second) == ["a", "b"], "others join"
    assert second.sequences is not None
    assert second.attempts == (1, 1)
    assert [place.again for place in second.sequences.places] == [True, False]
    assert bench.finish(second) == []
    assert bench.scheduler.live_sequences() == 0


def test_a_new_owner_leaves_sequences_where_they_are() -> None:
    bench = Bench(serve=False, rows=2)
    run = b"r" * 16
    key = sequence_key(1, SequenceMark("a").key)
    about = SequenceAbout(key, run, 1, "h", "f", 0, 1, 77, 3, 0)
    running = bench.request("b", "s")
    bench.see(SequenceFound(about), running, bench.request("a"))
    other = Bench(rows=2)
    left = batch(other.send("b", "s"))
    bench.see(BatchRunning("old-1", "e", 1, [running], False, left.sequences, "h"))
    decided = batch(bench.see(VersionServed("e", 1, "h", 1), VersionServed("f", 1, "h", 1)))
    assert (names(decided), decided.executor) == (["a"], "f")
    assert decided.sequences is not None
    place = decided.sequences.places[0]
    assert (place.slot, place.run, place.binding) == (1, run, 77)
    bench.see(bench.request("b"))
    assert names(batch(bench.see(BatchFinished("old-1", "e")))) == ["b"]
    bench.finish(decided)
    bench.see(VersionServed("f", 1, "other", 1))
    moved = batch(bench.send("a"))
    assert moved.sequences is not None
    assert moved.sequences.places[0].binding != 77, "another incarnation remembers nothing"


def test_an_unloaded_version_refuses_what_waits() -> None:
    bench = Bench()
    first = batch(bench.send("a", "s"))
    waiting = bench.request("a")
    bench.see(waiting)
    (refused,) = bench.see(VersionsAbandoned(frozenset()))
    assert isinstance(refused, RejectRequest)
    assert (refused.request, refused.code) == (waiting, ErrorCode.UNAVAILABLE)
    assert [type(one) for one in bench.finish(first)] == [ForgetSequences]
    assert bench.scheduler.live_sequences() == 0


def test_hooks_hold_the_first_batch_back() -> None:
    """S43."""
    bench = Bench(rows=1, delays=Delays(2, 1))
    assert bench.send("a", "s") == bench.send("a") == []
    assert names(batch(bench.send("b", "s"))) == ["a"]


def test_what_is_asked_of_it() -> None:
    bench = Bench(rows=1)
    first = batch(bench.send("a", "s"))
    waiting = bench.request("a")
    bench.see(waiting)
    scheduler = bench.scheduler
    assert (scheduler.pending_count(), scheduler.queued_by_version()) == (1, {1: 1})
    assert (scheduler.waiting(), scheduler.outstanding_requests()) == ([waiting], 1)
    assert scheduler.find(waiting.id) is waiting
    assert len(scheduler.unended()) == 2
    assert scheduler.holding() == [("e", 1, first.requests)]


def test_a_sequence_needs_the_instance_of_the_one_before_only_while_that_has_requests_left() -> None:
    """Its last request runs, on an instance that takes batches of others meanwhile."""
    bench = Bench(rows=2)
    first = batch(bench.send("a", "s"))
    bench.see(SlotFreed(first.batch_id, "e"))
    other = batch(bench.send("b", "s"))
    last, successor = bench.request("a", "e"), bench.request("a", "s")
    assert bench.see(last, successor) == []
    running, busy = first.requests[0].id, other.requests[0].id
    assert bench.scheduler.step(successor.id) == Step(before=(running,), instance=(busy,))
    assert bench.finish(first) == []
    last_batch = batch(bench.see(SlotFreed(other.batch_id, "e")))
    bench.see(SlotFreed(last_batch.batch_id, "e"))
    assert bench.finish(other) == []
    assert names(batch(bench.send("b"))) == ["b"]
    assert bench.scheduler.step(successor.id) == Step(before=(last.id,))


def test_slots_cost_nothing_before_somebody_has_them() -> None:
    """A configuration may ask for two billion of them."""
    bench = Bench(f"oldest {{ max_candidate_sequences: {2**31 - 1} }}")
    assert batch(bench.send("a", "s")).sequences.places[0].slot == 0  # type: ignore[union-attr]


def test_a_slot_that_is_asked_for_leaves_those_below_free() -> None:
    instance = SequenceInstance("e", 0, "h", 8)
    sequences = [LiveSequence(1, b"%d" % number) for number in range(5)]
    assert instance.take(sequences[0], 3)
    assert not instance.take(sequences[1], 3)
    assert not instance.take(sequences[1], 8)
    assert instance.take(sequences[1], 1)
    for sequence in sequences[2:]:
        assert instance.take(sequence)
    assert [sequence.slot for sequence in sequences] == [3, 1, 0, 2, 4]
    assert (instance.room, instance.rows) == (3, 5)
    instance.release(sequences[1])
    assert instance.take(LiveSequence(1, b"x"))
    assert sorted(instance.slots) == [0, 1, 2, 3, 4]


def test_a_request_that_is_read_again_is_joined_with_the_known_one_waiting_or_running() -> None:
    bench = Bench(rows=0)
    start, end = bench.request("a", "s"), bench.request("a", "e")
    first = batch(bench.see(start))
    bench.see(end)
    for known in (start, end):
        again = structs.replace(known)
        assert bench.see(known) == []
        assert bench.see(again) == [JoinEntries(known, again)]
    last = batch(bench.finish(first))
    assert last.requests == [end]
    assert bench.finish(last) == []
    assert bench.scheduler.unended() == []


def test_requests_of_a_batch_that_is_too_large_run_alone_and_one_that_is_too_large_alone_ends() -> None:
    bench = Bench()
    first = batch(bench.see(bench.request("a", "s"), bench.request("b", "s"), bench.request("c", "s")))
    assert len(first.requests) == 3
    alone = batch(bench.see(BatchTooLarge(first.batch_id, "e", "too large")))
    assert names(alone) == ["a"]
    ended = bench.see(BatchTooLarge(alone.batch_id, "e", "too large"))
    rejected, second = ended[0], ended[-1]
    assert isinstance(rejected, RejectRequest)
    assert (rejected.request, rejected.code, rejected.message) == (
        alone.requests[0],
        ErrorCode.INVALID_ARG,
        "too large",
    )
    assert isinstance(second, DispatchBatch)
    assert names(second) == ["b"]
    third = batch(bench.finish(second))
    assert names(third) == ["c"]
    assert bench.see(BatchTooLarge(first.batch_id, "e", "too large")) == []
