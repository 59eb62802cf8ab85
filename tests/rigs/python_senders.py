"""Instances of the python backend whose models answer through response senders, and who takes their responses."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import python_instances
from python_instances import IDENTITY, Load

from charonia.backend import ModelRequest, ModelResponse
from charonia.tensors import Tensor
from charonia.testing.driven_instance import KeptResponses
from executors.backends.python.python_instance import PythonInstance

DECOUPLED = IDENTITY + " model_transaction_policy { decoupled: true }"
PATIENCE_S = 30.0

HEAD = """
import threading, time, gc, asyncio

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[value]], np.float32))])

def value_of(request):
    return float(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)[0])

"""


@asynccontextmanager
async def loading(tmp_path: Path) -> AsyncIterator[Load]:
    """Loads models of which a test writes `execute` and what else the class has; all are closed at the end."""
    async with python_instances.loading(tmp_path) as load:

        async def create(execute: str, config: str = DECOUPLED) -> PythonInstance:
            body = textwrap.indent(textwrap.dedent(execute).strip(), "    ")
            return await load(f"{HEAD}\nclass TritonPythonModel:\n{body}\n", config)

        yield create


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
