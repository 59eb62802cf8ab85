"""What the responses of a stream leave in the log, and how a later run goes on after them.

A record has all that its response says, so giving it again needs no model. After that the engine is asked again, in one
of two ways. Where any continuation is as good as the lost one (greedy texts, and unseeded ones without anything that
looks at the text so far) the prompt is continued with the tokens that were given. Otherwise the request runs again from
its beginning, and what is known already is dropped as long as it is the same, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgpack

from charonia.errors import StreamInterrupted

from .text_responses import Gained

_DISAGREES = "its engine was lost, and the next run does not give the same text"
_GREEDY = 1e-5
"""vLLM takes smaller temperatures as 0."""

_USUAL: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "stop": [],
    "bad_words": [],
    "structured_outputs": None,
    "extra_args": None,
    "repetition_detection": None,
    "thinking_token_budget": None,
}
"""Parameters that look at what was generated so far, or may, and the value with which they do not."""


def pack_record(gained: Sequence[Gained], input_tokens: int) -> bytes:
    """The record of a response."""
    texts = [[one.text, list(one.tokens), one.cumulative_logprob, one.logprobs, one.finish] for one in gained]
    return bytes(msgpack.packb([input_tokens, texts], unicode_errors="surrogatepass"))


def read_record(record: bytes) -> tuple[list[Gained], int]:
    """What each text gained with a response, and the number of tokens of the prompt."""
    input_tokens, texts = msgpack.unpackb(record, unicode_errors="surrogatepass")
    return [Gained(*one) for one in texts], int(input_tokens)


class Recorded:
    """What earlier runs of a stream gave; with `rest` a run from the beginning goes on after it."""

    def __init__(self, records: Sequence[bytes]) -> None:
        self.input_tokens = 0
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.finished: set[int] = set()
        """The texts, of several, that had ended."""
        self._given: dict[int, Gained] = {}
        for record in records:
            gained, self.input_tokens = read_record(record)
            for index, one in enumerate(gained):
                self.tokens.setdefault(index, []).extend(one.tokens)
                self.texts[index] = self.texts.get(index, "") + one.text
                if one.has_ended:
                    self.finished.add(index)

    def rest(self, index: int, gained: Gained) -> Gained | None:
        """What of an output of the new run is not recorded; None for nothing.

        Raises `StreamInterrupted` when it is not the same as what is recorded.
        """
        known, text = self.tokens.get(index, []), self.texts.get(index, "")
        before = self._given.get(index, Gained())
        now = replace(gained, text=before.text + gained.text, tokens=[*before.tokens, *gained.tokens])
        self._given[index] = now
        both = min(len(known), len(now.tokens))
        if list(now.tokens[:both]) != known[:both] or (gained.has_ended and len(now.tokens) < len(known)):
            raise _interrupted()
        if len(now.tokens) < len(known) or (len(now.tokens) == len(known) and not gained.has_ended):
            return None
        if not now.text.startswith(text):
            raise _interrupted()
        if index in self.finished:
            return None
        if len(before.tokens) >= len(known) and len(before.text) >= len(text):
            return gained
        added = len(now.tokens) - max(len(known), len(before.tokens))
        logprobs = None if gained.logprobs is None else gained.logprobs[len(gained.tokens) - added :]
        return replace(gained, text=now.text[len(text) :], tokens=now.tokens[len(known) :], logprobs=logprobs)


def continues_after_tokens(parameters: Any, recorded: Recorded) -> bool:
    """Whether the prompt with the recorded tokens may be given to the engine in place of a run from the beginning.

    `parameters` are vLLM's. Not for a text whose last character is not whole yet.
    """
    if any(getattr(parameters, name, usual) != usual for name, usual in _USUAL.items()):
        return False
    greedy = parameters.temperature < _GREEDY
    if not greedy and parameters.seed is not None:
        return False
    tokens = recorded.tokens.get(0, [])
    return bool(tokens) and (parameters.max_tokens is None or len(tokens) < parameters.max_tokens)


def _interrupted() -> StreamInterrupted:
    return StreamInterrupted(_DISAGREES)
