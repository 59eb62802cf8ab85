"""Engines over a decoder without a model, requests for them, and what they answer when each runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from stub_decoder import StubDecoder
from stub_tokens import StubTokenizer

from charonia.generation.parameters import SamplingParameters
from charonia.generation.tokenizer import Tokenizer
from executors.generation.engine import GenerationRequest, TokenEvent, TokenLogprob
from executors.generation.step_scheduler import SchedulerSettings
from executors.generation.token_engine import TokenEngine

TOKENIZER = cast(Tokenizer, StubTokenizer())


@dataclass
class Answer:
    """All that the events of one request said."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    error: Exception | None = None
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)

    def take(self, event: TokenEvent) -> None:
        assert not self.finish
        assert self.error is None
        self.tokens += event.tokens
        self.text += event.text
        self.finish, self.error = event.finish, event.error
        self.logprobs += event.logprobs


def make_engine(
    decoder: StubDecoder | None = None, *, adapters: dict[str, str] | None = None, **settings: Any
) -> TokenEngine:
    decoder = decoder or StubDecoder(vocabulary=TOKENIZER.vocabulary)
    bounds = SchedulerSettings(**({"max_num_seqs": 8, "max_num_batched_tokens": 32} | settings))
    return TokenEngine(decoder, TOKENIZER, bounds, adapters=adapters or {})


def make_request(
    name: str,
    prompt: str | Sequence[int],
    *,
    adapter: str = "",
    priority: int = 0,
    emitted: Sequence[int] = (),
    **more: Any,
) -> GenerationRequest:
    tokens = TOKENIZER.encode(prompt, special=True) if isinstance(prompt, str) else prompt
    parameters = SamplingParameters(**({"seed": 7, "temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | more))
    return GenerationRequest(name.encode(), tokens, parameters, adapter, priority, emitted)


def run_all(engine: TokenEngine, requests: Sequence[GenerationRequest], *, at_once: bool = True) -> dict[str, Answer]:
    """The answers of all requests, which come together or one with each step."""
    answers = {request.key.decode(): Answer() for request in requests}
    waiting = list(requests)
    while waiting or engine.load().running or engine.load().waiting:
        for _ in range(len(waiting) if at_once else 1):
            if waiting:
                engine.admit(waiting.pop(0))
        for event in engine.step():
            answers[event.key.decode()].take(event)
    return answers


def run_alone(request: GenerationRequest, **more: Any) -> Answer:
    return run_all(make_engine(**more), [request])[request.key.decode()]
