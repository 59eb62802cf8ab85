"""Response senders of python models, decoupled and not, in real model processes (P4, P11)."""

from __future__ import annotations

import asyncio
import gc
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from charonia.backend import InstanceDied, InstanceSpec, ModelRequest, ModelResponse, ModelSource, StreamingInstance
from charonia.errors import ErrorCode
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from charonia.testing.driven_stream import KeptResponses
from executors.backends.python import PythonBackend
from executors.backends.python.instance import PythonInstance
from protos.model_config_pb2 import ModelConfig

TENSORS = 'input { name: "IN" data_type: TYPE_FP32 dims: -1 } output { name: "OUT" data_type: TYPE_FP32 dims: -1 }'
DECOUPLED = TENSORS + " model_transaction_policy { decoupled: true }"
PATIENCE_S = 30.0
HEAD = """
import threading, time, gc, asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[value]], np.float32))])

def value_of(request):
    return float(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)[0])

"""
Load = Callable[..., Awaitable[PythonInstance]]


@pytest.fixture
async def load(tmp_path: Path) -> AsyncIterator[Load]:
    loaded: list[PythonInstance] = []

    async def create(execute: str, config: str = DECOUPLED) -> PythonInstance:
        version = tmp_path / "m" / "1"
        version.mkdir(parents=True, exist_ok=True)
        body = textwrap.indent(textwrap.dedent(execute).strip(), "    ")
        (version / "model.py").write_text(f"{HEAD}\nclass TritonPythonModel:\n{body}\n")
        parsed = text_format.Parse(f'name: "m" backend: "python" max_batch_size: 8 {config}', ModelConfig())
        model = ModelSource("m", 1, tmp_path / "m", parsed, {})
        spec = InstanceSpec("m_0_0", "CPU", -1, model, ModelInterface.of(parsed))
        instance = await PythonBackend().create_instance(spec)
        loaded.append(instance)
        return instance

    yield create
    for instance in loaded:
        await instance.close_instance()


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


async def test_a_decoupled_model_answers_none_one_or_many_times(load: Load) -> None:
    instance = await load("""
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                count = int(value_of(request))
                for number in range(count):
                    last = number == 1
                    sender.send(response(number), FINAL if last else 0)
                    if last:
                        break
                else:
                    sender.send(flags=FINAL)
    """)
    assert isinstance(instance, StreamingInstance)
    responses = await run(instance, 0, 1, 2)
    assert [responses.told(index) for index in range(3)] == [[], [0], [0, 1]]
    assert responses.ended == [True] * 3


async def test_threads_answer_after_execute_returned_while_the_next_batch_runs(load: Load) -> None:
    instance = await load("""
        def initialize(self, args):
            self.go = threading.Event()

        def execute(self, requests):
            for request in requests:
                value = value_of(request)
                sender = request.get_response_sender()
                if value == 1:
                    threading.Thread(target=self.later, args=(sender, value)).start()
                else:
                    sender.send(response(value), FINAL)
                    self.go.set()

        def later(self, sender, value):
            sender.send(response(value))
            self.go.wait()
            sender.send(response(value + 10))
            sender.send(flags=FINAL)
    """)
    first = Responses(1)
    going = asyncio.ensure_future(instance.execute_stream([request(1)], first))
    await asyncio.wait_for(first.freed.wait(), PATIENCE_S)
    assert not first.ended[0]
    second = await run(instance, 2)
    assert second.told() == [2]
    await asyncio.wait_for(going, PATIENCE_S)
    assert first.told() == [1, 11]


SENDER_ERRORS = [
    (
        DECOUPLED,
        "sender.send(flags=FINAL)\nsender.send(response(1))",
        "Unable to send response. Response sender has been closed.",
    ),
    (
        DECOUPLED,
        "sender.send(None)",
        "Inference Response object must be provided when the response flags is set to zero.",
    ),
    (DECOUPLED, "sender.send(response(1), 2)", "Unable to send response. Unsupported flag provided."),
    (
        TENSORS,
        "sender.send(response(1))\nsender.send(response(2))",
        "Unable to send response. Non-decoupled model cannot send more than one response.",
    ),
    (
        TENSORS,
        "sender.send(flags=FINAL)",
        "Unable to send response. Non-decoupled model cannot send complete final before sending a response.",
    ),
    (
        TENSORS,
        "sender.send(response(1), FINAL)\nsender.send(flags=FINAL)",
        "Unable to send response. Response sender has been closed.",
    ),
]


