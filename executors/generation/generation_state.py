"""What a request's next token depends on besides the model, and when its text ends: a fold over the emitted tokens.

Grammar, penalties and the search for stop strings are carried on from tokens that an earlier attempt emitted as if they
had been sampled here. `executors.generation.token_engine` gives it the tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from charonia.generation.detokenizer import Detokenizer, end_tokens
from charonia.generation.grammar import Matcher
from charonia.generation.sampling import RowState
from charonia.generation.tokenizer import Tokenizer

from .engine import GenerationRequest


class GenerationState:
    """One request. Raises `InvalidArgument` for a grammar that cannot be used."""

    __slots__ = ("adapter", "detokenizer", "ends", "finish", "is_constrained", "max_tokens", "matcher", "min_tokens", "request", "row")

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, adapter: str, max_tokens: int) -> None:
        parameters = request.parameters
        self.request = request
        self.adapter = adapter
        """Its name in the engine."""
        self.max_tokens = max_tokens
        self.detokenizer = Detokenizer(tokenizer, parameters)
        self.matcher = None if parameters.structured is None else Matcher(parameters.structured, tokenizer)
        self.min_tokens = min(parameters.min_tokens, max_tokens)
        self.ends = np.array(sorted(end_tokens(tokenizer, parameters)), np.int64)
        self.row = RowState(parameters, np.asarray(request.prompt, np.int32))
        self.finish = ""
        self.is_constrained = self.matcher is not None or self.min_tokens > 0
        for token in request.emitted:
            self.accept(token)

    def constrain(self, logits: npt.NDArray[np.float32], row: int) -> npt.NDArray[np.float32]:
        """Forbid what the next token cannot be; returns `logits`, or a copy if they cannot be changed."""
        if self.matcher is not None:
            self.row.mask = self.matcher.mask()
        if len(self.row.emitted) < self.min_tokens and len(self.ends):
            if not logits.flags.writeable:
                logits = logits.copy()
            logits[row, self.ends] = -np.inf
        return logits

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
