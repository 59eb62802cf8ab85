"""Requests of models that do something else with a text than generate: one for each item, which the batcher joins.

A model says what it does by the parameter `charonia.openai_task`. `embedding_routes`, `scoring_routes` and
`moderation_routes` have the endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from charonia.datatypes import DataType
from charonia.inference import LATEST_VERSION, InferenceRequest
from charonia.tensors import Tensor
from gateway.handler import Handler
from gateway.requests.delivery import ANYONE, Caller, DeliveryOptions

from .shapes.embedding_shapes import Vector
from .text_models import TextModel
from .text_serving import element, shape_of


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
    handler: Handler, model: TextModel, items: Sequence[Mapping[str, str]], output: str, caller: Caller = ANYONE
) -> list[Vector]:
    """The values of `output`, float32 [n], for each item: its texts by the names of inputs.

    Raises the error of the first that failed, and cancels the others.
    """
    tasks = [asyncio.create_task(_ask(handler, model, item, output, caller)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _ask(handler: Handler, model: TextModel, item: Mapping[str, str], output: str, caller: Caller) -> Vector:
    interface = model.served.interface
    tensors = [
        Tensor(name, DataType.BYTES, shape_of(interface, name, 1), element(text.encode("utf-8", "replace")))
        for name, text in item.items()
    ]
    request = InferenceRequest(model.name, LATEST_VERSION, tensors, outputs=(output,), served=model.served)
    options = DeliveryOptions(caller=caller) if caller is not ANYONE else None
    response = await handler.infer(request, options=options)
    return np.frombuffer(response.outputs[0].data, "<f4")
