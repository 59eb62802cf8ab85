"""Requests over an engine in a thread: tensors, flow, cancellation, resumption, death."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
from generation_bench import TOKENIZER, make_engine
from stub_decoder import StubDecoder
from text_calls import Call, ask, model_request, output, serving

from charonia.backend import (
    CancellableInstance,
    InstanceDied,
    ModelResponse,
    SelfCheckingInstance,
    StreamingInstance,
    WindowedInstance,
)
from charonia.errors import Cancelled, InvalidArgument
from executors.generation.engine import StepInput
from executors.generation.token_engine import TokenEngine


def decoder(**more: int) -> StubDecoder:
    return StubDecoder(vocabulary=TOKENIZER.vocabulary, **more)


def names(response: ModelResponse) -> list[str]:
    return [tensor.name for tensor in response.outputs]


def values(response: ModelResponse) -> list[tuple[str, tuple[int, ...], bytes]]:
    return [(tensor.name, tensor.shape, bytes(tensor.data)) for tensor in response.outputs]


class Gate:
    """Lets a decoder make its steps one by one, so that a test decides what happens between them."""

    def __init__(self, stub: StubDecoder) -> None:
        self.steps = threading.Semaphore(0)
        stub.before_step = self._wait

    def _wait(self, step: StepInput) -> None:
        assert self.steps.acquire(timeout=30)

    def open(self, count: int = 1) -> None:
        self.steps.release(count)


async def admitted(engine: TokenEngine, count: int) -> None:
    """Wait until the engine has so many requests."""
    while len(engine._states) < count:
        await asyncio.sleep(0)


async def test_a_stream_has_a_response_for_each_step() -> None:
    async with serving() as instance:
        assert isinstance(instance, StreamingInstance)
        assert isinstance(instance, WindowedInstance)
        assert isinstance(instance, CancellableInstance)
        assert isinstance(instance, SelfCheckingInstance)
        assert await instance.check_health()
        call = await ask(instance, "hello", ignore_eos=True)
        assert call.freed.is_set()
        assert 1 <= len(call.responses) <= 8
        assert all(names(response) == ["text_output"] for response in call.responses)
        assert instance.open == 0


async def test_a_stream_in_parts_of_several_tokens() -> None:
    stub = decoder()
    gate = Gate(stub)
    async with serving(make_engine(stub)) as instance:
        wanted = {"return_num_output_tokens": True, "stream_interval": 3}
        call = Call(model_request("hello", ignore_eos=True, inputs=wanted)).start(instance)
        for parts in (1, 2):
            gate.open(3)
            await call.until(parts)
        gate.open(2)
        await call.end()
        assert call.values("num_output_tokens") == [3, 3, 2]
        gate.open(100)
        single = await ask(instance, "hello", ignore_eos=True)
        assert call.text == single.text
        # parts that an earlier attempt gave are given again, and the next one begins after them
        given = [call.responses[0].progress]
        again = await ask(instance, "hello", ignore_eos=True, inputs=wanted, progress=given)
        assert again.values("num_output_tokens")[0] == 3
        assert again.text == single.text
        refused = await ask(instance, "hello", inputs={"stream_interval": 0})
        assert isinstance(refused.error, InvalidArgument)
        assert refused.error.message == "'stream_interval' must be an integer of at least 1"


async def test_log_probabilities_of_a_prompt() -> None:
    """In the first response, and again where another attempt gives that one again."""
    async with serving() as instance:
        inputs = {"return_prompt_logprobs": True, "return_token_ids": True}
        call = await ask(instance, "hello", ignore_eos=True, prompt_logprobs=2, inputs=inputs)
        first, *rest = call.values("prompt_logprobs")
        assert set(rest) <= {"null"}
        rows = json.loads(first)
        prompt = TOKENIZER.encode("hello", special=True)
        assert rows[0] is None
        assert [next(iter(row)) for row in rows[1:]] == [str(token) for token in prompt[1:]]
        assert all(2 <= len(row) <= 3 for row in rows[1:])
        assert set(rows[1][str(prompt[1])]) == {"logprob", "rank", "decoded_token"}
        if call.responses[0].progress:
            given = [call.responses[0].progress]
            again = await ask(instance, "hello", ignore_eos=True, prompt_logprobs=2, inputs=inputs, progress=given)
            assert values(again.responses[0]) == values(call.responses[0])
            assert set(again.values("prompt_logprobs")[1:]) <= {"null"}
        without = await ask(instance, "hello", prompt_logprobs=2, inputs={"return_token_ids": True})
        assert names(without.responses[0]) == ["text_output", "token_ids"]


async def test_responses_of_a_step_are_sent_together() -> None:
    """Where the stream can hold them; here both calls have one connection, as in a process of the model's own."""
    sent: list[list[Call]] = []
    is_held = False

    class Held(Call):
        @contextmanager
        def hold(self) -> Iterator[None]:
            nonlocal is_held
            sent.append([])
            is_held = True
            try:
                yield
            finally:
                is_held = False

        def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
            assert is_held
            sent[-1].append(self)
            super().send(index, response, final=final)

    stub = decoder()
    gate = Gate(stub)
    engine = make_engine(stub)
    async with serving(engine) as instance:
        calls = [Held(model_request(text, ignore_eos=True)).start(instance) for text in ("hello", "there")]
        await admitted(engine, 2)
        gate.open(100)
        for call in calls:
            await call.end()
    assert sum(map(len, sent)) == sum(len(call.responses) for call in calls)
    assert any(set(step) == set(calls) for step in sent)


