"""The parameter `charonia.target_p99_ms`: what it may say, and beside what."""

from __future__ import annotations

import pytest

from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.models.latency_target import target_p99_ns
from executors.configuration.config import InstanceError, normalise, validate

MODEL = (
    'name: "m" backend: "b" input { name: "X" data_type: TYPE_INT8 dims: 1 } '
    'output { name: "Y" data_type: TYPE_INT8 dims: 1 } '
)
TARGET = ' parameters { key: "charonia.target_p99_ms" value { string_value: "%s" } }'


def load(text: str, target: str) -> ModelInterface:
    config = normalise(parse(MODEL + text + TARGET % target))
    validate(config, "m")
    return ModelInterface.of(config)


@pytest.mark.parametrize(("text", "ns"), [("20", 20_000_000), ("0.5", 500_000), (" 1e3 ", 1_000_000_000)])
def test_a_target_is_milliseconds(text: str, ns: int) -> None:
    interface = load("max_batch_size: 8 dynamic_batching { }", text)
    assert target_p99_ns(interface.parameters) == ns
    assert target_p99_ns({}) == 0


@pytest.mark.parametrize("text", ["0", "-1", "", "soon", "nan", "inf", "1e9"])
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(InstanceError) as raised:
        load("max_batch_size: 8 dynamic_batching { }", text)
    assert raised.value.message == (
        f"parameter 'charonia.target_p99_ms' of model 'm' must be a number of milliseconds above 0, got '{text}'"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_batch_size: 8", "needs 'dynamic_batching'"),
        ("dynamic_batching { }", "needs 'dynamic_batching' and a 'max_batch_size' of at least 1"),
        (
            "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 1 }",
            "chooses delay and batch size itself",
        ),
        ("max_batch_size: 8 dynamic_batching { preferred_batch_size: 4 }", "chooses delay and batch size itself"),
    ],
)
def test_what_it_would_choose_cannot_be_set(text: str, reason: str) -> None:
    with pytest.raises(InstanceError) as raised:
        load(text, "5")
    assert reason in raised.value.message
