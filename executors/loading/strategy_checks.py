"""What of custom batching (P22) keeps a model from loading. Which requests go together is the batcher's to ask."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from charonia.batch_strategies import check_batch_strategy
from charonia.errors import Unsupported
from protos.model_config_pb2 import ModelConfig

LIBRARY = "batchstrategy.so"
"""What Triton looks for beside a model or one of its versions."""


def check_strategy(config: ModelConfig, directory: Path, versions: Iterable[int]) -> None:
    """Raises `InvalidArgument` for a strategy that cannot be had, `Unsupported` for a library of Triton's.

    Looks into the model's directory and reads metadata of what is installed.
    """
    places = (directory, *(directory / str(version) for version in versions))
    if any((place / LIBRARY).exists() for place in places):
        raise Unsupported(
            f"custom batching by a C++ library ('{LIBRARY}'; see 'charonia.batch_strategy') is not supported yet"
        )
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    check_batch_strategy(parameters, batching=config.HasField("dynamic_batching") and config.max_batch_size > 0)
