"""Budgets follow the placement of roles, and verdicts the right direction."""

from __future__ import annotations

import pytest

from loadtest.bench_report import Round, report
from loadtest.budgets import Verdict, cpu_budgets_us, less_backend
from loadtest.calibration import factors


def test_budgets_of_a_colocated_batcher() -> None:
    assert cpu_budgets_us(["serve", "gateway", "redis", "executor+batcher"], "http") == {
        "gateway": 50.0,
        "redis": 8.0,
        "executor+batcher": 12.0,
    }


def test_budgets_of_a_separate_batcher() -> None:
    assert cpu_budgets_us(["gateway", "redis", "batcher", "executor"], "grpc") == {
        "gateway": 180.0,
        "redis": 14.0,
        "batcher": 6.0,
        "executor": 6.0,
    }


def test_only_the_executing_role_is_freed_of_the_backends_time() -> None:
    cpu = {"gateway": 40.0, "executor+batcher": 15.0}
    assert less_backend(cpu, 4.0) == {"gateway": 40.0, "executor+batcher": 11.0}
    assert less_backend(cpu, None) == cpu


@pytest.mark.parametrize(
    ("figure", "floor", "within", "text"),
    [
        (9.0, False, True, "ok"),
        (14.0, False, True, "over x1.40"),
        (16.0, False, False, "MISSED x1.60"),
        (11.0, True, True, "ok"),
        (8.0, True, True, "over x1.25"),
        (5.0, True, False, "MISSED x2.00"),
        (0.0, True, False, "MISSED xinf"),
    ],
)
def test_verdicts(figure: float, floor: bool, within: bool, text: str) -> None:
    verdict = Verdict(figure, 10.0, floor, 1.5)
    assert (verdict.within, str(verdict)) == (within, text)


def _round(gateway_us: float, per_entry: float | None = 8.0) -> Round:
    cpu = {"gateway": gateway_us, "redis": 5.0, "executor+batcher": 12.0}
    return Round(1000.0, 10.0, 20.0, 5.0, cpu, backend_us=3.0, requests_per_entry=per_entry, batch_size=8.0)


def test_the_median_round_is_judged_and_only_at_64_in_flight() -> None:
    cells = {
        ("charonia http", "http", 1): [_round(900.0)],
        ("charonia http", "http", 64): [_round(40.0), _round(45.0), _round(900.0)],
        ("echo http", "http", 64): [_round(900.0)],
    }
    document = report(cells, 1.5, None, {}, {})
    assert document["missed"] == []
    judged = document["cells"][1]
    assert judged["cpu_us"]["gateway"] == {"median": 45.0, "min": 40.0, "max": 900.0}
    assert judged["cpu_less_backend_us"]["executor+batcher"]["median"] == 9.0
    assert judged["verdicts"]["gateway"]["text"] == "ok"
    assert not document["cells"][0]["verdicts"]
    assert not document["cells"][2]["verdicts"]


def test_a_budget_missed_or_unmeasured_is_listed() -> None:
    document = report({("charonia http", "http", 64): [_round(80.0, per_entry=None)]}, 1.5, None, {}, {})
    assert document["missed"] == [
        "charonia http at 64 in flight: gateway 80.0, budget 50",
        "charonia http at 64 in flight: requests per entry not measured",
    ]


def test_a_slower_machine_stretches_the_budgets_of_its_roles() -> None:
    machine = factors("http", 54.0, 1.6)
    assert machine == {"gateway": 2.0, "batcher": 2.0, "executor": 2.0, "redis": 2.0}
    assert cpu_budgets_us(["gateway", "redis", "executor+batcher"], "http", machine) == {
        "gateway": 100.0,
        "redis": 16.0,
        "executor+batcher": 24.0,
    }


def test_a_faster_machine_is_held_to_the_budgets_as_they_are() -> None:
    assert set(factors("grpc", 10.0, 0.1).values()) == {1.0}
    assert set(factors("grpc", None, None).values()) == {1.0}
