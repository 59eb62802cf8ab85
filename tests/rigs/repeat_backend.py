"""A decoupled native backend, as a third party would write one: each request gets its value so many times.

Inputs `value` and `count` INT32 [1], output `y` INT32 [1]: `value * 1000 + n` for n below count, then a final flag. The
tests steer it by value: `HOLD_AFTER[value]` responses are sent, then it waits for `release(value)`; it frees its slot
first when the value is in `FREE`; it ends with a response without outputs when it is in `ENDS_BARE`; it raises
`FAIL[value]` after those responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

import numpy as np

from charonia.backend import (
    InstanceSpec,
    ModelRequest,
    ModelResponse,
    ModelSource,
    ResponseStream,
)
from charonia.datatypes import DataType
from charonia.tensors import Tensor

CONFIG = """
backend: "repeat" max_batch_size: 8
input [{ name: "value" data_type: TYPE_INT32 dims: 1 }, { name: "count" data_type: TYPE_INT32 dims: 1 }]
output { name: "y" data_type: TYPE_INT32 dims: 1 }
model_transaction_policy { decoupled: true }
instance_group { count: 1 kind: KIND_CPU }
"""

HOLD_AFTER: dict[int, int] = {}
FREE: set[int] = set()
FAIL: dict[int, Exception] = {}
LAST_IS_FINAL: set[int] = set()
ENDS_BARE: set[int] = set()
CANCELLED: list[int] = []
MADE: list[int] = []
_HELD: dict[int, asyncio.Event] = {}


def reset() -> None:
    for one in (HOLD_AFTER, FREE, FAIL, LAST_IS_FINAL, ENDS_BARE, CANCELLED, MADE, _HELD):
        one.clear()


def release(value: int) -> None:
    """Let what waits go on; a later hold waits anew."""
    held = _HELD.pop(value, None)
    if held is not None:
        held.set()


class RepeatInstance:
    """Answers the requests of a call side by side."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Task[None]] = set()

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        values = [_number(request, "value") for request in requests]
        if FREE.intersection(values):
            responses.free()
        tasks = [
            asyncio.ensure_future(self._answer(index, value, _number(request, "count"), responses))
            for index, (value, request) in enumerate(zip(values, requests, strict=True))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, index: int, value: int, count: int, responses: ResponseStream) -> None:
        for number in range(count):
            if HOLD_AFTER.get(value) == number:
                await self._hold(value)
            last = value in LAST_IS_FINAL and number == count - 1
            MADE.append(value * 1000 + number)
            responses.send(index, _response(value * 1000 + number), final=last)
            await responses.drain()
        if HOLD_AFTER.get(value) == count:
            await self._hold(value)
        if value not in LAST_IS_FINAL:
            responses.send(index, ModelResponse([]) if value in ENDS_BARE else None, final=True)

    async def _hold(self, value: int) -> None:
        await _HELD.setdefault(value, asyncio.Event()).wait()
        if value in FAIL:
            raise FAIL[value]

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        CANCELLED.extend(_number(request, "value") for request in requests)

    async def close_instance(self) -> None:
        """Nothing is held."""


class RepeatBackend:
    name = "repeat"

    async def load(self, source: ModelSource) -> Self:
        return self

    async def signature(self) -> None: ...

    async def close(self) -> None: ...

    async def create_instance(self, spec: InstanceSpec) -> RepeatInstance:
        return RepeatInstance()


def _number(request: ModelRequest, name: str) -> int:
    (found,) = (tensor for tensor in request.inputs if tensor.name == name)
    return int(found.array()[0, 0])


def _response(value: int) -> ModelResponse:
    return ModelResponse([Tensor("y", DataType.INT32, (1, 1), np.array([[value]], np.int32).tobytes())])


def inputs(value: int, count: int) -> list[Tensor]:
    return [
        Tensor(name, DataType.INT32, (1, 1), number.to_bytes(4, "little"))
        for name, number in (("value", value), ("count", count))
    ]
