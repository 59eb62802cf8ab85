"""The next token of each row of logits, by the row's own parameters.

Token `i` of a request is a function of its logits, its parameters, the tokens before it and (seed, i): each token of
the vocabulary gets Gumbel noise of its own from a Philox generator keyed by (seed, i), and the largest sum of logit and
noise wins. No generator state is carried, and no row depends on another one, so a text that another executor continues
goes on as it would have. The order of the steps is vLLM's: mask, bad words, bias, penalties, temperature, min_p, top_k,
top_p.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from charonia.errors import CharoniaError, InternalError, InvalidArgument
from charonia.generation.parameters import SamplingParameters

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_CHUNK = 64
"""Tokens of which only the largest logit is compared first, to find the few that can be among the top ones."""
_NUCLEUS = 256
"""How many tokens are tried for top_p before all are sorted; a model that is sure of itself needs fewer."""
_BINS_PER_UNIT = 32
_BINS = 2048
"""Bins of logits, divided by the temperature, below the largest one: 64 units hold all that can be drawn."""
_SORTED_FOR = 32
"""Tokens whose ranks are wanted for which a row is sorted once: it takes as long as to compare it so many times."""
_NO_TOKEN = -np.inf
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for; OpenAI's least."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token for a place in the text. `rank` is 1 for the most likely one."""

    token: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """A row's token. `logprobs` are the chosen token and then the most likely others, if the request wants them."""

    token: int
    logprobs: tuple[Candidate, ...] = ()


class RowState:
    """What a request's next token depends on besides the logits. Append each of its tokens to `emitted`.

    `allowed` is a mask of the tokens that may come: bool [vocabulary], or int32 words of 32 bits each, the lowest bit
    first (`grammar.Matcher.mask`); None allows all. `bad_words` are sequences of tokens (`bad_word_sequences`) that
    must not be completed. None of `end_tokens` comes before the request's `min_tokens`. `is_plain`: sampling is greedy,
    no parameter changes logits, and no log probabilities are wanted; a mask still counts.
    """

    __slots__ = (
        "_counted", "_counts", "_prompt", "allowed", "bad_words", "emitted", "end_tokens", "is_plain", "parameters",
    )  # fmt: skip

    def __init__(
        self,
        parameters: SamplingParameters,
        prompt: npt.ArrayLike = (),
        emitted: Sequence[int] = (),
        *,
        bad_words: Sequence[Sequence[int]] = (),
        end_tokens: Collection[int] = (),
    ) -> None:
        self.parameters = parameters
        self.emitted = list(emitted)
        self.allowed: npt.NDArray[np.bool_] | npt.NDArray[np.int32] | None = None
        self.bad_words = bad_words
        self.end_tokens = tuple(end_tokens)
        repeats = parameters.repetition_penalty != 1.0
        self._prompt = np.unique(np.asarray(prompt, np.int64)) if repeats else np.empty(0, np.int64)
        self._counts: dict[int, int] = {}
        self._counted = 0
        self.is_plain = not bad_words and _is_plain(parameters)

    @property
    def index(self) -> int:
        """Which token of the request comes next, from 0 on."""
        return len(self.emitted)

    def repeated(self) -> Ids:
        """The tokens of prompt and text, each once."""
        return np.union1d(self._prompt, self.counts()[0])

    def counts(self) -> tuple[Ids, Row]:
        """The tokens of the text so far, each once, and how often each came."""
        for token in self.emitted[self._counted :]:
            self._counts[token] = self._counts.get(token, 0) + 1
        self._counted = len(self.emitted)
        count = len(self._counts)
        return np.fromiter(self._counts, np.int64, count), np.fromiter(self._counts.values(), np.float32, count)


def sample(logits: npt.NDArray[np.float32], rows: Sequence[RowState]) -> list[Sampled | CharoniaError]:
    """Returns the next token of each row, or the error of that row alone.

    `logits` are float32 [rows, vocabulary] and stay as they are. A row is an error if it has NaN or infinity, or if no
    token is allowed there.
    """
    if logits.ndim != 2 or len(logits) != len(rows):
        raise InternalError(f"logits of shape {logits.shape} for {len(rows)} rows")
    if not rows:
        return []
    first = np.argmax(logits, axis=1)  # of a row with NaN its place
    finite = np.isfinite(logits[np.arange(len(rows)), first])
    found: list[Sampled | CharoniaError] = []
    for at, (state, best, is_finite) in enumerate(zip(rows, first.tolist(), finite.tolist(), strict=True)):
        if state.is_plain and state.allowed is None and is_finite:
            found.append(Sampled(best))
            continue
        try:
            found.append(_sampled(logits[at], state, best))
        except CharoniaError as error:
            found.append(error)
    return found


def _is_plain(parameters: SamplingParameters) -> bool:
    return not (
        parameters.temperature
        or parameters.min_tokens
        or parameters.presence_penalty
        or parameters.frequency_penalty
        or parameters.repetition_penalty != 1.0
        or parameters.logit_bias
        or parameters.allowed_token_ids
        or parameters.logprobs is not None
        or parameters.logprob_token_ids
    )


