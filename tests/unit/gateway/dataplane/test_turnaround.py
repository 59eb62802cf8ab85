"""When a queue's answers count as quick."""

from __future__ import annotations

from gateway.dataplane.turnaround import Turnaround


def test_nothing_is_quick_before_it_was_measured() -> None:
    turnaround = Turnaround()
    assert not turnaround.is_quick
    turnaround.accepted(400_000)
    assert not turnaround.is_quick
    unaccepted = Turnaround()
    unaccepted.answered(400_000)
    assert not unaccepted.is_quick


def test_answers_are_measured_by_what_the_log_takes_not_by_the_clock() -> None:
    for scale in (1, 1000):
        quick, slow = Turnaround(), Turnaround()
        for turnaround, answered_ns in ((quick, 6_000), (slow, 7_000)):
            turnaround.accepted(1_000 * scale)
            turnaround.answered(answered_ns * scale)
        assert quick.is_quick
        assert not slow.is_quick


def test_it_follows_a_model_that_becomes_slow_and_quick_again() -> None:
    turnaround = Turnaround()
    turnaround.accepted(400)
    turnaround.answered(1_000)
    turnaround.accepted(400)
    turnaround.answered(3_000)
    assert turnaround.is_quick  # one late answer is none too many
    for _ in range(10):
        turnaround.accepted(400)
        turnaround.answered(8_000)
    assert not turnaround.is_quick
    for _ in range(20):
        turnaround.accepted(400)
        turnaround.answered(1_000)
    assert turnaround.is_quick


def test_how_many_are_under_way_is_what_is_sent_in_the_time_of_an_answer() -> None:
    turnaround = Turnaround()
    assert turnaround.under_way == 0
    for _ in range(200):
        turnaround.sent(4, 1_000_000)
    assert turnaround.under_way == 0  # nothing was answered
    for _ in range(40):
        turnaround.answered(3_000_000)
    assert 11.9 < turnaround.under_way < 12.4
    turnaround.sent(0, 25_000_000)
    assert 4.3 < turnaround.under_way < 4.6
    turnaround.sent(0, 10**12)
    assert turnaround.under_way < 1e-9
