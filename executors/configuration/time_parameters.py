"""Parameters of a model's configuration that are times, such as `charonia.max_execution_s`."""

from __future__ import annotations

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument

MAX_EXECUTION = "charonia.max_execution_s"
DEFAULT_MAX_EXECUTION_S = 600.0


def max_execution_s(source: ModelSource) -> float:
    """Return a model's time limit for one execution in seconds; 0: no limit. Raises `InvalidArgument`."""
    return parameter_seconds(source, MAX_EXECUTION, DEFAULT_MAX_EXECUTION_S)


def parameter_seconds(source: ModelSource, key: str, default: float) -> float:
    """Return a parameter in seconds. Raises `InvalidArgument` for a value that is no time."""
    parameters = source.config.parameters
    return number(key, parameters[key].string_value) if key in parameters else default


def number(key: str, text: str) -> float:
    """Parse a finite number of at least 0. Raises `InvalidArgument` with `key` in the message."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise InvalidArgument(f"'{key}' must be a number of at least 0, got '{text}'")
    return found
