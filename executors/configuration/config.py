"""Validates a model's configuration as a whole, and re-exports its normalisation and JSON form.

The canonical form is the message `protos.model_config_pb2.ModelConfig`; hot paths read
`charonia.models.interface.ModelInterface`. The rules are in `validation` and `sequence_validation`;
`executors.repository.pbtxt` parses texts, `executors.repository.model_repository` reads files.

A configuration goes through: `validate_structure` (as written, backend known) -> autofill -> `normalise` ->
`validate` -> `ModelInterface.of`.
"""

from __future__ import annotations

from charonia.errors import ConfigError
from charonia.models.caching import caching_rules
from charonia.models.config_errors import InstanceError, StructureError, poll_failure
from charonia.models.json_form import from_json, to_json
from charonia.models.latency_target import check_adaptive_batching
from charonia.models.metric_control import check_metrics
from charonia.models.repeatable import check_repeatable
from charonia.models.sequence_batcher import checkpoint_every
from protos.model_config_pb2 import ModelConfig

from .normalisation import normalise
from .platforms import ENSEMBLE
from .sequence_validation import check_sequence_batching, check_states
from .validation import (
    check_batch_io,
    check_dynamic_batching,
    check_ensemble,
    check_file_names,
    check_instance_groups,
    check_tensors,
    check_warmups,
    unsupported_features,
)

__all__ = [
    "ConfigError",
    "InstanceError",
    "StructureError",
    "from_json",
    "normalise",
    "poll_failure",
    "to_json",
    "unsupported_features",
    "validate",
    "validate_instances",
    "validate_structure",
]


def validate(config: ModelConfig, directory_name: str, *, gpus: int = 0) -> None:
    """Check all rules on a completed, normalised configuration, and raise for the first one that is broken.

    `gpus` is the number of devices where the model will run. Raises `StructureError` or `InstanceError` (C62).
    """
    validate_structure(config, directory_name)
    validate_instances(config, gpus=gpus)


def validate_structure(config: ModelConfig, directory_name: str) -> None:
    """Check the rules that do not depend on the model's files (C1, C2, C4, C13, C26, C32, C40-C43, C51, C63).

    The configuration's backend must be known; autofill need not have completed it yet. Raises `StructureError`.
    """
    name = directory_name
    if config.name and config.name != directory_name:
        raise StructureError(
            f"unexpected directory name '{directory_name}' for model '{config.name}', "
            "directory name must equal model name"
        )
    if not config.platform and not config.backend and not config.HasField("ensemble_scheduling"):
        raise StructureError(f"must specify 'platform' or 'backend' for '{name}'")
    if config.max_batch_size < 0:
        raise StructureError(f"'max_batch_size' must be non-negative value for {name}")
    if config.HasField("dynamic_batching"):
        check_dynamic_batching(config, name)
    if config.HasField("sequence_batching"):
        check_sequence_batching(config, name)
    if config.HasField("ensemble_scheduling"):
        check_ensemble(config, name)
    elif config.platform == ENSEMBLE:
        raise StructureError(f"ensemble scheduling must be set for ensemble '{name}' whose platform is '{ENSEMBLE}'")
    check_metrics(config, name)
    _check_response_cache(config, name)


def validate_instances(config: ModelConfig, *, gpus: int = 0) -> None:
    """Check the rules for creating instances (C5-C9, C12, C17, C20-C22, C45) on a completed, normalised configuration.

    Raises `InstanceError`.
    """
    check_tensors(config)
    check_batch_io(config)
    check_instance_groups(config, gpus)
    if config.HasField("sequence_batching"):
        check_states(config)
        checkpoint_every(config)
    check_file_names(config)
    check_warmups(config)
    caching_rules(config)
    check_adaptive_batching(config)
    check_repeatable(config)


def _check_response_cache(config: ModelConfig, name: str) -> None:
    """Raise `StructureError` for a response cache of a decoupled or sequence model (C63)."""
    if not config.response_cache.enable:
        return
    remedy = "Please disable the response cache."
    if config.HasField("sequence_batching"):
        raise StructureError(
            f"Response Cache does not currently support model {name} with sequence batching scheduler. {remedy}"
        )
    if config.model_transaction_policy.decoupled:
        raise StructureError(
            f"Response Cache does not currently support model {name} with 'decoupled' transaction policy. {remedy}"
        )
