"""The sequence scheduler under everything that may happen to it: what must hold whatever the order of events.

One outcome each; order within a sequence; never two requests of a sequence at once; never two sequences in one slot; no
slot is lost; the rules of START and END (S32, S33); nothing runs anew of which a response was seen.
"""

from __future__ import annotations

from example_counts import examples
from hypothesis import settings
from sequence_machine import DIRECT, OLDEST, SLOW_DIRECT, Sequences

from batcher.scheduling.decisions import DispatchBatch, RejectRequest
from batcher.scheduling.observations import BatchFinished, PolicyChanged, RequestCancelled, RequestQueued, VersionServed
from batcher.scheduling.sequences.sequence_scheduler import SequenceScheduler
from charonia.errors import ErrorCode
from charonia.wire import SequenceMark


class SlowSequences(Sequences):
    model = SLOW_DIRECT


class OldestSequences(Sequences):
    model = OLDEST


TestDirect = Sequences.TestCase
TestDirect.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestSlowDirect = SlowSequences.TestCase
TestSlowDirect.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
TestOldest = OldestSequences.TestCase
TestOldest.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_start_is_needed_once() -> None:
    scheduler = SequenceScheduler("b")
    scheduler.observe(PolicyChanged(DIRECT), 0)

    def send(number: int, *, start: bool = False, end: bool = False) -> list[object]:
        request = RequestQueued(
            number.to_bytes(16, "big"), 1, 0, 1, 0, 0, 0, 0, sequence=SequenceMark("a", start=start, end=end)
        )
        return list(scheduler.observe(request, 0))

    (refused,) = send(1)
    assert isinstance(refused, RejectRequest)
    assert (refused.code, refused.bare) == (ErrorCode.INVALID_ARG, True)
    assert refused.message == (
        "inference request for sequence a to model 'm' must specify the START flag on the first request of the sequence"
    )
    assert send(2, start=True) == send(3) == send(4, start=True) == send(5, end=True) == []
    assert isinstance(send(6)[0], RejectRequest), "after END the id is free, and nobody has begun with it"
    assert send(7, start=True) == []


def test_one_that_is_given_up_in_between_lets_nobody_pass() -> None:
    scheduler = SequenceScheduler("b")
    scheduler.observe(PolicyChanged(OLDEST), 0)
    for number, end, timeout_us in ((1, True, 0), (2, True, 10), (3, False, 0)):
        mark = SequenceMark("a", start=True, end=end)
        request = RequestQueued(number.to_bytes(16, "big"), 1, 0, 1, 0, timeout_us, 0, 0, sequence=mark)
        assert not scheduler.observe(request, 0)
    (refused,) = scheduler.advance(20_000)
    assert isinstance(refused, RejectRequest)
    (batch,) = scheduler.observe(VersionServed("e1", 1, "a", 1), 20_000)
    assert isinstance(batch, DispatchBatch)
    assert [request.id[-1] for request in batch.requests] == [1]
    (batch,) = scheduler.observe(BatchFinished(batch.batch_id, "e1"), 20_000)
    assert isinstance(batch, DispatchBatch)
    assert [request.id[-1] for request in batch.requests] == [3]


def test_one_that_ends_before_its_turn_does_not_hide_who_runs() -> None:
    scheduler = SequenceScheduler("b")
    scheduler.observe_all([PolicyChanged(OLDEST), VersionServed("e1", 1, "a", 2)], 0)

    def send(number: int, *, end: bool = False) -> list[object]:
        mark = SequenceMark("a", start=True, end=end)
        return list(scheduler.observe(RequestQueued(number.to_bytes(16, "big"), 1, 0, 1, 0, 0, 0, 0, sequence=mark), 0))

    send(1, end=True)
    (batch,) = scheduler.advance(10_000)
    assert isinstance(batch, DispatchBatch)
    assert send(2) == []
    scheduler.observe(RequestCancelled((2).to_bytes(16, "big")), 10_000)
    assert send(3) == scheduler.advance(20_000) == [], "the second instance is free, but the first has its sequence"
    (batch,) = scheduler.observe(BatchFinished(batch.batch_id, "e1"), 20_000)
    assert isinstance(batch, DispatchBatch)
    assert [request.id[-1] for request in batch.requests] == [3]
