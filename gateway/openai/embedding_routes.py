"""Models that make a vector of texts, and `/v1/embeddings`: each text is a request, and the batcher joins them.

A model that embeds has one BYTES input, one FP32 output and the parameter `charonia.openai_task: "embed"`, or the
tensors with which Triton's vLLM backend embeds, with or without the parameter.
`scoring_routes` and `moderation_routes` ask other models in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import orjson

from charonia.datatypes import DataType
from charonia.errors import InternalError
from charonia.inference import LATEST_VERSION, InferenceRequest, InferenceResponse
from charonia.tensors import Tensor
from gateway.handler import Handler
from gateway.requests.delivery import ANYONE, Caller, DeliveryOptions

from .api_calls import ApiCall, RouteTable
from .shapes.api_errors import ApiError, long_field
from .shapes.embedding_shapes import EmbeddingRequest, Vector, embedding_document, read_embedding
from .text_metrics import TextCounts
from .text_models import NOBODY, Asked, TextModel, TextModels, TextTools, too_long
from .text_serving import element, shape_of

EMBEDDING = "embedding"
REQUEST, ANSWER, COUNT = "embedding_request", "text_output", "num_input_tokens"
"""The tensors of Triton's vLLM backend: what to embed and the embedding, both as JSON, and the tokens of the text."""

Adjust = Callable[[InferenceRequest], None]
"""Sets what a caller's body does not say of its requests, such as their priority."""

Item = TypeVar("Item")
Found = TypeVar("Found")

MAX_RUNNING = 256
"""Requests of one call that are made and wait for their answers: enough to fill batches. Thousands made at once would
stop the event loop, and all would be made before the first one is refused."""


class EmbeddingEndpoint:
    """Answers bodies of `/v1/embeddings`; also those that come in a batch's file."""

    def __init__(self, handler: Handler, models: TextModels, counts: TextCounts) -> None:
        self._handler = handler
        self._models = models
        self._counts = counts

    async def document(
        self, body: Mapping[str, Any], caller: Caller = ANYONE, asked: Asked = NOBODY, adjust: Adjust | None = None
    ) -> dict[str, Any]:
        """The answer to a body. Raises `ApiError`, and the error of the first text that failed."""
        wanted = read_embedding(body)
        model = self._models.find(wanted.model, asked)
        refuse_adapter(model)
        if reads_requests(model):
            return await self._by_requests(wanted, model, caller, adjust)
        name, output = embedding_tensors(model)
        tools = await self._models.tools(model)
        with long_field("input"):
            texts, tokens = await self._texts(wanted, tools)
        with self._counts.call(EMBEDDING, model.name, caller.tenant, tokens):
            vectors = await ask_all(self._handler, model, [{name: text} for text in texts], output, caller, adjust)
        return embedding_document(wanted, vectors, tokens)

    async def _by_requests(
        self, wanted: EmbeddingRequest, model: TextModel, caller: Caller, adjust: Adjust | None
    ) -> dict[str, Any]:
        """The answer of a model with the tensors of Triton's vLLM backend, which takes token ids and counts tokens."""
        inputs: Sequence[str | list[int]] = wanted.inputs
        with self._counts.call(EMBEDDING, model.name, caller.tenant, 0) as counted:
            vectors, tokens = await embed_all(self._handler, model, inputs, caller, wanted.dimensions, adjust)
            counted.reported_prompts[0] = tokens
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
        size = 0
        for one in lists:
            if len(one) > tools.context:
                raise too_long(tools.context, len(one))
            if any(token >= tools.tokenizer.vocabulary for token in one):
                raise ApiError("'input' has a token id outside the model's vocabulary", param="input")
            text = tools.tokenizer.decode(one)
            size += len(text)
            self._models.check_size(size, f"the texts of {len(lists)} lists of token ids", "input")
            texts.append(text.decode("utf-8", "replace"))
            await asyncio.sleep(0)  # thousands of lists are not decoded at once
        return texts, sum(map(len, (*tokens, *lists)))


def refuse_adapter(model: TextModel) -> None:
    """Raises a 400 `ApiError` for a name with an adapter, which would be answered without it."""
    if model.adapter:
        raise ApiError(f"the model '{model.name}' gives embeddings and scores without adapters alone", param="model")


def embedding_tensors(model: TextModel) -> tuple[str, str]:
    """The names of the text and of the embedding. Raises a 400 `ApiError` for a model of another kind."""
    found = texts_to_vector(model) if model.task == "embed" else None
    if found is None:
        raise ApiError(
            f"The model '{model.name}' does not embed text: it needs the parameter charonia.openai_task, one BYTES "
            f"input and one FP32 output; or {REQUEST} and {ANSWER}",
            param="model",
        )
    return found


