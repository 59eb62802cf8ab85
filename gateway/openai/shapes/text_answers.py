"""Responses of a model that generates text, as deltas of text and tokens, and the fold of them. Pure.

The tensors are those of `charonia.generation.text_tensors`; a model may lack all but `text_output`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from charonia.errors import InvalidArgument
from charonia.generation.sampling import LEAST_LOGPROB
from charonia.inference import InferenceResponse
from charonia.tensors import Tensor, split_bytes_elements

_UNFINISHED = ("null", "None", "")
"""Finish reasons of models while a text goes on: JSON's and Python's word, which Triton's vLLM backend writes."""


PromptRow = Mapping[str, Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one response adds: text, its tokens, and why the text ended ("" while it goes on).

    `logprobs` has for each token the candidates by token id, as the model reports them; empty if they were not asked
    for. `prompt_tokens` is None where the model does not count them; `count` counts tokens, also where ids are missing.
    """

    text: str
    tokens: tuple[int, ...] = ()
    count: int = 0
    finish: str = ""
    prompt_tokens: int | None = None
    logprobs: tuple[Mapping[str, Mapping[str, Any]], ...] = ()
    prompt_logprobs: Sequence[PromptRow] | None = None
    """Of the first delta, if asked for: candidates for each token of the prompt, itself first; None for the first."""


def read_delta(response: InferenceResponse) -> TextDelta:
    """The delta of a response. A response without outputs, as the last one may be, adds nothing."""
    tensors = {tensor.name: tensor for tensor in response.outputs}
    text = b"".join(_elements(tensors.get("text_output"))).decode("utf-8", "replace")
    tokens = tuple(_numbers(tensors.get("token_ids"), "<i4"))
    counted = _numbers(tensors.get("num_output_tokens"), "<u4")
    prompt = _numbers(tensors.get("num_input_tokens"), "<u4")
    reasons = [reason.decode("utf-8", "replace") for reason in _elements(tensors.get("finish_reason"))]
    finish = next((reason for reason in reasons if reason not in _UNFINISHED), "")
    rows: list[Mapping[str, Mapping[str, Any]]] = []
    for element in _elements(tensors.get("logprobs")):
        found = orjson.loads(element) if element and element != b"null" else None
        rows += found if isinstance(found, list) else [found] if isinstance(found, dict) and found else []
    scored = next(iter(_elements(tensors.get("prompt_logprobs"))), b"")
    prompt_rows = orjson.loads(scored) if scored else None
    return TextDelta(
        *(text, tokens, sum(counted) if counted else len(tokens), finish),
        *(prompt[0] if prompt else None, tuple(rows), prompt_rows),
    )


def _elements(tensor: Tensor | None) -> Sequence[bytes]:
    return list(split_bytes_elements(tensor.data)) if tensor is not None else []


def _numbers(tensor: Tensor | None, form: str) -> list[int]:
    return np.frombuffer(tensor.data, form).tolist() if tensor is not None else []


@dataclass(slots=True)
class TextFold:
    """All of one text so far."""

    parts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Mapping[str, Mapping[str, Any]]] = field(default_factory=list)
    count: int = 0
    finish: str = ""
    prompt_tokens: int | None = None
    prompt_logprobs: Sequence[PromptRow] | None = None

    def add(self, delta: TextDelta) -> None:
        self.parts.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.count += delta.count
        self.finish = delta.finish or self.finish
        if delta.prompt_tokens is not None:
            self.prompt_tokens = delta.prompt_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs

    @property
    def text(self) -> str:
        return "".join(self.parts)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The member `usage` of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


TokenBytes = Callable[[int], bytes]
"""The bytes of a token; a token may be a part of a character."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log probability, and the candidates in its place by rank, itself perhaps among them."""

    token: str
    raw: bytes
    logprob: float
    candidates: tuple[tuple[str, bytes, float], ...]


def token_logprobs(
    tokens: Sequence[int],
    rows: Sequence[Mapping[str, Mapping[str, Any]]],
    most: int,
    bytes_of: TokenBytes | None,
) -> list[TokenLogprob]:
    """The log probabilities of the tokens, each with `most` candidates. `bytes_of` None: the model's texts count."""
    found: list[TokenLogprob] = []
    for at, row in enumerate(rows):
        ranked = sorted(row.items(), key=lambda one: (int(one[1].get("rank") or 0), -float(one[1]["logprob"])))
        if not ranked:
            continue
        chosen = str(tokens[at]) if at < len(tokens) else ranked[0][0]
        entries = [(name, *_text(name, entry, bytes_of), _finite(entry["logprob"])) for name, entry in ranked]
        by_name = {name: (text, raw, logprob) for name, text, raw, logprob in entries}
        text, raw, logprob = by_name.get(chosen, entries[0][1:])
        candidates = tuple((text, raw, logprob) for _, text, raw, logprob in entries[:most])
        found.append(TokenLogprob(text, raw, logprob, candidates))
    return found


def prompt_logprobs(rows: Sequence[PromptRow], bytes_of: TokenBytes | None) -> list[dict[str, Any] | None]:
    """The member `prompt_logprobs` of an answer, in vLLM's form."""
    return [
        None
        if row is None
        else {
            name: {
                "logprob": _finite(entry["logprob"]),
                "rank": entry.get("rank"),
                "decoded_token": _text(name, entry, bytes_of)[0],
            }
            for name, entry in row.items()
        }
        for row in rows
    ]


def _finite(logprob: Any) -> float:
    return max(float(logprob), LEAST_LOGPROB)


def _text(name: str, entry: Mapping[str, Any], bytes_of: TokenBytes | None) -> tuple[str, bytes]:
    if bytes_of is not None and name.isdigit():
        try:
            raw = bytes_of(int(name))
        except InvalidArgument:
            pass  # a model may have more rows than its tokenizer has tokens
        else:
            return raw.decode("utf-8", "replace"), raw
    text = str(entry.get("decoded_token") or "")
    return text, text.encode("utf-8", "replace")
