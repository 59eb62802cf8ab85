"""Sampling: each parameter against its definition, rows that do not depend on one another, errors of one row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from charonia.errors import CharoniaError
from charonia.generation.parameters import SamplingParameters
from charonia.generation.sampling import LEAST_LOGPROB, RowState, Sampled, candidates, named_candidates, sample

FOUR = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))

KNOWN = [386, 983, 443, 639, 903]


def state(emitted: tuple[int, ...] = (), prompt: tuple[int, ...] = (), **parameters: Any) -> RowState:
    return RowState(SamplingParameters(**({"seed": 1} | parameters)), prompt, emitted)


def one(row: npt.NDArray[np.float32], wanted: RowState) -> Sampled:
    found = sample(row[np.newaxis], [wanted])[0]
    if isinstance(found, CharoniaError):
        raise found
    return found


def drawn(row: npt.NDArray[np.float32], count: int, **parameters: Any) -> npt.NDArray[np.int64]:
    """How often each token is drawn over `count` seeds."""
    found = [one(row, state(seed=seed, **parameters)).token for seed in range(count)]
    return np.bincount(found, minlength=len(row))


def test_greedy_is_the_first_of_the_largest() -> None:
    row = np.array([1, 3, 3, 2], np.float32)
    assert one(row, state(temperature=0.0)).token == 1


def test_logits_stay_as_they_are() -> None:
    logits = np.tile(FOUR, (2, 1))
    before = logits.copy()
    sample(logits, [state(logit_bias={0: -100.0}, repetition_penalty=1.5, prompt=(1,)), state(top_k=1)])
    assert np.array_equal(logits, before)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    counts = drawn(FOUR, 4000)
    expected = np.exp(FOUR) * 4000
    assert float(np.sum((counts - expected) ** 2 / expected)) < 16.3  # chi-square of 3 degrees, p = 0.001


def test_temperature_flattens() -> None:
    scaled = np.exp(FOUR / 2.0)
    expected = scaled / scaled.sum() * 4000
    counts = drawn(FOUR, 4000, temperature=2.0)
    assert float(np.sum((counts - expected) ** 2 / expected)) < 16.3


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.94}, {0, 1, 2}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"min_p": 0.5}, {0, 1}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        ({"top_k": 2, "min_p": 0.7}, {0}),
        ({"allowed_token_ids": (1, 3)}, {1, 3}),
        ({"logit_bias": {0: -100.0, 1: -100.0}}, {2, 3}),
    ],
)
def test_what_may_be_drawn(parameters: dict[str, Any], kept: set[int]) -> None:
    assert set(np.flatnonzero(drawn(FOUR, 400, **parameters)).tolist()) == kept


def test_equals_at_the_border_of_top_k_stay() -> None:
    assert set(np.flatnonzero(drawn(np.array([2, 1, 1, 0], np.float32), 300, top_k=2)).tolist()) == {0, 1, 2}


def test_token_and_place_have_noise_of_their_own() -> None:
    flat = np.zeros(1000, np.float32)
    by_place = {one(flat, state(tuple(range(index)))).token for index in range(50)}
    by_seed = {one(flat, state(seed=seed)).token for seed in range(50)}
    assert len(by_place) > 40
    assert len(by_seed) > 40
    assert one(flat, state(seed=-1)).token == one(flat, state(seed=2**64 - 1)).token


def test_known_tokens_of_known_seeds() -> None:
    """A text that was begun by another release goes on as it would have there."""
    flat = np.zeros(1000, np.float32)
    assert [one(flat, state(tuple([0] * index), seed=42)).token for index in range(5)] == KNOWN


def test_penalties() -> None:
    row = np.array([2, -2, 1, 0], np.float32)

    def greedy(**parameters: Any) -> int:
        return one(row, state(temperature=0.0, **parameters)).token

    assert greedy(repetition_penalty=3.0, prompt=(0,)) == 2
    assert greedy(repetition_penalty=3.0, emitted=(0,)) == 2
    assert greedy(repetition_penalty=0.1, prompt=(1, 2)) == 2
    assert greedy(presence_penalty=1.5, emitted=(0, 0)) == 2
    assert greedy(presence_penalty=1.5, prompt=(0,)) == 0
    assert greedy(frequency_penalty=0.4, emitted=(0, 0)) == 0
    assert greedy(frequency_penalty=0.4, emitted=(0, 0, 0)) == 2


def test_counts_follow_the_text() -> None:
    wanted = state(temperature=0.0, frequency_penalty=0.4)
    row = np.array([2, 1, 0], np.float32)
    found = []
    for _ in range(6):
        found.append(one(row, wanted).token)
        wanted.emitted.append(found[-1])
    assert found == [0, 0, 0, 1, 0, 1]
    assert wanted.index == 6


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_grammars(packed: bool) -> None:
    row = np.arange(70, dtype=np.float32)
    allowed = np.zeros(70, np.bool_)
    allowed[[3, 64]] = True
    wanted = state(temperature=0.0, logprobs=5)
    padded = np.concatenate([allowed, np.ones(26, np.bool_)])
    wanted.allowed = np.packbits(padded, bitorder="little").view(np.int32) if packed else allowed
    found = one(row, wanted)
    assert found.token == 64
    assert [each.token for each in found.logprobs] == [64, 3]
    wanted.allowed = allowed[:64]
    assert one(row, wanted).token == 3


def test_bad_words_are_not_completed() -> None:
    row = np.array([3, 2, 1, 0], np.float32)
    bad = [(0,), (2, 3, 1)]

    def greedy(*emitted: int) -> int:
        parameters = SamplingParameters(seed=0, temperature=0.0)
        return one(row, RowState(parameters, (), emitted, bad_words=bad)).token

    assert greedy() == 1
    assert greedy(2, 3) == 2
    assert greedy(3) == 1
    assert greedy(2, 3, 0) == 1


def test_end_tokens_wait_for_min_tokens() -> None:
    row = np.array([3, 2], np.float32)
    wanted = RowState(SamplingParameters(seed=0, temperature=0.0, min_tokens=1), end_tokens=[0])
    assert one(row, wanted).token == 1
    wanted.emitted.append(1)
    assert one(row, wanted).token == 0


def test_log_probabilities() -> None:
    found = one(FOUR, state(temperature=0.0, logit_bias={3: 100.0}, logprobs=2)).logprobs
    assert [(each.token, each.rank) for each in found] == [(3, 4), (0, 1), (1, 2)]
    assert [round(math.exp(each.logprob), 4) for each in found] == [0.05, 0.5, 0.3]
    assert [each.token for each in one(FOUR, state(temperature=0.0, logprobs=2)).logprobs] == [0, 1]
    assert len(one(FOUR, state(logprobs=0)).logprobs) == 1
    assert one(FOUR, state()).logprobs == ()
    assert len(candidates(FOUR, 0, 100)) == 4


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_row_that_is_no_number_fails_alone(wrong: float) -> None:
    logits = np.tile(FOUR, (3, 1))
    logits[1, 2] = wrong
    found = sample(logits, [state(temperature=temperature) for temperature in (0.0, 1.0, 1.0)])
    assert isinstance(found[0], Sampled)
    assert isinstance(found[2], Sampled)
    assert str(found[1]) == "the model gave logits that are NaN or infinite"


def test_a_row_without_an_allowed_token_fails_alone() -> None:
    wanted = state()
    wanted.allowed = np.zeros(4, np.bool_)
    found = sample(np.tile(FOUR, (2, 1)), [wanted, state(temperature=0.0)])
    assert "no token is allowed" in str(found[0])
    assert found[1] == Sampled(0)


@pytest.mark.parametrize("parameters", [{"logit_bias": {4: 1.0}}, {"allowed_token_ids": (9,)}])
def test_tokens_that_the_model_lacks_fail_alone(parameters: dict[str, Any]) -> None:
    found = sample(np.tile(FOUR, (2, 1)), [state(**parameters), state(temperature=0.0)])
    assert "the model has 4 tokens" in str(found[0])
    assert found[1] == Sampled(0)


def test_rows_and_states_have_to_fit() -> None:
    assert sample(np.empty((0, 4), np.float32), []) == []
    with pytest.raises(CharoniaError, match="for 2 rows"):
        sample(FOUR[np.newaxis], [state(), state()])


def test_named_tokens_are_reported_in_place_of_the_likeliest() -> None:
    found = one(FOUR, state(temperature=0.0, logprobs=3, logprob_token_ids=(3, 0, 3), allowed_token_ids=(2,)))
    assert found.token == 2
    assert [(each.token, each.rank) for each in found.logprobs] == [(2, 3), (3, 4), (0, 1)]
    assert [math.exp(each.logprob) for each in found.logprobs] == pytest.approx([0.15, 0.05, 0.5], rel=1e-5)


@pytest.mark.parametrize("count", [0, 1, 30, 31, 32, 128])
def test_ranks_of_named_tokens_count_the_larger_logits(count: int) -> None:
    """Of few and of many tokens, also of equal, forbidden, and zero logits of both signs."""
    random = np.random.default_rng(count)
    row = np.round(random.normal(0.0, 3.0, 4000), 1).astype(np.float32)
    row[random.integers(0, 4000, 500)] = -np.inf
    row[::7] = np.where(random.random(len(row[::7])) < 0.5, np.float32(0.0), np.float32(-0.0))
    others = random.integers(0, 4000, count).tolist()
    found = named_candidates(row, 7, others)
    assert [each.token for each in found] == list(dict.fromkeys((7, *others)))
    assert [each.rank for each in found] == [1 + int(np.count_nonzero(row > row[each.token])) for each in found]
    alone = [candidates(row, each.token, 0)[0] for each in found]
    assert [(each.logprob, each.rank) for each in found] == [
        (max(each.logprob, LEAST_LOGPROB), each.rank) for each in alone
    ]


def test_a_named_token_that_a_grammar_forbids() -> None:
    wanted = state(temperature=0.0, logprob_token_ids=(0,))
    wanted.allowed = np.array([False, True, True, True])
    found = one(FOUR, wanted)
    assert [(each.token, each.logprob == LEAST_LOGPROB) for each in found.logprobs] == [(1, False), (0, True)]


def test_a_named_token_that_there_is_not() -> None:
    (found,) = sample(FOUR[np.newaxis], [state(logprob_token_ids=(4,))])
    assert isinstance(found, CharoniaError)
    assert "logprob_token_ids" in found.message


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.1}, {"min_tokens": 1}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5},
        {"repetition_penalty": 0.5}, {"logit_bias": {1: 0.5}}, {"allowed_token_ids": (1,)}, {"logprobs": 0},
        {"logprob_token_ids": (1,)},
    ],
)  # fmt: skip
def test_a_row_that_wants_more_than_the_largest_logit_is_not_plain(more: dict[str, Any]) -> None:
    assert RowState(SamplingParameters(seed=0, temperature=0.0)).is_plain
    assert not RowState(SamplingParameters(**{"seed": 0, "temperature": 0.0} | more)).is_plain
    assert not RowState(SamplingParameters(0, temperature=0.0), bad_words=[[1]]).is_plain
