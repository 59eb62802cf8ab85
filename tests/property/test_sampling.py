"""Sampling of many rows: each as if it were alone, and only tokens that a plain definition of top_k and top_p keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.generation.parameters import SamplingParameters
from charonia.generation.sampling import RowState, Sampled, candidates, sample

parameters = st.fixed_dictionaries(
    {"seed": st.integers(-(2**63), 2**63 - 1)},
    optional={
        "temperature": st.sampled_from([0.0, 0.01, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([1, 2, 5, 40, 500]),
        "top_p": st.sampled_from([0.01, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.01, 0.5, 1.0]),
        "presence_penalty": st.floats(-2, 2, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
        "repetition_penalty": st.sampled_from([0.5, 1.5]),
        "logit_bias": st.dictionaries(st.integers(0, 99), st.floats(-100, 100, width=32), max_size=4),
        "logprobs": st.integers(0, 20),
    },
)
requests = st.lists(st.tuples(parameters, st.lists(st.integers(0, 99), max_size=8)), min_size=1, max_size=8)
spreads = st.sampled_from([0.0, 0.1, 3.0, 10.0])


def made(vocabulary: int, rows: int, seed: int, spread: float) -> npt.NDArray[np.float32]:
    """Logits of which many are equal, as those of models of low precision."""
    values = np.random.default_rng(seed).standard_normal((rows, vocabulary)) * spread
    return (np.round(values * 8) / 8).astype(np.float32)


@given(requests, st.integers(0, 2**32), spreads, st.sampled_from([100, 5000]))
def test_a_row_in_a_batch_is_the_row_alone(
    wanted: list[tuple[dict[str, Any], list[int]]], seed: int, spread: float, vocabulary: int
) -> None:
    logits = made(vocabulary, len(wanted), seed, spread)

    def states() -> list[RowState]:
        return [RowState(SamplingParameters(**given), emitted, emitted) for given, emitted in wanted]

    together = sample(logits, states())
    alone = [sample(logits[at : at + 1].copy(), [one])[0] for at, one in enumerate(states())]
    backwards = sample(logits[::-1], states()[::-1])[::-1]
    assert together == alone == backwards
    assert all(isinstance(each, Sampled) for each in together)


tokens = st.integers(0, 7)  # few, so that what came before is often the largest
greedy = st.fixed_dictionaries(
    {"seed": st.just(0), "temperature": st.just(0.0)},
    optional={
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 1.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "logit_bias": st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=2),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=4),
        "min_tokens": st.integers(0, 4),
        "max_tokens": st.just(8),
        "logprobs": st.none() | st.integers(0, 2),
        "logprob_token_ids": st.lists(tokens, max_size=2),
    },
)
masks = st.none() | st.lists(st.booleans(), min_size=8, max_size=8)
outliers = st.none() | st.tuples(tokens, st.sampled_from([np.nan, np.inf, -np.inf]))


@settings(max_examples=examples(300))
@given(
    greedy, st.lists(tokens, max_size=8), st.lists(st.lists(tokens, min_size=1, max_size=2), max_size=2), masks,
    outliers, st.integers(0, 2**32), spreads,
)  # fmt: skip
def test_plain_rows_get_the_token_that_the_whole_way_gives(
    given: dict[str, Any], emitted: list[int], bad_words: list[list[int]], mask: list[bool] | None,
    outlier: tuple[int, float] | None, seed: int, spread: float,
) -> None:  # fmt: skip
    logits = made(8, 1, seed, spread)
    if outlier is not None:
        logits[0, outlier[0]] = outlier[1]

    def state() -> RowState:
        made = RowState(SamplingParameters(**given), emitted, emitted, bad_words=bad_words, end_tokens=range(4))
        made.allowed = None if mask is None else np.array(mask)
        return made

    whole = state()
    whole.is_plain = False
    assert repr(sample(logits, [state()])) == repr(sample(logits, [whole]))  # errors as well


@given(parameters, st.integers(0, 2**32), spreads, st.sampled_from([100, 20000]))
def test_only_tokens_that_are_kept_are_drawn(given: dict[str, Any], seed: int, spread: float, vocabulary: int) -> None:
    chosen = SamplingParameters(
        **{name: given[name] for name in ("seed", "temperature", "top_k", "top_p", "min_p") if name in given}
    )
    row = made(vocabulary, 1, seed, spread)[0]
    (found,) = sample(row[np.newaxis], [RowState(chosen)])
    assert isinstance(found, Sampled)
    assert row[found.token] >= lowest(row.astype(np.float64), chosen)


def lowest(row: npt.NDArray[np.float64], chosen: SamplingParameters) -> float:
    """The least logit that may be drawn, by the definitions of min_p, top_k and top_p."""
    if chosen.temperature == 0.0:
        return float(row.max())
    values = np.sort(row)[::-1]
    chances = np.exp((values - values[0]) / chosen.temperature)
    keep = chances >= chosen.min_p * (1 - 1e-6)
    if chosen.top_k:
        keep &= values >= values[min(chosen.top_k, len(values)) - 1]
    chances = np.where(keep, chances, 0.0)
    before = np.cumsum(chances) - chances
    keep &= before <= chosen.top_p * chances.sum() * (1 + 1e-5)
    return float(values[np.flatnonzero(keep)[-1]])


@given(st.integers(0, 2**32), spreads, st.integers(0, 20), st.sampled_from([10, 100, 7000]))
def test_candidates_are_the_most_likely_ones(seed: int, spread: float, count: int, vocabulary: int) -> None:
    row = made(vocabulary, 1, seed, spread)[0]
    token = seed % vocabulary
    found = candidates(row, token, count)
    best = np.argsort(-row, kind="stable")[:count].tolist()
    assert [each.token for each in found] == [token, *(each for each in best if each != token)]
    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    assert np.allclose([each.logprob for each in found], exact[[each.token for each in found]], atol=1e-4)
    assert found[0].rank == 1 + int((row > row[token]).sum())
    assert all(each.rank == best.index(each.token) + 1 for each in found[1:])
