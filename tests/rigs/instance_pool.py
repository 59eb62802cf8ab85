"""Instances of a model that doubles, and their workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from charonia.backend import InstanceDied, InstanceSpec, ModelRequest, ModelResponse, ModelSource
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument, Unavailable
from charonia.models.interface import InstanceGroup, ModelInterface, TensorSpec
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, ResponseRecord, pack_request, request_meta, unpack_request, unpack_response
from executors.batches.batch_results import Executed
from executors.running.instance_pool import InstancePool
from executors.running.submitted_batch import SubmittedBatch
from protos.model_config_pb2 import ModelConfig

MODEL = ModelInterface(
    "m",
    "test",
    "",
    4,
    {"x": TensorSpec("x", DataType.FP32, (1,))},
    {"y": TensorSpec("y", DataType.FP32, (1,))},
    required_inputs=frozenset("x"),
)
SPEC = InstanceSpec("m_0", "CPU", -1, ModelSource("m", 1, Path("/none"), ModelConfig()), MODEL)
DEADLY, WRONG, BROKEN = 666.0, 13.0, 99.0


class Doubling:
    """Doubles; dies of 666, answers wrongly to 13, raises for 99."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate, self.closed, self.threads = gate, False, set[int]()

    def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
        self.threads.add(threading.get_ident())
        if self.gate is not None:
            assert self.gate.wait(30)
        x = inputs["x"]
        if (x == DEADLY).any():
            raise InstanceDied("gone", "last words")
        if (x == BROKEN).any():
            raise ZeroDivisionError("nought")
        return {"y": np.concatenate([x, x]) if (x == WRONG).any() else x * 2}

    def close(self) -> None:
        self.closed = True


class DoublingRequests:
    """The same over single requests."""

    def __init__(self) -> None:
        self.closed = False

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        await asyncio.sleep(0)
        answers = []
        for request in requests:
            x = request.inputs[0].array()
            if (x == DEADLY).any():
                raise InstanceDied("gone", "last words")
            if (x == BROKEN).any():
                answers.append(ModelResponse(error=InvalidArgument("not this one")))
            else:
                answers.append(ModelResponse([Tensor.of("y", x * 2)], {"p": 1}))
        return answers[:-1] if any((r.inputs[0].array() == WRONG).any() for r in requests) else answers

    async def close_instance(self) -> None:
        self.closed = True


def record(value: float, number: int = 0, deadline_ns: int = 0) -> RequestRecord:
    tensor = Tensor.of("x", np.full((1, 1), value, np.float32))
    packed = pack_request(
        number.to_bytes(16, "big"),
        b"gw",
        b"",
        request_meta(1, "", [tensor], (), {}),
        [tensor.data],
        rows=1,
        signature=0,
        level=0,
        accepted_ns=1,
        deadline_ns=deadline_ns,
    )
    return unpack_request(packed)


class Pool:
    """A pool and what comes out of it."""

    def __init__(
        self, *instances: Any, create: Any = None, passive: bool = False, group: Any = None, **fields: Any
    ) -> None:
        async def none(_spec: InstanceSpec) -> Any:
            raise Unavailable("no instance to be had")

        self.pool = InstancePool(MODEL, 1, create or none, **fields)
        for instance in instances:
            self.pool.add(SPEC, instance, group or InstanceGroup("m", 1, "KIND_CPU", passive=passive))
        self.pool.start()

    def run(self, *values: float) -> asyncio.Future[Executed]:
        return self.run_batch([record(value, i) for i, value in enumerate(values)])[1]

    def run_batch(
        self, records: Sequence[RequestRecord], **fields: Any
    ) -> tuple[SubmittedBatch, asyncio.Future[Executed]]:
        future: asyncio.Future[Executed] = asyncio.get_running_loop().create_future()
        batch = SubmittedBatch(records, lambda _batch, executed: future.set_result(executed), **fields)
        self.pool.submit(batch)
        return batch, future

    async def submit(self, *values: float) -> list[ResponseRecord]:
        return [unpack_response(answer) for answer in (await self.run(*values)).answers]


def values(responses: list[ResponseRecord]) -> list[float]:
    return [float(response.outputs[0].array()[0, 0]) for response in responses]
