"""Loads versions: auto-complete, defaults, checks, instances, warm-up.

`executors.deployment` decides when, and announces the result. Everything that reads files or blocks runs in threads, so
that heartbeats continue.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Never

from charonia.backend import (
    Backend,
    GraphSignature,
    InstanceSpec,
    MeasuredModel,
    Model,
    ModelCalls,
    ModelSource,
    RequestInstance,
    TextModel,
)
from charonia.batch_strategies import check_batch_strategy
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, InternalError, Unsupported, error_of_model
from charonia.exchange.exchanging_instance import with_wanted_memory
from charonia.generation.text_assets import digest_of
from charonia.generation.text_tensors import ASSETS_PARAMETER
from charonia.models.ensemble import Find
from charonia.models.interface import InstanceGroup, ModelInterface
from charonia.models.metric_control import unknown_families
from charonia.wire import RequestRecord
from executors.backends.given_objects import checked_instance, checked_signature, code_of_models, loaded_model
from executors.backends.python.process_settings import python_based
from executors.backends.registry import BackendRegistry, has_own_environment, prefers_gpu
from executors.batches.sequence_tensors import SequenceTensors
from executors.batches.sequences import Memory, Sequences
from executors.configuration.autofill import default_max_batch_size, from_graph
from executors.configuration.config import normalise, unsupported_features, validate
from executors.configuration.declarations import SHIPPED
from executors.configuration.known_parameters import unknown_parameters
from executors.configuration.time_parameters import max_execution_s
from executors.configuration.validation import check_reshapes
from executors.host.host_policy import HostPolicies
from executors.isolation.isolated_model import IsolatedModel, IsolatingBackend
from executors.isolation.isolation_choice import ISOLATION, NONE, isolation_of
from executors.isolation.strings_apart import StringsApart
from executors.outgoing_calls import NearCalls, ResolvingCalls
from executors.repository.model_directory import ModelDirectory, content_hash, load_labels
from executors.repository.repository_agents import RepositoryAgents
from executors.running.health import interval_s
from executors.running.instance_pool import InstancePool, LoadedVersion
from executors.running.resource_grants import ResourceGrants
from executors.running.workers import Instance
from protos.model_config_pb2 import ModelConfig

from .composing_models import completed_ensemble, is_ensemble
from .opened_backends import OpenedBackend, OpenedBackends
from .warmup import warmup_records

_log = logging.getLogger(__name__)

_KINDS = {"KIND_CPU": "CPU", "KIND_GPU": "GPU", "KIND_MODEL": "MODEL"}


class Loader:
    """Loads versions. `gpus` is the number of devices of this machine; `backend_config` is backend -> key -> value.

    `isolates` False: models are opened in this process, whatever they want; for checks that run none of their code.
    `require_sandbox` and `native_models` are the options `--require-sandbox` and `--allow-native-models`.
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
        isolates: bool = True,
        require_sandbox: bool = False,
        native_models: Sequence[str] = (),
    ) -> None:
        self._agents = agents or RepositoryAgents()
        self._registry = registry
        self._backends = OpenedBackends(registry, backend_config)
        self._gpus = gpus
        self._auto_complete = auto_complete
        self._backend_config = backend_config
        self._retries = retries
        self._isolates = isolates
        self._require_sandbox = require_sandbox
        self._native_models = frozenset(native_models)
        self.keep_assets: Callable[[str, bytes], Awaitable[None]] | None = None
        """Stores the text assets of models under their digests, where gateways find them."""
        self.resource_grants = resource_grants
        self._host_policies = host_policies or HostPolicies({})
        self._open: dict[str, tuple[int, Model]] = {}
        """By key: the version and the model that were opened for auto-complete, until `load` takes it or `release`."""

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
        source = self.source(directory, 0, config)  # of any version: the backend has the code
        if python_based(source) is not None:
            return True
        return config.backend in SHIPPED and has_own_environment(source, self._registry.get(config.backend))

    async def complete(self, directory: ModelDirectory, versions: Sequence[int], find: Find) -> ModelConfig:
        """Return the final configuration: auto-completed, with defaults, and fully checked (C60, C70).

        The model stays open for its `load`; call `release` when none follows.
        `find` returns the interfaces of an ensemble's composing models. Raises a `CharoniaError`, which is the reason
        for all of the model's versions.
        """
        with _told(directory.name):
            return await self._complete(directory, versions, find)

    async def _complete(self, directory: ModelDirectory, versions: Sequence[int], find: Find) -> ModelConfig:
        written = directory.required_config()
        unsupported = unsupported_features(written)
        if unsupported:
            raise Unsupported("; ".join(unsupported))
        for family in unknown_families(written):
            _log.warning("Metric family '%s' in 'metric_identifier' is not a customizable metric", family)
        for sentence in unknown_parameters(written):
            _log.warning("model '%s': %s", directory.name, sentence)
        await asyncio.to_thread(self._agents.run, directory.path, written)
        if is_ensemble(written):
            await asyncio.to_thread(check_strategy, written, directory.path, ())
            return completed_ensemble(written, directory.name, find)
        source = self.source(directory, versions[-1] if versions else 0, written)
        opened = await self._backend_of(source)
        config = written
        check_reshapes(written)
        isolated = isinstance(opened.backend, IsolatingBackend)
        wants_gpu = self._gpus > 0 and not isolated and await asyncio.to_thread(prefers_gpu, opened.backend)
        if versions and (self._auto_complete or (isolated and self._gpus > 0)):
            await self.release(directory.key)
            model = await opened.run(partial(loaded_model, opened.backend, source))
            self._open[directory.key] = source.version, model
            try:
                if self._auto_complete:
                    config = await opened.run(partial(_completed, model, source, written))
                config = await self._with_assets(model, source, config)
                if self._gpus > 0 and isinstance(model, IsolatedModel):
                    wants_gpu = await model.prefers_gpu()
            except BaseException:
                await self.release(directory.key)
                raise
        config = normalise(config, gpus=self._gpus, backend_prefers_gpu=wants_gpu)
        validate(config, directory.name, gpus=self._gpus)
        unsupported = unsupported_features(config)
        if unsupported:
            raise Unsupported("; ".join(unsupported))
        await asyncio.to_thread(check_strategy, config, directory.path, versions)
        if isinstance(opened.backend, IsolatingBackend):  # as it is, for all who read the configuration
            config.parameters[ISOLATION].string_value = opened.backend.wanted
        return config

    async def load(self, directory: ModelDirectory, version: int, config: ModelConfig) -> LoadedVersion:
        """Return a version with warmed-up instances, not started. Raises a `CharoniaError` and leaves nothing."""
        for attempt in range(self._retries + 1):
            try:
                with _told(directory.name):
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
        opened = await self._backend_of(source)
        interface = ModelInterface.of(config)
        health_interval_s = interval_s(source)
        digest, labels = await asyncio.to_thread(_hash_and_labels, source, config)
        if self._open.get(directory.key, (None,))[0] == version:
            model = self._open.pop(directory.key)[1]
        else:
            model = await opened.run(partial(loaded_model, opened.backend, source))
        try:
            config = await self._with_assets(model, source, config)
        except BaseException:
            await _close(model, source.name)
            raise
        source = replace(source, config=config)
        # of an isolated model the time limit ends its process, not the executor
        ceiling_s = 0.0 if isinstance(model, IsolatedModel) else max_execution_s(source)
        pool = InstancePool(
            *(interface, version, lambda spec: opened.run(partial(_instance_of, model, spec)), ceiling_s),
            resource_grants=self.resource_grants,
            close_model=partial(_close, model, source.name),
        )
        try:
            await self._instances(source, pool, self._calls_of(directory))
            if self._isolates and self._runs_strings_apart(opened.backend, model, pool):
                pool.apart = StringsApart(source, ceiling_s)
            if interface.sequence_batching is not None:
                pool.sequences = await asyncio.to_thread(_sequences, interface, source, pool)
            batches = await asyncio.to_thread(_warmups, interface, source)
            warmed = await pool.warm_up(batches)
            load_ns = monotonic_ns() - started
            memory = await asyncio.to_thread(_memory_of, model, source.name) if isinstance(model, MeasuredModel) else {}
        except BaseException:
            await pool.close()
            raise
        return LoadedVersion(
            *(directory.key, source, interface, digest, pool, labels, warmed, load_ns, health_interval_s), memory=memory
        )

    async def _with_assets(self, model: Model, source: ModelSource, config: ModelConfig) -> ModelConfig:
        """The configuration with the digest of a version's text assets, which are stored before it is announced."""
        assets = await model.text_assets() if isinstance(model, TextModel) else b""
        if not assets:
            return config
        digest = digest_of(assets)
        if self.keep_assets is not None:
            await self.keep_assets(digest, assets)
        done = ModelConfig()
        done.CopyFrom(config)
        done.parameters[ASSETS_PARAMETER].string_value = digest
        return done

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
            served.pool.set_target(served.pool.instance_count + change)
        served.source, served.interface, served.pool.interface = source, interface, interface
        return change

    async def check_warmups(self, source: ModelSource) -> None:
        """Build the warm-up requests of a version without running them. Raises what their load would raise."""
        await asyncio.to_thread(_warmups, ModelInterface.of(source.config), source)

    async def release(self, model: str) -> None:
        """Close what `complete` opened of a model and no load took."""
        if model in self._open:
            _, left = self._open.pop(model)
            await _close(left, model)

    async def close(self) -> None:
        """Close what `complete` opened, and the backends, once no version is left."""
        for model in list(self._open):
            await self.release(model)
        await self._backends.close()

    def _runs_strings_apart(self, backend: Backend, model: Model, pool: InstancePool) -> bool:
        """Whether batches of many strings get a process of their own, see `Backend.strings_apart`."""
        return (
            bool(getattr(backend, "strings_apart", False))
            and self._registry.is_movable(backend)
            and not isinstance(model, IsolatedModel)
            and pool.planner.strings.occur
            and pool.is_stateless
            and all(spec.kind == "CPU" for spec in pool.specs)
        )

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
        native = directory.repository in self._native_models
        return ModelSource(directory.name, version, directory.path, config, settings, native)

    async def _backend_of(self, source: ModelSource) -> OpenedBackend:
        """The backend of a model; for an isolated one, which is opened in its process, what starts that."""
        backend = await asyncio.to_thread(self._registry.of, source)
        movable = self._registry.is_movable(backend)
        isolation = isolation_of(source, backend, require_sandbox=self._require_sandbox, movable=movable)
        if isolation == NONE or not self._isolates:
            return await self._backends.of(source)
        return OpenedBackend(IsolatingBackend(backend.name, isolation, getattr(backend, "custom_metrics", None)))


