"""Loads versions: auto-complete, defaults, checks, instances, warm-up.

`executors.deployment` decides when, and announces the result. Everything that reads files or blocks runs in threads, so
that heartbeats continue.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Never

from charonia.backend import Backend, GraphSignature, InstanceSpec, ModelCalls, ModelSource, RequestInstance
from charonia.batch_strategies import check_batch_strategy
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, InternalError, Unsupported
from charonia.models.ensemble import Find
from charonia.models.interface import InstanceGroup, ModelInterface
from charonia.models.metric_control import unknown_families
from charonia.wire import RequestRecord
from executors.backends.python.process_settings import python_based
from executors.backends.registry import BackendRegistry, prefers_gpu
from executors.batches.sequence_tensors import SequenceTensors
from executors.batches.sequences import Memory, Sequences
from executors.configuration.autofill import default_max_batch_size, from_graph
from executors.configuration.config import normalise, unsupported_features, validate
from executors.configuration.time_parameters import max_execution_s
from executors.configuration.validation import check_reshapes
from executors.host.host_policy import HostPolicies
from executors.isolation.isolated_instance import create_isolated, wants_process
from executors.outgoing_calls import NearCalls, ResolvingCalls
from executors.repository.model_directory import ModelDirectory, content_hash, load_labels
from executors.repository.repository_agents import RepositoryAgents
from executors.running.health import interval_s
from executors.running.instance_pool import InstancePool, LoadedVersion
from executors.running.resource_grants import ResourceGrants
from protos.model_config_pb2 import ModelConfig

from .composition import completed_ensemble, is_ensemble
from .warmup import warmup_records

_log = logging.getLogger(__name__)

_KINDS = {"KIND_CPU": "CPU", "KIND_GPU": "GPU", "KIND_MODEL": "MODEL"}


class Loader:
    """Loads versions. `gpus` is the number of devices of this machine; `backend_config` is backend -> key -> value.

    With `resource_grants`, executions are limited by the resources of their instance groups (Q1). `calls` lets models
    call models.
    """

    calls: ResolvingCalls | None = None

    def __init__(
        self,
        registry: BackendRegistry,
        *,
        gpus: int,
        auto_complete: bool,
        backend_config: Mapping[str, Mapping[str, str]],
        retries: int = 0,
        resource_grants: ResourceGrants | None = None,
        host_policies: HostPolicies | None = None,
        agents: RepositoryAgents | None = None,
    ) -> None:
        self._agents = agents or RepositoryAgents()
        self._registry = registry
        self._gpus = gpus
        self._auto_complete = auto_complete
        self._backend_config = backend_config
        self._retries = retries
        self.resource_grants = resource_grants
        self._host_policies = host_policies or HostPolicies({})

    def backends(self) -> list[tuple[str, str, str]]:
        """(name, file, settings as JSON) of the backends that models have used so far (R30)."""
        everywhere = self._backend_config.get("", {})
        return [
            (word, path, json.dumps({**everywhere, **self._backend_config.get(word, {})}, sort_keys=True))
            for word, path in self._registry.files().items()
        ]

    def can_find_backend(self, directory: ModelDirectory) -> bool:
        """Whether the backend of a model is installed, without importing it. Reads files and metadata."""
        config = directory.required_config()
        if not config.backend or self._registry.has(config.backend):
            return True
        return python_based(self.source(directory, 0, config)) is not None  # of any version: the backend has the code

    async def complete(self, directory: ModelDirectory, versions: Sequence[int], find: Find) -> ModelConfig:
        """Return the final configuration: auto-completed, with defaults, and fully checked (C60, C70).

        `find` returns the interfaces of an ensemble's composing models. Raises a `CharoniaError`, which is the reason
        for all of the model's versions.
        """
        written = directory.required_config()
        unsupported = unsupported_features(written)
        if unsupported:
            raise Unsupported("; ".join(unsupported))
        for family in unknown_families(written):
            _log.warning("Metric family '%s' in 'metric_identifier' is not a customizable metric", family)
        await asyncio.to_thread(self._agents.run, directory.path, written)
        if is_ensemble(written):
            await asyncio.to_thread(check_strategy, written, directory.path, ())
            return completed_ensemble(written, directory.name, find)
        source = self.source(directory, versions[-1] if versions else 0, written)
        backend = await asyncio.to_thread(self._registry.of, source)
        config = written
        check_reshapes(written)
        if self._auto_complete and versions:
            config = await self._probed(backend, source, written)
        wants_gpu = self._gpus > 0 and await asyncio.to_thread(prefers_gpu, backend)
        config = normalise(config, gpus=self._gpus, backend_prefers_gpu=wants_gpu)
        validate(config, directory.name, gpus=self._gpus)
        unsupported = unsupported_features(config)
        if unsupported:
            raise Unsupported("; ".join(unsupported))
        await asyncio.to_thread(check_strategy, config, directory.path, versions)
        return config

    async def load(self, directory: ModelDirectory, version: int, config: ModelConfig) -> LoadedVersion:
        """Return a version with warmed-up instances, not started. Raises a `CharoniaError` and leaves nothing."""
        for attempt in range(self._retries + 1):
            try:
                return await self._load(directory, version, config)
            except CharoniaError as error:
                if attempt == self._retries:
                    raise
                _log.warning("loading %s version %d failed, trying again: %s", directory.name, version, error)
        raise InternalError(f"model '{directory.name}' version {version} could not be loaded")

    async def _load(self, directory: ModelDirectory, version: int, config: ModelConfig) -> LoadedVersion:
        started = monotonic_ns()
        if is_ensemble(config):
            return await self._load_ensemble(directory, version, config, started)
        source = self.source(directory, version, config)
        backend = await asyncio.to_thread(self._registry.of, source)
        interface = ModelInterface.of(config)
        health_interval_s = interval_s(source)
        digest, labels = await asyncio.to_thread(_hash_and_labels, source, config)
        ceiling_s = max_execution_s(source)
        create = backend.create_instance
        if wants_process(source):
            # the time limit ends the instance's process, not the executor
            create, ceiling_s = partial(create_isolated, ceiling_s=ceiling_s), 0.0
        pool = InstancePool(interface, version, create, ceiling_s, resource_grants=self.resource_grants)
        try:
            await self._instances(source, pool, self._calls_of(directory))
            if interface.sequence_batching is not None:
                pool.sequences = await asyncio.to_thread(_sequences, interface, source, pool)
            batches = await asyncio.to_thread(_warmups, interface, source)
            warmed = await pool.warm_up(batches)
        except CharoniaError:
            await pool.close()
            raise
        except asyncio.CancelledError:
            await pool.close()
            raise
        except Exception as error:
            await pool.close()
            _log.exception("loading %s version %d failed", directory.name, version)
            raise InternalError(f"{type(error).__name__}: {error}") from error
        load_ns = monotonic_ns() - started
        return LoadedVersion(directory.key, source, interface, digest, pool, labels, warmed, load_ns, health_interval_s)

    async def _load_ensemble(
        self, directory: ModelDirectory, version: int, config: ModelConfig, started: int
    ) -> LoadedVersion:
        """Load an ensemble, which has no instances: its owner runs it on its composing models."""
        source = self.source(directory, version, config)
        digest, labels = await asyncio.to_thread(_hash_and_labels, source, config)
        interface = ModelInterface.of(config)
        return LoadedVersion(
            directory.key,
            source,
            interface,
            digest,
            InstancePool(interface, version, _no_instance),
            labels,
            [],
            monotonic_ns() - started,
        )

    async def resize(self, served: LoadedVersion, directory: ModelDirectory, version: int, config: ModelConfig) -> int:
        """Add or remove instances of a served version, if a configuration changes nothing else (R23).

        Returns the change in instances; 0 when the version must be reloaded. Surplus instances leave with
        `InstancePool.shrink`. Raises what `load` raises.
        """
        if self.resource_grants is not None or is_ensemble(config) or served.pool.is_shrinking:
            return 0
        interface, before = ModelInterface.of(config), served.interface
        bound = interface.sequence_batching is not None
        change = change_of(before.instance_groups, interface.instance_groups, bound=bound)
        source = self.source(directory, version, config)
        if change == 0 or (await asyncio.to_thread(_hash_and_labels, source, config))[0] != served.content_hash:
            return 0
        if change > 0:
            group = interface.instance_groups[-1]
            taken = {spec.name for spec in served.pool.specs}
            named = _specs(
                replace(group, count=group.count + len(taken)),
                source,
                interface,
                self._host_policies,
                self._calls_of(directory),
            )
            free = [spec for spec in named if spec.name not in taken]
            batches = await asyncio.to_thread(_warmups, interface, source)
            served.warmed = await served.pool.grow(free[:change], group, batches)
        else:
            served.warmed = []
            served.pool.set_target(served.pool.slots + change)
        served.source, served.interface, served.pool.interface = source, interface, interface
        return change

    async def check_warmups(self, source: ModelSource) -> None:
        """Build the warm-up requests of a version without running them. Raises what their load would raise."""
        await asyncio.to_thread(_warmups, ModelInterface.of(source.config), source)

    async def _probed(self, backend: Backend, source: ModelSource, written: ModelConfig) -> ModelConfig:
        try:
            found = await backend.probe(source)
        except CharoniaError:
            raise
        except Exception as error:
            _log.exception("backend %s failed to probe %s", written.backend, source.name)
            raise InternalError(f"{type(error).__name__}: {error}") from error
        if found is None:
            return written
        if isinstance(found, GraphSignature):
            return from_graph(written, found, default_max_batch=default_max_batch_size(source.backend_config))
        return found

    def _calls_of(self, directory: ModelDirectory) -> ModelCalls | None:
        """How the model calls others: those of its own namespace first."""
        if self.calls is None or not directory.namespace:
            return self.calls
        return NearCalls(self.calls, directory.namespace, directory.key)

    async def _instances(self, source: ModelSource, pool: InstancePool, calls: ModelCalls | None) -> None:
        wanted = [
            (spec, group)
            for group in pool.interface.instance_groups
            for spec in _specs(group, source, pool.interface, self._host_policies, calls)
        ]
        made = await asyncio.gather(*(pool.create(spec) for spec, _ in wanted), return_exceptions=True)
        failure: BaseException | None = None
        for (spec, group), instance in zip(wanted, made, strict=True):
            if isinstance(instance, BaseException):
                failure = failure or instance
                continue
            try:
                pool.add(spec, instance, group)
            except CharoniaError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        if isinstance(made[0], RequestInstance) and (pool.interface.batch_inputs or pool.interface.scattered_outputs):
            _log.warning(
                "model %s: 'batch_input' and 'batch_output' have no effect with the %s backend, which takes requests "
                "one by one",
                source.name,
                source.config.backend,
            )

    def source(self, directory: ModelDirectory, version: int, config: ModelConfig) -> ModelSource:
        """Return what a backend gets to know of a version."""
        settings = {**self._backend_config.get("", {}), **self._backend_config.get(config.backend, {})}
        return ModelSource(directory.name, version, directory.path, config, settings)


async def _no_instance(spec: InstanceSpec) -> Never:
    raise InternalError(f"'{spec.name}' is an instance of an ensemble, which has none")


def _specs(
    group: InstanceGroup,
    source: ModelSource,
    interface: ModelInterface,
    policies: HostPolicies,
    calls: ModelCalls | None,
) -> list[InstanceSpec]:
    """The instances of a group, named `<group>_<index>`, numbered over its devices (C8)."""
    kind = _KINDS[group.kind]
    devices = group.gpus if kind == "GPU" else (-1,)
    places = [device for device in devices for _ in range(group.count)]
    return [
        InstanceSpec(
            f"{group.name}_{index}", kind, device, source, interface, policies.cores(group, kind, device), calls
        )
        for index, device in enumerate(places)
    ]


def _hash_and_labels(source: ModelSource, config: ModelConfig) -> tuple[str, dict[str, list[str]]]:
    digest = content_hash(source.directory, source.version, config)
    labels = {name: list(lines) for name, lines in load_labels(source.directory, config).items()}
    return digest, labels


def _warmups(interface: ModelInterface, source: ModelSource) -> list[list[RequestRecord]]:
    batches: list[list[RequestRecord]] = []
    for warmup in interface.warmups:
        batches.extend([warmup_records(interface, source.version, source.directory, warmup)] * warmup.count)
    return batches


def _sequences(interface: ModelInterface, source: ModelSource, pool: InstancePool) -> Sequences:
    tensors = SequenceTensors(interface, source.directory)
    memory: Memory = "states" if tensors.states else "nothing" if pool.is_stateless else "instances"
    return Sequences(interface, source.version, tensors, memory)


LIBRARY = "batchstrategy.so"
"""The file that Triton looks for in a model's directory and in those of its versions."""


