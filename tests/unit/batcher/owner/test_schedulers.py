"""The strategy of batching a batcher asks: one that is missing or fails costs batches, never the model's scheduling."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from batcher.owner import schedulers as strategies
from batcher.owner.schedulers import strategy_of
from batcher.scheduling.queues.dynamic_batching import BatchRules
from charonia.batch_strategies import BatchCandidate, Joins
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching

ONE = BatchCandidate(1, 4, (), {})


def interface(**parameters: str) -> ModelInterface:
    named = {name.replace("__", "."): value for name, value in parameters.items()}
    return ModelInterface(name="m", backend="", platform="", max_batch_size=8, inputs={}, outputs={}, parameters=named)


def test_none_is_none() -> None:
    assert strategy_of(interface()) is None


def test_the_shipped_one_is_asked() -> None:
    found = strategy_of(interface(charonia__batch_strategy="volume", MAX_BATCH_VOLUME_BYTES="8"))
    assert found is not None
    joins = found.begin()
    assert [joins(ONE) for _ in range(3)] == [True, True, False]


def test_the_same_parameters_are_the_same_rules() -> None:
    def rules(**parameters: str) -> BatchRules:
        found = interface(**parameters)
        return BatchRules.of(replace(found, dynamic_batching=DynamicBatching()), strategy_of(found))

    for parameters in ({"MAX_BATCH_VOLUME_BYTES": "8"}, {"MAX_BATCH_VOLUME_BYTES": "none"}):
        named = {"charonia__batch_strategy": "volume", **parameters}
        assert rules(**named) == rules(**named) != rules()
        assert rules(**named) != rules(**named | {"MAX_BATCH_VOLUME_BYTES": "9"})


def test_one_that_is_not_there_lets_nobody_join(caplog: pytest.LogCaptureFixture) -> None:
    found = strategy_of(interface(charonia__batch_strategy="tetris"))
    assert found is not None
    assert not found.begin()(ONE)
    assert "the requests of model 'm' are not batched: there is no batch strategy 'tetris'" in caplog.text


class Fragile:
    def __init__(self) -> None:
        self.begins = 0

    def begin(self) -> Joins:
        self.begins += 1
        if self.begins > 1:
            raise RuntimeError("no more")

        def joins(candidate: BatchCandidate) -> bool:
            raise ValueError(candidate.rows)

        return joins


def test_one_that_fails_ends_batches_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(strategies, "batch_strategy", lambda _parameters: Fragile())
    found = strategy_of(interface())
    assert found is not None
    with caplog.at_level(logging.ERROR):
        assert not found.begin()(ONE)
        assert not found.begin()(ONE)
    assert caplog.text.count("the batch strategy of model 'm' failed") == 1
