"""Documents ranked by a query, and scores of pairs of texts: requests read, answers written. Pure.

`/v1/rerank` has the fields of Jina and Cohere, `/v1/score` those of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .api_errors import ApiError, missing
from .sampling_fields import flag, text, whole

MAX_PAIRS = 2048

_FIRST = ("text_1", "queries", "data_1")
_SECOND = ("text_2", "documents", "items", "data_2")


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """Documents to be ranked by how well they answer `query`. `top_n` 0: all of them."""

    model: str
    query: str
    documents: list[str]
    top_n: int = 0
    returns_documents: bool = True

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The query with each document."""
        return [(self.query, document) for document in self.documents]


def read_rerank(body: Mapping[str, Any]) -> RerankRequest:
    """The request of a body. Raises `ApiError`."""
    model, query = text(body, "model"), text(body, "query")
    given = body.get("documents")
    if given is None:
        raise missing("documents")
    if not isinstance(given, list) or not given:
        raise ApiError("'documents' must be a list of texts that is not empty", param="documents")
    if len(given) > MAX_PAIRS:
        raise ApiError(f"'documents' has {len(given)} texts, the bound is {MAX_PAIRS}", param="documents")
    documents = [one.get("text") if isinstance(one, dict) else one for one in given]
    found = [one for one in documents if isinstance(one, str)]
    if len(found) != len(documents):
        raise ApiError("'documents' must be strings, or objects with a 'text'", param="documents")
    top_n = whole(body, "top_n", 0, 2**31 - 1) or 0
    return RerankRequest(model, query, found, top_n, flag(body, "return_documents", True))


def rerank_document(wanted: RerankRequest, answer_id: str, scores: Sequence[float], tokens: int) -> dict[str, Any]:
    """The answer: the best first, equal ones in the order of the documents."""
    ranked = sorted(range(len(scores)), key=lambda at: -scores[at])[: wanted.top_n or None]
    results = []
    for at in ranked:
        document = {"document": {"text": wanted.documents[at]}} if wanted.returns_documents else {}
        results.append({"index": at, **document, "relevance_score": scores[at]})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": answer_id, "model": wanted.model, "usage": usage, "results": results}


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Pairs of texts to be scored."""

    model: str
    pairs: list[tuple[str, str]]


def read_score(body: Mapping[str, Any]) -> ScoreRequest:
    """The request of a body: one text with one, one with each of several, or each with its own. Raises `ApiError`."""
    model = text(body, "model")
    first, second = _texts(body, _FIRST), _texts(body, _SECOND)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise ApiError(
            f"{len(first)} texts cannot be paired with {len(second)}: the first must be one, or as many",
            param=_FIRST[0],
        )
    return ScoreRequest(model, list(zip(first, second, strict=True)))


def _texts(body: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    name = next((one for one in names if body.get(one) is not None), names[0])
    given = body.get(name)
    if given is None:
        raise missing(name)
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise ApiError(f"'{name}' must be a string or a list of strings", param=name)
    if len(found) > MAX_PAIRS:
        raise ApiError(f"'{name}' has {len(found)} texts, the bound is {MAX_PAIRS}", param=name)
    return found


def score_document(
    wanted: ScoreRequest, answer_id: str, created_s: int, scores: Sequence[float], tokens: int
) -> dict[str, Any]:
    """The answer, in the order of the pairs."""
    return {
        "id": answer_id,
        "object": "list",
        "created": created_s,
        "model": wanted.model,
        "data": [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)],
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
    }
