from __future__ import annotations

from pathlib import Path

import pytest

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument
from executors.backends.python.process_settings import Limits
from protos.model_config_pb2 import ModelConfig


def source(parameters: dict[str, str], settings: dict[str, str]) -> ModelSource:
    config = ModelConfig(name="m")
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return ModelSource("m", 1, Path("/none"), config, settings)


def test_defaults() -> None:
    assert Limits.of(source({}, {})) == Limits(30, 600, 600, 5)


def test_values_come_from_the_configuration_and_the_backend_settings() -> None:
    limits = Limits.of(
        source(
            {"charonia.max_execution_s": "1.5", "charonia.max_load_s": "0"},
            {"stub-timeout-seconds": "7", "shm-default-byte-size": "1048576"},
        )
    )
    assert limits == Limits(7, 0, 1.5, 5)


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf"])
def test_values_that_are_no_times_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"'charonia.max_execution_s' must be a number of at least 0, got '"):
        Limits.of(source({"charonia.max_execution_s": text}, {}))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"shm-default-byte-size": "1048575"}, "shm-default-byte-size can't be smaller than 4 MiBs"),
        ({"shm-growth-byte-size": "0"}, "shm-growth-byte-size can't be smaller than or equal to zero."),
        ({"shm-default-byte-size": "much"}, "'shm-default-byte-size' must be a number of at least 0, got 'much'"),
    ],
)
def test_settings_for_shared_memory_are_checked(settings: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Limits.of(source({}, settings))
    assert caught.value.message == text


def test_where_inputs_may_lie_is_yes_or_no() -> None:
    for answer in ("yes", "no"):
        Limits.of(source({"FORCE_CPU_ONLY_INPUT_TENSORS": answer}, {}))
    with pytest.raises(InvalidArgument, match="Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: maybe'"):
        Limits.of(source({"FORCE_CPU_ONLY_INPUT_TENSORS": "maybe"}, {}))


def test_an_unknown_setting_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    Limits.of(source({}, {"shm-region-prefix-name": "x", "stub-timeout": "3"}))
    assert [record.getMessage() for record in caplog.records] == [
        "model m: the python backend has no setting 'stub-timeout'"
    ]
