"""The order of loads and unloads around ensembles: composing models first at load, last at unload (C52, C53, R26).

An ensemble has no instances here; its owner runs it. `executors.deployment.deployment` loads and unloads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from charonia.catalog.catalog import Catalog
from charonia.errors import CharoniaError, InvalidArgument, Unsupported
from charonia.models.config_errors import CompositionError
from charonia.models.ensemble import Find, circle, compose, composing_models
from charonia.models.interface import ModelInterface
from charonia.tasks import Tasks
from executors.configuration.config import normalise, unsupported_features, validate
from executors.repository.model_directory import ModelDirectory
from protos.model_config_pb2 import ModelConfig

from .placement_rules import NotPlacedHere

_log = logging.getLogger(__name__)


def is_ensemble(config: ModelConfig | None) -> bool:
    return config is not None and config.HasField("ensemble_scheduling")


def completed_ensemble(written: ModelConfig, name: str, find: Find) -> ModelConfig:
    """Return the final configuration of an ensemble. Raises the error that keeps it from being loaded.

    An ensemble is decoupled when one of its composing models is (C53).
    """
    config = normalise(written)
    validate(config, name)
    unsupported = unsupported_features(config)
    if unsupported:
        raise Unsupported("; ".join(unsupported))
    try:
        graph = compose(config, find)
    except InvalidArgument as error:
        raise CompositionError(error.message) from error
    config.model_transaction_policy.decoupled = graph.decoupled
    if graph.decoupled:
        validate(config, name)
        unsupported = unsupported_features(config)
        if unsupported:
            raise Unsupported("; ".join(unsupported))
    return config


class ModelLoads(Protocol):
    """Loads models. Implemented by `executors.deployment.deployment.Deployment`."""

    def configs(self) -> Mapping[str, ModelConfig]:
        """The configurations of the served models."""

    def interfaces(self, model: str) -> Mapping[int, ModelInterface]:
        """The served versions of a model."""

    def find_directory(self, model: str) -> ModelDirectory | None:
        """A model's directory with its override. Reads files."""

    def failure(self, model: str) -> CharoniaError | None:
        """The error of a model's last load, None when it succeeded."""

    async def load_underway(self, model: str) -> bool:
        """Wait for a joint load of a model; False when there is none."""

    async def catalog(self) -> Catalog:
        """The catalog of what all executors serve."""

    def is_underway(self, model: str) -> bool:
        """Whether a joint load of this model is in progress."""

    def is_loading(self, model: str) -> bool:
        """Whether a load or unload of this model is in progress."""

    async def load_ended(self, model: str) -> None:
        """Wait until no load or unload of this model is in progress."""

    async def load(self, model: str, request: None) -> None: ...

    async def unload(self, model: str) -> None: ...

    async def reload(self, model: str) -> None:
        """Load a model again although its files are unchanged."""


