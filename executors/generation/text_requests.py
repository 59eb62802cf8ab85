"""Reads the tensors of a request for text (`charonia.generation.text_tensors`), with the meaning that Triton's vLLM
backend gives them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from charonia.backend import ModelRequest
from charonia.errors import InvalidArgument
from charonia.generation.parameters import SamplingParameters, parse_sampling
from charonia.generation.text_tensors import STREAM_INTERVAL
from charonia.generation.tokenizer import Tokenizer
from charonia.tensors import Tensor

_RETURN = "return_"
_LARGE = 4096
"""A prompt of more characters or tokens is prepared in a thread: it would hold up the responses of others."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What a request asks for. `returns` are the outputs it wants besides the text; `sampling` is not parsed yet.

    `text` is "" if only `ids`, the tokens of the prompt, are given.
    """

    text: str
    ids: tuple[int, ...] | None
    sampling: str | Mapping[str, Any]
    stream: bool
    includes_prompt: bool
    returns: frozenset[str]
    interval: int = 1
    """Of a stream: how many tokens a response has at least, but for the last one."""

    @property
    def is_large(self) -> bool:
        """Whether it may take long to prepare: its prompt is long, or it has a grammar."""
        return len(self.text) > _LARGE or len(self.ids or ()) > _LARGE or "structured_outputs" in self.sampling


@dataclass(frozen=True, slots=True)
class Prepared:
    """The tokens of a prompt, and how those of the answer are sampled."""

    prompt: tuple[int, ...]
    parameters: SamplingParameters


def read_text_request(request: ModelRequest) -> TextRequest:
    """Raises `InvalidArgument` for tensors that contradict one another, or are not what the interface says."""
    tensors = {tensor.name: tensor for tensor in request.inputs}
    stream = _flag(tensors, "stream", False)
    includes_prompt = not _flag(tensors, "exclude_input_in_output", stream)
    if includes_prompt and stream:
        raise InvalidArgument(
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
        )
    ids = None
    if "prompt_token_ids" in tensors:
        ids = tuple(tensors["prompt_token_ids"].array().reshape(-1).tolist())
    elif "text_input" not in tensors:
        raise InvalidArgument("expected 'text_input' or 'prompt_token_ids'")
    sampling: str | Mapping[str, Any] = request.parameters
    if "sampling_parameters" in tensors:
        sampling = _text(tensors["sampling_parameters"])
    returns = frozenset(
        name.removeprefix(_RETURN) for name in tensors if name.startswith(_RETURN) and _flag(tensors, name, False)
    )
    text = _text(tensors["text_input"]) if "text_input" in tensors else ""
    return TextRequest(text, ids, sampling, stream, includes_prompt, returns, _interval(tensors))


def prepare(request: TextRequest, tokenizer: Tokenizer, context: int, seed: int) -> Prepared:
    """Tokenises the prompt and parses the parameters; `seed` is for a request without one.

    Raises `InvalidArgument` for a prompt that is too long, and for wrong parameters.
    """
    prompt = request.ids
    if prompt is None:
        prompt = tuple(tokenizer.encode(request.text, special=True, limit=context))
    parameters = parse_sampling(
        request.sampling,
        context=context,
        prompt_tokens=len(prompt),
        seed=lambda: seed,
        scores_prompt="prompt_logprobs" in request.returns,
    )
    return Prepared(prompt, parameters)


def _element(tensor: Tensor) -> Any:
    elements = tensor.array().reshape(-1)
    if len(elements) != 1:
        raise InvalidArgument(f"expected one element in '{tensor.name}', got {len(elements)}")
    return elements[0]


def _text(tensor: Tensor) -> str:
    element = _element(tensor)
    if not isinstance(element, bytes):
        raise InvalidArgument(f"expected text in '{tensor.name}', got {tensor.datatype.name}")
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"'{tensor.name}' is not UTF-8") from None


def _interval(tensors: Mapping[str, Tensor]) -> int:
    name = STREAM_INTERVAL.name
    if name not in tensors:
        return 1
    element = _element(tensors[name])
    if not isinstance(element, np.integer) or element < 1:
        raise InvalidArgument(f"'{name}' must be an integer of at least 1")
    return int(element)


def _flag(tensors: Mapping[str, Tensor], name: str, default: bool) -> bool:
    if name not in tensors:
        return default
    element = _element(tensors[name])
    if not isinstance(element, np.bool_):
        raise InvalidArgument(f"expected a BOOL in '{name}', got {tensors[name].datatype.name}")
    return bool(element)
