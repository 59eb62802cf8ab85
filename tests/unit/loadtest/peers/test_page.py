"""A section is written between its peer's markers, with a verdict for each line."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.bench.points import Key, Point
from loadtest.model import LoadTestError
from loadtest.peers.page import replace_section, section, verdict
from loadtest.peers.recipes import RECIPES

PAGE = Path(__file__).resolve().parents[4] / "docs" / "performance.md"


def test_verdicts() -> None:
    assert [verdict(ratio) for ratio in (2.0, 1.1, 0.9, 0.5, None)] == ["win", "level", "level", "loss", "-"]


def test_a_section_counts_wins_and_losses() -> None:
    fast, slow = Point(200, 1, 2, 100, 0), Point(100, 2, 4, 100, 0)
    results = {
        Key("identity", "grpc", 1): {"own": [fast], "triton": [slow]},
        Key("identity", "http", 1): {"own": [slow], "triton": [fast]},
        Key("mixed", "http", 1): {"own": [slow]},
    }
    text = section("triton", RECIPES["triton"], results, 1, 1.0)
    assert "**1 won, 0 level, 1 lost** of 2 points" in text
    assert "| identity | grpc | 1 | 200 | 100 |" in text
    assert text.splitlines()[-1].endswith("| 0.50 | loss |")


def test_only_the_text_between_the_markers_changes() -> None:
    page = "head\n<!-- peer a: begin -->\nold\n<!-- peer a: end -->\ntail\n"
    new = replace_section(page, "a", "new")
    assert new == "head\n<!-- peer a: begin -->\n\nnew\n\n<!-- peer a: end -->\ntail\n"
    assert replace_section(new, "a", "new") == new
    with pytest.raises(LoadTestError, match="peer b: begin"):
        replace_section(page, "b", "new")


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_a_section_for_each_peer(name: str) -> None:
    assert replace_section(PAGE.read_text(), name, "x")