@contextmanager
def _told(model: str) -> Iterator[None]:
    """Turn any other error into a `CharoniaError`, so that a backend's mistake fails its own model alone."""
    try:
        with code_of_models():
            yield
    except Exception as error:
        if not isinstance(error, CharoniaError):
            _log.exception("loading %s failed", model)
        if (told := error_of_model(error)) is error:
            raise
        raise told from error


def _memory_of(model: MeasuredModel, name: str) -> dict[str, int]:
    """What a model says that it holds; nothing, and a line in the log, when that is no memory."""
    found: dict[str, int] = {}
    try:
        for use in model.memory():
            if use.kind not in ("CPU", "CPU_PINNED", "GPU") or min(use.device_id, use.size_bytes) < 0:
                raise ValueError(f"{use!r} is no memory")
            place = f"{use.kind} {int(use.device_id)}"
            if use.size_bytes:
                found[place] = found.get(place, 0) + int(use.size_bytes)
    except Exception:
        _log.exception("model %s cannot say how much memory it holds", name)
        return {}
    return found


async def _close(model: Model, name: str) -> None:
    """Close a model. An error changes nothing for its caller: it is logged."""
    try:
        with code_of_models():
            await model.close()
    except Exception:
        _log.exception("failed to close model %s", name)


async def _completed(model: Model, source: ModelSource, written: ModelConfig) -> ModelConfig:
    """The configuration with what the model says of itself."""
    found = checked_signature(await model.signature(), written.backend)
    if found is None:
        return written
    if isinstance(found, GraphSignature):
        return from_graph(written, found, default_max_batch=default_max_batch_size(source.backend_config))
    return found


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


async def _instance_of(model: Model, spec: InstanceSpec) -> Instance:
    with code_of_models():  # in a task of its own, as instances are made at once
        instance = checked_instance(await model.create_instance(spec), spec.source.config.backend)
    made: Instance = await with_wanted_memory(model, instance, spec)
    return made


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