async def test_an_answer_in_one_piece_has_the_prompt_before_it() -> None:
    async with serving() as instance:
        stream = await ask(instance, "hello", ignore_eos=True)
        whole = await ask(instance, "hello", ignore_eos=True, inputs={"stream": False})
        assert len(whole.responses) == 1
        assert whole.text == "hello" + stream.text
        without = await ask(
            instance, "hello", ignore_eos=True, inputs={"stream": None, "exclude_input_in_output": True}
        )
        assert without.text == stream.text


async def test_a_stream_with_its_prompt_is_refused() -> None:
    async with serving() as instance:
        call = await ask(instance, "hello", inputs={"exclude_input_in_output": False})
        assert isinstance(call.error, InvalidArgument)
        assert call.error.message == (
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
        )


async def test_the_outputs_that_are_asked_for() -> None:
    wanted = {
        f"return_{name}": True
        for name in (
            *("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens"),
            "token_ids",
        )
    }
    async with serving() as instance:
        call = await ask(instance, "hello", ignore_eos=True, logprobs=2, inputs=wanted)
        assert call.values("finish_reason") == ["None"] * (len(call.responses) - 1) + ["length"]
        assert call.values("num_input_tokens") == [5] * len(call.responses)
        tokens = [token for each in call.values("token_ids") for token in each]
        assert len(tokens) == 8
        assert [len(each) for each in call.values("token_ids")] == call.values("num_output_tokens")
        candidates = [one for each in call.values("logprobs") for one in json.loads(each)]
        assert [next(iter(one)) for one in candidates] == [str(token) for token in tokens]
        assert all(2 <= len(one) <= 3 for one in candidates)
        first = candidates[0][str(tokens[0])]
        assert first["decoded_token"] == TOKENIZER.token_bytes(tokens[0]).decode()
        total = sum(one[str(token)]["logprob"] for one, token in zip(candidates, tokens, strict=True))
        assert call.values("cumulative_logprob")[-1] == pytest.approx(total, rel=1e-5)
        plain = await ask(instance, "hello", inputs=wanted)
        assert set(plain.values("logprobs")) == {"null"}
        assert math.isnan(plain.values("cumulative_logprob")[0])


async def test_tokens_may_be_given_in_place_of_a_text() -> None:
    ids = {"prompt_token_ids": TOKENIZER.encode("hello", special=True)}
    async with serving() as instance:
        by_text = await ask(instance, "hello", ignore_eos=True, inputs={"stream": False})
        by_ids = await ask(instance, None, ignore_eos=True, inputs={"stream": False, **ids})
        assert by_ids.text == by_text.text


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": None}, "expected 'text_input' or 'prompt_token_ids'"),
        ({"sampling_parameters": "[]"}, ""),
        ({"sampling_parameters": json.dumps({"max_tokens": -5})}, "max_tokens"),
        ({"sampling_parameters": json.dumps({"lora_name": "x"})}, "LoRA feature is not enabled."),
        ({"text_input": "a" * 300}, "more than 256 tokens"),
        ({"stream": 7}, "expected a BOOL in 'stream'"),
        ({"prompt_token_ids": [5, 9999]}, "token ids of a prompt"),
    ],
)
async def test_a_wrong_request_is_refused_alone(inputs: dict[str, Any], message: str) -> None:
    async with serving() as instance:
        good = Call(model_request("hello")).start(instance)
        call = await ask(instance, "hello", inputs=inputs)
        assert isinstance(call.error, InvalidArgument)
        assert message in call.error.message
        assert (await good.end()).error is None


async def test_several_requests_of_one_call() -> None:
    class Several(Call):
        def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
            assert index not in done
            if final:
                done.add(index)
            self.final = len(done) == 3

    done: set[int] = set()
    async with serving() as instance:
        requests = [model_request("hello"), model_request("hi", max_tokens=-1), model_request("you")]
        await instance.execute_stream(requests, Several(requests[0]))
        assert done == {0, 1, 2}


