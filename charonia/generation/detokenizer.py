"""Text of tokens that come one by one: whole characters only, and nothing that a stop string may still take back.

A pure fold: the same tokens give the same texts, however often they are replayed. `tokenizer` knows the
bytes of tokens.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from charonia.generation.parameters import SamplingParameters


class TokenTexts(Protocol):
    """What a detokenizer needs of a `Tokenizer`."""

    end_tokens: frozenset[int]
    special_tokens: frozenset[int]

    def token_bytes(self, token: int) -> bytes: ...


class Detokenizer:
    """The text of one request. Bytes that are no UTF-8 become U+FFFD, as soon as they cannot become a character.

    A stop string ends the text as soon as its last character is there; of two that end there, the longer one counts,
    so the text is the same however tokens cut it. Its text is left out but for `include_stop_str_in_output`. None ends
    in the first `min_tokens` tokens. `finished` is "" until then, and "stop" after it or after an end token.
    """

    def __init__(self, tokenizer: TokenTexts, parameters: SamplingParameters) -> None:
        self._tokenizer = tokenizer
        self._ends = end_tokens(tokenizer, parameters)
        self._skipped = tokenizer.special_tokens if parameters.skip_special_tokens else frozenset()
        self._stops = [_StopString(text) for text in parameters.stop]
        self._includes_stop = parameters.include_stop_str_in_output
        self._min_tokens = parameters.min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._count = 0
        self.finished = ""
        self.stop_string: str | None = None
        """The stop string that ended the text."""

    def push(self, token: int) -> str:
        """Returns the text that is certain after a token; "" once the text is finished."""
        if self.finished:
            return ""
        self._count += 1
        is_end = token in self._ends and self._count > self._min_tokens
        hidden = token in self._skipped or (is_end and not self._includes_stop)
        text = "" if hidden else self._decoder.decode(self._tokenizer.token_bytes(token))
        if is_end:
            return self._end(text)
        return self._add(text) if text else ""

    def flush(self) -> str:
        """Returns the text that was held back, after the last token; "" if a stop string ended the text."""
        if self.finished:
            return ""
        text = self._add(self._decoder.decode(b"", final=True))
        if not self.finished:
            text += self._held
            self._held = ""
        return text

    def _end(self, text: str) -> str:
        released = self._add(text + self._decoder.decode(b"", final=True))
        if not self.finished:
            released += self._held
            self._held, self.finished = "", "stop"
        return released

    def _add(self, text: str) -> str:
        if not self._stops:
            return text
        before = self._held
        window = before + text
        checked = self._count > self._min_tokens
        for at, character in enumerate(text, len(before) + 1):
            ended = [stop for stop in self._stops if stop.push(character)]
            if ended and checked:
                stop = max(ended, key=lambda each: len(each.text))
                self.finished, self.stop_string, self._held = "stop", stop.text, ""
                return window[:at] if self._includes_stop else window[: at - len(stop.text)]
        certain = len(window) - max(stop.matched for stop in self._stops)
        self._held = window[certain:]
        return window[:certain]


class _StopString:
    """Follows a text character by character (Knuth, Morris, Pratt): `matched` characters at its end begin `text`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0] * len(text)
        length = 0
        for at in range(1, len(text)):
            while length and text[at] != text[length]:
                length = self._shorter[length - 1]
            length += text[at] == text[length]
            self._shorter[at] = length

    def push(self, character: str) -> bool:
        """Returns whether the text ends with the whole stop string now."""
        text, matched = self.text, self.matched
        while matched and text[matched] != character:
            matched = self._shorter[matched - 1]
        matched += text[matched] == character
        whole = matched == len(text)
        self.matched = self._shorter[matched - 1] if whole else matched
        return whole


def end_tokens(tokenizer: TokenTexts, parameters: SamplingParameters) -> frozenset[int]:
    """Returns the tokens that end a request's text: the model's, unless they are ignored, and the request's own."""
    own = frozenset(parameters.stop_token_ids)
    return own if parameters.ignore_eos else tokenizer.end_tokens | own
