"""Wall time is what all processes of a log agree on."""

from __future__ import annotations

import time
from typing import Any

import pytest

from charonia import clock

S = 1_000_000_000
HOUR = 3600 * S
START = 1_763_700_000 * S


class Machine:
    """Its clocks, and a log whose clock is right."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.off = 0
        monkeypatch.setattr(clock, "monotonic_ns", lambda: 77 * S + self.now)
        monkeypatch.setattr(clock, "_system_ns", lambda: START + self.now + self.off)
        monkeypatch.setattr(clock, "_ahead_of_monotonic_ns", START - 77 * S)

    def beat(self, *, log_off: int = 0, within: int = 0) -> int:
        self.now += S // 2
        return clock.agree(START + self.now + log_off, within)

    @property
    def shown(self) -> int:
        """By how much wall time is off."""
        return clock.wall_ns() - START - self.now


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    return Machine(monkeypatch)


def test_it_is_the_time() -> None:
    assert abs(clock.wall_ns() - time.time_ns()) < 10 * S


def test_near_clocks_are_left_alone_and_followed(machine: Any) -> None:
    machine.off = 1 * S
    assert machine.shown == 0, "not looked at yet"
    assert machine.beat() == 0
    assert machine.shown == 1 * S
    machine.off = -1 * S  # set back a little
    assert machine.beat() == 0
    assert machine.shown == -1 * S
    assert machine.beat(log_off=2 * S, within=2 * S) == 0, "the log answered late"


@pytest.mark.parametrize("off", [HOUR, -HOUR, 5 * S, -5 * S])
def test_a_machine_that_is_off_goes_by_the_log(machine: Any, off: int) -> None:
    assert machine.beat() == 0
    machine.off = off
    assert machine.shown == 0, "nothing steps when the clock is set"
    assert machine.beat() == off
    assert machine.shown == 0
    # what comparing costs in exactness does not add up
    assert machine.beat(log_off=S // 10) == off - S // 10
    assert machine.shown == 0
    machine.off = 0
    assert machine.beat() == 0
    assert machine.shown == 0


@pytest.mark.parametrize("off", [HOUR, -5 * S])
def test_a_machine_that_was_off_when_it_came_agrees_at_once(machine: Any, monkeypatch: Any, off: int) -> None:
    machine.off = off
    monkeypatch.setattr(clock, "_ahead_of_monotonic_ns", START - 77 * S + off)
    assert machine.shown == off
    assert machine.beat() == off
    assert machine.shown == 0


def test_another_log_may_show_another_time(machine: Any) -> None:
    assert machine.beat(log_off=HOUR) == -HOUR
    assert machine.shown == HOUR
    assert machine.beat() == 0
    assert machine.shown == 0