async def test_a_cancelled_request_frees_its_slot_and_blocks_in_the_next_step() -> None:
    stub = decoder()
    gate, engine = Gate(stub), make_engine(stub)
    async with serving(engine) as instance:
        call = Call(model_request("hello", max_tokens=200, ignore_eos=True)).start(instance)
        other = Call(model_request("hi", max_tokens=5, ignore_eos=True)).start(instance)
        gate.open(2)
        await call.until(1)
        instance.cancel_requests([call.request])
        instance.cancel_requests([call.request])
        await call.end()
        assert isinstance(call.error, Cancelled)
        gate.open(20)
        await other.end()
    assert engine.load().running == 0
    assert engine.scheduler.pool.available == 256
    assert stub.steps < 20


async def test_a_thousand_cancels_leave_nothing() -> None:
    engine = make_engine(decoder(blocks=60), max_num_seqs=6)
    rng = random.Random(5)
    tasks, threads = len(asyncio.all_tasks()), threading.active_count()
    async with serving(engine, max_open=24) as instance:

        async def one(number: int) -> None:
            request = model_request("ab" * rng.randrange(1, 30), max_tokens=rng.randrange(1, 60), ignore_eos=True)
            call = Call(request).start(instance)
            wanted = rng.randrange(8)
            if rng.random() < 0.3:
                await asyncio.sleep(0)
            else:
                until = asyncio.ensure_future(call.until(wanted))
                assert call.task is not None
                await asyncio.wait({until, call.task}, return_when=asyncio.FIRST_COMPLETED)
                until.cancel()
            if number % 10 == 0:
                assert call.task is not None
                call.task.cancel()  # its executor gave the batch up
                await asyncio.gather(call.task, return_exceptions=True)
            else:
                instance.cancel_requests([request])
                await call.end()

        for begin in range(0, 1000, 50):
            await asyncio.gather(*(one(number) for number in range(begin, begin + 50)))
        assert instance.open == 0
        await ask(instance, "hello")  # the engine takes what it is told in order
        assert len(asyncio.all_tasks()) == tasks
    assert engine._states == {}
    engine.scheduler.pool.check()
    assert engine.load().free_blocks == 60
    assert engine.load().running + engine.load().waiting == 0
    assert threading.active_count() < threads + 40  # asyncio's own are at most 32


async def test_a_request_that_is_prepared_in_a_thread_may_be_given_up() -> None:
    engine = make_engine(decoder(context=6000, blocks=3000))
    async with serving(engine) as instance:
        for cancel in (False, True):
            request = model_request("ab" * 2500, max_tokens=500, ignore_eos=True)
            call = Call(request).start(instance)
            await call.freed.wait()
            assert call.task is not None
            if cancel:
                instance.cancel_requests([request])
                await call.end()
            else:
                call.task.cancel()
                await asyncio.gather(call.task, return_exceptions=True)
        await ask(instance, "hello")
        async with asyncio.timeout(60):
            while engine._states or instance.load is None or instance.load.running or instance.load.waiting:
                await asyncio.sleep(0)  # its thread may give it to the engine, and take it back, only now


async def test_a_slow_reader_gets_fewer_responses_and_holds_nobody_up() -> None:
    stub = decoder()
    gate, engine = Gate(stub), make_engine(stub)
    async with serving(engine) as instance:
        slow = Call(model_request("hello", max_tokens=20, ignore_eos=True, inputs={"return_token_ids": True}))
        slow.full = True
        slow.start(instance)
        quick = Call(model_request("hi", max_tokens=10, ignore_eos=True)).start(instance)
        await admitted(engine, 2)
        gate.open(12)
        await quick.end()
        assert slow.responses == []
        slow.full = False
        slow.capacity.set()
        await slow.until(1)
        assert len(output(slow.responses[0], "token_ids")) >= 9
        gate.open(20)
        await slow.end()
        assert sum(len(each) for each in slow.values("token_ids")) == 20


async def test_a_response_that_cannot_be_sent_ends_its_request_only() -> None:
    class Broken(Call):
        def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
            raise OSError("gone")

    stub = decoder()
    gate, engine = Gate(stub), make_engine(stub)
    async with serving(engine) as instance:
        broken = Broken(model_request("hello", max_tokens=100, ignore_eos=True)).start(instance)
        good = Call(model_request("hi", max_tokens=5, ignore_eos=True)).start(instance)
        await admitted(engine, 2)
        gate.open(20)
        await good.end()
        assert broken.task is not None
        await broken.task
        assert instance.open == 0
        gate.open(200)  # the engine may have begun a step of it before it heard that it is over


async def test_no_more_responses_than_are_wanted() -> None:
    stub = decoder()
    gate = Gate(stub)
    async with serving(make_engine(stub)) as instance:
        call = Call(model_request("hello", window=2, ignore_eos=True))
        call.start(instance)
        for count in (1, 2):
            gate.open()
            await call.until(count)
        gate.open(30)
        other = await ask(instance, "hello", ignore_eos=True)
        assert len(call.responses) == 2
        instance.allow_responses(call.request, 3)
        await call.end()
        assert len(call.responses) == 3
        assert call.text == other.text


