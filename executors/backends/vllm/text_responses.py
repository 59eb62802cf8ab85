"""Turns what the engine gave since the response before into tensors, in the forms of Triton's vLLM backend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from charonia.backend import ModelResponse
from charonia.generation.sampling import LEAST_LOGPROB
from charonia.tensors import Tensor

NOT_FINISHED = "None"
"""`finish_reason` of a text that goes on."""


class Completion(Protocol):
    """What is used of one of vLLM's outputs. `text`, `token_ids` and `logprobs` are those since the last output."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: Sequence[Mapping[int, Any]] | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Gained:
    """What one of a request's texts gained with a response. `logprobs` has an object for each token, ready for JSON."""

    text: str = ""
    tokens: Sequence[int] = ()
    cumulative_logprob: float | None = None
    logprobs: Sequence[Mapping[str, Any]] | None = None
    finish: str = NOT_FINISHED

    @property
    def has_ended(self) -> bool:
        return self.finish != NOT_FINISHED


def gained_by(one: Completion, *, with_logprobs: bool) -> Gained:
    """What one of vLLM's outputs says."""
    logprobs = None if one.logprobs is None or not with_logprobs else [_candidates(each) for each in one.logprobs]
    return Gained(one.text, list(one.token_ids), one.cumulative_logprob, logprobs, str(one.finish_reason))


def text_response(
    found: Sequence[Gained],
    returns: frozenset[str],
    *,
    prompt: str = "",
    input_tokens: int = 0,
    transfer: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
) -> ModelResponse:
    """A response with an element for each text of a request (as many as its parameter `n`).

    `prompt` is put before each. `transfer` is what the engine's connector says about the keys and values of the prompt,
    in the last response. `outputs` are the requested names, empty for all. `token_ids` has those of all texts,
    one after the other, and `num_output_tokens` how many each has.
    """
    tensors = [_strings("text_output", [prompt + one.text for one in found])]
    if "finish_reason" in returns:
        tensors.append(_strings("finish_reason", [one.finish for one in found]))
    if "cumulative_logprob" in returns:
        sums = [np.nan if one.cumulative_logprob is None else one.cumulative_logprob for one in found]
        tensors.append(Tensor.of("cumulative_logprob", np.asarray(sums, np.float32)))
    if "logprobs" in returns:
        tensors.append(_strings("logprobs", [json.dumps(one.logprobs) for one in found]))
    tensors += _counts(returns, input_tokens, [len(one.tokens) for one in found])
    if "token_ids" in returns:
        tensors.append(Tensor.of("token_ids", np.asarray([token for one in found for token in one.tokens], np.int32)))
    if "kv_transfer_params" in returns:
        tensors.append(_strings("kv_transfer_params", [json.dumps(transfer)]))
    wanted = [tensor for tensor in tensors if not outputs or tensor.name in outputs]
    return ModelResponse(wanted, tokens=sum(len(one.tokens) for one in found))


def embedding_response(
    embedding: Sequence[float], returns: frozenset[str], *, input_tokens: int, outputs: Sequence[str] = ()
) -> ModelResponse:
    """A response with an embedding as JSON text."""
    tensors = [_strings("text_output", [json.dumps(list(embedding))]), *_counts(returns, input_tokens, [0])]
    return ModelResponse([tensor for tensor in tensors if not outputs or tensor.name in outputs])


def _counts(returns: frozenset[str], inputs: int, outputs: Sequence[int]) -> list[Tensor]:
    counts = {"num_input_tokens": [inputs], "num_output_tokens": outputs}
    return [Tensor.of(name, np.asarray(count, np.uint32)) for name, count in counts.items() if name in returns]


def _strings(name: str, texts: Sequence[str]) -> Tensor:
    # vLLM replaces what is no Unicode; half of a surrogate pair may come from a JSON prompt
    return Tensor.of(name, np.array([text.encode("utf-8", "replace") for text in texts], np.object_))


def _candidates(candidates: Mapping[int, Any]) -> dict[str, Any]:
    return {
        str(token): {
            "logprob": max(one.logprob, LEAST_LOGPROB),
            "rank": one.rank,
            "decoded_token": one.decoded_token,
        }
        for token, one in candidates.items()
    }
