"""The two kinds of refused configuration, told apart because clients see them differently (interface item C62).

    ConfigError (charonia.errors)
    ├── StructureError   found while reading the repository: a generic 500, the reason only in the log
    └── InstanceError    found when instances are created: 400 "load failed for model ...", with the reason

Which rule raises which is decided in `validation` and `sequence_validation` of `executors.configuration`.
"""

from __future__ import annotations

from charonia.errors import ConfigError, InvalidArgument


class StructureError(ConfigError):
    """Text, names, batcher blocks or a combination of blocks are invalid: the repository cannot be polled."""


class InstanceError(ConfigError):
    """Tensors, batch I/O, instance groups, states or versions are invalid: no instance can be created."""


class CompositionError(InvalidArgument):
    """An ensemble cannot be composed of the models that are there: 400 "load failed for model ...: " and this text."""


def poll_failure(model_name: str) -> str:
    """The only text that clients get for a `StructureError` (items C62, R20), as INTERNAL."""
    return f"failed to load '{model_name}', failed to poll from model repository"
