"""Time-outs, deadlines and cancels of what is queued and of what runs (S20-S24)."""

from __future__ import annotations

import pytest
from scheduler_bench import DELAY, US, Model, ident, timing

from batcher.scheduling.observations import ExecutorLost, QueueHeld, RequestCancelled, RequestSettled, VersionServed
from charonia.models.scheduling import DynamicBatching, QueuePolicy, TimeoutAction

# -- S20-S23: time-outs and deadlines ----------------------------------------------------------------------------------


def test_reject_is_prompt_while_all_instances_are_busy() -> None:
    model = Model(timing(TimeoutAction.REJECT))
    model.put(1)
    model.put(2, 3)
    assert model.wakeup_us() == 10
    assert model.at(10) == [
        "2 UNAVAILABLE REJECTED Request timeout expired",
        "3 UNAVAILABLE REJECTED Request timeout expired",
    ]
    assert model.wakeup_us() is None
    assert model.finish(1) == []


@pytest.mark.parametrize(
    ("default_us", "override", "asked_us", "expected_us"),
    [
        (10, True, 4, 4),
        (10, True, 40, 10),
        (10, True, 0, 10),
        (10, False, 4, 10),
        (0, True, 4, None),
    ],
)
def test_an_override_can_only_shorten(default_us: int, override: bool, asked_us: int, expected_us: int | None) -> None:
    model = Model(timing(TimeoutAction.REJECT, override=override, timeout_us=default_us), slots=0)
    model.put(1, timeout_us=asked_us)
    assert model.wakeup_us() == expected_us


def test_delay_serves_the_expired_after_the_rest_and_never_rejects() -> None:
    model = Model(timing(DELAY), max_batch_size=2)
    model.put(1)
    model.put(2, 3)
    assert model.at(10) == []
    model.put(4)
    assert model.wakeup_us() == 20
    assert model.finish(1) == ["a: 4 2"]
    assert model.at(1000) == []
    assert model.finish(4) == ["a: 3"]


def test_delayed_requests_still_count_towards_the_queue_size() -> None:
    policy = QueuePolicy(timeout_action=DELAY, default_timeout_us=10, max_queue_size=1)
    model = Model(DynamicBatching(default_queue_policy=policy))
    model.put(1)
    model.put(2)
    model.at(10)
    assert model.put(3) == ["3 UNAVAILABLE REJECTED Exceeds maximum queue size"]


@pytest.mark.parametrize("block", [None, DynamicBatching(max_queue_delay_us=50), timing(DELAY)])
def test_a_deadline_ends_a_request_on_time_and_before_execution(block: DynamicBatching | None) -> None:
    model = Model(block, slots=0)
    model.put(1, deadline_us=20)
    model.at(19)
    assert model.wakeup_us() == 20
    assert model.at(20) == ["1 DEADLINE_EXCEEDED REJECTED Deadline exceeded before execution"]
    assert model.put(2, deadline_us=20) == ["2 DEADLINE_EXCEEDED REJECTED Deadline exceeded before execution"]
    assert model.see(VersionServed("a", 1, "h1", 1)) == []


def test_what_expires_at_the_instant_an_instance_frees_up_does_not_run() -> None:
    model = Model(timing(TimeoutAction.REJECT))
    model.put(1)
    model.put(2)
    model.now_ns = 10 * US
    assert model.finish(1) == ["2 UNAVAILABLE REJECTED Request timeout expired"]


def test_time_spent_in_a_lost_batch_is_no_queue_time() -> None:
    model = Model(timing(TimeoutAction.REJECT))
    model.put(1)
    model.at(100)
    assert model.see(ExecutorLost("a", drained=True)) == []
    assert model.wakeup_us() == 110


# -- S24: cancellation -------------------------------------------------------------------------------------------------


def test_cancel_ends_a_queued_request_and_a_running_one_once() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    model.put(2, 3)
    assert model.see(RequestCancelled(ident(2))) == ["2 CANCELLED CANCELED"]
    assert model.see(RequestCancelled(ident(2)), RequestCancelled(ident(1)), RequestCancelled(ident(99))) == [
        "1 CANCELLED CANCELED",
        "stop 1 on a",
    ]
    assert model.see(RequestCancelled(ident(1)), RequestSettled(ident(1))) == []
    assert model.finish(1) == ["a: 3"]


def test_a_request_cancelled_while_running_is_not_run_again() -> None:
    model = Model(DynamicBatching())
    model.put(1, 2)
    model.see(RequestCancelled(ident(1)))
    assert model.see(ExecutorLost("a")) == []
    assert model.see(VersionServed("b", 1, "h1", 1)) == ["b: 2"]


def test_a_running_request_ends_at_its_deadline() -> None:
    model = Model(DynamicBatching())
    assert model.put(1, 2, deadline_us=50) == ["a: 1 2"]
    assert model.wakeup_us() == 50
    assert model.at(50) == [
        "1 DEADLINE_EXCEEDED OTHER Deadline exceeded during execution",
        "stop 1 on a",
        "2 DEADLINE_EXCEEDED OTHER Deadline exceeded during execution",
        "stop 2 on a",
    ]
    assert model.wakeup_us() is None
    assert model.see(ExecutorLost("a"), VersionServed("b", 1, "h1", 1)) == []
    assert model.scheduler.find(ident(1)) is None


def test_a_held_queue_gives_out_nothing_and_still_ends_requests() -> None:
    model = Model(DynamicBatching(max_queue_delay_us=100), max_batch_size=2)
    model.put(1)
    assert model.see(QueueHeld(True)) == []
    assert model.wakeup_us() is None
    assert model.put(2, deadline_us=10) == []
    assert model.see(RequestCancelled(ident(1))) == ["1 CANCELLED CANCELED"]
    assert model.at(10) == ["2 DEADLINE_EXCEEDED REJECTED Deadline exceeded before execution"]
    model.put(3, 4)
    assert model.at(1000) == []
    assert model.see(QueueHeld(False)) == ["a: 3 4"]
