"""Drives an instance of any shape as the executor does, request by request, for `backend_contract`.

A `BatchInstance` runs in a thread of its own on arrays joined along the batch dimension; a `RequestInstance` gets
tensors; so does a `StreamingInstance` (`stream`), which is to give each request the same response a number of
times. Either way requests go in and one answer for each comes out: arrays by output name, or the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from charonia.backend import (
    Array,
    BatchInstance,
    InstanceDied,
    InstanceSpec,
    Model,
    ModelRequest,
    ModelResponse,
    Outcome,
    RequestInstance,
    StreamingInstance,
    SubmittingInstance,
    timings_of,
)
from charonia.errors import CharoniaError, InternalError, error_of_model
from charonia.exchange.exchanging_instance import with_wanted_memory
from charonia.tensors import Tensor

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
        self._started = False
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"instance {spec.name}")

    @staticmethod
    async def create(model: Model, spec: InstanceSpec, copies: int = 1) -> DrivenInstance:
        """Raises `AssertionError` for something that is no instance."""
        instance = await model.create_instance(spec)
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
        return DrivenInstance(spec, await with_wanted_memory(model, instance, spec), copies)

    @property
    def decoupled(self) -> bool:
        """Whether its model may answer a request any number of times."""
        return self._interface.decoupled

    async def run(self, requests: Sequence[Inputs], outputs: tuple[str, ...]) -> list[Answer]:
        """One answer for each request, in order; no `outputs` asks for all. One batch at a time, as the executor does.

        Raises `AssertionError` for answers of a wrong form and for an instance that dies.
        """
        async with self._turn:
            if isinstance(self.instance, StreamingInstance) and (
                self.decoupled or not isinstance(self.instance, RequestInstance)
            ):
                responses = await stream(self.instance, asked(requests, outputs))
                return [self._only(some) for some in responses]
            if isinstance(self.instance, RequestInstance):
                return await self._run_requests(self.instance, requests, outputs)
            names = outputs or tuple(self._interface.outputs)
            if self._interface.batching:
                return await self._run_joined(requests, names)
            return [await self._execute(inputs, names) for inputs in requests]

    def _begun(self, execute: Callable[..., Mapping[str, Array] | Outcome], *arguments: Any) -> Any:
        """Call `execute` in the instance's thread, of which the instance has been told."""
        if not self._started:
            self._started = True
            started = getattr(self.instance, "started", None)
            if started is not None:
                started()
        return execute(*arguments)

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
        answers = [of_response(response) for response in responses]
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
            responses = await instance.execute_requests(asked(requests, outputs))
        except InstanceDied as death:
            raise AssertionError(f"the instance died: {death} {death.stderr}".rstrip()) from death
        except Exception as error:
            return [error] * len(requests)
        require(
            len(responses) == len(requests),
            f"execute_requests gave {len(responses)} responses to {len(requests)} requests",
        )
        return [of_response(response) for response in responses]

    async def _run_joined(self, requests: Sequence[Inputs], names: Sequence[str]) -> list[Answer]:
        if len(requests) == 1:  # the arrays of a single request are not copied
            joined = dict(requests[0])
        else:
            joined = {name: np.concatenate([inputs[name] for inputs in requests]) for name in requests[0]}
        before = {name: bytes(Tensor.of(name, array).data) for name, array in joined.items()}
        failures: dict[int, CharoniaError] = {}
        results = await self._execute(joined, names, failures)
        for name, array in joined.items():
            require(bytes(Tensor.of(name, array).data) == before[name], f"the instance changed its input '{name}'")
        if isinstance(results, Exception):
            return [results] * len(requests)
        counts = [next(iter(inputs.values())).shape[0] for inputs in requests]
        require(
            all(0 <= row < sum(counts) for row in failures),
            f"execute said that the rows {sorted(failures)} failed, of a batch of {sum(counts)} rows",
        )
        for name, array in results.items():
            require(
                array.ndim > 0 and array.shape[0] == sum(counts),
                f"output '{name}' of a batch of {sum(counts)} rows has shape {array.shape}; the first dimension is the "
                "batch's",
            )
        ends = np.cumsum(counts).tolist()
        answers: list[Answer] = []
        for count, end in zip(counts, ends, strict=True):
            failed = [failures[row] for row in range(end - count, end) if row in failures]
            cut = {name: array[end - count : end] for name, array in results.items()}
            answers.append(failed[0] if failed else cut)
        return answers

    async def _execute(
        self, inputs: Inputs, names: Sequence[str], failures: dict[int, CharoniaError] | None = None
    ) -> Answer:
        """Run arrays in the instance's thread. Rows that failed are put into `failures`, which fail all without it."""
        assert isinstance(self.instance, BatchInstance)
        sizes = getattr(self.instance, "batch_sizes", ()) if self._interface.batching else ()
        run = (
            partial(_submit, self.instance) if isinstance(self.instance, SubmittingInstance) else self.instance.execute
        )
        execute = partial(_execute_sized, run, sizes) if sizes else run
        try:
            loop = asyncio.get_running_loop()
            results = await loop.run_in_executor(self._thread, self._begun, execute, inputs, names)
        except Exception as error:
            return error
        if isinstance(results, Outcome):
            try:
                timings_of(results)
            except CharoniaError as error:
                return error
            require(
                all(isinstance(error, CharoniaError) for error in results.failures.values()),
                "the error of a row that failed must be a CharoniaError",
            )
            if failures is None and results.failures:
                return next(iter(results.failures.values()))
            if failures is not None:
                failures.update(results.failures)
            results = results.arrays
        require(isinstance(results, Mapping), f"execute returned a {type(results).__name__}; it must be a mapping")
        for name, array in results.items():
            require(
                isinstance(array, np.ndarray),
                f"execute returned a {type(array).__name__} as output '{name}'; it must be a NumPy array",
            )
        return dict(results)


