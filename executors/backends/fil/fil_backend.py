"""Runs tree ensembles (XGBoost, LightGBM, scikit-learn by way of treelite) on CPUs, as Triton's backend `fil` does.

A process of its own reads and checks the file, or the model's own in a sandbox (`model_reader`); onnxruntime runs the
trees, treelite where it is not installed or cannot. Numbers are FP32 outside, and decided on as the model's library
would. Libraries are imported when a model first needs them.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from dataclasses import dataclass, field
from typing import ClassVar

from charonia.backend import (
    Backend,
    Format,
    GraphSignature,
    InstanceSpec,
    Isolation,
    MemoryUse,
    ModelSource,
    TensorSignature,
)
from charonia.errors import Unsupported
from executors.configuration.autofill import check_against_graph
from executors.host.host_policy import thread_on
from protos.model_config_pb2 import ModelConfig

from .contributions import contributions_of
from .engines import Engine, engine_of, has_onnxruntime
from .fil_instance import INPUT, OUTPUT, SHAP_OUTPUT, FilInstance
from .fil_settings import FilSettings, settings_of, warn_of_retired
from .model_reader import ForestSummary, read_model
from .predictions import Predictions


class FilBackend(Backend):
    """The backend `fil`."""

    name = "fil"
    api = (1, 0)
    formats: ClassVar[tuple[Format, ...]] = (
        Format(files=("xgboost.json", "xgboost.ubj", "xgboost.model", "model.txt", "checkpoint.tl")),
    )
    requires = (("treelite", "charonia[fil]"),)

    def isolation_of(self, source: ModelSource) -> Isolation:
        """A process for models whose own library explains their answers: it takes seconds to import, and parses."""
        return "process" if SHAP_OUTPUT in _written_outputs(source.config) else "none"

    async def load(self, source: ModelSource) -> FilModel:
        """Return the model; its file is read when something asks for it."""
        return FilModel(source)


@dataclass(slots=True)
class _Read:
    """What a file was read to, and the engines that were made from it, by their cores."""

    settings: FilSettings
    forest: ForestSummary
    content: bytes
    engines: dict[frozenset[int], Engine] = field(default_factory=dict)


class FilModel:
    """One load of a model's version: its engines, one for each set of cores."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._found: _Read | None = None
        self._lock = threading.Lock()

    async def signature(self) -> GraphSignature:
        """Return the tensors that the file and the parameters mean. Raises `CharoniaError` for a broken file."""
        return await asyncio.to_thread(self._signature)

    async def create_instance(self, spec: InstanceSpec) -> FilInstance:
        """Make an instance over the engine of its cores.

        Raises `InvalidArgument` when the configuration does not fit the model, `Unsupported` for one on a GPU.
        """
        return await asyncio.to_thread(self._create, spec)

    def memory(self) -> list[MemoryUse]:
        """The forest as its engines are given it, once for each of them: they do not say what they make of it."""
        with self._lock:
            if self._found is None:
                return []
            return [MemoryUse("CPU", 0, len(self._found.content)) for _ in self._found.engines]

    async def close(self) -> None:
        """Release the engines. Their memory is freed when the last instance that uses one is closed."""
        with self._lock:
            self._found = None

    def _signature(self) -> GraphSignature:
        with self._lock:
            read = self._read()
        return _signature(self._source, read)[0]

    def _create(self, spec: InstanceSpec) -> FilInstance:
        source = spec.source
        if spec.kind == "GPU":
            raise Unsupported(f"model '{source.name}' asks for a GPU instance, but the fil backend runs on CPUs")
        with self._lock, thread_on(spec.cores):  # the engine's threads inherit the cores of this one
            sharers = sum(group.count for group in spec.interface.instance_groups if group.kind == "KIND_CPU") or 1
            read = self._read()
            signature, predictions, shape = _signature(source, read)
            check_against_graph(source.config, signature)
            threads = read.settings.threads or max(1, len(spec.cores or os.sched_getaffinity(0)) // sharers)
            engine = read.engines.get(spec.cores)
            if engine is None:
                engine = read.engines[spec.cores] = engine_of(read.forest, read.content, threads)
            contributions = contributions_of(source.name, read.settings, threads) if shape else None
        forest = read.forest
        return FilInstance(source.name, forest.features, forest.trees, engine, predictions, contributions, shape)

    def _read(self) -> _Read:
        if self._found is None:
            settings = settings_of(self._source)
            warn_of_retired(self._source)
            forest, content = read_model(
                self._source.name,
                settings.path,
                settings.format,
                allow_unknown=settings.allow_unknown_field,
                as_checkpoint=not has_onnxruntime(),
                here=self._source.isolation == "sandbox",
            )
            self._found = _Read(settings, forest, content)
        return self._found


def _signature(source: ModelSource, read: _Read) -> tuple[GraphSignature, Predictions, tuple[int, ...]]:
    """The tensors, how `output__0` is made, and the shape of a row of `treeshap_output` or ()."""
    forest, written = read.forest, _written_outputs(source.config)
    predictions = Predictions(source.name, forest, read.settings, wide=written.get(OUTPUT) == (2,))
    outputs = [TensorSignature(OUTPUT, "FP32", (-1, predictions.width))]
    shape: tuple[int, ...] = ()
    if SHAP_OUTPUT in written:
        # Triton's backend writes the numbers of a row one after the other, whatever its dims
        count = forest.classes * (forest.features + 1)
        usual = (forest.features + 1,) if forest.classes == 1 else (forest.classes, forest.features + 1)
        shape = written[SHAP_OUTPUT] if math.prod(written[SHAP_OUTPUT]) == count else usual
        outputs.append(TensorSignature(SHAP_OUTPUT, "FP32", (-1, *shape)))
    return GraphSignature((TensorSignature(INPUT, "FP32", (-1, forest.features)),), tuple(outputs)), predictions, shape


def _written_outputs(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The dims of a row of the outputs that the configuration names."""
    skipped = 0 if config.max_batch_size > 0 else 1
    return {
        item.name: tuple(item.reshape.shape) if item.HasField("reshape") else tuple(item.dims)[skipped:]
        for item in config.output
    }
