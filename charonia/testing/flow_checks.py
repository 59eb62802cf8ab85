"""Checks of what is under way: batches of an instance that takes several, responses of one that answers several times.

Part of the contract suite (`backend_contract`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AsyncExitStack

import numpy as np

from charonia.backend import (
    Array,
    Backend,
    CancellableInstance,
    Interrupted,
    InterruptibleInstance,
    ModelRequest,
    ModelResponse,
    Outcome,
    RequestInstance,
    StreamingInstance,
    SubmittingInstance,
    WindowedInstance,
)

from .driven_instance import DrivenInstance, Inputs, KeptResponses, asked, of_response, require, stream
from .reference_model import ReferenceModel, check_answer, check_material, instance_of, round_trip

_ENDS_WITHIN_S = 60.0
_SETTLES_S = 0.1
"""How long an instance that should wait is watched."""
_MEASURABLE_S = 0.05
_MOST_OF_A_BATCH = 0.8
_ROUNDS = 8

Result = Future[Mapping[str, Array] | Outcome]


async def check_window(backend: Backend, model: ReferenceModel) -> None:
    """A `StreamingInstance` gives a request no more responses than are wanted for now, and goes on when more are.

    For decoupled models whose `copies` are 2 or more.
    """
    check_material(model)
    if not model.interface.decoupled or model.copies < 2:
        return
    async with AsyncExitStack() as stack:
        driven = await instance_of(stack, backend, model)
        instance = driven.instance
        assert isinstance(instance, StreamingInstance)
        (request,) = asked(model.requests[:1], ())
        request.window = 1
        responses = _Windowed(instance, request)
        running = asyncio.ensure_future(instance.execute_stream([request], responses))
        try:
            for window in range(1, model.copies):
                await responses.until(window, running)
                await asyncio.wait({running}, timeout=_SETTLES_S)
                count = len(responses.responses[0])
                require(
                    count <= window,
                    f"a request had {count} responses while {window} were wanted; await drain after each response, or "
                    "be a WindowedInstance",
                )
                require(
                    count == window, f"a request had {count} responses, while {window} were wanted: the others are lost"
                )
                responses.allow(window + 1)
            await responses.until(model.copies, running)
            responses.allow(model.copies + 1)  # what ends the request may come behind the last response
            done, _ = await asyncio.wait({running}, timeout=_ENDS_WITHIN_S)
            require(bool(done), "execute_stream did not go on when all responses were wanted")
            running.result()
        finally:
            request.window = 0
            responses.wake()  # what waits for more in a thread has to end
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        require(not responses.broken, responses.broken)
        for number, response in enumerate(responses.responses[0], start=1):
            what = f"response {number} of a request that had to wait for more to be wanted"
            check_answer(model, model.requests[0], of_response(response), tuple(model.interface.outputs), what)


async def check_submissions(backend: Backend, model: ReferenceModel) -> None:
    """A `SubmittingInstance` has several batches under way: each has its own results, failures and cancellation."""
    check_material(model)
    async with AsyncExitStack() as stack:
        driven = await instance_of(stack, backend, model)
        instance = driven.instance
        if not isinstance(instance, SubmittingInstance):
            return
        require(
            isinstance(instance.depth, int) and instance.depth >= 2,
            f"a SubmittingInstance has a depth of {instance.depth!r}; it must be 2 or more",
        )
        sizes: Sequence[int] = getattr(instance, "batch_sizes", ())
        if model.interface.batching and sizes:
            return  # the requests are not of these sizes; other checks submit them one at a time
        # as the executor does, each thread submits one batch and waits for it
        threads = [ThreadPoolExecutor(1, thread_name_prefix="instance") for _ in range(instance.depth)]
        for thread in threads:
            stack.callback(thread.shutdown, wait=False)
            started: Callable[[], None] | None = getattr(instance, "started", None)
            if started is not None:
                await asyncio.wrap_future(thread.submit(started))
        await asyncio.to_thread(_check_results, instance, model, threads)
        await asyncio.to_thread(_check_failures, instance, model, threads)
        await asyncio.to_thread(_check_cancellation, instance, model, threads)
        await asyncio.to_thread(_check_return, instance, model, threads[0])
        found = await asyncio.wrap_future(threads[0].submit(_executed, instance, model))
        _check(model, 0, found, "execute, once nothing is under way")


def _check_results(instance: SubmittingInstance, model: ReferenceModel, threads: Sequence[ThreadPoolExecutor]) -> None:
    """All batches of a round are under way before one is waited for, and their results stay until all are there."""
    memory = [[_copy(inputs) for inputs in model.requests] for _ in threads]
    for number in range(_ROUNDS):
        places = [(number + at) % len(model.requests) for at in range(len(threads))]
        given = [own[place] for own, place in zip(memory, places, strict=True)]
        under_way = [_submitted(instance, *one, model) for one in zip(threads, given, strict=True)]
        results = [_result_of(future) for future in reversed(under_way)]
        for place, inputs, result in zip(places, given, reversed(results), strict=True):
            _check(model, place, result, f"round {number + 1} of batches under way")
            for name, array in inputs.items():
                is_same = np.array_equal(array, model.requests[place][name])
                require(is_same, f"batches under way: the instance changed its input '{name}'")


def _check_failures(instance: SubmittingInstance, model: ReferenceModel, threads: Sequence[ThreadPoolExecutor]) -> None:
    for failing in range(len(threads)):
        inputs = [model.failing if at == failing else model.requests[0] for at in range(len(threads))]
        under_way = [_tried(instance, thread, given, model) for thread, given in zip(threads, inputs, strict=True)]
        for at, future in enumerate(under_way):
            result = future if isinstance(future, Exception) else _result_of(future)
            if at != failing:
                _check(model, 0, result, "a batch under way beside one that fails")
                continue
            failed = isinstance(result, Exception) or (isinstance(result, Outcome) and bool(result.failures))
            require(failed, "a batch the model cannot run was answered as if it had succeeded; set an exception")


def _check_cancellation(
    instance: SubmittingInstance, model: ReferenceModel, threads: Sequence[ThreadPoolExecutor]
) -> None:
    """Whether a cancellation came in time or not, the other batches are answered, and so are later ones."""
    for _ in range(_ROUNDS):
        under_way = [_submitted(instance, thread, _copy(model.requests[0]), model) for thread in threads]
        was_cancelled = under_way[-1].cancel()
        for at, future in enumerate(under_way):
            if was_cancelled and future is under_way[-1]:
                continue
            result = _result_of(future)
            which = "one whose cancellation came too late" if future is under_way[-1] else f"number {at + 1}"
            _check(model, 0, result, f"batches of which one was cancelled: {which}")
    result = _result_of(_submitted(instance, threads[0], model.requests[0], model))
    _check(model, 0, result, "a batch after others that were cancelled")


def _check_return(instance: SubmittingInstance, model: ReferenceModel, thread: ThreadPoolExecutor) -> None:
    """Of batches that take long enough to tell: `submit` returns before they are done."""

    def measured() -> tuple[float, float]:
        """Seconds of `submit`, and of the whole batch."""
        began = time.perf_counter()
        future = instance.submit(model.requests[0], tuple(model.interface.outputs))
        submitted = time.perf_counter()
        _result_of(future)
        return submitted - began, time.perf_counter() - began

    # of several, as other work on the machine holds threads up as well
    submit_s, took_s = min((thread.submit(measured).result() for _ in range(_ROUNDS)), key=lambda one: one[0] / one[1])
    require(
        took_s < _MEASURABLE_S or submit_s < _MOST_OF_A_BATCH * took_s,
        f"submit took {submit_s:.2f} s of the {took_s:.2f} s of its batch; it must return without waiting",
    )


def _submitted(
    instance: SubmittingInstance, thread: ThreadPoolExecutor, inputs: Inputs, model: ReferenceModel
) -> Result:
    submitting = thread.submit(instance.submit, inputs, tuple(model.interface.outputs))
    done, _ = wait((submitting,), _ENDS_WITHIN_S)
    require(bool(done), f"submit did not return within {_ENDS_WITHIN_S:g} s")
    future = submitting.result()
    require(
        isinstance(future, Future),
        f"submit returned a {type(future).__name__}; it must be a concurrent.futures.Future",
    )
    return future


def _tried(
    instance: SubmittingInstance, thread: ThreadPoolExecutor, inputs: Inputs, model: ReferenceModel
) -> Result | Exception:
    """The same; an exception where `submit` raises it."""
    try:
        return _submitted(instance, thread, inputs, model)
    except AssertionError:
        raise
    except Exception as error:
        return error


def _executed(instance: SubmittingInstance, model: ReferenceModel) -> Mapping[str, Array] | Outcome:
    return instance.execute(model.requests[0], tuple(model.interface.outputs))


def _result_of(future: Result) -> Mapping[str, Array] | Outcome | Exception:
    try:
        return future.result(_ENDS_WITHIN_S)
    except TimeoutError:
        raise AssertionError(f"a batch that was submitted is not done after {_ENDS_WITHIN_S:g} s") from None
    except CancelledError:
        raise AssertionError("the future of a batch was cancelled by the instance; set an exception") from None
    except Exception as error:
        return error


def _check(model: ReferenceModel, place: int, result: Mapping[str, Array] | Outcome | Exception, what: str) -> None:
    if isinstance(result, Outcome):
        result = next(iter(result.failures.values())) if result.failures else result.arrays
    check_answer(model, model.requests[place], result, tuple(model.interface.outputs), what)


async def check_cancellations(backend: Backend, model: ReferenceModel) -> None:
    """Interrupting or cancelling a call under way ends it, or does nothing, and the instance goes on working."""
    check_material(model)
    async with AsyncExitStack() as stack:
        driven = await instance_of(stack, backend, model)
        if isinstance(driven.instance, InterruptibleInstance) and not isinstance(driven.instance, SubmittingInstance):
            await _interrupted(driven, driven.instance, model)
        if isinstance(driven.instance, CancellableInstance):
            await _cancelled(driven, driven.instance, model)


async def _interrupted(driven: DrivenInstance, instance: InterruptibleInstance, model: ReferenceModel) -> None:
    outputs = tuple(model.interface.outputs)
    for _ in range(_ROUNDS):
        running = asyncio.ensure_future(driven.run(model.requests[:1], ()))
        while not running.done():
            instance.interrupt()
            await asyncio.sleep(0)
        (answer,) = running.result()
        if not isinstance(answer, Interrupted):
            check_answer(model, model.requests[0], answer, outputs, "a request that was interrupted too late")
    await driven.run(model.requests[:1], ())  # the last interruption may have come after the call
    await round_trip(driven, model, model.requests, "requests after interrupted ones")


async def _cancelled(driven: DrivenInstance, instance: CancellableInstance, model: ReferenceModel) -> None:
    for _ in range(_ROUNDS):
        requests = asked(model.requests, ())
        running = asyncio.ensure_future(_responses(driven, requests))
        while not running.done():
            instance.cancel_requests(requests)
            await asyncio.sleep(0)
        count = running.result()
        require(
            count == len(requests),
            f"{count} of {len(requests)} requests that were cancelled had a response; each still gets its own",
        )
    await round_trip(driven, model, model.requests, "requests after cancelled ones")


async def _responses(driven: DrivenInstance, requests: Sequence[ModelRequest]) -> int:
    """How many of the requests the instance answered, if only with an error."""
    instance = driven.instance
    if isinstance(instance, StreamingInstance) and (driven.decoupled or not isinstance(instance, RequestInstance)):
        return len(await stream(instance, requests))
    assert isinstance(instance, RequestInstance)
    return len(await instance.execute_requests(requests))


def _copy(inputs: Inputs) -> dict[str, Array]:
    return {name: np.array(array) for name, array in inputs.items()}


class _Windowed(KeptResponses):
    """Of its one request a number of responses are wanted, which `allow` raises."""

    def __init__(self, instance: StreamingInstance, request: ModelRequest) -> None:
        super().__init__(1)
        self._instance = instance
        self._request = request
        self._waiting: list[asyncio.Future[None]] = []

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        super().send(index, response, final=final)
        self.wake()

    @property
    def blocked(self) -> bool:
        return 0 < self._request.window <= len(self.responses[0]) and not self.ended[0]

    async def drain(self) -> None:
        await asyncio.sleep(0)
        while self.blocked and not isinstance(self._instance, WindowedInstance):
            await self._change()

    def allow(self, count: int) -> None:
        self._request.window = count
        self.wake()
        if isinstance(self._instance, WindowedInstance):
            self._instance.allow_responses(self._request, count)

    def wake(self) -> None:
        """Have what waits look again."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    async def until(self, count: int, running: asyncio.Future[None]) -> None:
        """Wait until so many responses were sent. Raises `AssertionError` when the call ends before, or takes long."""
        try:
            async with asyncio.timeout(_ENDS_WITHIN_S):
                while len(self.responses[0]) < count:
                    await asyncio.wait({self._change(), running}, return_when=asyncio.FIRST_COMPLETED)
                    if running.done() and len(self.responses[0]) < count:
                        running.result()
                        raise AssertionError(f"execute_stream returned after {len(self.responses[0])} responses")
        except TimeoutError:
            raise AssertionError(
                f"a request had {len(self.responses[0])} responses while {count} were wanted, and no more came"
            ) from None

    def _change(self) -> asyncio.Future[None]:
        """Done at the next change from now on."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(change)
        return change
