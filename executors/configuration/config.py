"""Validates a model's configuration as a whole, and writes default values into one that autofill has completed, as
clients read it back (C8, C60).

The canonical form is the message `protos.model_config_pb2.ModelConfig`; hot paths read
`charonia.models.interface.ModelInterface`. Here is which rules hold (`structure_rules`, `instance_rules`): a load stops
at the first that is broken, `charonia check` tries all. The rules are in `validation` and `sequence_validation`;
`charonia.models.config_forms` parses texts, `executors.repository.model_repository` reads files.

A configuration goes through: `validate_structure` (as written, backend known) -> autofill -> `normalise` ->
`validate` -> `ModelInterface.of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from charonia.errors import ConfigError
from charonia.models.caching import caching_rules
from charonia.models.config_errors import InstanceError, StructureError, poll_failure
from charonia.models.config_forms import from_json, to_json
from charonia.models.latency_target import check_adaptive_batching
from charonia.models.metric_control import check_metrics
from charonia.models.recording_rules import recording_rules
from charonia.models.repeatable import check_repeatable
from charonia.models.sequence_batcher import checkpoint_every
from charonia.models.text_routing import check_text_routing
from protos import model_config_pb2 as pb
from protos.model_config_pb2 import ModelConfig

from .platforms import detect_backend, format_of
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
    for rule in structure_rules(config):
        rule(config, directory_name)


def structure_rules(config: ModelConfig) -> Iterator[Callable[[ModelConfig, str], object]]:
    """The rules of `validate_structure`, in its order. Each takes the configuration and its directory's name."""
    yield _check_head
    if config.HasField("dynamic_batching"):
        yield check_dynamic_batching
    if config.HasField("sequence_batching"):
        yield check_sequence_batching
    yield check_ensemble
    yield check_metrics
    yield _check_response_cache


def validate_instances(config: ModelConfig, *, gpus: int = 0) -> None:
    """Check the rules for creating instances (C5-C9, C12, C17, C20-C22, C45) on a completed, normalised configuration.

    Raises `InstanceError`.
    """
    for rule, _ in instance_rules(config, gpus):
        rule(config)


def instance_rules(config: ModelConfig, gpus: int) -> Iterator[tuple[Callable[[ModelConfig], object], Sequence[str]]]:
    """The rules of `validate_instances`, in its order, each with the fields whose items it checks one by one."""
    yield check_tensors, ("input", "output")
    yield check_batch_io, ()
    yield partial(check_instance_groups, gpus=gpus), ("instance_group",)
    if config.HasField("sequence_batching"):
        yield check_states, ()
        yield checkpoint_every, ()
    yield check_file_names, ()
    yield check_warmups, ("model_warmup",)
    yield caching_rules, ()
    yield recording_rules, ()
    yield check_adaptive_batching, ()
    yield check_repeatable, ()
    yield check_text_routing, ()


def _check_head(config: ModelConfig, name: str) -> None:
    if config.name and config.name != name:
        raise StructureError(
            f"unexpected directory name '{name}' for model '{config.name}', directory name must equal model name"
        )
    if not config.platform and not config.backend and not config.HasField("ensemble_scheduling"):
        raise StructureError(f"must specify 'platform' or 'backend' for '{name}'")
    if config.max_batch_size < 0:
        raise StructureError(f"'max_batch_size' must be non-negative value for {name}")


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


_DEFAULT_SEQUENCE_IDLE_US = 1_000_000


def normalise(config: pb.ModelConfig, *, gpus: int = 0, backend_prefers_gpu: bool = True) -> pb.ModelConfig:
    """Return a copy with all defaults of C60 written in. Idempotent.

    `gpus` is the number of devices where the model will run, numbered from 0. An instance group of kind AUTO becomes
    GPU when there is one and the backend prefers it, or when the group names devices; else CPU.
    """
    done = pb.ModelConfig()
    done.CopyFrom(config)
    _outputs_once(done)
    policy = done.version_policy
    if policy.WhichOneof("policy_choice") is None:
        policy.latest.num_versions = 1
    if not done.backend and (done.platform or done.HasField("ensemble_scheduling")):
        done.backend, done.platform = detect_backend(done, done.name, ())
    _batching(done)
    if done.HasField("ensemble_scheduling"):
        return done  # an ensemble has no instances, optimisation or file (C51)
    if not done.optimization.HasField("input_pinned_memory"):
        done.optimization.input_pinned_memory.enable = True
    if not done.optimization.HasField("output_pinned_memory"):
        done.optimization.output_pinned_memory.enable = True
    format = format_of(done.backend, done.platform)
    if not done.default_model_filename:
        done.default_model_filename = format.files[0] if format.files else ""
    _instance_groups(done, gpus, backend_prefers_gpu, format.cpu_instances)
    return done


def _outputs_once(config: pb.ModelConfig) -> None:
    """Remove outputs that repeat another one in all: Triton loads them, and a template of TensorRT-LLM has one."""
    seen: list[pb.ModelOutput] = []
    for output in config.output:
        if output not in seen:
            seen.append(output)
    if len(seen) < len(config.output):
        del config.output[:]
        config.output.extend(seen)


def _batching(config: pb.ModelConfig) -> None:
    size = config.max_batch_size
    if config.HasField("dynamic_batching"):
        if not config.dynamic_batching.preferred_batch_size and size > 0:
            config.dynamic_batching.preferred_batch_size.append(size)
    elif config.HasField("sequence_batching"):
        block = config.sequence_batching
        if block.max_sequence_idle_microseconds == 0:
            block.max_sequence_idle_microseconds = _DEFAULT_SEQUENCE_IDLE_US
        if block.HasField("oldest") and not block.oldest.preferred_batch_size and size > 0:
            block.oldest.preferred_batch_size.append(size)


def _instance_groups(config: pb.ModelConfig, gpus: int, backend_prefers_gpu: bool, cpu_instances: int) -> None:
    kinds = pb.ModelInstanceGroup
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        if not group.name:
            group.name = f"{config.name}_{index}"
        if group.kind == kinds.KIND_AUTO:
            wants_gpu = bool(group.gpus) or (gpus > 0 and backend_prefers_gpu)
            group.kind = kinds.KIND_GPU if wants_gpu else kinds.KIND_CPU
        if group.kind == kinds.KIND_GPU and not group.gpus:
            group.gpus.extend(range(gpus))
        if group.count < 1:
            group.count = cpu_instances if group.kind == kinds.KIND_CPU else 1
