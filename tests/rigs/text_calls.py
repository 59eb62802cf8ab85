"""Calls of an instance that generates text, and what it answered, without an executor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from generation_bench import TOKENIZER, make_engine

from charonia.backend import ModelRequest, ModelResponse
from charonia.errors import CharoniaError
from charonia.tensors import Tensor
from executors.generation.engine import Engine
from executors.generation.generating_instance import GeneratingInstance, InstanceSettings
from executors.generation.token_engine import TokenEngine


class Call:
    """A `ResponseStream` of one request, which keeps the responses; `full` is the test's to set."""

    def __init__(self, request: ModelRequest) -> None:
        self.request = request
        self.responses: list[ModelResponse] = []
        self.final = False
        self.freed = asyncio.Event()
        self.changed = asyncio.Event()
        self.full = False
        self.blocked = False
        self.capacity = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        assert index == 0
        assert not self.final, "a response after the final one"
        self.final = final
        if response is not None:
            self.responses.append(response)
        self.changed.set()

    async def drain(self) -> None:
        await self.capacity.wait()

    def free(self) -> None:
        self.freed.set()

    def start(self, instance: GeneratingInstance) -> Call:
        self.task = asyncio.get_running_loop().create_task(instance.execute_stream([self.request], self))
        return self

    async def end(self) -> Call:
        assert self.task is not None
        await self.task
        assert self.final
        return self

    async def until(self, count: int) -> None:
        """Wait for so many responses."""
        while len(self.responses) < count:
            self.changed.clear()
            await self.changed.wait()

    @property
    def error(self) -> CharoniaError | None:
        return self.responses[-1].error if self.responses else None

    @property
    def text(self) -> str:
        return "".join(output(one, "text_output") for one in self.responses if one.error is None)

    def values(self, name: str) -> list[Any]:
        return [output(one, name) for one in self.responses]


def output(response: ModelResponse, name: str) -> Any:
    tensor = next(one for one in response.outputs if one.name == name)
    values = tensor.array().reshape(-1).tolist()
    if name == "token_ids":
        return values
    (value,) = values
    return value.decode() if isinstance(value, bytes) else value


def model_request(
    text: str | None,
    *,
    progress: Sequence[bytes] = (),
    window: int = 0,
    inputs: dict[str, Any] | None = None,
    **sampling: Any,
) -> ModelRequest:
    """A stream; `inputs` are further tensors, or others in place of the usual ones (None: without)."""
    given: dict[str, Any] = {"stream": True, "sampling_parameters": json.dumps({"max_tokens": 8, "seed": 1} | sampling)}
    if text is not None:
        given["text_input"] = text
    tensors = []
    for name, value in (given | (inputs or {})).items():
        if value is not None:
            array = np.asarray([value.encode()], object) if isinstance(value, str) else np.atleast_1d(np.asarray(value))
            tensors.append(Tensor.of(name, array))
    return ModelRequest("", 0, tensors, (), {}, progress=progress, window=window)


@asynccontextmanager
async def serving(engine: Engine | None = None, *, max_open: int = 64) -> AsyncIterator[GeneratingInstance]:
    engine = engine or make_engine()
    context = engine.context if isinstance(engine, TokenEngine) else 256
    instance = GeneratingInstance(engine, TOKENIZER, InstanceSettings(context, max_open))
    try:
        yield instance
    finally:
        await instance.close_instance()


async def ask(instance: GeneratingInstance, text: str | None, **more: Any) -> Call:
    return await Call(model_request(text, **more)).start(instance).end()
