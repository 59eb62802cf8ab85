"""What a request's next token depends on besides the model, and when its text ends: a fold over the emitted tokens.

Grammar, penalties and the search for stop strings are carried on from tokens that an earlier attempt emitted as if they
had been sampled here. `executors.generation.token_engine` gives it the tokens.
"""

from __future__ import annotations

from charonia.generation.detokenizer import Detokenizer, end_tokens
from charonia.generation.grammar import Matcher
from charonia.generation.sampling import RowState
from charonia.generation.tokenizer import Tokenizer, bad_word_sequences

from .engine import GenerationRequest


class GenerationState:
    """One request. Raises `InvalidArgument` for a grammar that cannot be used."""

    __slots__ = ("adapter", "detokenizer", "finish", "matcher", "max_tokens", "request", "row")

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
        for token in request.emitted:
            self.accept(token)

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
