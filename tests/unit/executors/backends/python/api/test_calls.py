"""Calls of other models as model code makes them, over an exchange that keeps what was sent and answers by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from executors.backends.python import api
from executors.backends.python.api.calls import Answer, Sink, set_exchange
from executors.backends.python.api.errors import TritonError, TritonModelException
from executors.backends.python.api.inference import InferenceRequest
from executors.backends.python.api.response import InferenceResponse
from executors.backends.python.api.tensor import Tensor
from executors.backends.python.protocol.frames import Buffer, padding

ONE = Tensor("X", np.array([1, 2, 3], np.int32))
ONLY_IN_EXECUTE = r"^BLS is only supported during the 'execute' function\.$"


def answer(*tensors: Tensor, last: bool = True, failure: tuple[int, str] | None = None) -> Answer:
    described, data = [], b""
    for tensor in tensors:
        encoded = bytes(tensor.encoded())
        described.append([tensor.name(), tensor.triton_dtype(), tensor.shape(), len(encoded)])
        data += encoded + bytes(padding(len(encoded)))
    return [failure, {"k": 1, "score": 0.5}, described], memoryview(bytearray(data)), last


END: Answer = (None, memoryview(b""), True)


class FakeExchange:
    """Answers with `answers` at once, from a thread of its own, or when told."""

    def __init__(self) -> None:
        self.executes = True
        self.model = "mine"
        self.answers: list[Answer | None] = []
        self.sent: list[list[Any]] = []
        self.data: list[list[bytes]] = []
        self.sinks: list[Sink] = []
        self.given_up: list[int] = []
        self.asked_to_end: list[int] = []
        self.blocks: list[bool] = []

    def call(self, content: list[Any], data: Iterable[Buffer], sink: Sink, *, blocks: bool = False) -> int:
        self.blocks.append(blocks)
        self.sent.append(content)
        self.data.append([bytes(buffer) for buffer in data])
        self.sinks.append(sink)
        if self.answers:
            answers, self.answers = self.answers, []
            threading.Thread(target=lambda: [sink(one) for one in answers]).start()
        return len(self.sent)

    control = call

    def give_up(self, number: int, *, gentle: bool = False) -> None:
        (self.asked_to_end if gentle else self.given_up).append(number)


@pytest.fixture
def exchange() -> Iterator[FakeExchange]:
    found = FakeExchange()
    set_exchange(found)
    yield found
    set_exchange(None)


def asked(**more: Any) -> InferenceRequest:
    return InferenceRequest(**{"model_name": "m", "requested_output_names": ["Y"], "inputs": [ONE], **more})


def value(response: InferenceResponse) -> list[int]:
    tensor = api.get_output_tensor_by_name(response, "Y")
    assert tensor is not None
    return list(tensor.as_numpy())


async def test_only_who_waits_for_the_one_response_does_nothing_else(exchange: FakeExchange) -> None:
    for _ in range(2):
        exchange.answers = [answer(Tensor("Y", np.array([4], np.int32)))]
        asked().exec()
        exchange.answers = [answer(Tensor("Y", np.array([4], np.int32)))]
        await asked().async_exec()
    asked().exec(decoupled=True)
    await asked().async_exec(decoupled=True)
    assert exchange.blocks == [True, False, True, False, False, False]


def test_a_call_waits_for_its_response(exchange: FakeExchange) -> None:
    exchange.answers = [answer(Tensor("Y", np.array([4, 5], np.int32)), Tensor("Z", np.ones(3)))]
    response = asked(
        request_id="r",
        correlation_id="c",
        model_version=2,
        flags=3,
        timeout=5,
        parameters={"a": 1, "b": "c", "d": True},
    ).exec()
    assert (value(response), response.parameters(), response.has_error()) == ([4, 5], '{"k": 1, "score": 0.5}', False)
    (content,) = exchange.sent
    assert content[:9] == ["m", 2, ["Y"], "r", "c", 3, 5, {"a": 1, "b": "c", "d": True}, False]
    assert content[9] == [["X", 8, [3], 12]]
    assert exchange.data == [[np.array([1, 2, 3], np.int32).tobytes()]]


def test_what_goes_wrong_is_in_the_response(exchange: FakeExchange) -> None:
    exchange.answers = [answer(failure=(4, "not now"))]
    error = asked().exec().error()
    assert (error.code(), error.message()) == (TritonError.UNAVAILABLE, "not now")
    # an error that the interface has no word for keeps its code on its way through the model
    exchange.answers = [answer(failure=(9, "late"))]
    assert asked().exec().error().code() == 9


def test_several_responses_come_one_by_one(exchange: FakeExchange) -> None:
    parts = [answer(Tensor("Y", np.array([n], np.int32)), last=False) for n in range(3)]
    exchange.answers = [*parts, END]
    assert [value(response) for response in asked().exec(decoupled=True)] == [[0], [1], [2]]
    exchange.answers = [*parts[:1], answer(failure=(1, "broke"))]
    found = list(asked().exec(decoupled=True))
    assert [response.has_error() for response in found] == [False, True]
    assert exchange.given_up == []


def test_a_cancelled_call_yields_what_comes_until_its_model_ends_it(exchange: FakeExchange) -> None:
    responses = asked().exec(decoupled=True)
    responses.cancel()
    assert exchange.asked_to_end == [1]
    exchange.sinks[0](answer(Tensor("Y", np.array([1], np.int32)), last=False))
    exchange.sinks[0](answer(failure=(7, "")))
    first, last = responses
    assert (value(first), last.error().code()) == ([1], TritonError.CANCELLED)
    responses.cancel()
    assert (exchange.asked_to_end, exchange.given_up) == ([1], [])
    # the call of a lost iterator is read by nothing
    asked().exec(decoupled=True)
    assert (exchange.asked_to_end, exchange.given_up) == ([1], [2])


def test_a_later_loop_yields_the_responses_again(exchange: FakeExchange) -> None:
    """P13: it begins anew after the end, and goes on before it."""
    exchange.answers = [answer(Tensor("Y", np.array([n], np.int32)), last=n == 3) for n in range(4)]
    responses = asked().exec(decoupled=True)
    assert value(next(responses)) == [0]
    assert [value(response) for response in responses] == [[1], [2], [3]]
    with pytest.raises(StopIteration):
        next(responses)
    for response in responses:
        assert value(response) == [0]
        break
    assert [value(response) for response in responses] == [[1], [2], [3]]
    for _ in range(2):
        assert [value(response) for response in responses] == [[0], [1], [2], [3]]


async def test_a_later_loop_may_be_of_the_other_kind(exchange: FakeExchange) -> None:
    exchange.answers = [answer(Tensor("Y", np.array([n], np.int32)), last=False) for n in range(2)] + [END]
    responses = await asked().async_exec(decoupled=True)
    assert [value(response) async for response in responses] == [[0], [1]]
    assert [value(response) for response in responses] == [[0], [1]]
    assert [value(response) async for response in responses] == [[0], [1]]


async def test_calls_are_on_their_way_before_they_are_awaited(exchange: FakeExchange) -> None:
    first, second = asked().async_exec(), asked().async_exec()
    assert len(exchange.sent) == 2
    exchange.sinks[1](answer(Tensor("Y", np.array([2], np.int32))))
    exchange.sinks[0](answer(Tensor("Y", np.array([1], np.int32))))
    assert [value(response) for response in await asyncio.gather(first, second)] == [[1], [2]]
    third = asked().async_exec()
    third.cancel()
    await asyncio.sleep(0)
    assert exchange.given_up == [3]
    exchange.sinks[2](answer(failure=(7, "")))  # too late for anybody


async def test_several_responses_are_awaited_one_by_one(exchange: FakeExchange) -> None:
    exchange.answers = [answer(Tensor("Y", np.array([n], np.int32)), last=n == 1) for n in range(2)]
    responses = await asked().async_exec(decoupled=True)
    assert [value(response) async for response in responses] == [[0], [1]]
    assert exchange.given_up == []


async def test_responses_that_are_still_to_come_are_awaited(exchange: FakeExchange) -> None:
    responses = await asked().async_exec(decoupled=True)
    nexts = asyncio.ensure_future(anext(responses))
    for n in range(2):
        await asyncio.sleep(0)
        assert not nexts.done()
        exchange.sinks[0](answer(Tensor("Y", np.array([n], np.int32)), last=False))
        assert value(await nexts) == [n]
        nexts = asyncio.ensure_future(anext(responses))
    exchange.sinks[0](END)
    with pytest.raises(StopAsyncIteration):
        await nexts


async def test_an_async_model_reads_responses_with_a_plain_loop(exchange: FakeExchange) -> None:
    """As upstream's documentation has it; no answer waits for the event loop, which stands still meanwhile."""
    exchange.answers = [answer(Tensor("Y", np.array([n], np.int32)), last=n == 1) for n in range(2)]
    responses = await asked().async_exec(decoupled=True)
    assert [value(response) for response in responses] == [[0], [1]]
    responses = await asked().async_exec(decoupled=True)
    responses.cancel()
    assert exchange.asked_to_end == [2]