def named_candidates(row: Row, token: int, others: Sequence[int]) -> tuple[Candidate, ...]:
    """Returns a chosen token and others by their ids, each once; one that a mask forbids has `LEAST_LOGPROB`.

    Raises `InvalidArgument` for an id that is none.
    """
    _within(others, row, "logprob_token_ids")
    ids = list(dict.fromkeys((token, *others)))
    values = row[ids]
    logprobs = np.maximum(values - _normaliser(row), LEAST_LOGPROB).tolist()
    return tuple(map(Candidate, ids, logprobs, _ranks(row, values)))


def _ranks(row: Row, values: Row) -> list[int]:
    """For each value one more than there are larger ones in the row. Equal values share a rank."""
    if len(values) < _SORTED_FOR:
        return [1 + int(np.count_nonzero(row > value)) for value in values]
    ranks: list[int] = (1 + len(row) - np.searchsorted(np.sort(row), values, side="right")).tolist()
    return ranks


def _normaliser(row: Row) -> np.float64:
    peak = np.max(row)
    return np.float64(peak + np.log(np.sum(np.exp(row - peak), dtype=np.float64)))


def _candidate(row: Row, token: int, normaliser: np.float64) -> Candidate:
    return Candidate(token, float(row[token] - normaliser), *_ranks(row, row[token : token + 1]))


def candidates(row: Row, token: int, count: int) -> tuple[Candidate, ...]:
    """Returns a chosen token and the `count` most likely ones of a row of logits, the chosen one only once."""
    normaliser = _normaliser(row)
    chosen = _candidate(row, token, normaliser)
    if not count:
        return (chosen,)
    others = _ordered(row, _top(row, count))[:count]
    ranked = zip(others.tolist(), (row[others] - normaliser).tolist(), range(1, count + 1), strict=False)
    return (chosen, *(Candidate(*each) for each in ranked if each[0] != token and each[1] != _NO_TOKEN))


def _sampled(row: Row, state: RowState, best: int) -> Sampled:
    _check(row, best)
    parameters = state.parameters
    masked = row if state.allowed is None else _masked(row, state.allowed)
    changed = _changed(masked, state)
    if changed is not row:
        best = int(np.argmax(changed))
        _check(changed, best)
    token = best if parameters.temperature == 0.0 else _drawn(changed, state, best)
    if parameters.logprob_token_ids:
        return Sampled(token, named_candidates(masked, token, parameters.logprob_token_ids))
    if parameters.logprobs is None:
        return Sampled(token)
    return Sampled(token, candidates(masked, token, parameters.logprobs))


def _check(row: Row, best: int) -> None:
    if np.isfinite(row[best]):
        return
    if row[best] == _NO_TOKEN:
        raise InternalError("no token is allowed here: mask, bad words and bias leave none")
    raise InternalError("the model gave logits that are NaN or infinite")


# -- what changes logits -----------------------------------------------------------------------------------------------


def _masked(row: Row, allowed: npt.NDArray[np.bool_] | npt.NDArray[np.int32]) -> Row:
    if allowed.dtype != np.bool_:
        allowed = np.unpackbits(allowed.view(np.uint8), bitorder="little").view(np.bool_)
    if len(allowed) < len(row):  # a model may have more rows than the tokenizer has tokens
        allowed = np.concatenate([allowed, np.zeros(len(row) - len(allowed), np.bool_)])
    return np.where(allowed[: len(row)], row, np.float32(_NO_TOKEN))


def _changed(row: Row, state: RowState) -> Row:
    """The row with all that the parameters add or forbid; the same row if there is nothing."""
    parameters = state.parameters
    banned = _banned(state)
    penalised = state.emitted and (parameters.presence_penalty or parameters.frequency_penalty)
    repeats = parameters.repetition_penalty != 1.0
    if not (banned or penalised or repeats or parameters.logit_bias or parameters.allowed_token_ids):
        return row
    if parameters.allowed_token_ids:
        allowed = _within(parameters.allowed_token_ids, row, "allowed_token_ids")
        changed = np.full_like(row, _NO_TOKEN)
        changed[allowed] = row[allowed]
    else:
        changed = row.copy()
    if banned:
        changed[_within(banned, row, "a forbidden token")] = _NO_TOKEN
    if parameters.logit_bias:
        biased = _within(tuple(parameters.logit_bias), row, "logit_bias")
        changed[biased] += np.fromiter(parameters.logit_bias.values(), np.float32, len(biased))
    if repeats:
        seen = state.repeated()
        values = changed[seen]
        factor = np.float32(parameters.repetition_penalty)
        changed[seen] = np.where(values > 0, values / factor, values * factor)
    if penalised:
        tokens, counts = state.counts()
        frequency, presence = np.float32(parameters.frequency_penalty), np.float32(parameters.presence_penalty)
        changed[tokens] -= frequency * counts + presence
    return changed


