"""How long one execution of a model may take: `parameters: charonia.max_execution_s`, for backends of every kind."""

from __future__ import annotations

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument

MAX_EXECUTION = "charonia.max_execution_s"
DEFAULT_MAX_EXECUTION_S = 600.0


def max_execution_s(source: ModelSource) -> float:
    """Seconds; 0 is no limit. Raises `InvalidArgument` for a value that is no time."""
    return parameter_seconds(source, MAX_EXECUTION, DEFAULT_MAX_EXECUTION_S)


def parameter_seconds(source: ModelSource, key: str, default: float) -> float:
    """A parameter of a model's configuration that is a time. Raises `InvalidArgument`."""
    parameters = source.config.parameters
    return number(key, parameters[key].string_value) if key in parameters else default


def number(key: str, text: str) -> float:
    """A finite number of at least 0. Raises `InvalidArgument`, naming `key`."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise InvalidArgument(f"'{key}' must be a number of at least 0, got '{text}'")
    return found
