"""`charonia.repeatable`: whether a request may be run again once some of its responses were read. Only the model's author
knows: the same request must give the same responses in the same order.

`charonia.resumable`: whether another run goes on where the lost one was. Each response has a record in the log
(`ModelResponse.progress`) before it is seen; a later run is given all of them, gives those responses again without
running the model, and goes on. Such a model is repeatable.
"""

from __future__ import annotations

from collections.abc import Mapping

from protos.model_config_pb2 import ModelConfig

from .config_errors import InstanceError

REPEATABLE = "charonia.repeatable"
RESUMABLE = "charonia.resumable"

_YES, _NO = ("true", "1", "yes"), ("false", "0", "no", "")


def is_repeatable(parameters: Mapping[str, str]) -> bool:
    """The value in a model's parameters; False by default."""
    return _says(parameters, REPEATABLE) or is_resumable(parameters)


def is_resumable(parameters: Mapping[str, str]) -> bool:
    """The value in a model's parameters; False by default."""
    return _says(parameters, RESUMABLE)


def _says(parameters: Mapping[str, str], key: str) -> bool:
    return parameters.get(key, "").strip().lower() in _YES


def check_repeatable(config: ModelConfig) -> None:
    """Raises `InstanceError` for a value other than yes or no, and for a resumable model that cannot be one."""
    for key in (REPEATABLE, RESUMABLE):
        text = config.parameters[key].string_value if key in config.parameters else ""
        if text.strip().lower() not in (*_YES, *_NO):
            raise InstanceError(f"parameter '{key}' must be true or false, got '{text}'")
    if not _says({key: value.string_value for key, value in config.parameters.items()}, RESUMABLE):
        return
    if not config.model_transaction_policy.decoupled or config.HasField("sequence_batching"):
        raise InstanceError(f"parameter '{RESUMABLE}' is for decoupled models without a sequence batcher")
