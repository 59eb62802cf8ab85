"""What a request's next token depends on besides the model, and when its text ends: a fold over the emitted tokens.

Pure. Grammar, penalties and the search for stop strings are carried on from tokens that an earlier attempt emitted as
if they had been sampled here. `executors.generation.token_engine` gives it the tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from charonia.errors import CharoniaError, InternalError
from charonia.generation.detokenizer import Detokenizer, end_tokens
from charonia.generation.grammar import Matcher
from charonia.generation.sampling import RowState, candidates
from charonia.generation.tokenizer import Tokenizer, bad_word_sequences

from .engine import GenerationRequest, TokenLogprob


class GenerationState:
    """One request. Raises `InvalidArgument` for a grammar that cannot be used."""

    __slots__ = (
        "adapter",
        "detokenizer",
        "finish",
        "matcher",
        "max_tokens",
        "prompt_logprobs",
        "request",
        "row",
        "score_error",
    )

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, adapter: str, max_tokens: int) -> None:
        parameters = request.parameters
        self.request = request
        self.adapter = adapter
        """Its name in the engine."""
        self.max_tokens = max_tokens
        self.detokenizer = Detokenizer(tokenizer, parameters)
        self.matcher = None if parameters.structured is None else Matcher(parameters.structured, tokenizer)
        self.row = RowState(
            parameters,
            request.prompt,
            bad_words=bad_word_sequences(tokenizer, parameters.bad_words),
            end_tokens=end_tokens(tokenizer, parameters),
        )
        self.finish = ""
        wants_prompt = parameters.prompt_logprobs is not None and not request.emitted
        self.prompt_logprobs: list[tuple[TokenLogprob, ...]] | None = [] if wants_prompt else None
        """Of the prompt's tokens so far, from the second on. An earlier attempt that emitted tokens has given them."""
        self.score_error: CharoniaError | None = None
        for token in request.emitted:
            self.accept(token)

    def score(self, rows: npt.NDArray[np.float32]) -> None:
        """Take the logits [n, vocabulary] that the next `n` tokens of the prompt were preceded by."""
        found, count = self.prompt_logprobs, self.request.parameters.prompt_logprobs
        assert found is not None
        assert count is not None
        for row in rows:
            if not np.isfinite(row.max()):
                self.score_error = InternalError("the model gave logits that are NaN or infinite")
                return
            token = int(self.request.prompt[len(found) + 1])
            found.append(tuple(TokenLogprob(one.token, one.logprob, one.rank) for one in candidates(row, token, count)))

    def constrain(self) -> None:
        """Compute which tokens the grammar allows next."""
        if self.matcher is not None:
            self.row.allowed = self.matcher.mask()

    def accept(self, token: int) -> str:
        """Take the next token; returns the text that is certain now. `finish` says whether it was the last."""
        row, matcher = self.row, self.matcher
        row.emitted.append(token)
        text = self.detokenizer.push(token)
        if matcher is not None:
            matcher.push(token)
        if self.detokenizer.finished:
            self.finish = "stop"
            return text
        if matcher is not None and matcher.finished:
            self.finish = "stop"
        elif len(row.emitted) >= self.max_tokens:
            self.finish = "length"
        else:
            return text
        return text + self.detokenizer.flush()
