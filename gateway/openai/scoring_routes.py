"""`/v1/rerank` and `/v1/score`: how well texts fit together, by a model that scores pairs or one that embeds.

A model that scores has the parameter `charonia.openai_task: "score"`, the BYTES inputs `query` and `document`, and one
FP32 output with one value. Of a model that embeds, as `embedding_routes` describes it, the score is the cosine of two
embeddings.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np

from charonia.clock import wall_ns
from charonia.errors import InternalError
from gateway.handler import Handler
from gateway.requests.delivery import Caller

from .api_calls import ApiCall, RouteTable
from .embedding_routes import (
    ANSWER,
    REQUEST,
    ask_all,
    embed_all,
    embedding_tensors,
    reads_requests,
    refuse_adapter,
    texts_to_vector,
)
from .shapes.api_errors import ApiError, long_field
from .shapes.embedding_shapes import Vector
from .shapes.scoring_shapes import read_rerank, read_score, rerank_document, score_document
from .text_metrics import TextCounts
from .text_models import Asked, TextModel, TextModels, size_of, too_long

RERANK, SCORE = "rerank", "score"
QUERY, DOCUMENT = "query", "document"
"""The inputs of a model that scores."""

Pairs = Sequence[tuple[str, str]]


class Scoring:
    """Scores pairs of texts."""

    def __init__(self, handler: Handler, models: TextModels, counts: TextCounts) -> None:
        self._handler = handler
        self._models = models
        self._counts = counts

    async def scores(
        self, name: str, pairs: Pairs, caller: Caller, endpoint: str, asked: Asked
    ) -> tuple[list[float], int]:
        """The score of each pair, and how many tokens the model reads: 0 where no tokenizer is here and it counts none.

        Raises `ApiError` for a model that cannot, and the error of the first request that failed.
        """
        model = self._models.find(name, asked)
        refuse_adapter(model)
        if reads_requests(model):
            return await self._by_requests(model, pairs, caller, endpoint)
        scores = model.task == "score"
        output = _score_output(model) if scores else ""
        text, vector = ("", "") if scores else _embedding_tensors(model)
        if scores:
            self._check_size(pairs, "query" if endpoint == RERANK else "text_1")
        with long_field("documents" if endpoint == RERANK else "text_2"):
            tokens = await self._tokens(model, pairs, together=scores)
        with self._counts.call(endpoint, model.name, caller.tenant, tokens):
            if scores:
                items = [{QUERY: query, DOCUMENT: document} for query, document in pairs]
                found = await ask_all(self._handler, model, items, output, caller)
                return [_only(model, one) for one in found], tokens
            texts = _different(pairs)
            vectors = await ask_all(self._handler, model, [{text: one} for one in texts], vector, caller)
            return _cosines(pairs, texts, vectors), tokens

    async def _by_requests(
        self, model: TextModel, pairs: Pairs, caller: Caller, endpoint: str
    ) -> tuple[list[float], int]:
        """As `scores`, of a model with the tensors of Triton's vLLM backend, which counts tokens itself."""
        texts = _different(pairs)
        with self._counts.call(endpoint, model.name, caller.tenant, 0) as counted:
            vectors, tokens = await embed_all(self._handler, model, texts, caller)
            counted.reported_prompts[0] = tokens
            return _cosines(pairs, texts, vectors), tokens

    def _check_size(self, pairs: Pairs, param: str) -> None:
        """Raises a 400: each pair is a request with both texts, and one query stands in all of them."""
        sizes = {one: size_of(one) for one in _different(pairs)}
        total = sum(sizes[query] + sizes[document] for query, document in pairs)
        self._models.check_size(total, f"{len(pairs)} pairs of texts", param)

    async def _tokens(self, model: TextModel, pairs: Pairs, *, together: bool) -> int:
        """How many tokens the model reads; `together`: a pair as one text. Raises a 400 for one that is too long."""
        tools = await self._models.tools(model)
        if tools is None:
            return 0
        texts = _different(pairs)
        counts = map(len, await self._models.encode_all(tools, texts, special=True))
        of_text = dict(zip(texts, counts, strict=True))
        if not together:
            return sum(of_text.values())
        most = max(of_text[query] + of_text[document] for query, document in pairs)
        if most > tools.context:
            raise too_long(tools.context, most)
        return sum(of_text[query] + of_text[document] for query, document in pairs)


def _score_output(model: TextModel) -> str:
    found = texts_to_vector(model, (QUERY, DOCUMENT))
    if found is None:
        raise ApiError(
            f"The model '{model.name}' cannot score: it needs the BYTES inputs '{QUERY}' and '{DOCUMENT}', no other "
            "input that is required, and one FP32 output",
            param="model",
        )
    return found[1]


def _embedding_tensors(model: TextModel) -> tuple[str, str]:
    """The tensors of a model that embeds. Raises a 400 `ApiError` that says what a model needs."""
    if model.task != "embed":
        raise ApiError(
            f"The model '{model.name}' cannot score: it needs the parameter charonia.openai_task, 'score' or 'embed', "
            f"or the BYTES tensors {REQUEST} and {ANSWER}",
            param="model",
        )
    return embedding_tensors(model)


def _different(pairs: Pairs) -> list[str]:
    """The texts of all pairs, each once."""
    return list(dict.fromkeys(one for pair in pairs for one in pair))


def _cosines(pairs: Pairs, texts: Sequence[str], vectors: Sequence[Vector]) -> list[float]:
    of_text = dict(zip(texts, vectors, strict=True))
    return [cosine(of_text[query], of_text[document]) for query, document in pairs]


def _only(model: TextModel, values: Vector) -> float:
    if values.size != 1:
        raise InternalError(f"model '{model.name}' gave {values.size} scores for one pair")
    if not np.isfinite(values[0]):
        raise InternalError(f"model '{model.name}' gave a score that is no number")
    return float(values[0])


def cosine(one: Vector, other: Vector) -> float:
    """The cosine of two vectors float32 [n], between -1 and 1; 0 if either has no length."""
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    if one.size != other.size or not np.isfinite(lengths):
        raise InternalError("the model's embeddings cannot be compared")
    return max(-1.0, min(1.0, float(one @ other) / lengths)) if lengths else 0.0


def add_scoring(routes: RouteTable, scoring: Scoring) -> None:
    """Add the paths of this module; `/v2/rerank` is Cohere's."""

    async def rerank(call: ApiCall) -> None:
        wanted = read_rerank(await call.json())
        scores, tokens = await scoring.scores(wanted.model, wanted.pairs, call.caller, RERANK, call.asked)
        await call.reply(rerank_document(wanted, f"rerank-{uuid.uuid4().hex}", scores, tokens))

    async def score(call: ApiCall) -> None:
        wanted = read_score(await call.json())
        scores, tokens = await scoring.scores(wanted.model, wanted.pairs, call.caller, SCORE, call.asked)
        created_s = wall_ns() // 1_000_000_000
        await call.reply(score_document(wanted, f"score-{uuid.uuid4().hex}", created_s, scores, tokens))

    routes.add("POST", "/v1/rerank", rerank)
    routes.add("POST", "/v2/rerank", rerank)
    routes.add("POST", "/v1/score", score)
