"""Writes default values into a configuration that autofill has completed, as clients read it back (C8, C60).

`executors.configuration.config.validate` checks the result.
"""

from __future__ import annotations

from protos import model_config_pb2 as pb

from .platforms import default_filename, detect_backend

_DEFAULT_SEQUENCE_IDLE_US = 1_000_000
# backends that release the interpreter's lock, and gain from a second instance on a CPU (C8)
_TWO_CPU_INSTANCES = frozenset({"onnxruntime", "tensorflow"})


def normalise(config: pb.ModelConfig, *, gpus: int = 0, backend_prefers_gpu: bool = True) -> pb.ModelConfig:
    """Return a copy with all defaults of C60 written in. Idempotent.

    `gpus` is the number of devices where the model will run, numbered from 0. An instance group of kind AUTO becomes
    GPU when there is one and the backend prefers it, or when the group names devices; else CPU.
    """
    done = pb.ModelConfig()
    done.CopyFrom(config)
    policy = done.version_policy
    if policy.WhichOneof("policy_choice") in (None, "latest") and policy.latest.num_versions == 0:
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
    if not done.default_model_filename:
        done.default_model_filename = default_filename(done.backend, done.platform)
    _instance_groups(done, gpus, backend_prefers_gpu)
    return done


def _batching(config: pb.ModelConfig) -> None:
    size = config.max_batch_size
    if config.HasField("dynamic_batching"):
        if not config.dynamic_batching.preferred_batch_size and size > 0:
            config.dynamic_batching.preferred_batch_size.append(size)
    elif config.HasField("sequence_batching"):
        block = config.sequence_batching
        if block.max_sequence_idle_microseconds == 0:
            block.max_sequence_idle_microseconds = _DEFAULT_SEQUENCE_IDLE_US
        if block.WhichOneof("strategy_choice") is None:
            block.direct.SetInParent()
        if block.HasField("oldest") and not block.oldest.preferred_batch_size and size > 0:
            block.oldest.preferred_batch_size.append(size)


def _instance_groups(config: pb.ModelConfig, gpus: int, backend_prefers_gpu: bool) -> None:
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
            two = group.kind == kinds.KIND_CPU and config.backend in _TWO_CPU_INSTANCES
            group.count = 2 if two else 1
