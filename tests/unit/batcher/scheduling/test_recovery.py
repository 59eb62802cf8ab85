"""Losses, returns, a new owner, stale facts and a configuration that changes."""

from __future__ import annotations

import pytest
from scheduler_account import queued_by_level
from scheduler_bench import Model, interface, timing

from batcher.scheduling.decisions import Decision, DispatchBatch
from batcher.scheduling.observations import (
    BatchFinished,
    BatchReturned,
    BatchRunning,
    ExecutorLost,
    PolicyChanged,
    RequestQueued,
    VersionsAbandoned,
    VersionServed,
    VersionWithdrawn,
)
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.models.scheduling import DynamicBatching, TimeoutAction

# -- losses, returns, recovery, stale facts ----------------------------------------------------------------------------


def test_lost_requests_come_first_in_their_order_and_count_an_attempt() -> None:
    model = Model(DynamicBatching(), slots=2, max_batch_size=2)
    assert model.put(1, 2, 3, 4, 5) == ["a: 1 2", "a: 3 4"]
    assert model.see(ExecutorLost("a", drained=True)) == []
    assert model.see(VersionServed("b", 1, "h1", 3)) == ["b: 1 2", "b: 3 4", "b: 5"]
    assert model.batches[1].attempts == (2, 2)
    assert model.batches[5].attempts == (1,)


def test_returned_requests_come_first_and_are_given_out_anew() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    model.put(2)
    model.see(VersionWithdrawn("a", 1))
    assert model.give_back(1) == []
    assert model.see(VersionServed("b", 1, "h1", 1)) == ["b: 1 2"]
    # every giving-out is an attempt of its own, so that one that was not returned for good is fenced
    assert model.batches[1].attempts == (2, 1)


def test_stale_and_repeated_facts_are_ignored() -> None:
    model = Model(DynamicBatching())
    first = model.request(1)
    assert model.see(first) == ["a: 1"]
    assert model.see(first) == []
    batch = model.batches[1]
    assert model.see(BatchFinished(batch.batch_id, "z"), BatchReturned("p-99", "a")) == []
    assert model.scheduler.outstanding() == {"a": 1}
    assert model.see(ExecutorLost("a"), VersionServed("b", 1, "h1", 1)) == ["b: 1"]
    assert model.see(BatchFinished(batch.batch_id, "a"), BatchReturned(batch.batch_id, "a")) == []
    assert model.scheduler.outstanding() == {"b": 1}
    model.finish(1)
    model.finish(1)
    assert model.put(2) == ["b: 2"]
    assert model.put(3) == []


@pytest.mark.parametrize("known", [False, True])
def test_a_new_owner_takes_over_what_runs_already(known: bool) -> None:
    model = Model(DynamicBatching(), slots=0)
    requests = [model.request(number) for number in (1, 2)]
    if known:
        model.see(*requests)
    model.put(3)
    assert model.see(BatchRunning("old-1", "a", 1, requests)) == []
    assert (model.scheduler.pending_count(), model.scheduler.outstanding_requests()) == (1, 2)
    assert model.see(VersionServed("a", 1, "h1", 1)) == []
    assert model.see(*[model.request(number) for number in (1, 2)]) == ["join 1", "join 2"]
    assert model.see(ExecutorLost("a", drained=True), VersionServed("b", 1, "h1", 1)) == ["b: 1 2 3"]
    assert model.batches[1].attempts == (2, 2, 1)


def test_a_taken_over_batch_that_finishes_ends_its_requests() -> None:
    model = Model(DynamicBatching(), slots=0)
    model.see(BatchRunning("old-1", "a", 1, [model.request(1)]), VersionServed("a", 1, "h1", 1))
    assert model.put(2) == []
    assert model.see(BatchFinished("old-1", "a")) == ["a: 2"]
    assert model.scheduler.outstanding_requests() == 1


def test_abandoned_versions_refuse_what_waits_for_them() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    model.put(2)
    model.put(3, version=4)
    assert model.see(VersionsAbandoned(frozenset({1}))) == [
        "3 UNAVAILABLE REJECTED Request for unknown model: 'm' version 4 is not at ready state"
    ]
    assert model.scheduler.pending_count() == 1


# -- a new configuration -----------------------------------------------------------------------------------------------


def test_a_new_configuration_holds_for_what_is_queued() -> None:
    model = Model(DynamicBatching(priority_levels=3, default_priority_level=3), slots=0)
    model.put(1, level=3)
    model.put(2, level=1)
    model.put(3, rows=4)
    model.see(PolicyChanged(interface(3, timing(TimeoutAction.REJECT))))
    assert queued_by_level(model.scheduler) == {0: 2}
    assert model.wakeup_us() == 10
    assert model.see(VersionServed("a", 1, "h1", 1)) == ["a: 1 2"]


def test_a_request_too_large_for_the_new_configuration_is_refused() -> None:
    model = Model(DynamicBatching(), slots=0)
    model.put(1, rows=4)
    assert model.see(PolicyChanged(interface(3, None))) == [
        "1 INVALID_ARG OTHER inference request batch-size must be <= 3 for 'm'"
    ]


def test_the_same_configuration_again_changes_nothing() -> None:
    block = DynamicBatching(max_queue_delay_us=10)
    model = Model(block)
    model.put(1)
    assert model.see(PolicyChanged(interface(4, block))) == []
    assert model.wakeup_us() == 10


def test_a_hook_holds_the_first_batch_back() -> None:
    """S43: nothing before so many wait, then as ever."""
    scheduler = ModelScheduler("b", waits_for=2)
    scheduler.observe_all([PolicyChanged(interface(4, DynamicBatching())), VersionServed("e", 1, "h", 1)], 0)

    def send(number: int) -> list[Decision]:
        return scheduler.observe(RequestQueued(bytes([number]) * 16, 1, 0, 1, 0, 0, 0, 0), 0)

    assert send(1) == []
    (batch,) = send(2)
    assert isinstance(batch, DispatchBatch)
    assert len(batch.requests) == 2
    scheduler.observe(BatchFinished(batch.batch_id, "e"), 0)
    assert len(send(3)) == 1
