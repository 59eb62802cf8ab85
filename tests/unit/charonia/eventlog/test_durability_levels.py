"""The words of durability levels."""

from __future__ import annotations

import pytest

from charonia.errors import InvalidArgument
from charonia.eventlog.durability_levels import FSYNC, MEMORY, Level, parse_level


def test_levels_are_spelled_one_way() -> None:
    assert parse_level("memory") == MEMORY
    assert parse_level("fsync") == FSYNC
    assert parse_level("replicated:2") == Level("replicated:2", 2)
    assert parse_level("replicated:99").replicas == 99


@pytest.mark.parametrize(
    "text", ["", "Fsync", "disk", "replicated", "replicated:0", "replicated:100", "replicated:-1", "replicated:1 "]
)
def test_nothing_else_is_a_level(text: str) -> None:
    with pytest.raises(InvalidArgument, match="durability must be memory, fsync or replicated"):
        parse_level(text)