def _submit(instance: SubmittingInstance, inputs: Inputs, names: Sequence[str]) -> Mapping[str, Array] | Outcome:
    """Execute as the executor does for an instance that has several batches under way."""
    return instance.submit(inputs, names).result()


def _execute_sized(
    execute: Callable[[Inputs, Sequence[str]], Mapping[str, Array] | Outcome],
    sizes: Collection[int],
    inputs: Inputs,
    names: Sequence[str],
) -> Mapping[str, Array] | Outcome:
    """Execute as the executor does for an instance with `batch_sizes`: the last row is repeated up to the next size."""
    rows, most = len(next(iter(inputs.values()))), max(sizes)
    arrays: dict[str, list[Array]] = {}
    failures: dict[int, CharoniaError] = {}
    for start in range(0, rows, most):
        count = min(most, rows - start)
        added = min(size for size in sizes if size >= count) - count
        cut = {name: array[start : start + count] for name, array in inputs.items()}
        padded = {name: np.concatenate([array, np.repeat(array[-1:], added, 0)]) for name, array in cut.items()}
        found = execute(padded, names)
        outcome = found if isinstance(found, Outcome) else Outcome(found)
        timings_of(outcome)
        failures.update({start + row: error for row, error in outcome.failures.items() if row < count})
        for name, array in outcome.arrays.items():
            arrays.setdefault(name, []).append(array[:count])
    return Outcome({name: np.concatenate(parts) for name, parts in arrays.items()}, None, failures)


def asked(requests: Sequence[Inputs], outputs: tuple[str, ...]) -> list[ModelRequest]:
    """The requests as an instance over requests gets them."""
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


def of_response(response: ModelResponse) -> Answer:
    """The arrays of a response, or its error. Raises `AssertionError` for an error of another kind."""
    if response.error is not None:
        require(
            isinstance(response.error, CharoniaError),
            f"the error of a ModelResponse is a {type(response.error).__name__}; it must be a CharoniaError",
        )
        return response.error
    return {tensor.name: tensor.array() for tensor in response.outputs}


class KeptResponses:
    """A `ResponseStream` that keeps all it gets: `responses[i]` are those of request `i`."""

    def __init__(self, count: int) -> None:
        self.responses: list[list[ModelResponse]] = [[] for _ in range(count)]
        self.ended = [False] * count
        self.freed = asyncio.Event()
        self.broken: str = ""

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        if self.ended[index]:
            self.broken = f"the instance sent to request {index + 1} after its final response"
            raise InternalError("a response came after the final one of its request")
        if response is None and not final:
            self.broken = "the instance sent neither a response nor a final flag"
            raise ValueError("neither a response nor a final flag")
        if response is not None:
            self.responses[index].append(response)
        self.ended[index] = final

    @property
    def full(self) -> bool:
        return False

    @property
    def blocked(self) -> bool:
        return False

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def free(self) -> None:
        self.freed.set()


async def stream(instance: StreamingInstance, requests: Sequence[ModelRequest]) -> list[list[ModelResponse]]:
    """The responses to each request, in their order. Raises `AssertionError` for an instance that breaks the rules.

    A call that fails gives each request without a final response that failure, as the executor does.
    """
    kept = KeptResponses(len(requests))
    failure: Exception | None = None
    try:
        await instance.execute_stream(requests, kept)
    except InstanceDied as death:
        raise AssertionError(f"the instance died: {death} {death.stderr}".rstrip()) from death
    except Exception as error:
        failure = error
    if kept.broken:
        raise AssertionError(kept.broken)
    for index, ended in enumerate(kept.ended):
        if ended:
            continue
        if failure is None:
            raise AssertionError(f"execute_stream returned before the final response of request {index + 1}")
        told = error_of_model(failure)
        kept.responses[index].append(ModelResponse(error=told))
    return kept.responses
