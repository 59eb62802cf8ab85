"""Texts while their executor is killed again and again: each token once, and the same text as undisturbed.

Real processes over a real log, with a decoder that has no model; the test plays the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_side import GatewaySide

from charonia.calls.waiters import Visible
from charonia.generation.parameters import parse_sampling
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord
from executors.generation.engine import GenerationRequest

pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")
import text_backend

pytestmark = pytest.mark.integration

KILLS = 4
SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 60}},
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
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([path, os.environ.get("PYTHONPATH", "")]))
    text_backend.write_model(tmp_path / "models", "near", 20)
    isolated = 'parameters { key: "charonia.isolation" value { string_value: "process" } }'
    text_backend.write_model(tmp_path / "models", "apart", 20, isolated)
    async with Stack.over(fresh_log_url, tmp_path, tmp_path / "models") as stack:
        yield stack


@pytest.mark.parametrize("model", ["near", "apart"])
async def test_texts_are_the_same_however_often_their_executor_is_killed(stack: Stack, model: str) -> None:
    _, executor = await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    structured = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 300}
    endless = {"max_tokens": 300, "ignore_eos": True}  # longer than all kills take, on a busy machine too
    texts = [await stack.ask(model, f"greedy {n}", temperature=0, seed=n, **endless) for n in range(5)]
    texts += [await stack.ask(model, f"seeded {n}", temperature=1.0, seed=n, **endless) for n in range(5)]
    texts += [await stack.ask(model, f"schema {n}", temperature=1.0, seed=n, **structured) for n in range(3)]
    stops = {"stop": ["the zz"], **endless}
    texts += [await stack.ask(model, f"stops {n}", temperature=1.0, seed=n, **stops) for n in range(2)]
    for _ in range(KILLS):
        seen = {text: len(text.tokens) for text in texts}
        await stack.until(lambda seen=seen: all(text.ended or len(text.tokens) > seen[text] for text in texts))
        executor.kill()
        executor = await stack.start("executor")
    for text in texts:
        await stack.until(lambda text=text: text.ended)
        assert text.error is None, text.error
        assert (text.tokens, text.text, text.finish) == text.undisturbed()
    assert max(len(text.attempts) for text in texts) >= KILLS + 1  # more where a busy machine misses a heartbeat
    schemas = [text for text in texts if text.prompt.startswith("schema") and text.finish == "stop"]
    assert all(len(json.loads(text.text)["words"]) >= 60 for text in schemas)
