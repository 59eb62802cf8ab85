"""Reads the tensors of a request: a prompt to be continued, or a text to be embedded.

Rules and texts are those of Triton's vLLM backend; `sampling_arguments` reads the parameters.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from charonia.backend import ModelRequest
from charonia.errors import InvalidArgument
from charonia.tensors import Tensor

RETURNS = (
    *("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens", "token_ids"),
    "kv_transfer_params",
)
"""The outputs that a request gets when its input `return_<name>` is true."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt, as text or as token ids. `returns` are the outputs besides `text_output`."""

    text: str
    token_ids: tuple[int, ...]
    images: tuple[bytes, ...]
    """Encoded images (JPEG, PNG, ...)."""
    streams: bool
    prepends_prompt: bool
    parameters: str
    """JSON text, "" for none."""
    returns: frozenset[str]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A text or its token ids, and to how many dimensions its embedding is cut, 0: all."""

    text: str
    token_ids: tuple[int, ...]
    dimensions: int
    returns: frozenset[str]


def is_embedding(request: ModelRequest) -> bool:
    """Whether a request asks for an embedding."""
    return any(tensor.name == "embedding_request" for tensor in request.inputs)


def prompt_request(request: ModelRequest) -> PromptRequest:
    """Read a request to generate. Raises `InvalidArgument`."""
    inputs = {tensor.name: tensor for tensor in request.inputs}
    streams = _flag(inputs, "stream")
    prepends = not _flag(inputs, "exclude_input_in_output") if "exclude_input_in_output" in inputs else not streams
    if prepends and streams:
        raise InvalidArgument("When streaming, `exclude_input_in_output` = False is not allowed.")
    ids = tuple(int(one) for one in inputs["prompt_token_ids"].array().flat) if "prompt_token_ids" in inputs else ()
    text = _text(inputs["text_input"], "text_input") if "text_input" in inputs else ""
    if ids and text:
        raise InvalidArgument("'text_input' and 'prompt_token_ids' must not both be given")
    if not ids and "text_input" not in inputs:
        raise InvalidArgument("'text_input' or 'prompt_token_ids' must be given")
    if "sampling_parameters" in inputs:
        parameters = _text(inputs["sampling_parameters"], "sampling_parameters")
    else:
        parameters = json.dumps(request.parameters) if request.parameters else ""
    images = tuple(_image(one) for one in inputs["image"].array().flat) if "image" in inputs else ()
    return PromptRequest(text, ids, images, streams, prepends, parameters, _returns(inputs))


def embedding_request(request: ModelRequest) -> EmbeddingRequest:
    """Read a request to embed. Raises `InvalidArgument`."""
    inputs = {tensor.name: tensor for tensor in request.inputs}
    written = json_object(_text(inputs["embedding_request"], "embedding_request"), "embedding_request")
    given = written.get("input")
    pooling = written.get("pooling_params") or {}
    dimensions = pooling.get("dimensions") if isinstance(pooling, dict) else None
    if isinstance(dimensions, list):  # Triton's front sends a list of one
        dimensions = dimensions[0] if dimensions else None
    if dimensions is not None and (not _is_integer(dimensions) or dimensions < 1):
        raise InvalidArgument(f"'dimensions' must be a positive integer, got {dimensions!r}")
    returns = _returns(inputs) & {"num_input_tokens", "num_output_tokens"}
    if isinstance(given, str):
        return EmbeddingRequest(given, (), dimensions or 0, returns)
    if isinstance(given, list) and given and all(_is_integer(one) for one in given):
        return EmbeddingRequest("", tuple(given), dimensions or 0, returns)
    raise InvalidArgument("'input' of 'embedding_request' must be a text or a list of token ids")


def json_object(text: str, name: str) -> dict[str, Any]:
    """JSON text as an object. Raises `InvalidArgument`, naming the input."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"'{name}' is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"'{name}' must be a JSON object")
    return found


def _returns(inputs: dict[str, Tensor]) -> frozenset[str]:
    return frozenset(name for name in RETURNS if _flag(inputs, f"return_{name}"))


def _flag(inputs: dict[str, Tensor], name: str) -> bool:
    return name in inputs and bool(_first(inputs[name].array().flat, name))


def _text(tensor: Tensor, name: str) -> str:
    try:
        return bytes(_first(tensor.array().flat, name)).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"'{name}' is not UTF-8: {error}") from None


def _first(elements: Any, name: str) -> Any:
    found: Sequence[Any] = list(elements)[:1]
    if not found:
        raise InvalidArgument(f"'{name}' must have an element")
    return found[0]


def _image(element: Any) -> bytes:
    try:
        return base64.b64decode(bytes(element), validate=True)
    except binascii.Error as error:
        raise InvalidArgument(f"'image' is not base64: {error}") from None


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
