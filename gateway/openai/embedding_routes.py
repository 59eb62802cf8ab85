"""`/v1/embeddings`: each text is a request of a model with one BYTES input and one FP32 output.

A model says that it embeds by the parameter `charonia.openai_task: "embed"`; the batcher joins the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from gateway.handler import Handler
from gateway.requests.delivery import ANYONE, Caller

from .api_calls import ApiCall, RouteTable
from .shapes.api_errors import ApiError
from .shapes.embedding_shapes import EmbeddingRequest, embedding_document, read_embedding
from .task_requests import ask_all, texts_to_vector
from .text_metrics import TextCounts
from .text_models import TextModel, TextModels, TextTools, too_long

EMBEDDING = "embedding"


class EmbeddingEndpoint:
    """Answers bodies of `/v1/embeddings`; also those that come in a batch's file."""

    def __init__(self, handler: Handler, models: TextModels, counts: TextCounts) -> None:
        self._handler = handler
        self._models = models
        self._counts = counts

    async def document(self, body: Mapping[str, Any], caller: Caller = ANYONE) -> dict[str, Any]:
        """The answer to a body. Raises `ApiError`, and the error of the first text that failed."""
        wanted = read_embedding(body)
        model = self._models.find(wanted.model)
        name, output = embedding_tensors(model)
        tools = await self._models.tools(model)
        texts, tokens = await self._texts(wanted, tools)
        with self._counts.call(EMBEDDING, model.name, caller.tenant, tokens):
            vectors = await ask_all(self._handler, model, [{name: text} for text in texts], output, caller)
        return embedding_document(wanted, vectors, tokens)

    async def _texts(self, wanted: EmbeddingRequest, tools: TextTools | None) -> tuple[list[str], int]:
        """The texts, and the number of their tokens: 0 where the model has no tokenizer here."""
        texts = [one for one in wanted.inputs if isinstance(one, str)]
        lists = [one for one in wanted.inputs if not isinstance(one, str)]
        if tools is None:
            if lists:
                raise ApiError("the model has no tokenizer: 'input' must be text", param="input")
            return texts, 0
        tokens = await self._models.encode_all(tools, texts, special=True)
        for one in lists:
            if len(one) > tools.context:
                raise too_long(tools.context, len(one))
            if any(token >= tools.tokenizer.vocabulary for token in one):
                raise ApiError("'input' has a token id outside the model's vocabulary", param="input")
            texts.append(tools.tokenizer.decode(one).decode("utf-8", "replace"))
            await asyncio.sleep(0)  # thousands of lists are not decoded at once
        return texts, sum(map(len, (*tokens, *lists)))


def embedding_tensors(model: TextModel) -> tuple[str, str]:
    """The names of the text and of the embedding. Raises a 400 `ApiError` for a model of another kind."""
    found = texts_to_vector(model) if model.task == "embed" else None
    if found is None:
        raise ApiError(
            f"The model '{model.name}' does not embed text: it needs the parameter charonia.openai_task, one BYTES "
            "input and one FP32 output",
            param="model",
        )
    return found


def add_embeddings(routes: RouteTable, endpoint: EmbeddingEndpoint) -> None:
    """Add the path of this module."""

    async def embeddings(call: ApiCall) -> None:
        await call.reply(await endpoint.document(await call.json(), call.caller))

    routes.add("POST", "/v1/embeddings", embeddings)
