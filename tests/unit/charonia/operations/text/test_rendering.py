"""Tables, ages and sizes as operators read them."""

from __future__ import annotations

import pytest

from charonia.operations.text.rendering import age, moment, one_line, pairs, size, table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.25, "250ms"), (3.44, "3.4s"), (312, "5m12s"), (7500, "2h05m"), (273_600, "3d04h"), (-2, "-2.0s")],
)
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert size(size_bytes) == text


def test_moments_are_utc() -> None:
    assert moment(1_700_000_000_123_456) == "2023-11-14T22:13:20.123Z"


def test_tables_align_numbers_to_the_right_and_show_what_is_missing() -> None:
    rows = [{"name": "a", "n": 5, "on": True}, {"name": "long", "n": 1234, "on": None}]
    assert table(rows, (("name", "name"), ("n", "n"), ("on", "on"))) == [
        "NAME  N     ON",
        "a        5  yes",
        "long  1234  -",
    ]


def test_pairs_leave_out_what_is_empty() -> None:
    assert pairs({"id": "x", "tenant": "", "age_s": 90.0}, ("id", "tenant", "age_s")) == ["id     x", "age    1m30s"]


def test_text_of_the_log_cannot_command_a_terminal() -> None:
    assert one_line("a\x1b[2Jb\nc") == "a\\x1b[2Jb\\nc"
    assert one_line("ünï") == "ünï"
