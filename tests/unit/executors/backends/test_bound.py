"""Callables as instances: how they are called, what they may return, what becomes of their errors (P21)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_calls import instance_of

from charonia.backend import (
    BatchInstance,
    InstanceSpec,
    ModelRequest,
    ModelResponse,
    ModelSource,
    RequestInstance,
    StreamingInstance,
)
from charonia.errors import CharoniaError, ErrorCode, InternalError, InvalidArgument, NotFound
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from executors.backends.bound import BoundBackend, BoundFunction, Request

ONE = np.ones((2, 2), np.float32)


async def made(
    function: Callable[..., Any], style: Any = "keywords", outputs: Sequence[str] = ("Y",), decoupled: bool = False
) -> Any:
    backend = BoundBackend()
    backend.functions["m"] = BoundFunction(function, style, tuple(outputs))
    config = parse(
        'name: "m" input { name: "X" data_type: TYPE_FP32 dims: -1 } output { name: "Y" data_type: TYPE_FP32 }'
    )
    config.model_transaction_policy.decoupled = decoupled
    source = ModelSource("m", 1, Path("/none"), config)
    return await instance_of(backend, InstanceSpec("m_0", "CPU", -1, source, ModelInterface.of(config)))


def request(**fields: Any) -> ModelRequest:
    values: dict[str, Any] = {"id": "", "correlation_id": 0, "outputs": (), "parameters": {}, **fields}
    return ModelRequest(inputs=[Tensor.of("X", ONE)], **values)


@pytest.mark.parametrize(
    ("style", "function", "outputs"),
    [
        ("keywords", lambda X: {"Y": X * 2}, ["Y"]),
        ("keywords", lambda **inputs: [inputs["X"] * 2], ["Y"]),
        ("keywords", lambda X: X * 2, ["Y"]),
        ("dict", lambda inputs: {"Y": inputs["X"] * 2}, ["Y"]),
        ("dict", lambda inputs: (inputs["X"] * 2, inputs["X"]), ["Y", "Z"]),
        ("keywords", lambda X: {"Y": (X * 2).tolist()}, ["Y"]),
    ],
)
async def test_arrays_in_and_out(style: str, function: Callable[..., Any], outputs: list[str]) -> None:
    instance = await made(function, style, outputs)
    assert isinstance(instance, BatchInstance)
    results = instance.execute({"X": ONE}, outputs)
    assert list(results) == outputs
    assert (results["Y"] == ONE * 2).all()
    instance.close()
    instance.close()


async def test_a_coroutine_function() -> None:
    async def function(X: Any) -> Any:
        await asyncio.sleep(0)
        return X * 2

    instance = await made(function)
    results = await asyncio.to_thread(instance.execute, {"X": ONE}, ["Y"])
    assert (results["Y"] == 2).all()
    await asyncio.to_thread(instance.close)


@pytest.mark.parametrize("answer", [None, 3, [ONE, ONE], "Y"])
async def test_what_is_no_result(answer: Any) -> None:
    instance = await made(lambda X: answer)
    with pytest.raises(InternalError, match="must return a dict of arrays or the outputs Y in this order"):
        instance.execute({"X": ONE}, ["Y"])


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("no good"), ErrorCode.INTERNAL, "ValueError: no good"),
        (NotFound("not here"), ErrorCode.NOT_FOUND, "not here"),
    ],
)
async def test_errors_keep_their_kind(error: Exception, code: ErrorCode, text: str) -> None:
    def function(X: Any) -> Any:
        raise error

    instance = await made(function)
    with pytest.raises(CharoniaError) as caught:
        instance.execute({"X": ONE}, ["Y"])
    assert (caught.value.code, caught.value.message) == (code, text)


async def test_what_nobody_bound() -> None:
    source = ModelSource("n", 1, Path("/none"), parse('name: "n"'))
    with pytest.raises(InvalidArgument, match="nothing is bound as 'n' in this process"):
        await instance_of(BoundBackend(), InstanceSpec("n_0", "CPU", -1, source, ModelInterface.of(source.config)))


async def test_requests_are_answered_one_by_one() -> None:
    threads: set[int] = set()

    def function(requests: list[Request]) -> list[Any]:
        threads.add(threading.get_ident())
        answers: list[Any] = []
        for each in requests:
            do = each.parameters["do"]
            answers.append(
                {"Y": each.inputs["X"] * 2} if do == "answer" else KeyError(each.id) if do == "raise" else do
            )
        return answers

    instance = await made(function, "requests")
    assert isinstance(instance, RequestInstance)
    batch = [request(id="a", parameters={"do": do}) for do in ("answer", "raise", 7)]
    good, bad, wrong = await instance.execute_requests(batch)
    assert (good.outputs[0].array() == 2).all()
    assert bad.error is not None
    assert bad.error.message == "KeyError: 'a'"
    assert wrong.error is not None
    assert "must return a dict" in wrong.error.message
    await instance.execute_requests(batch)
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    await instance.close_instance()


async def test_too_few_answers_fail_the_batch() -> None:
    instance = await made(lambda requests: [], "requests")
    with pytest.raises(InternalError, match="must return a list of 1 answers, one per request"):
        await instance.execute_requests([request()])
    await instance.close_instance()


# -- generators --------------------------------------------------------------------------------------------------------


class Responses:
    """A `ResponseStream` that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any, bool]] = []
        self.drained = 0

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        value: Any = None
        if response is not None:
            value = response.error.message if response.error else {t.name: t.array().tolist() for t in response.outputs}
        self.sent.append((index, value, final))

    async def drain(self) -> None:
        self.drained += 1

    def free(self) -> None: ...


