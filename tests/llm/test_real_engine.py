"""The engine over a real model: against the library's own loop, in company, after an interruption, with grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import generation_bench as bench
import numpy as np
import openvino
import openvino_genai
import pytest

from charonia.errors import InvalidArgument
from charonia.generation.parameters import SamplingParameters, StructuredOutput
from executors.backends.llm.decoder import OpenVinoDecoder
from executors.generation.engine import GenerationRequest
from executors.generation.step_scheduler import SchedulerSettings
from executors.generation.token_engine import TokenEngine

PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nWrite a short poem about rain.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was a small dog who",
    "def fibonacci(n):\n",
    "The three most important inventions of the last century were",
    "Q: What is 12 times 12?\nA:",
)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
NEAR = 1.5
"""Logits nearer than this may change their order: activations are rounded to eight bits, in other kernels otherwise."""


class Real:
    """Makes engines over one decoder, and requests."""

    def __init__(self, decoder: OpenVinoDecoder, model: Any) -> None:
        self.decoder = decoder
        self.model = model

    def engine(self, **settings: Any) -> TokenEngine:
        bounds = {"max_num_seqs": 16, "max_num_batched_tokens": 256} | settings
        return TokenEngine(
            self.decoder, self.model.tokenizer, SchedulerSettings(**bounds), adapters=self.model.adapters
        )

    def request(
        self, name: str, prompt: str, emitted: Sequence[int] = (), adapter: str = "", **said: Any
    ) -> GenerationRequest:
        parameters = SamplingParameters(**({"seed": 11, "temperature": 0.0, "max_tokens": 40} | said))
        ids = self.model.tokenizer.encode(prompt, special=True)
        return GenerationRequest(name.encode(), ids, parameters, adapter, 0, emitted)

    def run(self, *requests: GenerationRequest, at_once: bool = True, **settings: Any) -> dict[str, bench.Answer]:
        return bench.run_all(self.engine(**settings), requests, at_once=at_once)


@pytest.fixture(scope="module")
def real(decoder: OpenVinoDecoder, model: Any) -> Real:
    return Real(decoder, model)


def mix(real: Real) -> dict[str, GenerationRequest]:
    """Requests of all kinds: greedy, seeded, with penalties, a schema and an adapter."""
    structured = StructuredOutput("json", SCHEMA)
    pattern = StructuredOutput("regex", r'\{"name": "[a-z]{1,10}", "age": [0-9]{1,2}\}')
    kinds: Mapping[str, Mapping[str, Any]] = {
        "greedy": {},
        "seeded": {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        "penalties": {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        "json": {"temperature": 0.9, "seed": 7, "structured": structured},
        "regex": {"temperature": 0.9, "seed": 9, "structured": pattern, "max_tokens": 40},
        "adapter": {"adapter": "two", "temperature": 0.5, "seed": 8},
    }
    return {
        name: real.request(name, PROMPTS[at], **{"max_tokens": 24 + at, **said})
        for at, (name, said) in enumerate(kinds.items())
    }


def test_greedy_is_what_the_library_says(real: Real) -> None:
    """Token by token, but where two candidates are nearer than rounding: there the library's is the other one."""
    settings = openvino_genai.SchedulerConfig()
    settings.num_kv_blocks, settings.max_num_batched_tokens = 64, 256
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(real.model.directory), settings, "CPU", {}, {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}
    )
    wanted = openvino_genai.GenerationConfig()
    wanted.max_new_tokens, wanted.do_sample, wanted.ignore_eos = 32, False, True
    same = 0
    for at, prompt in enumerate(PROMPTS):
        ids = real.model.tokenizer.encode(prompt, special=True)
        handle = pipeline.add_request(at, openvino.Tensor(np.array([ids], np.int64)), wanted)
        while pipeline.has_non_finished_requests():
            pipeline.step()
        theirs = list(handle.read_all()[0].generated_ids)
        said = {"max_tokens": 32, "ignore_eos": True, "logprobs": 5}
        ours = real.run(real.request("one", prompt, **said))["one"]
        differs = next((i for i, (a, b) in enumerate(zip(theirs, ours.tokens, strict=True)) if a != b), None)
        same += len(theirs) if differs is None else differs
        if differs is None:
            continue
        near = {one.token: one.logprob for one in ours.logprobs[differs]}
        assert near[ours.tokens[differs]] - near.get(theirs[differs], -np.inf) < NEAR, (prompt, differs)
    assert same > len(PROMPTS) * 32 // 3


def test_many_together_equal_each_alone(real: Real) -> None:
    requests = mix(real)
    alone = {name: real.run(request)[name] for name, request in requests.items()}
    others = [real.request(f"other{at}", PROMPTS[at % 6], seed=at, temperature=1.0) for at in range(11)]
    together = real.run(*requests.values(), *others, at_once=False)
    for name, answer in alone.items():
        assert (together[name].tokens, together[name].text) == (answer.tokens, answer.text), name
    assert set(json.loads(alone["regex"].text)) == {"name", "age"}
    assert alone["regex"].finish == "stop"
    assert alone["json"].text.lstrip().startswith("{")


@pytest.mark.parametrize("at", [1, 9, 23])
def test_an_answer_goes_on_as_if_nothing_had_happened(real: Real, at: int) -> None:
    """After any token, in another engine without cached blocks, beside others: the same tokens."""
    requests = mix(real)
    whole = real.run(*requests.values())
    again = []
    for name, request in requests.items():
        emitted = whole[name].tokens[: min(at, len(whole[name].tokens) - 1)]
        again.append(GenerationRequest(request.key, request.prompt, request.parameters, request.adapter, 0, emitted))
    resumed = real.run(*again, prefix_cache=False)
    for one in again:
        name = one.key.decode()
        assert list(one.emitted) + resumed[name].tokens == whole[name].tokens, name
        assert resumed[name].finish == whole[name].finish


def test_chunks_and_cached_prefixes_change_nothing(real: Real) -> None:
    prompt = "Rain falls on the roof. " * 30 + "The roof"
    request = real.request("long", prompt, temperature=1.0, seed=3, max_tokens=12)
    whole = real.run(request)["long"]
    assert real.run(request, max_num_batched_tokens=17)["long"].tokens == whole.tokens
    engine = real.engine()
    first = bench.run_all(engine, [request])["long"]
    second = bench.run_all(engine, [request])["long"]
    assert first.tokens == second.tokens == whole.tokens
    assert engine.counters.hit_tokens > 100


def test_an_adapter_that_is_not_there_is_refused(real: Real) -> None:
    with pytest.raises(InvalidArgument, match="LoRA none is not supported"):
        real.engine().admit(real.request("one", "text", adapter="none"))


def test_a_prompt_is_as_likely_as_it_was_generated(real: Real) -> None:
    """Scored in chunks beside another request, the tokens of a text have the probabilities that they had as answers."""
    written = real.request("written", PROMPTS[2], logprobs=2, max_tokens=24)
    answer = real.run(written)["written"]
    prompt = [*written.prompt, *answer.tokens]
    parameters = SamplingParameters(seed=1, max_tokens=1, prompt_logprobs=2)
    engine = real.engine(max_num_batched_tokens=20)
    engine.admit(real.request("beside", PROMPTS[0]))
    engine.admit(GenerationRequest(b"scored", prompt, parameters))
    found = None
    while found is None:
        found = next((event.prompt_logprobs for event in engine.step() if event.key == b"scored"), None)
    assert [row[0].token for row in found] == prompt[1:]
    assert list(found[len(written.prompt) - 1 :]) == answer.logprobs
