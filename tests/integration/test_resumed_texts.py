"""Texts while their executor is killed again and again: each token once, and the same text as undisturbed.

Real processes over a real log, with a decoder that has no model; the test plays the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import role_processes as roles
import text_backend
from gateway_side import GatewaySide

from charonia.calls.request_endings import end_requests
from charonia.calls.waiters import Visible
from charonia.facts.jobs import JobState
from charonia.generation.parameters import parse_sampling
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord
from executors.generation.engine import GenerationRequest

pytestmark = pytest.mark.integration

KILLS = int(os.environ.get("CHARONIA_TEST_KILLS", "4"))
CANCELS = int(os.environ.get("CHARONIA_TEST_CANCELS", "60"))
STREAMS = 16
LENGTH = max(300, 20 * KILLS)
"""Tokens of a text: more than steps of half a second generate until the last kill, on a busy machine too."""
WORDS = LENGTH // 5
STEP_TOKENS = max(text_backend.STEP_TOKENS, STREAMS * LENGTH)
SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": WORDS}},
    "required": ["words"],
    "additionalProperties": False,
}


class Text:
    """What the reader of one request sees."""

    def __init__(self, prompt: str, sampling: dict[str, Any]) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.text, self.finish = "", ""
        self.tokens: list[int] = []
        self.attempts: set[int] = set()
        self.ended = False
        self.error: Exception | None = None
        self._visible = Visible(repeatable=True)

    def take(self, response: ResponseRecord) -> None:
        self.ended |= response.final
        self.error = response.error or self.error
        if response.place is None or not self._visible.admits(response.place, final=response.final):
            return
        self.attempts.add(response.place[0])
        for tensor in response.outputs:
            values = tensor.array().reshape(-1).tolist()
            if tensor.name == "token_ids":
                self.tokens += values
            elif tensor.name == "text_output":
                self.text += values[0].decode()
            elif tensor.name == "finish_reason":
                self.finish = values[0].decode()

    def undisturbed(self) -> tuple[list[int], str, str]:
        """The same request in an engine here."""
        engine = text_backend.make_text_engine()
        prompt = text_backend.byte_level().encode(self.prompt, special=True)
        parameters = parse_sampling(
            self.sampling, context=engine.context, prompt_tokens=len(prompt), seed=lambda: pytest.fail("no seed")
        )
        engine.admit(GenerationRequest(b"a", prompt, parameters))
        tokens: list[int] = []
        text = finish = ""
        while not finish:
            for event in engine.step():
                tokens += event.tokens
                text += event.text
                finish = event.finish
        return tokens, text, finish


class Stack(GatewaySide):
    """Reads the text of each request."""

    PATIENCE_S = 120.0

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.texts: dict[bytes, Text] = {}

    def take(self, response: ResponseRecord) -> None:
        self.texts[response.id].take(response)

    async def ask(self, model: str, prompt: str, **sampling: Any) -> Text:
        request_id = (len(self.texts) + 1).to_bytes(16, "big")
        self.texts[request_id] = text = Text(prompt, sampling)
        flags = {name: np.array([True]) for name in ("stream", "return_token_ids", "return_finish_reason")}
        strings = {"text_input": prompt, "sampling_parameters": json.dumps(sampling)}
        tensors = [Tensor.of(name, array) for name, array in flags.items()]
        tensors += [Tensor.of(name, np.array([value.encode()], object)) for name, value in strings.items()]
        await self.send(model, request_id, tensors, {})
        return text


@pytest.fixture
async def stack(fresh_log_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    path = text_backend.install(tmp_path / "plugin")
    monkeypatch.setenv("STUBTEXT_HURRY", str(tmp_path / "hurry"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([path, os.environ.get("PYTHONPATH", "")]))
    # an executor reads all prompts and tokens so far in its first step: more kills are not more tokens
    text_backend.write_model(tmp_path / "models", "near", 500, step_tokens=STEP_TOKENS)
    text_backend.write_model(tmp_path / "models", "quick", 20)
    isolated = 'parameters { key: "charonia.isolation" value { string_value: "process" } }'
    text_backend.write_model(tmp_path / "models", "apart", 500, isolated, STEP_TOKENS)
    async with Stack.over(fresh_log_url, tmp_path, tmp_path / "models") as stack:
        yield stack


async def ask_all(stack: Stack, model: str) -> list[Text]:
    """As many texts as the engine has slots: greedy, seeded, of a schema, with a stop string."""
    endless = {"max_tokens": LENGTH, "ignore_eos": True}
    structured = {"structured_outputs": {"json": SCHEMA}, "max_tokens": LENGTH}
    kinds: list[tuple[str, int, dict[str, Any]]] = [
        ("greedy", 5, {"temperature": 0, **endless}),
        ("seeded", 5, {"temperature": 1.0, **endless}),
        ("schema", 4, {"temperature": 1.0, **structured}),
        ("stops", 2, {"temperature": 1.0, "stop": ["the zz"], **endless}),
    ]
    asked = [
        await stack.ask(model, f"{name} {number}", seed=number, **sampling)
        for name, count, sampling in kinds
        for number in range(count)
    ]
    assert len(asked) == STREAMS
    return asked


async def each_goes_on(stack: Stack, texts: list[Text]) -> None:
    """Wait until each text has another token, or has failed."""
    seen = {text: len(text.tokens) for text in texts}
    await stack.until(lambda: all(text.ended or len(text.tokens) > seen[text] for text in texts))


async def are_undisturbed(stack: Stack, texts: list[Text]) -> None:
    """All still run, and with quick steps now each ends as it does in an engine that nothing disturbs."""
    assert not any(text.ended for text in texts), "the disturbances take less time than so many slow steps"
    (stack.directory / "hurry").touch()
    for text in texts:
        await stack.until(lambda text=text: text.ended)
        assert text.error is None, text.error
        assert (text.tokens, text.text, text.finish) == text.undisturbed()
    schemas = [text for text in texts if text.prompt.startswith("schema") and text.finish == "stop"]
    assert all(len(json.loads(text.text)["words"]) >= WORDS for text in schemas)


@pytest.mark.parametrize("model", ["near", "apart"])
@pytest.mark.long
async def test_texts_are_the_same_however_often_their_executor_is_killed(stack: Stack, model: str) -> None:
    _, executor = await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    texts = await ask_all(stack, model)
    for _ in range(KILLS):
        await each_goes_on(stack, texts)
        executor.kill()
        executor = await stack.start("executor")
    await are_undisturbed(stack, texts)
    assert all(len(text.attempts) >= KILLS + 1 for text in texts)  # more where a busy machine misses a heartbeat


@pytest.mark.long
async def test_texts_are_the_same_while_their_executors_are_replaced(stack: Stack) -> None:
    """A rolling upgrade: what outlasts the drain of an executor goes on at its successor."""
    brief = "--exit-timeout-secs=1"
    _, executor = await asyncio.gather(stack.start("batcher"), stack.start("executor", brief))
    texts = await ask_all(stack, "apart")
    for _ in range(2):
        await each_goes_on(stack, texts)
        successor = await stack.start("executor", brief)
        executor.process.terminate()
        await asyncio.to_thread(executor.process.wait)
        executor = successor
    await are_undisturbed(stack, texts)
    assert all(len(text.attempts) > 1 for text in texts)


async def test_cancelled_texts_leave_no_slot_and_no_block(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while they wait for a slot, while their prompts are read, and after some tokens."""
    counts = tmp_path / "counts"
    counts.mkdir()
    monkeypatch.setenv("STUBTEXT_COUNTS", str(counts))
    await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    instants = random.Random(7)
    running: set[asyncio.Task[None]] = set()

    async def cancelled(number: int) -> None:
        text = await stack.ask("quick", f"{number} " * instants.randrange(1, 100), max_tokens=3000, ignore_eos=True)
        (request_id,) = (one for one, other in stack.texts.items() if other is text)
        tokens = instants.choice((0, 0, 1, 2, 5))
        await stack.until(lambda: len(text.tokens) >= tokens)
        (won,) = await end_requests(stack.log, "quick", [request_id], JobState.CANCELLED)
        assert won

    for number in range(CANCELS):
        running.add(asyncio.create_task(cancelled(number)))
        if len(running) == 2 * STREAMS:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
    await asyncio.gather(*running)
    await stack.left_nothing("quick", [*stack.texts])
    last = await stack.ask("quick", "the last", temperature=0, seed=1, max_tokens=5, ignore_eos=True)
    await stack.until(lambda: last.ended)
    assert (last.tokens, last.text, last.finish) == last.undisturbed()

    def held() -> dict[str, int]:
        (path,) = counts.glob("*.json")
        return {name: json.loads(path.read_text())[name] for name in ("running", "waiting", "blocks")}

    nothing = {"running": 0, "waiting": 0, "blocks": 0}
    await asyncio.to_thread(roles.until, "the engine holds nothing", lambda: held() == nothing)