@pytest.mark.parametrize(("config", "statements", "text"), SENDER_ERRORS)
async def test_what_a_sender_refuses_is_told_in_words(load: Load, config: str, statements: str, text: str) -> None:
    """P11: the text reaches the model, as a TritonModelException."""
    indented = textwrap.indent(statements, " " * 20)
    instance = await load(
        f"""
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                other = None
                try:
{indented}
                except pb_utils.TritonModelException as error:
                    other = error.message()
                assert other == {text!r}, other
                print("as expected", flush=True)
            return {"None" if config is DECOUPLED else "[None for _ in requests]"}
    """,
        config,
    )
    if config is DECOUPLED:
        responses = await run(instance, 1)
        told = responses.told()
    else:
        async with asyncio.timeout(PATIENCE_S):
            (answer,) = await instance.execute_requests([request(1)])
        told = [answer.error.message if answer.error else "answered"]
    # what was not answered ends with an error of its own, not of the assertion
    async with asyncio.timeout(PATIENCE_S):  # printed before it was answered, but through another pipe
        while "as expected" not in instance._child.last_lines():
            await asyncio.sleep(0.005)
    assert not any("AssertionError" in str(one) for one in told)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return []", "Python model 'm' is using the decoupled mode and the execute function must return None."),
        ("raise ValueError('no')", "ValueError: no\n\nAt:\n"),
    ],
)
async def test_a_failing_execute_ends_requests_without_a_final_response(load: Load, body: str, text: str) -> None:
    instance = await load(f"""
        def execute(self, requests):
            sender = requests[0].get_response_sender()
            sender.send(response(1), FINAL)
            self.kept = requests[1].get_response_sender()
            self.kept.send(response(2))
            {body}
    """)
    responses = Responses(2)
    with pytest.raises(Exception, match="Failed to process") as caught:
        await instance.execute_stream([request(1), request(2)], responses)
    assert str(caught.value).startswith(f"Failed to process the request(s) for model 'm_0_0', message: {text}")
    assert (responses.told(0), responses.told(1)) == ([1], [2])
    assert responses.ended == [True, False]


async def test_coroutines_of_a_decoupled_model_run_beside_each_other(load: Load) -> None:
    instance = await load("""
        def initialize(self, args):
            self.go = None

        async def execute(self, requests):
            if self.go is None:
                self.go = asyncio.Event()
            for request in requests:
                sender, value = request.get_response_sender(), value_of(request)
                if value == 1:
                    await self.go.wait()
                if value == 3:
                    raise ValueError("three")
                sender.send(response(value), FINAL)
                if value == 2:
                    self.go.set()
    """)
    first = Responses(1)
    going = asyncio.ensure_future(instance.execute_stream([request(1)], first))
    await asyncio.wait_for(first.freed.wait(), PATIENCE_S)
    assert (await run(instance, 2)).told() == [2]
    await asyncio.wait_for(going, PATIENCE_S)
    assert first.told() == [1]
    (text,) = (await run(instance, 3)).told()
    assert text.startswith("Failed to process the request(s) for model 'm_0_0', message: ValueError: three\n\nAt:\n")


@pytest.mark.parametrize("config", [DECOUPLED, TENSORS])
async def test_a_request_that_its_model_lets_go_of_ends(load: Load, config: str) -> None:
    instance = await load(
        """
        def execute(self, requests):
            for request in requests:
                request.get_response_sender()
            if value_of(requests[0]) == 2:
                self.kept = [request.get_response_sender() for request in requests]
                threading.Timer(0.05, self.kept.clear).start()
            %s
    """
        % ("" if config is DECOUPLED else "return [None for _ in requests]"),
        config,
    )
    for value in (1, 2):
        if config is DECOUPLED:
            responses = await run(instance, value)
            told = responses.responses[0]
        else:
            async with asyncio.timeout(PATIENCE_S):
                told = list(await instance.execute_requests([request(value)]))
        assert told[0].error is not None
        assert told[0].error.code is ErrorCode.INTERNAL
        assert told[0].error.message == "the model let go of the request without a final response"


