"""The `llm` backend: language models on CPUs, with continuous batching over OpenVINO's kernels.

A model has the tensors of `charonia.generation.text_tensors` and is decoupled. Its process converts it, if need be,
reads its tokenizer and runs an engine for each instance.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from charonia.backend import Backend, Format, InstanceSpec, Isolation, MemoryUse, Model, ModelSource, StreamingInstance
from charonia.errors import InvalidArgument, Unsupported
from charonia.generation.text_assets import digest_of
from charonia.generation.text_tensors import ADAPTERS_PARAMETER, ENGINE_INPUTS, ENGINE_OUTPUTS, TextTensor
from charonia.generation.tokenizer import Tokenizer
from charonia.models.repeatable import RESUMABLE
from executors.backends.engine_families import OWNED
from executors.backends.python.custom_metrics import CustomMetrics
from executors.host.host_policy import thread_on
from protos import model_config_pb2 as pb

from .adapters import adapter_needs
from .conversion import IR
from .language_model import GGUF, LanguageModel, added_adapters, find_model
from .llm_settings import LlmSettings

if TYPE_CHECKING:
    from executors.generation.engine import EngineObserver
    from executors.generation.token_engine import TokenEngine

_log = logging.getLogger(__name__)


class LlmBackend(Backend):
    """The backend `llm`."""

    name = "llm"
    api = (1, 0)
    formats: ClassVar[tuple[Format, ...]] = (Format(files=(GGUF, IR)),)
    requires = tuple((module, "charonia[llm]") for module in ("openvino", "tokenizers", "llguidance"))
    isolation: ClassVar[Isolation] = "process"

    def __init__(self) -> None:
        self.custom_metrics = CustomMetrics(OWNED)
        """The boards of its models' processes, which `executors.isolation` gives them."""

    def render_metrics(self) -> bytes:
        """Return the families of all engines in the text format."""
        return self.custom_metrics.render()

    async def load(self, source: ModelSource) -> LlmModel:
        """Return the model; its files are read when something asks for them."""
        return LlmModel(source)


