"""Drives an instance of either shape as the executor does, request by request, for `backend_contract`.

A `BatchInstance` runs in a thread of its own on arrays joined along the batch dimension; a `RequestInstance` gets
tensors. Either way requests go in and one answer for each comes out: arrays by output name, or the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from charonia.backend import (
    Array,
    Backend,
    BatchInstance,
    InstanceDied,
    InstanceSpec,
    ModelRequest,
    ModelResponse,
    RequestInstance,
)
from charonia.errors import CharoniaError
from charonia.tensors import Tensor

Inputs = Mapping[str, Array]
Answer = Mapping[str, Array] | Exception


def require(kept: bool, sentence: str) -> None:
    """Raises `AssertionError` with `sentence` unless a promise was `kept`; unlike `assert`, also under `python -O`."""
    if not kept:
        raise AssertionError(sentence)


class DrivenInstance:
    """An instance and, for a `BatchInstance`, the one thread that runs it."""

    def __init__(self, spec: InstanceSpec, instance: BatchInstance | RequestInstance) -> None:
        self.instance = instance
        self.is_batch = isinstance(instance, BatchInstance)
        self._interface = spec.interface
        self._closes = 0
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"instance {spec.name}")

    @staticmethod
    async def create(backend: Backend, spec: InstanceSpec) -> DrivenInstance:
        """Raises `AssertionError` for something that is no instance."""
        instance = await backend.create_instance(spec)
        shapes = isinstance(instance, BatchInstance), isinstance(instance, RequestInstance)
        require(
            shapes in ((True, False), (False, True)),
            f"create_instance returned a {type(instance).__name__}; it must be a BatchInstance (execute, close) or a "
            "RequestInstance (execute_requests, close_instance), and not both",
        )
        return DrivenInstance(spec, instance)

    async def run(self, requests: Sequence[Inputs], outputs: tuple[str, ...]) -> list[Answer]:
        """One answer for each request, in order; no `outputs` asks for all. One batch at a time, as the executor does.

        Raises `AssertionError` for answers of a wrong form and for an instance that dies.
        """
        async with self._turn:
            if isinstance(self.instance, RequestInstance):
                return await self._run_requests(self.instance, requests, outputs)
            names = outputs or tuple(self._interface.outputs)
            if self._interface.batching:
                return await self._run_joined(requests, names)
            return [await self._execute(inputs, names) for inputs in requests]

    async def close(self) -> None:
        """Close the instance; again is allowed, and closes it again. Raises `AssertionError` when that fails."""
        self._closes += 1
        self._thread.shutdown(wait=False)
        try:
            if isinstance(self.instance, RequestInstance):
                await self.instance.close_instance()
            else:
                await asyncio.to_thread(self.instance.close)
        except Exception as error:
            which = "first" if self._closes == 1 else "second"
            raise AssertionError(f"the {which} close of an instance raised {type(error).__name__}: {error}") from error

    async def release(self) -> None:
        """Close the instance unless that was done: what a check leaves behind."""
        if self._closes == 0:
            await self.close()

    async def _run_requests(
        self, instance: RequestInstance, requests: Sequence[Inputs], outputs: tuple[str, ...]
    ) -> list[Answer]:
        asked = [
            ModelRequest(
                id=f"request {number}",
                correlation_id=0,
                inputs=[Tensor.of(name, array) for name, array in inputs.items()],
                outputs=outputs,
                parameters={},
            )
            for number, inputs in enumerate(requests)
        ]
        try:
            responses = await instance.execute_requests(asked)
        except InstanceDied as death:
            raise AssertionError(f"the instance died: {death} {death.stderr}".rstrip()) from death
        except Exception as error:
            return [error] * len(requests)
        require(
            len(responses) == len(requests),
            f"execute_requests gave {len(responses)} responses to {len(requests)} requests",
        )
        return [_of_response(response) for response in responses]

    async def _run_joined(self, requests: Sequence[Inputs], names: Sequence[str]) -> list[Answer]:
        if len(requests) == 1:  # the arrays of a single request are not copied
            joined = dict(requests[0])
        else:
            joined = {name: np.concatenate([inputs[name] for inputs in requests]) for name in requests[0]}
        before = {name: bytes(Tensor.of(name, array).data) for name, array in joined.items()}
        results = await self._execute(joined, names)
        for name, array in joined.items():
            require(bytes(Tensor.of(name, array).data) == before[name], f"the instance changed its input '{name}'")
        if isinstance(results, Exception):
            return [results] * len(requests)
        counts = [next(iter(inputs.values())).shape[0] for inputs in requests]
        for name, array in results.items():
            require(
                array.ndim > 0 and array.shape[0] == sum(counts),
                f"output '{name}' of a batch of {sum(counts)} rows has shape {array.shape}; the first dimension is the "
                "batch's",
            )
        ends = np.cumsum(counts).tolist()
        return [
            {name: array[end - count : end] for name, array in results.items()}
            for count, end in zip(counts, ends, strict=True)
        ]

    async def _execute(self, inputs: Inputs, names: Sequence[str]) -> Answer:
        assert isinstance(self.instance, BatchInstance)
        try:
            results = await asyncio.get_running_loop().run_in_executor(
                self._thread, self.instance.execute, inputs, names
            )
        except Exception as error:
            return error
        require(isinstance(results, Mapping), f"execute returned a {type(results).__name__}; it must be a mapping")
        for name, array in results.items():
            require(
                isinstance(array, np.ndarray),
                f"execute returned a {type(array).__name__} as output '{name}'; it must be a NumPy array",
            )
        return results


def _of_response(response: ModelResponse) -> Answer:
    if response.error is not None:
        require(
            isinstance(response.error, CharoniaError),
            f"the error of a ModelResponse is a {type(response.error).__name__}; it must be a CharoniaError",
        )
        return response.error
    return {tensor.name: tensor.array() for tensor in response.outputs}
