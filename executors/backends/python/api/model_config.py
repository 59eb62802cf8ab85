"""The configuration in model code, for `auto_complete_config` and look-ups (P2, P8), and the model's directory.

`executors.configuration.autocomplete` has the rules. It is imported when a model first completes something, because
processes that only serve do not need it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_PROPERTIES = frozenset({"name", "data_type", "dims", "optional"})


class ModelConfig:
    """The written configuration, which a model may complete but not contradict: conflicts raise `ValueError` (P2)."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """The current configuration in its JSON form."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        _rules().set_max_batch_size(self._model_config, max_batch_size)

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching. Another written scheduler is a conflict."""
        _rules().set_dynamic_batching(self._model_config)

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set `{"decoupled": bool}` unless the opposite is written."""
        _rules().set_model_transaction_policy(self._model_config, dict(transaction_policy_dict))

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Add `{"name", "data_type", "dims", "optional"}`, or complete the written input with this name."""
        self._check_properties("input", input)
        _rules().add_input(self._model_config, dict(input))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add `{"name", "data_type", "dims"}`, or complete the written output with this name."""
        self._check_properties("output", output)
        _rules().add_output(self._model_config, dict(output))

    def _check_properties(self, kind: str, tensor: Mapping[str, Any]) -> None:
        # the merge rules also accept partial tensors, but a model must pass whole ones; they reject unknown keys
        if "name" not in tensor or not _PROPERTIES.issuperset(tensor):
            return
        for needed in ("data_type", "dims"):
            if needed not in tensor:
                raise ValueError(
                    f"{kind} '{tensor['name']}' in auto-complete-config function for model "
                    f"'{self._model_config.get('name', '')}' is missing '{needed}' property."
                )


def _rules() -> ModuleType:
    from executors.configuration import autocomplete

    return autocomplete


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return an input of a decoded configuration, or None (P8)."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return an output of a decoded configuration, or None (P8)."""
    return _named(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether a decoded configuration is decoupled (P8)."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _named(tensors: Any, name: str) -> dict[str, Any] | None:
    for tensor in tensors:
        if tensor["name"] == name:
            return tensor  # type: ignore[no-any-return]
    return None


_directory = ""


def set_model_dir(directory: str) -> None:
    global _directory
    _directory = directory


def get_model_dir() -> str:
    """The version's directory, which contains `model.py`."""
    return _directory