async def test_an_executor_that_is_gone_raises(exchange: FakeExchange) -> None:
    exchange.answers = [None]
    with pytest.raises(TritonModelException, match="the executor is gone"):
        asked().exec()
    exchange.answers = [None]
    with pytest.raises(TritonModelException, match="the executor is gone"):
        await asked().async_exec()
    exchange.answers = [None]
    with pytest.raises(TritonModelException, match="the executor is gone"):
        list(asked().exec(decoupled=True))


async def test_nothing_is_called_outside_of_execute(exchange: FakeExchange) -> None:
    exchange.executes = False
    for _ in range(2):  # while it loads, and where no executor is
        with pytest.raises(TritonModelException, match=ONLY_IN_EXECUTE):
            asked().exec()
        with pytest.raises(TritonModelException, match=ONLY_IN_EXECUTE):
            asked().async_exec()
        set_exchange(None)
    assert exchange.sent == []


def test_models_are_loaded_and_asked_for(exchange: FakeExchange) -> None:
    exchange.answers = [([None, None], memoryview(b""), True)]
    api.load_model("other", '{"name": "other"}', {"file:1/model.py": b"code", "1/weights": b""})
    exchange.answers = [([None, None], memoryview(b""), True)]
    api.unload_model("other", True)
    exchange.answers = [([None, True], memoryview(b""), True)]
    assert api.is_model_ready("other", "2")
    assert exchange.sent == [
        ["load", "other", '{"name": "other"}', [["1/model.py", 4], ["1/weights", 0]]],
        ["unload", "other", True],
        ["is_ready", "other", "2"],
    ]
    assert exchange.data[0] == [b"code", b""]
    exchange.answers = [([[4, "not explicit"], None], memoryview(b""), True)]
    with pytest.raises(TritonModelException, match=r"^Failed to load model: .* model '', message: not explicit$"):
        api.load_model("other")
    with pytest.raises(TritonModelException, match=r"^failed to load model 'other', files should be a dict"):
        api.load_model("other", files=[])  # type: ignore[arg-type]


