"""When a queue's answers count as quick."""

from __future__ import annotations

from gateway.turnaround import Turnaround


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
