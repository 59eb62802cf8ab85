from __future__ import annotations

from pathlib import Path

import pytest

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument
from executors.backends.python.limits import Limits
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