def texts_to_vector(model: TextModel, inputs: Sequence[str] = ()) -> tuple[str, str] | None:
    """The names of a model's first text and of its vector: it needs those texts, or one of any name, and no more.

    None for a model with other tensors: the texts are BYTES inputs, the vector is the only FP32 output.
    """
    interface = model.served.interface
    texts = [spec.name for spec in interface.inputs.values() if spec.datatype is DataType.BYTES]
    vectors = [spec.name for spec in interface.outputs.values() if spec.datatype is DataType.FP32]
    taken = set(inputs) or set(texts[:1])
    if interface.decoupled or len(vectors) != 1 or not taken or not taken <= set(texts):
        return None
    if interface.required_inputs - taken:
        return None
    return texts[0], vectors[0]


async def ask_all(
    handler: Handler,
    model: TextModel,
    items: Sequence[Mapping[str, str]],
    output: str,
    caller: Caller = ANYONE,
    adjust: Adjust | None = None,
) -> list[Vector]:
    """The values of `output`, float32 [n], for each item: its texts by the names of inputs. Raises as `run_all`."""
    return await run_all(items, lambda item: _ask(handler, model, item, output, caller, adjust))


async def run_all(items: Sequence[Item], ask: Callable[[Item], Awaitable[Found]]) -> list[Found]:
    """What `ask` returns for each item.

    Raises the error of the first that failed, and cancels the others. At most `MAX_RUNNING` run at a time.
    """
    waiting = iter(enumerate(items))
    found: dict[int, Found] = {}

    async def work() -> None:
        for at, item in waiting:
            found[at] = await ask(item)

    tasks = [asyncio.create_task(work()) for _ in items[:MAX_RUNNING]]
    try:
        await asyncio.gather(*tasks)
        return [found[at] for at in range(len(items))]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _ask(
    handler: Handler, model: TextModel, item: Mapping[str, str], output: str, caller: Caller, adjust: Adjust | None
) -> Vector:
    interface = model.served.interface
    tensors = [
        Tensor(name, DataType.BYTES, shape_of(interface, name, 1), element(text.encode("utf-8", "replace")))
        for name, text in item.items()
    ]
    request = InferenceRequest(model.name, LATEST_VERSION, tensors, outputs=(output,), served=model.served)
    if adjust is not None:
        adjust(request)
    options = DeliveryOptions(caller=caller) if caller is not ANYONE else None
    response = await handler.infer(request, options=options)
    return np.frombuffer(response.outputs[0].data, "<f4")


def reads_requests(model: TextModel) -> bool:
    """Whether it has the tensors of Triton's vLLM backend; one that generates refuses requests to embed itself."""
    interface = model.served.interface
    tensors = (interface.inputs.get(REQUEST), interface.outputs.get(ANSWER))
    return model.task in ("", "embed") and all(one is not None and one.datatype is DataType.BYTES for one in tensors)


async def embed_all(
    handler: Handler,
    model: TextModel,
    items: Sequence[str | list[int]],
    caller: Caller,
    dimensions: int | None = None,
    adjust: Adjust | None = None,
) -> tuple[list[Vector], int]:
    """The embedding of each text or list of token ids, float32 [n], by a model that `reads_requests`.

    With them the number of their tokens, 0 where the model does not count them. Raises as `run_all`.
    """
    found = await run_all(items, lambda item: _embed(handler, model, item, dimensions, caller, adjust))
    return [vector for vector, _ in found], sum(count for _, count in found)


async def _embed(
    handler: Handler,
    model: TextModel,
    item: str | list[int],
    dimensions: int | None,
    caller: Caller,
    adjust: Adjust | None,
) -> tuple[Vector, int]:
    """The embedding of a text or of token ids, float32 [n], and how many tokens it has."""
    interface = model.served.interface
    asked = {"input": item, "pooling_params": {} if dimensions is None else {"dimensions": [dimensions]}}
    written = element(orjson.dumps(asked))
    tensors = [Tensor(REQUEST, DataType.BYTES, shape_of(interface, REQUEST, 1), written)]
    if (counts := f"return_{COUNT}") in interface.inputs:
        tensors.append(Tensor(counts, DataType.BOOL, shape_of(interface, counts, 1), b"\1"))
    request = InferenceRequest(model.name, LATEST_VERSION, tensors, served=model.served)
    if adjust is not None:
        adjust(request)
    options = DeliveryOptions(caller=caller) if caller is not ANYONE else None
    found: InferenceResponse | None = None
    async with contextlib.aclosing(handler.stream(request, options=options)) as responses:
        async for response in responses:
            if response.error is not None:
                raise response.error
            found = response if response.outputs else found
    outputs = {tensor.name: tensor for tensor in found.outputs} if found is not None else {}
    try:
        vector = np.asarray(orjson.loads(outputs[ANSWER].array().item(0)), "<f4")
        if vector.ndim != 1:
            raise ValueError(f"shape {list(vector.shape)}")
        return vector, int(outputs[COUNT].array().item(0)) if COUNT in outputs else 0
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise InternalError(f"the model '{model.name}' gave no embedding in {ANSWER}: {error}") from None


def add_embeddings(routes: RouteTable, endpoint: EmbeddingEndpoint) -> None:
    """Add the path of this module."""

    async def embeddings(call: ApiCall) -> None:
        await call.reply(await endpoint.document(await call.json(), call.caller, call.asked))

    routes.add("POST", "/v1/embeddings", embeddings)
