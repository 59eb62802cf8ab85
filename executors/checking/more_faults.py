"""Finds the further faults of a model that is refused: a load stops at the first, a check names all it can.

Each rule of `executors.configuration` is tried by itself, and tensors, groups and warm-ups one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from charonia.errors import CharoniaError
from charonia.models.caching import caching_rules
from charonia.models.latency_target import check_adaptive_batching
from charonia.models.metric_control import check_metrics
from charonia.models.repeatable import check_repeatable
from charonia.models.text_routing import check_text_routing
from executors.configuration.config import normalise, validate_structure
from executors.configuration.sequence_validation import check_sequence_batching
from executors.configuration.validation import (
    check_batch_io,
    check_dynamic_batching,
    check_ensemble,
    check_file_names,
    check_instance_groups,
    check_tensors,
    unsupported_features,
)
from executors.repository.model_directory import ModelDirectory, load_labels
from protos.model_config_pb2 import ModelConfig

_BLOCKS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling", "model_metrics")


def further_problems(directory: ModelDirectory, written: ModelConfig, gpus: int) -> list[str]:
    """Return the texts of all rules that a configuration breaks by itself, without its model's files."""
    found = []
    for rule in _rules(directory, written, gpus):
        try:
            rule()
        except CharoniaError as error:
            if error.message not in found:
                found.append(error.message)
    if sentences := unsupported_features(written):
        found.append("; ".join(sentences))
    return found


def _rules(directory: ModelDirectory, written: ModelConfig, gpus: int) -> Iterator[Callable[[], object]]:
    name = directory.name
    config = ModelConfig()
    config.CopyFrom(written)
    config.name = name
    structure = _without(config, *_BLOCKS)
    yield lambda: validate_structure(structure, name)
    if config.HasField("dynamic_batching"):
        yield lambda: check_dynamic_batching(config, name)
    if config.HasField("sequence_batching"):
        yield lambda: check_sequence_batching(config, name)
    if config.HasField("ensemble_scheduling"):
        yield lambda: check_ensemble(config, name)
    yield lambda: check_metrics(config, name)
    for one in _single_tensors(config):
        yield lambda one=one: check_tensors(one)  # type: ignore[misc]
    yield lambda: check_batch_io(config)
    yield lambda: check_file_names(config)
    yield lambda: load_labels(directory.path, config)
    if not config.HasField("ensemble_scheduling"):
        full = normalise(config, gpus=gpus)
        for index in range(len(full.instance_group)):
            single = _without(full, "instance_group")
            single.instance_group.add().CopyFrom(full.instance_group[index])
            yield lambda single=single: check_instance_groups(single, gpus)  # type: ignore[misc]
    yield lambda: caching_rules(config)
    yield lambda: check_adaptive_batching(config)
    yield lambda: check_repeatable(config)
    yield lambda: check_text_routing(config)


def _without(config: ModelConfig, *fields: str) -> ModelConfig:
    copy = ModelConfig()
    copy.CopyFrom(config)
    for field in fields:
        copy.ClearField(field)
    return copy


def _single_tensors(config: ModelConfig) -> Iterator[ModelConfig]:
    """The configuration with one of its tensors each. Those that the model's file may complete are left out."""
    for item in config.input:
        if item.name and item.data_type and item.dims:
            one = _without(config, "input", "output")
            one.input.add().CopyFrom(item)
            yield one
    for output in config.output:
        if output.name and output.data_type and output.dims:
            one = _without(config, "input", "output")
            one.output.add().CopyFrom(output)
            yield one
