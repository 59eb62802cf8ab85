"""Instances of the python backend whose models answer through response senders, and who takes their responses."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from backend_calls import instance_of
from google.protobuf import text_format

from charonia.backend import InstanceSpec, ModelRequest, ModelResponse, ModelSource
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from charonia.testing.driven_instance import KeptResponses
from executors.backends.python import PythonBackend
from executors.backends.python.python_instance import PythonInstance
from protos.model_config_pb2 import ModelConfig

TENSORS = 'input { name: "IN" data_type: TYPE_FP32 dims: -1 } output { name: "OUT" data_type: TYPE_FP32 dims: -1 }'
DECOUPLED = TENSORS + " model_transaction_policy { decoupled: true }"
PATIENCE_S = 30.0

HEAD = """
import threading, time, gc, asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[value]], np.float32))])

def value_of(request):
    return float(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)[0])

"""
Load = Callable[..., Awaitable[PythonInstance]]


@asynccontextmanager
async def loading(tmp_path: Path) -> AsyncIterator[Load]:
    loaded: list[PythonInstance] = []

    async def create(execute: str, config: str = DECOUPLED) -> PythonInstance:
        version = tmp_path / "m" / "1"
        version.mkdir(parents=True, exist_ok=True)
        body = textwrap.indent(textwrap.dedent(execute).strip(), "    ")
        (version / "model.py").write_text(f"{HEAD}\nclass TritonPythonModel:\n{body}\n")
        parsed = text_format.Parse(f'name: "m" backend: "python" max_batch_size: 8 {config}', ModelConfig())
        model = ModelSource("m", 1, tmp_path / "m", parsed, {})
        spec = InstanceSpec("m_0_0", "CPU", -1, model, ModelInterface.of(parsed))
        instance = await instance_of(PythonBackend(), spec)
        loaded.append(instance)
        return instance

    yield create
    for instance in loaded:
        await instance.close_instance()


def request(value: float, **fields: Any) -> ModelRequest:
    inputs = [Tensor.of("IN", np.array([[value]], dtype=np.float32))]
    return ModelRequest(id="", correlation_id=0, inputs=inputs, outputs=(), parameters={}, **fields)


class Responses(KeptResponses):
    """Keeps responses, wakes who waits for them, and may be full."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.changed = asyncio.Event()
        self.room = asyncio.Event()
        self.room.set()

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        super().send(index, response, final=final)
        self.changed.set()

    @property
    def full(self) -> bool:
        return not self.room.is_set()

    async def drain(self) -> None:
        await self.room.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def told(self, index: int = 0) -> list[Any]:
        return [
            r.error.message if r.error else float(r.outputs[0].array().reshape(-1)[0]) for r in self.responses[index]
        ]


async def run(instance: PythonInstance, *values: float) -> Responses:
    responses = Responses(len(values))
    async with asyncio.timeout(PATIENCE_S):
        await instance.execute_stream([request(value) for value in values], responses)
    assert responses.broken == ""
    return responses
