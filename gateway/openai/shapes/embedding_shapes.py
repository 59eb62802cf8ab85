"""Embeddings: the request read, and the answer written as numbers or base64. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .api_errors import ApiError, missing
from .known_fields import EMBEDDING, refuse_unknown
from .sampling_fields import text, token_ids, whole

MAX_INPUTS = 2048

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts, or lists of token ids, to be embedded. `dimensions` None: as many as the model gives."""

    model: str
    inputs: list[str] | list[list[int]]
    dimensions: int | None = None
    as_base64: bool = False


def read_embedding(body: Mapping[str, Any]) -> EmbeddingRequest:
    """The request of a body. Raises `ApiError`."""
    refuse_unknown(body, EMBEDDING)
    model = text(body, "model")
    form = body.get("encoding_format")
    if form not in (None, "float", "base64"):
        raise ApiError("'encoding_format' must be float or base64", param="encoding_format")
    return EmbeddingRequest(model, _inputs(body.get("input")), whole(body, "dimensions", 1, 2**20), form == "base64")


def _inputs(given: Any) -> list[str] | list[list[int]]:
    if given is None:
        raise missing("input")
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        raise ApiError("'input' must be a string, token ids, or a list of either", param="input")
    if type(given[0]) is int:
        return [token_ids(given, "input")]
    if len(given) > MAX_INPUTS:
        raise ApiError(f"'input' has {len(given)} texts, the bound is {MAX_INPUTS}", param="input")
    if all(isinstance(one, str) for one in given):
        if not all(given):
            raise ApiError("'input' must not hold an empty string", param="input")
        return given
    if not all(isinstance(one, list) and one for one in given):
        raise ApiError("'input' must be a string, token ids, or a list of either", param="input")
    return [token_ids(one, "input") for one in given]


def shortened(vector: Vector, dimensions: int | None) -> Vector:
    """The first `dimensions` values of float32 [n], of length 1 again. Raises `ApiError` if the model gives fewer."""
    if dimensions is None or dimensions == vector.size:
        return vector
    if dimensions > vector.size:
        raise ApiError(f"'dimensions' is {dimensions}, the model gives {vector.size}", param="dimensions")
    cut = vector[:dimensions]
    length = float(np.linalg.norm(cut))
    return cut if length == 0.0 else (cut / np.float32(length)).astype(np.float32)


def embedding_document(wanted: EmbeddingRequest, vectors: Sequence[Vector], prompt_tokens: int) -> dict[str, Any]:
    """The answer; `vectors` are float32 [n], in the order of the inputs. Raises as `shortened`."""
    data = []
    for index, vector in enumerate(vectors):
        values = shortened(vector, wanted.dimensions)
        written: Any = (
            base64.b64encode(values.astype("<f4").tobytes()).decode() if wanted.as_base64 else values.tolist()
        )
        data.append({"object": "embedding", "index": index, "embedding": written})
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "model": wanted.model, "usage": usage}