def numbers(X: Any) -> Iterator[Any]:
    yield {"Y": X[0], "Z": X[1]}
    yield [X[0] * 2, X[1]]


async def numbers_later(X: Any) -> AsyncIterator[Any]:
    for each in numbers(X):
        await asyncio.sleep(0)
        yield each


@pytest.mark.parametrize("function", [numbers, numbers_later])
async def test_a_generator_answers_with_what_it_yields(function: Any) -> None:
    instance = await made(function, outputs=["Y", "Z"], decoupled=True)
    assert isinstance(instance, StreamingInstance)
    responses = Responses()
    await instance.execute_stream([request(outputs=("Y",)), request(outputs=("Y",))], responses)
    each = [({"Y": [1.0, 1.0]}, False), ({"Y": [2.0, 2.0]}, False), (None, True)]
    assert responses.sent == [(index, *answer) for index in (0, 1) for answer in each]
    assert responses.drained == 6
    await instance.close_instance()


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_error_ends_its_request_alone(asynchronous: bool) -> None:
    calls = 0

    def failing(X: Any) -> Iterator[Any]:
        nonlocal calls
        calls += 1
        yield X
        if calls == 1:
            raise ValueError("no more")

    async def failing_later(X: Any) -> AsyncIterator[Any]:
        for each in failing(X):
            yield each

    instance = await made(failing_later if asynchronous else failing, decoupled=True)
    responses = Responses()
    await instance.execute_stream([request(), request()], responses)
    one = {"Y": ONE.tolist()}
    assert responses.sent == [
        (0, one, False),
        (0, "ValueError: no more", True),
        (1, one, False),
        (1, None, True),
    ]
    await instance.close_instance()


async def test_a_cancelled_generator_is_closed() -> None:
    closed = threading.Event()
    asked = request()

    def endless(X: Any) -> Iterator[Any]:
        try:
            while True:
                yield X
        finally:
            closed.set()

    instance = await made(endless, decoupled=True)

    class Cancelling(Responses):
        def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
            super().send(index, response, final=final)
            instance.cancel_requests([asked, request()])

    responses = Cancelling()
    await instance.execute_stream([asked], responses)
    assert responses.sent[-1] == (0, None, True)
    assert len(responses.sent) == 2
    assert closed.is_set()
    assert not instance._cancelled
    await instance.close_instance()
