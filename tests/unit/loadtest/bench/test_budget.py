"""Budgets are read as they are written, ceilings and floors are told apart, and the best attempt is judged."""

from __future__ import annotations

import pytest

from gateway.lane import gathering
from loadtest.bench.budget import ATTEMPTS, FILE, PAUSE_S, Budget, as_toml, judge, parse
from loadtest.model import LoadTestError

CEILING = Budget("identity", "http", 1, "log_commands", 15.5)
FLOOR = Budget("identity", "http", 1, "requests_per_entry", 2.0)


def test_the_file_of_the_repository_is_valid() -> None:
    budgets = parse(FILE.read_text())
    assert {one.count for one in budgets} == {"log_commands", "requests_per_entry", "calls"}
    assert {1, 64} <= {one.in_flight for one in budgets}


@pytest.mark.parametrize(
    "text",
    [
        "identity = 3",
        "[identity.http.one]\ncalls = 1",
        "[identity.http.1]\nseconds = 1",
        "[identity.http.7]\ncalls = 1",
    ],
)
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(LoadTestError):
        parse(text)


def test_limits() -> None:
    assert CEILING.keeps(15.5)
    assert not CEILING.keeps(15.6)
    assert FLOOR.keeps(2.0)
    assert not FLOOR.keeps(1.9)


def test_a_count_over_budget_is_measured_again_and_the_best_is_judged() -> None:
    attempts = [{"log_commands": 17.0, "requests_per_entry": 3.0}, {"log_commands": 15.0, "requests_per_entry": 2.5}]
    left = list(attempts)
    pauses: list[float] = []
    assert list(judge([CEILING, FLOOR], lambda *_: left.pop(0), pauses.append)) == [(CEILING, 15.0), (FLOOR, 3.0)]
    assert (left, pauses) == ([], [PAUSE_S])


def test_a_model_taken_for_too_slow_rides_in_waves_again_after_a_pause() -> None:
    assert max(gathering._CLOSED_NS) < PAUSE_S * 1e9


def test_a_count_that_stays_over_budget_is_reported() -> None:
    asked = []

    def measure(model: str, protocol: str, in_flight: int) -> dict[str, float]:
        asked.append((model, protocol, in_flight))
        return {"log_commands": 20.0}

    ((budget, value),) = judge([CEILING], measure, lambda _: None)
    assert value == 20.0
    assert not budget.keeps(value)
    assert len(asked) == ATTEMPTS


def test_printed_budgets_have_slack_and_can_be_read_again() -> None:
    many = Budget("identity", "http", 64, "log_commands", 0.0)
    text = as_toml([(CEILING, 10.0), (FLOOR, 1.0), (many, 0.2)])
    assert [(one.count, one.in_flight, one.limit) for one in parse(text)] == [
        ("log_commands", 1, 10.3),
        ("requests_per_entry", 1, 1.0),
        ("log_commands", 64, 0.26),
    ]
