"""Response senders of python models, decoupled and not, in real model processes (P4, P11)."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from python_instances import IDENTITY, Load
from python_senders import DECOUPLED, PATIENCE_S, Responses, loading, request, run

from charonia.backend import StreamingInstance
from charonia.errors import ErrorCode


@pytest.fixture
async def load(tmp_path: Path) -> AsyncIterator[Load]:
    async with loading(tmp_path) as load:
        yield load


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


async def test_a_response_that_cannot_be_sent_is_an_error_of_its_request(load: Load) -> None:
    instance = await load("""
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                parameters = {"k": 1 << 64} if value_of(request) else {}
                sender.send(pb_utils.InferenceResponse(response(0).output_tensors(), parameters=parameters))
                sender.send(response(1), FINAL)
    """)
    responses = await run(instance, 0, 1)
    assert responses.told(0) == [0, 1]
    refused, last = responses.told(1)
    assert refused.startswith("Failed to process the request for model '")
    assert "message: response parameter 'k' is an int out of range" in refused
    assert last == 1


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
        IDENTITY,
        "sender.send(response(1))\nsender.send(response(2))",
        "Unable to send response. Non-decoupled model cannot send more than one response.",
    ),
    (
        IDENTITY,
        "sender.send(flags=FINAL)",
        "Unable to send response. Non-decoupled model cannot send complete final before sending a response.",
    ),
    (
        IDENTITY,
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
        ("return []", "Python model 'm_0_0' is using the decoupled mode and the execute function must return None."),
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


@pytest.mark.parametrize("config", [DECOUPLED, IDENTITY])
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
        IDENTITY,
    )
    async with asyncio.timeout(PATIENCE_S):
        answers = await instance.execute_requests([request(value) for value in (1, 2, 3)])
    assert [float(answer.outputs[0].array().reshape(-1)[0]) for answer in answers] == [1, 2, 3]


@pytest.mark.parametrize("returned", ["None", "[None] * len(requests)"])
@pytest.mark.parametrize("taken", ["in execute", "later"])
async def test_execute_may_leave_all_answers_to_senders(load: Load, returned: str, taken: str) -> None:
    take = "[request.get_response_sender() for request in requests]"
    now, later = (take, "taken") if taken == "in execute" else ("requests", "[r.get_response_sender() for r in taken]")
    instance = await load(
        f"""
        def execute(self, requests):
            values = [value_of(request) for request in requests]
            threading.Timer(0.02, self.answer, ({now}, values)).start()
            return {returned}

        def answer(self, taken, values):
            for sender, value in zip({later}, values):
                sender.send(response(value), FINAL)
    """,
        IDENTITY,
    )
    for values in ((1, 2), (3,)):
        async with asyncio.timeout(PATIENCE_S):
            answers = await instance.execute_requests([request(value) for value in values])
        assert [float(answer.outputs[0].array().reshape(-1)[0]) for answer in answers] == list(values)


async def test_none_of_a_model_that_takes_no_sender_ends_the_request(load: Load) -> None:
    instance = await load(
        """
        def execute(self, requests):
            if value_of(requests[0]) == 2:
                return [response(2)]
            return None  # of the code, only this comment mentions get_response_sender
    """,
        IDENTITY,
    )
    for value, error in ((1, "the model let go of the request without a final response"), (2, None)):
        async with asyncio.timeout(PATIENCE_S):
            (answer,) = await instance.execute_requests([request(value)])
        assert (answer.error and answer.error.message) == error


async def test_none_without_a_sender_is_a_wrong_answer(load: Load) -> None:
    instance = await load("def execute(self, requests):\n    return [None]", IDENTITY)
    (answer,) = await instance.execute_requests([request(1)])
    assert answer.error is not None
    assert answer.error.message.endswith(
        "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'NoneType'>'."
    )