def check_strategy(config: ModelConfig, directory: Path, versions: Iterable[int]) -> None:
    """Raise `InvalidArgument` for a strategy that is not installed, `Unsupported` for one of Triton's C++ libraries.

    Reads the model's directory and the metadata of installed distributions.
    """
    places = (directory, *(directory / str(version) for version in versions))
    if any((place / LIBRARY).exists() for place in places):
        raise Unsupported(
            f"custom batching by a C++ library ('{LIBRARY}'; see 'charonia.batch_strategy') is not supported yet"
        )
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    check_batch_strategy(parameters, batching=config.HasField("dynamic_batching") and config.max_batch_size > 0)


def change_of(before: Sequence[InstanceGroup], after: Sequence[InstanceGroup], *, bound: bool) -> int:
    """Return how many instances the last group gains or loses (negative); 0 when anything else differs.

    With a sequence batcher (`bound`), instances are known by number and the last ones leave. Otherwise any free
    instance may leave, so all must be alike.
    """
    if len(before) != len(after) or not before or any(group.passive for group in (*before, *after)):
        return 0
    if [replace(g, name="") for g in before[:-1]] != [replace(g, name="") for g in after[:-1]]:
        return 0
    last, wanted = before[-1], after[-1]
    if replace(last, name="", count=0) != replace(wanted, name="", count=0) or len(wanted.gpus) > 1:
        return 0
    change = wanted.count - last.count
    return 0 if change < 0 and not bound and len(before) > 1 else change