def _banned(state: RowState) -> list[int]:
    emitted = state.emitted
    banned = [
        sequence[-1]
        for sequence in state.bad_words
        if len(sequence) == 1 or list(sequence[:-1]) == emitted[1 - len(sequence) :]
    ]
    if state.index < state.parameters.min_tokens:
        banned += state.end_tokens
    return banned


def _within(tokens: Sequence[int], row: Row, name: str) -> Ids:
    ids = np.asarray(tokens, np.int64)
    if np.any((ids < 0) | (ids >= len(row))):
        raise InvalidArgument(f"{name} has a token id out of the vocabulary: the model has {len(row)} tokens")
    return ids


# -- what is drawn -----------------------------------------------------------------------------------------------------


def _drawn(row: Row, state: RowState, best: int) -> int:
    """The token with the largest sum of scaled logit and noise among those that min_p, top_k and top_p leave."""
    parameters = state.parameters
    kept = _kept(row, parameters, row[best])
    noise = _gumbel(parameters.seed, state.index, len(row), kept)
    inverse = np.float32(1.0 / parameters.temperature)
    if kept is None:
        return int(np.argmax(row * inverse + noise))
    return int(kept[np.argmax(row[kept] * inverse + noise)])


def _gumbel(seed: int, index: int, vocabulary: int, kept: Ids | None) -> Row:
    """The noise of the tokens `kept`, or of all: the 32-bit word of each in the stream of Philox keyed (seed, index).

    Raw words, because numpy promises these for all its releases, but not what its distributions make of them.
    """
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, index], np.uint64)
    words = np.random.Philox(key=key).random_raw((vocabulary + 1) // 2).view(np.uint32)
    chosen = words[:vocabulary] if kept is None else words[kept]
    uniform = (chosen >> np.uint32(8)).astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2**-24)
    # 1 - 2**-25 would round to 1, whose logarithm is 0
    np.minimum(uniform, np.float32(1 - 2**-24), out=uniform)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    return np.negative(uniform, out=uniform)


def _kept(row: Row, parameters: SamplingParameters, peak: np.float32) -> Ids | None:
    """The tokens that may be drawn, in rising order; None for all."""
    inverse = np.float32(1.0 / parameters.temperature)
    kept = None
    if parameters.min_p > 0.0:
        lowest = peak + np.float32(np.log(parameters.min_p) * parameters.temperature)
        kept = np.flatnonzero(row >= lowest)
    if 0 < parameters.top_k < (len(row) if kept is None else len(kept)):
        kept = _top(row, parameters.top_k) if kept is None else kept[_top(row[kept], parameters.top_k)]
    if parameters.top_p >= 1.0:
        return kept
    if kept is not None:
        weights = np.exp((row[kept] - peak) * inverse)
        return kept[_nucleus(row[kept], weights, parameters.top_p * float(np.sum(weights, dtype=np.float64)))]
    weights = np.exp((row - peak) * inverse)
    wanted = parameters.top_p * float(np.sum(weights, dtype=np.float64))
    kept = _top(row, _NUCLEUS)
    if np.sum(weights[kept], dtype=np.float64) >= wanted:
        return kept[_nucleus(row[kept], weights[kept], wanted)]
    # many tokens: the bin of logits in which the sum is reached, and all in bins before it
    bins = np.minimum((peak - row) * (inverse * np.float32(_BINS_PER_UNIT)), np.float32(_BINS - 1)).astype(np.intp)
    sums = np.cumsum(np.bincount(bins, weights, _BINS))
    last = min(int(np.searchsorted(sums, wanted)), _BINS - 1)
    within = np.flatnonzero(bins == last)
    rest = wanted - (float(sums[last - 1]) if last else 0.0)
    within = within[_nucleus(row[within], weights[within], rest)]
    return np.concatenate([np.flatnonzero(bins < last), within])


def _nucleus(values: Row, weights: Row, wanted: float) -> Ids:
    """The places of the fewest values, largest first and of equal ones the first, whose weights sum up to `wanted`."""
    order = np.argsort(-values, kind="stable")
    count = int(np.searchsorted(np.cumsum(weights[order], dtype=np.float64), wanted)) + 1
    return np.asarray(order[:count], np.int64)


def _top(row: Row, count: int) -> Ids:
    """The `count` largest logits' places in rising order, and those that equal the least of them."""
    if count >= len(row):
        return np.arange(len(row))
    chunks = len(row) // _CHUNK
    if count < chunks:
        # `count` chunks, and so as many tokens, have a logit of at least the `count`-th largest of the chunks' maxima
        peaks = row[: chunks * _CHUNK].reshape(_CHUNK, chunks).max(axis=0)
        places = np.flatnonzero(row >= np.partition(peaks, chunks - count)[chunks - count])
        values = row[places]
    else:
        places, values = np.arange(len(row)), row
    lowest = np.partition(values, len(values) - count)[len(values) - count]
    return np.asarray(places[values >= lowest], np.int64)


def _ordered(row: Row, places: Ids) -> Ids:
    """Places by falling logit; equal ones keep their order."""
    return np.asarray(places[np.argsort(-row[places], kind="stable")], np.int64)
