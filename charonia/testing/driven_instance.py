"""Drives an instance of any shape as the executor does, request by request, for `backend_contract`.

A `BatchInstance` runs in a thread of its own on arrays joined along the batch dimension; a `RequestInstance` gets
tensors; so does a `StreamingInstance` (`driven_stream`), which is to give each request the same response a number of
times. Either way requests go in and one answer for each comes out: arrays by output name, or the error.
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
    StreamingInstance,
)
from charonia.errors import CharoniaError
from charonia.tensors import Tensor

from .driven_stream import stream

Inputs = Mapping[str, Array]
Answer = Mapping[str, Array] | Exception


def require(kept: bool, sentence: str) -> None:
    """Raises `AssertionError` with `sentence` unless a promise was `kept`; unlike `assert`, also under `python -O`."""
    if not kept:
        raise AssertionError(sentence)


class DrivenInstance:
    """An instance and, for a `BatchInstance`, the one thread that runs it.

    `copies` is how many responses a request of a decoupled model gets.
    """

    def __init__(
        self, spec: InstanceSpec, instance: BatchInstance | RequestInstance | StreamingInstance, copies: int = 1
    ) -> None:
        self.instance = instance
        self._copies = copies
        self.is_batch = isinstance(instance, BatchInstance)
        self._interface = spec.interface
        self._closes = 0
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"instance {spec.name}")

    @staticmethod
    async def create(backend: Backend, spec: InstanceSpec, copies: int = 1) -> DrivenInstance:
        """Raises `AssertionError` for something that is no instance."""
        instance = await backend.create_instance(spec)
        of_requests = isinstance(instance, RequestInstance | StreamingInstance)
        require(
            isinstance(instance, BatchInstance) is not of_requests,
            f"create_instance returned a {type(instance).__name__}; it must be a BatchInstance (execute, close), or a "
            "RequestInstance (execute_requests, close_instance) or StreamingInstance (execute_stream, close_instance)",
        )
        require(
            not spec.interface.decoupled or isinstance(instance, StreamingInstance),
            f"create_instance returned a {type(instance).__name__} for a decoupled model; it must be a "
            "StreamingInstance (execute_stream, close_instance)",
        )
        return DrivenInstance(spec, instance, copies)

    async def run(self, requests: Sequence[Inputs], outputs: tuple[str, ...]) -> list[Answer]:
        """One answer for each request, in order; no `outputs` asks for all. One batch at a time, as the executor does.

        Raises `AssertionError` for answers of a wrong form and for an instance that dies.
        """
        async with self._turn:
            if isinstance(self.instance, StreamingInstance) and (
                self._interface.decoupled or not isinstance(self.instance, RequestInstance)
            ):
                responses = await stream(self.instance, _asked(requests, outputs))
                return [self._only(some) for some in responses]
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
            if isinstance(self.instance, RequestInstance | StreamingInstance):
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

    def _only(self, responses: Sequence[ModelResponse]) -> Answer:
        """The answer that all responses of a request are, or its error."""
        answers = [_of_response(response) for response in responses]
        for answer in answers:
            if isinstance(answer, Exception):
                return answer
        require(len(answers) == self._copies, f"a request had {len(answers)} responses, its model gives {self._copies}")
        first = answers[0]
        assert not isinstance(first, Exception)
        for other in answers[1:]:
            assert not isinstance(other, Exception)
            same = first.keys() == other.keys() and all(
                bytes(Tensor.of(name, first[name]).data) == bytes(Tensor.of(name, other[name]).data) for name in first
            )
            require(same, "the responses of a request differ; are those of two requests mixed?")
        return first

    async def _run_requests(
        self, instance: RequestInstance, requests: Sequence[Inputs], outputs: tuple[str, ...]
    ) -> list[Answer]:
        try:
            responses = await instance.execute_requests(_asked(requests, outputs))
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


def _asked(requests: Sequence[Inputs], outputs: tuple[str, ...]) -> list[ModelRequest]:
    return [
        ModelRequest(
            id=f"request {number}",
            correlation_id=0,
            inputs=[Tensor.of(name, array) for name, array in inputs.items()],
            outputs=outputs,
            parameters={},
        )
        for number, inputs in enumerate(requests)
    ]


def _of_response(response: ModelResponse) -> Answer:
    if response.error is not None:
        require(
            isinstance(response.error, CharoniaError),
            f"the error of a ModelResponse is a {type(response.error).__name__}; it must be a CharoniaError",
        )
        return response.error
    return {tensor.name: tensor.array() for tensor in response.outputs}