async def test_a_model_that_is_not_decoupled_answers_later_through_senders(load: Load) -> None:
    instance = await load(
        """
        def execute(self, requests):
            for request in requests[1:]:
                sender, value = request.get_response_sender(), value_of(request)
                threading.Timer(0.02, sender.send, [response(value), FINAL]).start()
            return [response(value_of(requests[0]))] + [None for _ in requests[1:]]
    """,
        TENSORS,
    )
    async with asyncio.timeout(PATIENCE_S):
        answers = await instance.execute_requests([request(value) for value in (1, 2, 3)])
    assert [float(answer.outputs[0].array().reshape(-1)[0]) for answer in answers] == [1, 2, 3]


async def test_none_without_a_sender_is_a_wrong_answer(load: Load) -> None:
    instance = await load("def execute(self, requests):\n    return [None]", TENSORS)
    (answer,) = await instance.execute_requests([request(1)])
    assert answer.error is not None
    assert answer.error.message.endswith(
        "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'NoneType'>'."
    )


async def test_a_cancel_is_seen_by_sender_and_request_after_execute_returned(load: Load) -> None:
    instance = await load("""
        def execute(self, requests):
            for request in requests:
                if value_of(request) == 1:
                    threading.Thread(target=self.until_cancelled, args=(request,)).start()
                else:
                    request.get_response_sender().send(response(0), FINAL)

        def until_cancelled(self, request):
            sender = request.get_response_sender()
            sender.send(response(float(sender.is_cancelled())))
            while not (request.is_cancelled() and sender.is_cancelled()):
                time.sleep(0.002)
            sender.send(response(1), FINAL)
    """)
    unwanted, responses = request(1), Responses(1)
    going = asyncio.ensure_future(instance.execute_stream([unwanted], responses))
    await asyncio.wait_for(responses.freed.wait(), PATIENCE_S)
    await responses.until(lambda: len(responses.responses[0]) == 1)
    await run(instance, 2)
    instance.cancel_requests([unwanted])
    await asyncio.wait_for(going, PATIENCE_S)
    assert responses.told() == [0, 1]


async def test_a_fast_model_waits_for_who_takes_its_responses(load: Load) -> None:
    instance = await load("""
        made = 0

        def execute(self, requests):
            threading.Thread(target=self.flood, args=(requests[0],)).start()

        def flood(self, request):
            sender = request.get_response_sender()
            big = np.zeros((1, 65536), np.float32)
            for number in range(200):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", big)]))
                type(self).made += 1
                print("made", type(self).made, flush=True)
            sender.send(flags=FINAL)
    """)
    responses = Responses(1)
    responses.room.clear()
    going = asyncio.ensure_future(instance.execute_stream([request(1)], responses))
    await responses.until(lambda: len(responses.responses[0]) > 0)

    def made() -> str:
        return instance._child.last_lines().splitlines()[-1] if instance._child.last_lines() else ""

    last = ""
    async with asyncio.timeout(PATIENCE_S):
        while not last or made() != last:  # 50 MiB in all; a few go into the socket's buffers
            last = made()
            await asyncio.sleep(0.2)
    assert 0 < int(last.split()[1]) < 40
    assert len(responses.responses[0]) < 10
    responses.room.set()
    await asyncio.wait_for(going, PATIENCE_S)
    assert len(responses.responses[0]) == 200


async def test_a_death_ends_every_call_with_open_senders(load: Load) -> None:
    instance = await load("""
        def execute(self, requests):
            value = value_of(requests[0])
            if value == 3:
                import os
                os._exit(7)
            self.kept = getattr(self, "kept", [])
            self.kept.append(requests[0].get_response_sender())
            self.kept[-1].send(response(value))
    """)
    calls = []
    for value in (1, 2):
        responses = Responses(1)
        calls.append(asyncio.ensure_future(instance.execute_stream([request(value)], responses)))
        await asyncio.wait_for(responses.freed.wait(), PATIENCE_S)
    calls.append(asyncio.ensure_future(instance.execute_stream([request(3)], Responses(1))))
    for call in calls:
        with pytest.raises(InstanceDied, match="exited with code 7"):
            await asyncio.wait_for(call, PATIENCE_S)


