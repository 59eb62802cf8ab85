"""Ratios pair figures of one round; what an idle server takes is no row's."""

from __future__ import annotations

import pytest

from loadtest.backends.comparison import Figure, document, lines, ratio

ROUNDS = {
    "bare": [Figure(10.0, 100.0), Figure(20.0, 50.0), Figure(10.0, 90.0)],
    "none": [Figure(9.0, 125.0, {"gateway": 25.0, "executor": 100.0}, 4.0, idle_us=90.0),
             Figure(18.0, 100.0, {"gateway": 60.0, "executor": 40.0}, 8.0, idle_us=90.0),
             Figure(5.0, 100.0, {"gateway": 10.0, "executor": 90.0}, None, idle_us=50.0)],
}  # fmt: skip


def test_ratios_are_medians_over_rounds() -> None:
    assert ratio(ROUNDS, "bare", "none") == pytest.approx(0.8)
    assert ratio(ROUNDS, "none", "bare", "rate") == pytest.approx(0.9)
    assert ratio(ROUNDS, "bare", "sandbox") is None


def test_idle_time_is_taken_off_by_the_rows_that_were_answered() -> None:
    assert ROUNDS["none"][0].busy_us == pytest.approx(115.0)
    assert ratio(ROUNDS, "bare", "none", "busy_us") == pytest.approx(100 / 115)


def test_the_document_has_medians_of_each_side() -> None:
    found = document(ROUNDS)
    assert found["bare"]["cpu_us_per_row"] == 90.0
    assert found["bare"]["bare_of_served"] is None
    assert found["none"]["roles_us"] == {"executor": 90.0, "gateway": 25.0}
    assert found["none"]["rows_per_execution"] == 6.0
    assert found["none"]["of_none"] == 1.0


def test_the_table_has_a_line_for_each_side() -> None:
    text = lines({"m": document(ROUNDS)}).splitlines()
    assert [line.split()[:2] for line in text[1:]] == [["m", "bare"], ["m", "none"]]
    assert "0.80" in text[2]
    assert "gateway 25.0" in text[2]