class LlmModel(Model):
    """One load of a model's version."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._reading = asyncio.Lock()
        self._found: tuple[LanguageModel, bytes, Tokenizer] | None = None
        self._memory: dict[str, int] = {}

    async def signature(self) -> pb.ModelConfig:
        """The configuration with the tensors of models that generate text, and the names of its adapters.

        Raises `CharoniaError` for files that cannot be read, and for a configuration that contradicts them.
        """
        files, _, _ = await self._files()
        return completed(self._source.config, files.adapters)

    async def text_assets(self) -> bytes:
        """See `TextModel`."""
        return (await self._files())[1]

    async def create_instance(self, spec: InstanceSpec) -> StreamingInstance:
        """Make an instance with an engine of its own. Raises a `CharoniaError` with the reason."""
        if spec.kind == "GPU":
            raise Unsupported(f"model '{spec.source.name}' asks for a GPU instance, but the llm backend runs on CPUs")
        _check(spec.source.config)
        files, assets, tokenizer = await self._files()
        needs = await asyncio.to_thread(adapter_needs, list(files.adapters.values()))
        settings = LlmSettings.of(spec, files.assets.context, needs)
        engine = await asyncio.to_thread(self._engine, spec, settings, files, assets, tokenizer)
        from executors.generation.generating_instance import GeneratingInstance, InstanceSettings

        waiting = 2 * settings.scheduler.max_num_seqs
        bounds = InstanceSettings(engine.context, waiting, spec.name)
        return GeneratingInstance(engine, tokenizer, bounds, _observer(engine, spec.source))

    def memory(self) -> list[MemoryUse]:
        """The weights as they lie in their file, and the blocks of keys and values, of all instances."""
        return [MemoryUse("CPU", 0, size) for size in self._memory.values()]

    async def close(self) -> None:
        """Forget the tokenizer."""
        self._found = None

    async def _files(self) -> tuple[LanguageModel, bytes, Tokenizer]:
        async with self._reading:
            if self._found is None:
                self._found = await asyncio.to_thread(self._read)
            return self._found

    def _read(self) -> tuple[LanguageModel, bytes, Tokenizer]:
        found = find_model(self._source)
        return found, found.assets.pack(), Tokenizer.from_bytes(found.assets.tokenizer_json, found.assets)

    def _engine(
        self, spec: InstanceSpec, settings: LlmSettings, files: LanguageModel, assets: bytes, tokenizer: Tokenizer
    ) -> TokenEngine:
        from executors.generation.token_engine import TokenEngine

        from .decoder import OpenVinoDecoder

        with thread_on(spec.cores):  # the library's threads inherit the cores of this one
            decoder = OpenVinoDecoder(str(files.graph), settings.decoder)
            for name in added_adapters(spec.source) & files.adapters.keys():
                decoder.check_adapter(files.adapters[name])  # one that does not fit is refused by the load
            decoder.warm_up()
        weights = files.graph.with_suffix(".bin").stat().st_size
        self._memory[spec.name] = weights + decoder.memory_bytes
        salt = f"{spec.source.name} {spec.source.version} {digest_of(assets)}".encode()
        return TokenEngine(decoder, tokenizer, settings.scheduler, adapters=files.adapters, salt=salt)


def _observer(engine: TokenEngine, source: ModelSource) -> EngineObserver | None:
    from .generation_metrics import GenerationMetrics

    try:
        return GenerationMetrics(engine, {"model": source.name, "version": str(source.version)})
    except Exception:  # so many instances that the board of their process is full
        _log.exception("an engine of model %s has no metrics", source.name)
        return None


def completed(written: pb.ModelConfig, adapters: Iterable[str] = ()) -> pb.ModelConfig:
    """A copy with tensors, transaction policy and the names of adapters.

    What is written is checked and stays, and outputs may be fewer.

    Raises `InvalidArgument` for tensors that such models do not have, and for a batch dimension.
    """
    _check(written)
    done = pb.ModelConfig()
    done.CopyFrom(written)
    known = {item.name for item in done.input}
    for tensor in ENGINE_INPUTS:
        if tensor.name not in known:
            done.input.add(name=tensor.name, data_type=_data_type(tensor), dims=tensor.dims, optional=tensor.optional)
    if not done.output:
        for tensor in ENGINE_OUTPUTS:
            done.output.add(name=tensor.name, data_type=_data_type(tensor), dims=tensor.dims)
    done.model_transaction_policy.decoupled = True
    if RESUMABLE not in done.parameters:
        done.parameters[RESUMABLE].string_value = "true"
    names = list(adapters)
    if names and ADAPTERS_PARAMETER not in done.parameters:
        done.parameters[ADAPTERS_PARAMETER].string_value = json.dumps(names)
    return done


def _check(config: pb.ModelConfig) -> None:
    if config.max_batch_size > 0:
        raise InvalidArgument(
            f"model '{config.name}': max_batch_size must be 0: requests that generate text share steps, not batches"
        )
    for side, items, tensors in (("input", config.input, ENGINE_INPUTS), ("output", config.output, ENGINE_OUTPUTS)):
        known = {tensor.name: tensor for tensor in tensors}
        for item in items:
            tensor = known.get(item.name)
            if tensor is None:
                raise InvalidArgument(f"model '{config.name}' has no {side} '{item.name}', it has {', '.join(known)}")
            if item.data_type != _data_type(tensor) or tuple(item.dims) != tensor.dims:
                raise InvalidArgument(
                    f"{side} '{item.name}' of '{config.name}' must be of type {tensor.datatype} and dims "
                    f"{list(tensor.dims)}"
                )


def _data_type(tensor: TextTensor) -> int:
    word = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    return pb.DataType.Value(f"TYPE_{word}")
