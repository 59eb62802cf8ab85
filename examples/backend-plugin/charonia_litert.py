"""TensorFlow Lite models (`backend: "litert"`, file model.tflite) with LiteRT, as a backend of its own distribution."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from charonia.backend import Array, Backend, Format, GraphSignature, InstanceSpec, Model, ModelSource, TensorSignature
from charonia.datatypes import DataType
from charonia.errors import InternalError


class LiteRtInstance:
    stateless = True

    def __init__(self, source: ModelSource) -> None:
        from ai_edge_litert.interpreter import Interpreter

        path = source.version_directory / (source.config.default_model_filename or "model.tflite")
        try:
            self._runner = Interpreter(model_path=str(path), num_threads=1).get_signature_runner()
        except (ValueError, RuntimeError) as error:
            raise InternalError(f"LiteRT cannot open model '{source.name}': {error}") from None
        self.inputs, self.outputs = self._runner.get_input_details(), self._runner.get_output_details()

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        try:
            results = self._runner(**inputs)
            return {name: results[name] for name in outputs}
        except (ValueError, RuntimeError) as error:
            raise InternalError(f"LiteRT: {error}") from None

    def close(self) -> None:
        self._runner = None


class LiteRtModel(Model):
    def __init__(self, source: ModelSource) -> None:
        self._source = source

    async def signature(self) -> GraphSignature:
        opened = await asyncio.to_thread(LiteRtInstance, self._source)
        return GraphSignature(_tensors(opened.inputs), _tensors(opened.outputs))

    async def create_instance(self, spec: InstanceSpec) -> LiteRtInstance:
        return await asyncio.to_thread(LiteRtInstance, spec.source)


class LiteRtBackend(Backend):
    name, api, formats = "litert", (1, 0), (Format(files=("model.tflite",)),)

    async def load(self, source: ModelSource) -> LiteRtModel:
        return LiteRtModel(source)


def _tensors(details: Mapping[str, Mapping]) -> tuple[TensorSignature, ...]:
    types = {name: DataType.of_numpy(np.dtype(one["dtype"])).value for name, one in details.items()}
    return tuple(TensorSignature(n, types[n], tuple(map(int, one["shape_signature"]))) for n, one in details.items())
