"""Finds the further faults of a model that is refused: a load stops at the first, a check names all it can.

Each rule of `executors.configuration.config` is tried by itself, and tensors, groups and warm-ups one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from charonia.errors import CharoniaError
from executors.configuration.config import instance_rules, normalise, structure_rules, unsupported_features
from executors.configuration.platforms import detect_backend
from executors.repository.model_directory import ModelDirectory, load_labels
from protos.model_config_pb2 import ModelConfig


def further_problems(directory: ModelDirectory, written: ModelConfig, gpus: int) -> list[str]:
    """Return the texts of all rules that a configuration breaks by itself, without its model's files."""
    found = []
    config = _with_backend(directory, written)
    for rule in _rules(directory, config, gpus):
        try:
            rule()
        except CharoniaError as error:
            if error.message not in found:
                found.append(error.message)
    if sentences := unsupported_features(config):
        found.append("; ".join(sentences))
    return found


def _with_backend(directory: ModelDirectory, written: ModelConfig) -> ModelConfig:
    """A copy with the names that a load completes first: the model's, and those of its files' backend."""
    config = ModelConfig()
    config.CopyFrom(written)
    config.name = directory.name  # a load would have named another one first
    with suppress(CharoniaError):  # no backend is known: a rule says so
        config.backend, config.platform = detect_backend(config, directory.name, directory.entries)
    return config


def _rules(directory: ModelDirectory, config: ModelConfig, gpus: int) -> Iterator[Callable[[], object]]:
    for structural in structure_rules(config):
        yield partial(structural, config, directory.name)
    try:
        config = normalise(config, gpus=gpus)
    except CharoniaError:
        pass  # no backend is known: a rule above says so
    yield partial(load_labels, directory.path, config)
    for rule, fields in instance_rules(config, gpus):
        for one in _single_items(config, fields) if fields else (config,):
            yield partial(rule, one)


def _single_items(config: ModelConfig, fields: Sequence[str]) -> Iterator[ModelConfig]:
    """The configuration with one item each of these fields. What the model's file may complete is left out."""
    inputs_are_known = bool(config.input) and all(map(_is_complete, config.input))
    for field in fields:
        for item in getattr(config, field):
            if field == "model_warmup" and not inputs_are_known:
                continue
            if field in ("input", "output") and not _is_complete(item):
                continue
            one = ModelConfig()
            one.CopyFrom(config)
            for name in fields:
                one.ClearField(name)
            getattr(one, field).add().CopyFrom(item)
            yield one


def _is_complete(tensor: Any) -> bool:
    return bool(tensor.name and tensor.data_type and tensor.dims)