class Composition:
    """The ensembles of one executor and their composing models."""

    def __init__(self, loads: ModelLoads) -> None:
        self._loads = loads
        self._parts: dict[str, frozenset[str]] = {}
        """By ensemble: the composing models at its last load."""
        self._waiting: dict[str, frozenset[str]] = {}
        """The same for ensembles whose load failed."""
        self._chosen: set[str] = set()
        """Models that were asked for by name: they stay when an ensemble takes its composing models along (R26)."""
        self._catalog: Catalog | None = None
        self._tasks = Tasks()

    async def prepare(self, directory: ModelDirectory) -> Find:
        """Load the composing models of an ensemble that are not served (R26); return the function that finds them.

        That function raises `InvalidArgument` with C52's texts for models that cannot be loaded.
        """
        config, name = directory.config, directory.key
        if config is None or not is_ensemble(config):
            return refuse_all
        models = composing_models(config)
        self._parts[name] = frozenset(models)
        cycle = await asyncio.to_thread(self._cycle, name, config)
        if cycle:
            text = f"circular dependency between ensembles: {cycle[0]} -> ... -> {cycle[-2]} -> {cycle[-1]}"
            return _Refusal(InvalidArgument(text))
        missing: set[str] = set()
        elsewhere: set[str] = set()
        for model in models:
            if await self._loads.load_underway(model) or self._loads.interfaces(model):
                if isinstance(self._loads.failure(model), NotPlacedHere):
                    elsewhere.add(model)
                continue
            if await asyncio.to_thread(self._loads.find_directory, model) is None:
                missing.add(model)
                continue
            try:
                await self._loads.load(model, None)
            except NotPlacedHere:
                elsewhere.add(model)
            except CharoniaError as error:
                _log.error("ensemble '%s' needs '%s': %s", name, model, error)
        away = await self._served_elsewhere([model for model in models if not self._loads.interfaces(model)])
        for model in sorted(elsewhere - away.keys()):
            raise NotPlacedHere(f"ensemble '{name}' waits for '{model}', which is loaded elsewhere")
        return _Members(name, self._loads, frozenset(missing), away).find

    async def _served_elsewhere(self, models: Sequence[str]) -> dict[str, dict[int, ModelInterface]]:
        """The versions of these models that other executors serve."""
        if not models:
            return {}
        if self._catalog is None:
            self._catalog = await self._loads.catalog()
            self._catalog.listeners.append(self._on_served)
        found = {model: self._catalog.served(model) for model in models}
        return {
            model: {number: version.interface for number, version in versions.items()}
            for model, versions in found.items()
            if versions
        }

    def _on_served(self, model: str) -> None:
        """Called when an executor serves a model: load ensembles here that wait for it."""
        waiting = [name for name, models in self._waiting.items() if model in models]
        if waiting and self._catalog is not None and self._catalog.served(model):
            self._tasks.spawn(self._try_again(waiting), "ensembles that wait")

    async def close(self) -> None:
        """Stop waiting for models of other executors."""
        if self._catalog is not None:
            self._catalog.listeners.remove(self._on_served)
            self._catalog = None
        await self._tasks.close()

    def _cycle(self, name: str, config: ModelConfig) -> tuple[str, ...]:
        def composed_of(model: str) -> list[str]:
            if model == name:
                return sorted(composing_models(config))
            directory = self._loads.find_directory(model)
            found = directory.config if directory is not None else None
            return sorted(composing_models(found)) if found is not None and is_ensemble(found) else []

        return circle(name, composed_of)

    async def loaded(self, model: str) -> None:
        """Reload the ensembles that contain a model which was loaded, and retry those that waited for it (R26)."""
        waiting = [name for name, models in self._waiting.items() if model in models]
        for ensemble in self.dependents(model):
            if not self._loads.interfaces(ensemble):
                continue  # it is unloaded, and drains
            if self._loads.is_underway(ensemble) or self._loads.is_loading(ensemble):
                self._tasks.spawn(
                    self._reload(ensemble, model), "ensembles to reload"
                )  # its load may wait for this one
            else:
                await self._reload(ensemble, model)
        await self._try_again(waiting)

    async def _reload(self, ensemble: str, model: str) -> None:
        try:
            await self._loads.reload(ensemble)
        except CharoniaError as error:
            _log.error("ensemble '%s' cannot go on with the new '%s': %s", ensemble, model, error.message)
            await self._loads.unload(ensemble)
            self.failed(ensemble)  # it is loaded again with a model that fits

    async def _try_again(self, ensembles: Sequence[str]) -> None:
        for ensemble in ensembles:
            if self._loads.is_underway(ensemble):
                continue  # its load waits for this one
            loading = [*filter(self._loads.is_loading, (ensemble, *self._waiting.get(ensemble, ())))]
            if loading:  # that load may wait for this one
                self._tasks.spawn(self._try_after(loading, ensemble), "ensembles that wait")
                continue
            if self._waiting.pop(ensemble, None) is None:
                continue
            try:
                await self._loads.load(ensemble, None)
            except CharoniaError as error:
                _log.info("ensemble '%s' is still not complete: %s", ensemble, error.message)

    async def _try_after(self, loading: Sequence[str], ensemble: str) -> None:
        for model in loading:
            await self._loads.load_ended(model)
        await self._try_again([ensemble])

    def chosen(self, model: str) -> None:
        """Note that a model was asked for by its name, not only as a part."""
        self._chosen.add(model)

    def failed(self, model: str) -> None:
        """Note a failed load, or an unload for a composing model's sake.

        An ensemble is tried again when one of its composing models is loaded.
        """
        if model in self._parts:
            self._waiting[model] = self._parts[model]

    def forget(self, model: str) -> None:
        """Do not try a failed ensemble again."""
        self._waiting.pop(model, None)

    def unloaded(self, model: str) -> None:
        """Note that a model is unloaded as a whole."""
        self.forget(model)
        self._chosen.discard(model)

    def dependents(self, model: str) -> list[str]:
        """The served ensembles that contain a model."""
        return [
            name
            for name, config in self._loads.configs().items()
            if is_ensemble(config) and model in composing_models(config)
        ]

    def parts(self, model: str) -> list[str]:
        """The composing models of an ensemble that no other ensemble contains, and that were not asked for by name.

        Empty for other models.
        """
        config = self._loads.configs().get(model)
        if config is None or not is_ensemble(config):
            return []
        parts = composing_models(config).keys() - self._chosen
        return [part for part in sorted(parts) if self.dependents(part) == [model]]


class _Members:
    """Finds the composing models of one ensemble that are served."""

    def __init__(
        self,
        ensemble: str,
        loads: ModelLoads,
        missing: frozenset[str],
        elsewhere: Mapping[str, Mapping[int, ModelInterface]],
    ) -> None:
        self._ensemble = ensemble
        self._elsewhere = elsewhere
        self._loads = loads
        self._missing = missing

    def find(self, model: str, version: int) -> ModelInterface:
        """Return the interface of a version (-1: the highest). Raises `InvalidArgument` with C52's texts."""
        ensemble = self._ensemble
        served = self._loads.interfaces(model) or self._elsewhere.get(model, {})
        if model in self._missing and not served:
            raise InvalidArgument(f"ensemble {ensemble} contains models that are not available or ambiguous: {model}")
        if not served:
            failure = self._loads.failure(model)
            why = ""
            if failure is not None:
                reason = failure.message.removeprefix(f"load failed for model '{model}': ").rstrip()
                why = f" Model '{model}' loading failed with error: {reason}"
            raise InvalidArgument(f"ensemble '{ensemble}' depends on '{model}' which has no loaded version.{why}")
        if version < 0:
            return served[max(served)]
        if version not in served:
            raise InvalidArgument(
                f"ensemble '{ensemble}' depends on '{model}' whose required version {version} is not loaded."
            )
        return served[version]


class _Refusal:
    """Raises the same error for every model."""

    def __init__(self, error: CharoniaError) -> None:
        self._error = error

    def __call__(self, model: str, version: int) -> ModelInterface:
        raise self._error


def refuse_all(model: str, version: int) -> ModelInterface:
    """The `find` function of models that are no ensembles: always raises."""
    raise InvalidArgument(f"'{model}' is no part of an ensemble")
