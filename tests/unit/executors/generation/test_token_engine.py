"""Answers do not depend on what else runs, go on after what was emitted, and end by every rule."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from generation_bench import TOKENIZER, make_engine, make_request, run_all, run_alone
from stub_decoder import StubDecoder

from charonia.errors import CharoniaError, InvalidArgument
from executors.generation.engine import GenerationRequest, StepInput
from executors.generation.token_engine import TokenEngine


def decoder(**more: int) -> StubDecoder:
    return StubDecoder(vocabulary=TOKENIZER.vocabulary, **more)


def mixed() -> list[GenerationRequest]:
    """Short and long, greedy and sampled, with a shared begin, of several levels."""
    shared = "the quick brown fox jumps"
    requests = []
    for number in range(24):
        prompt = (
            f"{shared} {'ab'[number % 2] * (number * 3 % 40 + 1)}" if number % 3 else "xyz"[number % 3] * (number + 1)
        )
        requests.append(
            make_request(
                f"r{number}",
                prompt,
                max_tokens=4 + number * 5 % 23,
                temperature=[0.0, 0.8, 1.3][number % 3],
                seed=number % 5,
                priority=number % 2,
            )
        )
    return requests


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("blocks", [24, 48, 500])
def test_answers_are_the_same_alone_and_beside_others(blocks: int, at_once: bool) -> None:
    requests = mixed()
    engine = make_engine(decoder(blocks=blocks), max_num_seqs=6, max_num_batched_tokens=17, long_prefill_tokens=8)
    together = run_all(engine, requests, at_once=at_once)
    for request in requests:
        assert together[request.key.decode()] == run_alone(request)
    load = engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, blocks)
    assert engine.counters.generated_tokens == sum(request.parameters.max_tokens for request in requests)
    if blocks == 24:
        assert engine.counters.preemptions > 0
    if blocks == 500:
        assert engine.counters.hit_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_goes_on_after_what_was_emitted(temperature: float) -> None:
    request = make_request("a", "hello there", max_tokens=12, temperature=temperature, logprobs=2)
    whole = run_alone(request)
    for count in range(1, 12):
        rest = run_alone(dataclasses.replace(request, emitted=whole.tokens[:count]))
        assert rest.tokens == whole.tokens[count:]
        assert whole.text.endswith(rest.text)
        assert rest.finish == "length"
        assert [[one.token for one in each] for each in rest.logprobs] == [
            [one.token for one in each] for each in whole.logprobs[count:]
        ]


def prompt_logprobs_of(engine: TokenEngine, requests: list[GenerationRequest]) -> dict[bytes, Any]:
    """Of each request what its event with the first token says; no other says something."""
    found: dict[bytes, Any] = {}
    for request in requests:
        engine.admit(request)
    while engine.load().running + engine.load().waiting:
        for event in engine.step():
            assert event.error is None
            assert event.prompt_logprobs is None or not event.index
            found.setdefault(event.key, event.prompt_logprobs)
    return found


@pytest.mark.parametrize("budget", [200, 9])
def test_tokens_of_prompts_have_the_probabilities_of_next_tokens(budget: int) -> None:
    """Whatever is computed with them, in chunks, and where the cache has their beginning."""
    shared = "the quick brown fox "
    vocabulary = decoder().vocabulary
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=budget, long_prefill_tokens=8)
    run_all(engine, [make_request("before", shared)])
    prompts = [TOKENIZER.encode(shared + "ab"[number % 2] * number, special=True) for number in range(5)]
    requests = [make_request(f"r{number}", prompt, prompt_logprobs=2) for number, prompt in enumerate(prompts)]
    found = prompt_logprobs_of(engine, requests)
    for number, prompt in enumerate(prompts):
        rows = found[f"r{number}".encode()]
        assert [row[0].token for row in rows] == list(prompt[1:])
        for at in (1, 7, len(prompt) - 1):
            all_of = run_alone(make_request("a", prompt[:at], max_tokens=1, logprobs=vocabulary)).logprobs[0]
            by_rank = {one.token: one for one in all_of}
            assert rows[at - 1][0] == by_rank[prompt[at]]
            assert {one.token for one in rows[at - 1]} >= {one.token for one in all_of if one.rank <= 2}


def test_a_prompt_is_scored_once_although_its_request_is_preempted() -> None:
    low = make_request("low", "a prompt of some length", prompt_logprobs=1, priority=2)
    alone = prompt_logprobs_of(make_engine(), [low])[b"low"]
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=6)
    engine.admit(low)
    for _ in range(2):
        assert engine.step() == []
    rows = prompt_logprobs_of(engine, [make_request("high", "first", priority=1)])[b"low"]
    assert engine.counters.preemptions == 1
    assert rows == alone


def test_prompts_of_texts_that_go_on_are_not_scored_again() -> None:
    request = make_request("a", "hello there", prompt_logprobs=1, emitted=[5, 6])
    engine = make_engine()
    engine.admit(request)
    while engine.load().running + engine.load().waiting:
        assert all(event.prompt_logprobs is None for event in engine.step())


def test_a_prompt_with_logits_that_are_no_numbers_fails_alone() -> None:
    stub = decoder()
    usual = stub.step

    def step(step: StepInput) -> Any:
        logits = usual(step)
        if len(step.sampled) > 2:
            logits[2:] = np.nan
        return logits

    stub.step = step  # type: ignore[method-assign]
    engine = make_engine(stub)
    answers = run_all(engine, [make_request("a", "hello", prompt_logprobs=1), make_request("b", "there")])
    assert isinstance(answers["a"].error, CharoniaError)
    assert answers["b"].finish == "length"


def test_events_have_the_index_of_their_token() -> None:
    engine = make_engine()
    engine.admit(make_request("a", "hello", emitted=[5, 6, 7]))
    events = []
    while engine.load().running + engine.load().waiting:
        events += engine.step()
    assert [event.index for event in events] == [3, 4, 5, 6, 7]
    assert [event.finish for event in events] == ["", "", "", "", "length"]


def test_nothing_is_computed_for_an_answer_that_had_ended() -> None:
    answer = run_alone(make_request("a", "hello", max_tokens=3, emitted=[5, 6, 7]))
    assert (answer.tokens, answer.text, answer.finish) == ([], "", "length")


def test_an_end_token_ends_the_text() -> None:
    request = make_request("a", "hello", max_tokens=200)
    ignored = run_alone(request)
    ended = run_alone(make_request("a", "hello", max_tokens=200, ignore_eos=False))
    at = ignored.tokens.index(0)
    assert ended.tokens == ignored.tokens[: at + 1]
    assert ended.finish == "stop"
    assert ended.text == TOKENIZER.decode(ended.tokens).decode()


def test_a_stop_token_ends_the_text_after_the_least_number_of_tokens() -> None:
    free = run_alone(make_request("a", "hello", max_tokens=40))
    token = free.tokens[4]
    first = free.tokens.index(token)
    answer = run_alone(make_request("a", "hello", max_tokens=40, stop_token_ids=(token,)))
    assert answer.tokens == free.tokens[: first + 1]
    assert answer.finish == "stop"
    later = run_alone(make_request("a", "hello", max_tokens=40, stop_token_ids=(token,), min_tokens=first + 1))
    assert token not in later.tokens[: first + 1]
    assert len(later.tokens) > first + 1


def test_a_stop_string_ends_the_text_before_it() -> None:
    free = run_alone(make_request("a", "hello", max_tokens=30))
    stop = free.text[6:9]
    answer = run_alone(make_request("a", "hello", max_tokens=30, stop=(stop,)))
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.finish == "stop"
    assert answer.tokens == free.tokens[: len(answer.tokens)]


def test_text_that_was_held_back_comes_with_the_last_token() -> None:
    free = run_alone(make_request("a", "hello", max_tokens=10))
    answer = run_alone(make_request("a", "hello", max_tokens=10, stop=(free.text[-3:] + "never",)))
    assert answer.text == free.text
    assert answer.finish == "length"


def test_an_answer_ends_with_the_context() -> None:
    answer = run_alone(make_request("a", "a" * 30, max_tokens=100), decoder=decoder(context=36))
    assert len(answer.tokens) == 6
    assert answer.finish == "length"


def test_adapters_give_their_own_answers() -> None:
    adapters = {"x": "/adapters/one", "y": "/adapters/two", "z": "/adapters/six"}
    requests = [make_request(f"{name}{n}", "hello", adapter=name) for n in range(2) for name in ("", "x", "y", "z")]
    engine = make_engine(decoder(adapter_slots=2), adapters=adapters)
    answers = run_all(engine, requests)
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 4
    for request in requests:
        alone = run_alone(request, decoder=decoder(adapter_slots=1), adapters=adapters)
        assert answers[request.key.decode()] == alone


def test_an_adapter_that_is_replaced_has_its_own_blocks() -> None:
    engine = make_engine(decoder(adapter_slots=2), adapters={"x": "/adapters/one"})
    before = run_all(engine, [make_request("a", "hello there", adapter="x")])["a"]
    engine.change_adapters({"x": "/adapters/two"})
    after = run_all(engine, [make_request("a", "hello there", adapter="x")])["a"]
    assert before.tokens != after.tokens
    assert engine.counters.hit_tokens == 0
    assert engine.adapters == {"x": "/adapters/two"}


def test_an_adapter_that_cannot_be_loaded_fails_its_requests_only() -> None:
    engine = make_engine(decoder(adapter_slots=2), adapters={"x": "/broken", "y": "/adapters/two"})
    requests = [make_request(name, "hello", adapter=name) for name in ("x", "y")]
    answers = run_all(engine, requests)
    assert isinstance(answers["x"].error, InvalidArgument)
    assert answers["y"].finish == "length"
    assert engine.scheduler.pool.available == 256


def test_what_can_never_run_is_refused() -> None:
    engine = make_engine(decoder(adapter_slots=1), adapters={"x": "/x"})
    with pytest.raises(InvalidArgument, match="no tokens"):
        engine.admit(make_request("a", ""))
    with pytest.raises(InvalidArgument, match="at most 256"):
        engine.admit(make_request("a", "a" * 256))
    with pytest.raises(InvalidArgument, match="from 0 to"):
        engine.admit(make_request("a", [5, 1000]))
    with pytest.raises(InvalidArgument, match=r"LoRA w is not supported, we currently support \['x'\]"):
        engine.admit(make_request("a", "a", adapter="w"))
    with pytest.raises(InvalidArgument, match="LoRA feature is not enabled"):
        make_engine().admit(make_request("a", "a", adapter="w"))
    engine.admit(make_request("a", "a"))
    with pytest.raises(InvalidArgument, match="this key"):
        engine.admit(make_request("a", "a"))


def test_a_cancelled_request_is_gone_before_the_next_step() -> None:
    engine = make_engine()
    engine.admit(make_request("a", "hello", max_tokens=100))
    engine.admit(make_request("b", "hello", max_tokens=100))
    engine.step()
    engine.cancel([b"a", b"never seen"])
    assert {event.key for event in engine.step()} == {b"b"}
    engine.cancel([b"b"])
    assert engine.step() == []
    load = engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, load.blocks)
    engine.admit(make_request("a", "hello"))
    assert engine.step() != []


def test_a_request_that_is_cancelled_while_it_is_admitted_does_not_run() -> None:
    """Another thread admits it: the engine hears of the end first, and of the request then."""
    engine = make_engine(decoder())
    engine.admit(make_request("b", "hi", max_tokens=2))
    engine.admit(make_request("a", "hello"))
    admitted = engine._inbox.pop()
    engine.cancel([b"a"])
    engine._inbox.append(admitted)
    while engine.load().running or engine.load().waiting:
        assert {event.key for event in engine.step()} <= {b"b"}
    assert not engine._states


def test_a_row_that_cannot_be_sampled_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.admit(make_request("a", "hello"))
    engine.admit(make_request("b", "hi"))
    engine.step()
    monkeypatch.setattr(engine._states[b"a"].detokenizer, "push", lambda token: 1 / 0)
    errors = {event.key: event.error for event in engine.step()}
    assert isinstance(errors[b"a"], CharoniaError)
    assert errors[b"b"] is None
    assert engine.load().running == 1


def test_steps_are_within_the_budget_and_decodes_come_first() -> None:
    stub = decoder()
    shapes: list[list[int]] = []

    def look(step: StepInput) -> None:
        counts = np.diff(step.begins).tolist()
        shapes.append(counts)
        assert len(step.tokens) == len(step.positions) == len(step.adapters) == sum(counts)
        assert len(step.blocks) == step.block_begins[-1]
        assert all(0 <= row < len(step.tokens) for row in step.sampled)

    stub.before_step = look
    engine = make_engine(stub, max_num_batched_tokens=12, max_num_seqs=4)
    run_all(engine, [make_request(f"{n}", "a" * (n * 5 + 1)) for n in range(8)])
    assert max(map(sum, shapes)) <= 12
    assert any(1 in counts and max(counts) > 1 for counts in shapes), "chunks run beside decodes"
