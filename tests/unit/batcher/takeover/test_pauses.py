"""Pauses before a model is taken again grow, and are forgotten."""

from __future__ import annotations

from batcher.takeover.pauses import Pauses

S = 1_000_000_000


def test_they_double_up_to_five_seconds() -> None:
    pauses = Pauses()
    assert [pauses.next_s("m", at * S) for at in range(7)] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_each_model_has_its_own() -> None:
    pauses = Pauses()
    assert [pauses.next_s("a", 0), pauses.next_s("a", S), pauses.next_s("b", S)] == [0.2, 0.4, 0.2]


def test_after_half_a_minute_it_begins_anew() -> None:
    pauses = Pauses()
    pauses.next_s("m", 0)
    assert pauses.next_s("m", 29 * S) == 0.4
    assert pauses.next_s("m", 59 * S) == 0.2
