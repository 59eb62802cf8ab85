"""`charonia.repeatable`: whether a request may be run again once some of its responses were read.

Only the model's author knows: the same request must give the same responses in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

from protos.model_config_pb2 import ModelConfig

from .config_errors import InstanceError

REPEATABLE = "charonia.repeatable"

_YES, _NO = ("true", "1", "yes"), ("false", "0", "no", "")


def is_repeatable(parameters: Mapping[str, str]) -> bool:
    """The value in a model's parameters; False by default."""
    return parameters.get(REPEATABLE, "").strip().lower() in _YES


def check_repeatable(config: ModelConfig) -> None:
    """Raises `InstanceError` for a value other than yes or no."""
    text = config.parameters[REPEATABLE].string_value if REPEATABLE in config.parameters else ""
    if text.strip().lower() not in (*_YES, *_NO):
        raise InstanceError(f"parameter '{REPEATABLE}' must be true or false, got '{text}'")
