"""Validates a model's custom batching strategy at load time. The batcher applies the strategy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from charonia.batch_strategies import check_batch_strategy
from charonia.errors import Unsupported
from protos.model_config_pb2 import ModelConfig

LIBRARY = "batchstrategy.so"
"""The file that Triton looks for in a model's directory and in those of its versions."""


def check_strategy(config: ModelConfig, directory: Path, versions: Iterable[int]) -> None:
    """Raise `InvalidArgument` for a strategy that is not installed, `Unsupported` for one of Triton's C++ libraries.

    Reads the model's directory and the metadata of installed distributions.
    """
    places = (directory, *(directory / str(version) for version in versions))
    if any((place / LIBRARY).exists() for place in places):
        raise Unsupported(
            f"custom batching by a C++ library ('{LIBRARY}'; see 'charonia.batch_strategy') is not supported yet"
        )
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    check_batch_strategy(parameters, batching=config.HasField("dynamic_batching") and config.max_batch_size > 0)