async def test_the_next_batch_comes_when_there_is_room() -> None:
    stub = decoder()
    gate = Gate(stub)
    async with serving(make_engine(stub), max_open=2) as instance:
        calls = [Call(model_request("hello", max_tokens=3, ignore_eos=True)).start(instance) for _ in range(2)]
        await calls[0].freed.wait()
        assert not calls[1].freed.is_set()
        gate.open(100)
        await calls[1].freed.wait()
        for call in calls:
            await call.end()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_what_was_given_is_given_again_and_continued(temperature: float) -> None:
    inputs = {f"return_{name}": True for name in ("logprobs", "cumulative_logprob", "token_ids", "num_output_tokens")}
    sampling = {"max_tokens": 12, "logprobs": 1, "temperature": temperature, "ignore_eos": True, "seed": None}
    stub = decoder()
    async with serving(make_engine(stub)) as instance:
        whole = await ask(instance, "hello", inputs=inputs, **sampling)
        progress = [response.progress for response in whole.responses[:-1]]
        assert all(progress)
        assert not whole.responses[-1].progress
        prompt = len(TOKENIZER.encode("hello", special=True))
        assert whole.responses[0].tokens > prompt
        assert sum(one.tokens for one in whole.responses) == prompt + 12
        for count in range(1, len(progress) + 1):
            again = await ask(instance, "hello", inputs=inputs, progress=progress[:count], **sampling)
            assert [one.progress for one in again.responses[:count]] == progress[:count]
            assert [values(one) for one in again.responses[:count]] == [values(one) for one in whole.responses[:count]]
            assert again.text == whole.text
            assert sum(one.tokens for one in again.responses) == prompt + 12
            assert list(chain(*again.values("token_ids"))) == list(chain(*whole.values("token_ids")))
            assert again.values("cumulative_logprob")[-1] == pytest.approx(whole.values("cumulative_logprob")[-1])


async def test_a_stop_string_over_the_break_of_two_attempts() -> None:
    async with serving() as instance:
        free = await ask(instance, "hello", max_tokens=30, ignore_eos=True)
        stop = free.text[10:14]
        whole = await ask(instance, "hello", max_tokens=30, ignore_eos=True, stop=stop)
        assert whole.text == free.text[: free.text.index(stop)]
        progress = [response.progress for response in whole.responses[:-1]]
        for count in range(1, len(progress) + 1):
            again = await ask(instance, "hello", max_tokens=30, ignore_eos=True, stop=stop, progress=progress[:count])
            assert again.text == whole.text


async def test_progress_that_cannot_be_read_is_refused() -> None:
    async with serving() as instance:
        call = await ask(instance, "hello", progress=[b"x"])
        assert isinstance(call.error, InvalidArgument)


async def test_a_dead_engine_is_a_dead_instance() -> None:
    stub = decoder()

    def fail(step: StepInput) -> None:
        raise MemoryError("no more")

    async with serving(make_engine(stub)) as instance:
        stub.before_step = fail
        calls = [Call(model_request("hello")).start(instance) for _ in range(2)]
        for call in calls:
            assert call.task is not None
            with pytest.raises(InstanceDied, match="MemoryError: no more") as caught:
                await call.task
            assert caught.value.shared
            assert not caught.value.blameless
        assert not await instance.check_health()
        with pytest.raises(InstanceDied):
            await instance.execute_stream([model_request("hello")], calls[0])
        assert instance.open == 0
    assert stub.closed


async def test_closing_ends_calls_and_the_engine() -> None:
    stub = decoder()
    gate = Gate(stub)
    async with serving(make_engine(stub)) as instance:
        call = Call(model_request("hello", max_tokens=200, ignore_eos=True)).start(instance)
        gate.open(100)  # not so many that the text may end first
        await call.until(1)
        closing = asyncio.ensure_future(instance.close_instance())
        await asyncio.sleep(0)
        gate.open(1000)
        await closing
        assert call.task is not None
        with pytest.raises(InstanceDied) as caught:
            await call.task
        assert caught.value.blameless
        assert stub.closed


async def test_levels_reach_the_engine() -> None:
    stub = decoder()
    gate, engine = Gate(stub), make_engine(stub, max_num_seqs=1)
    async with serving(engine) as instance:
        low = model_request("hello", max_tokens=50, ignore_eos=True)
        low.priority = 1
        below = Call(low).start(instance)
        gate.open(3)
        await below.until(1)
        above = Call(model_request("hi", max_tokens=3, ignore_eos=True)).start(instance)
        await admitted(engine, 2)
        gate.open(6)
        await above.end()
        assert not below.final
        gate.open(200)
        await below.end()
