"""Answers that a grammar constrains: in a batch with others, and continued after any token."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from generation_bench import Answer, run_all
from stub_decoder import StubDecoder

from charonia.errors import InvalidArgument
from charonia.generation.parameters import SamplingParameters, StructuredOutput
from executors.generation.engine import GenerationRequest
from executors.generation.step_scheduler import SchedulerSettings
from executors.generation.token_engine import TokenEngine

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}},
        "required": ["city", "ok"],
        "additionalProperties": False,
    }
)


def make() -> TokenEngine:
    from small_tokenizers import byte_level

    tokenizer = byte_level()
    decoder = StubDecoder(vocabulary=tokenizer.vocabulary, context=400, blocks=400)
    return TokenEngine(decoder, tokenizer, SchedulerSettings(8, 64))


def request(name: str, structured: StructuredOutput | None, *, seed: int = 3) -> GenerationRequest:
    parameters = SamplingParameters(seed, max_tokens=120, temperature=0.9, structured=structured)
    return GenerationRequest(name.encode(), [5, 6, 7], parameters)


def run_one(one: GenerationRequest) -> Answer:
    return run_all(make(), [one])[one.key.decode()]


def test_texts_have_their_forms_beside_one_another() -> None:
    requests = [
        request("json", StructuredOutput("json", SCHEMA)),
        request("regex", StructuredOutput("regex", "[a-c]{3}-[0-9]{2}")),
        request("choice", StructuredOutput("choice", '["yes", "no"]')),
        request("free", None),
    ]
    answers = run_all(make(), requests)
    assert set(json.loads(answers["json"].text)) == {"city", "ok"}
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", answers["regex"].text)
    assert answers["choice"].text in ("yes", "no")
    assert [answers[name].finish for name in ("json", "regex", "choice")] == ["stop"] * 3
    for one in requests:
        assert answers[one.key.decode()] == run_one(one)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_constrained_text_goes_on_after_any_token(seed: int) -> None:
    one = request("a", StructuredOutput("json", SCHEMA), seed=seed)
    whole = run_one(one)
    for count in range(1, len(whole.tokens)):
        rest = run_one(dataclasses.replace(one, emitted=whole.tokens[:count]))
        assert rest.tokens == whole.tokens[count:]
        assert whole.text.endswith(rest.text)


def test_what_does_not_fit_the_grammar_cannot_be_continued() -> None:
    one = request("a", StructuredOutput("choice", '["yes", "no"]'))
    with pytest.raises(InvalidArgument, match="does not fit"):
        make().admit(dataclasses.replace(one, emitted=[0x41, 0x42]))
