"""Custom batching (P22): strategies by name, and the one that is shipped."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from charonia import batch_strategies
from charonia.batch_strategies import BatchCandidate, VolumeStrategy, batch_strategy, check_batch_strategy
from charonia.errors import InvalidArgument


def of(size_bytes: int) -> BatchCandidate:
    return BatchCandidate(1, size_bytes, (), {})


def volume(text: str) -> dict[str, str]:
    return {"charonia.batch_strategy": "volume", "MAX_BATCH_VOLUME_BYTES": text}


def test_a_volume_is_counted_anew_for_each_batch() -> None:
    strategy = batch_strategy(volume("10"))
    assert strategy is not None
    for _ in range(2):
        joins = strategy.begin()
        assert [joins(of(size)) for size in (4, 6, 1)] == [True, True, False]


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "many", "٣", "9" * 5000])
def test_a_volume_is_a_number_of_bytes(text: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        batch_strategy(volume(text))
    assert raised.value.message == (
        "the batch strategy 'volume' needs the parameter 'MAX_BATCH_VOLUME_BYTES', a number of bytes above 0, "
        f"got '{text}'"
    )


def test_none_is_named() -> None:
    assert batch_strategy({"MAX_BATCH_VOLUME_BYTES": "1"}) is None
    check_batch_strategy({}, batching=False)


def test_an_unknown_one_is_told_with_those_there_are() -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_batch_strategy({"charonia.batch_strategy": "tetris"}, batching=True)
    assert raised.value.message == (
        "there is no batch strategy 'tetris': shipped is 'volume', others are entry points of the group "
        "'charonia.batch_strategies'"
    )


def test_it_needs_dynamic_batching() -> None:
    with pytest.raises(InvalidArgument, match="needs 'dynamic_batching' and a 'max_batch_size' of at least 1"):
        check_batch_strategy(volume("1"), batching=False)


def made_elsewhere(parameters: Mapping[str, str]) -> VolumeStrategy:
    """What another package would install."""
    return VolumeStrategy(2 * int(parameters["half"]))


def test_others_are_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> list[Any]:
        return [Entry(name, "", batch_strategies.ENTRY_POINT_GROUP)] if name == "double" else []

    monkeypatch.setattr(batch_strategies, "_installed", installed)
    strategy = batch_strategy({"charonia.batch_strategy": "double", "half": "4"})
    assert isinstance(strategy, VolumeStrategy)
    assert strategy.limit_bytes == 8


def test_what_others_raise_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_strategies, "_installed", lambda name: [Entry(name, "", "")])
    with pytest.raises(InvalidArgument) as raised:
        batch_strategy({"charonia.batch_strategy": "double", "half": "a"})
    assert raised.value.message == (
        "the batch strategy 'double' cannot be made: ValueError: invalid literal for int() with base 10: 'a'"
    )


class Entry(EntryPoint):
    """An entry point that need not be installed."""

    def load(self) -> Any:
        return made_elsewhere