def test_no_model_loads_itself_while_it_is_loaded(exchange: FakeExchange) -> None:
    exchange.executes = False
    for change in (api.load_model, api.unload_model):
        with pytest.raises(TritonModelException, match="model 'mine' cannot load or unload itself"):
            change("mine")
    assert exchange.sent == []
    set_exchange(None)
    with pytest.raises(TritonModelException, match="outside of a model's process"):
        api.is_model_ready("mine")


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda: api.load_model("other", config={"name": "other"}), "config"),  # type: ignore[arg-type]
        (lambda: api.load_model("other", config=None), "config"),  # type: ignore[arg-type]
        (lambda: api.load_model(5), "model_name"),  # type: ignore[arg-type]
        (lambda: api.load_model("other", "{}", {5: b""}), "a path of 'files'"),  # type: ignore[dict-item]
        (lambda: api.load_model("other", "{}", {"file:1/a": 3}), "the content of file"),  # type: ignore[dict-item]
        (lambda: api.load_model("other", "{}", {"file:1/a": "x"}), "the content of file"),  # type: ignore[dict-item]
        (lambda: api.unload_model(None), "model_name"),  # type: ignore[arg-type]
        (lambda: api.unload_model("other", "yes"), "unload_dependents"),  # type: ignore[arg-type]
        (lambda: api.unload_model("other", None), "unload_dependents"),  # type: ignore[arg-type]
        (lambda: api.is_model_ready(["other"]), "model_name"),  # type: ignore[arg-type]
        (lambda: api.is_model_ready("other", 2), "model_version"),  # type: ignore[arg-type]
        (lambda: asked().exec("yes"), "decoupled"),  # type: ignore[arg-type]
        (lambda: asked().async_exec([]), "decoupled"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_other_types_are_refused_at_once(
    exchange: FakeExchange, ask: Callable[[], object], what: str
) -> None:
    exchange.answers = [([None, None], memoryview(b""), True)]
    with pytest.raises(TypeError, match=f"^{what}.* must be of type"):
        ask()
    assert exchange.sent == []


def test_arguments_may_be_of_the_types_that_upstream_converts(exchange: FakeExchange) -> None:
    exchange.answers = [([None, None], memoryview(b""), True)]
    api.load_model(b"other", b'{"name": "other"}')  # type: ignore[arg-type]
    exchange.answers = [([None, None], memoryview(b""), True)]
    api.unload_model("other", np.bool_(True))  # type: ignore[arg-type]
    exchange.answers = [answer(Tensor("Y", np.array([1], np.int32)))]
    asked(model_version=np.int64(2), flags=np.int32(1), timeout=np.uint8(7)).exec(np.bool_(False))
    assert exchange.sent[:2] == [["load", "other", '{"name": "other"}', []], ["unload", "other", True]]
    sent = exchange.sent[2]
    found = [sent[1], sent[5], sent[6], sent[8]]
    assert (found, [*map(type, found)]) == ([2, 1, 7, False], [int, int, int, bool])