async def test_a_model_that_goes_on_answering_is_not_taken_for_one_that_hangs(load: Load) -> None:
    ceiling = ' parameters { key: "charonia.max_execution_s" value { string_value: "1.5" } }'
    instance = await load(
        """
        def execute(self, requests):
            sender = requests[0].get_response_sender()
            for number in range(20):
                time.sleep(0.1)
                sender.send(response(number))
            if value_of(requests[0]) == 2:
                time.sleep(60)
            sender.send(flags=FINAL)
    """,
        DECOUPLED + ceiling,
    )
    assert (await run(instance, 1)).told() == list(range(20))
    with pytest.raises(InstanceDied, match=r"it ran longer than 1\.5 s \(charonia\.max_execution_s\)"):
        await run(instance, 2)


async def test_nothing_is_kept_of_what_has_ended(load: Load) -> None:
    instance = await load("""
        def execute(self, requests):
            for request in requests:
                request.get_response_sender().send(response(1), FINAL)
    """)
    for _ in range(20):
        await run(instance, 1, 2)
    gc.collect()
    child = instance._child
    assert not (child._streams)
    assert not (child._heard_s)
    assert not (child._timers)
    assert not (instance._executing)


async def test_a_model_that_is_not_decoupled_frees_its_instance_too(load: Load) -> None:
    """The first request is answered by the second call of execute, which so must come before."""
    instance = await load(
        """
        kept = []

        def execute(self, requests):
            for request in requests:
                if value_of(request) == 1:
                    self.kept.append(request.get_response_sender())
            answers = [None if value_of(r) == 1 else response(value_of(r)) for r in requests]
            if answers[0] is not None:
                for sender in self.kept:
                    sender.send(response(9), FINAL)
                self.kept.clear()
            return answers
        """,
        TENSORS,
    )
    assert instance.answers_later
    first = Responses(2)
    going = asyncio.ensure_future(instance.execute_stream([request(1), request(3)], first))
    await asyncio.wait_for(first.freed.wait(), PATIENCE_S)
    assert (first.ended, first.told(1)) == ([False, True], [3])
    assert (await run(instance, 2)).told() == [2]
    await asyncio.wait_for(going, PATIENCE_S)
    assert first.told(0) == [9]


async def test_an_instance_whose_code_has_no_senders_does_not_answer_later(load: Load) -> None:
    assert not (await load("def execute(self, requests):\n    return []", TENSORS)).answers_later


@pytest.mark.parametrize("where", ["execute", "thread"])
async def test_a_sender_waits_until_more_is_wanted(load: Load, where: str) -> None:
    """S55: within its window a model sends, then it waits; a cancel lets it go."""
    instance = await load(
        """
        def execute(self, requests):
            for request in requests:
                work = (request.get_response_sender(), int(value_of(request)))
                if "WHERE" == "thread":
                    threading.Thread(target=self.answer, args=work, daemon=True).start()
                else:
                    self.answer(*work)

        def answer(self, sender, count):
            for number in range(count):
                if sender.is_cancelled():
                    break
                sender.send(response(number))
            sender.send(flags=FINAL)
    """.replace("WHERE", where)
    )
    asked, free = request(10, window=3), request(6)
    responses = Responses(2)
    call = asyncio.create_task(instance.execute_stream([asked, free] if where == "thread" else [asked], responses))
    await responses.until(lambda: len(responses.responses[0]) == 3)
    if where == "thread":
        await responses.until(lambda: responses.ended[1])
        assert len(responses.responses[1]) == 6, "the other one is not held back"
    assert not call.done()
    instance.allow_responses(asked, 5)
    await responses.until(lambda: len(responses.responses[0]) == 5)
    assert not responses.ended[0]
    instance.allow_responses(asked, 4)
    instance.cancel_requests([asked])
    await responses.until(lambda: responses.ended[0])
    assert responses.told(0)[:5] == [0, 1, 2, 3, 4]
    assert len(responses.responses[0]) <= 6
    async with asyncio.timeout(PATIENCE_S):
        await call
