"""`/v1/moderations`: a score for each category of a text, by a model that classifies.

The model has the parameter `charonia.openai_task: "moderate"`, one BYTES input and one FP32 output, whose labels
(`label_filename`) are the categories. A text is flagged where a score reaches the parameter
`charonia.moderation_threshold`, 0.5 without it.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from charonia.errors import InternalError
from gateway.handler import Handler

from .api_calls import ApiCall, RouteTable
from .embedding_routes import ask_all, texts_to_vector
from .shapes.api_errors import ApiError
from .shapes.embedding_shapes import Vector
from .shapes.sampling_fields import text
from .text_metrics import TextCounts
from .text_models import Asked, TextModel, TextModels

MODERATION = "moderation"
THRESHOLD = "charonia.moderation_threshold"
MAX_INPUTS = 2048
_NEEDED = (
    "a model needs the parameter charonia.openai_task 'moderate', one BYTES input, and one FP32 output with a "
    "label_filename that names its categories"
)


def add_moderations(routes: RouteTable, handler: Handler, models: TextModels, counts: TextCounts) -> None:
    """Add the path of this module."""

    async def moderations(call: ApiCall) -> None:
        body = await call.json()
        inputs = _inputs(body.get("input"))
        model = _model(body, models, call.asked)
        name, output, labels = _tensors(model)
        threshold = _threshold(model)
        with counts.call(MODERATION, model.name, call.caller.tenant, 0):
            scores = await ask_all(handler, model, [{name: one} for one in inputs], output, call.caller)
        results = [_result(model, labels, one, threshold) for one in scores]
        await call.reply(
            {"id": f"modr-{uuid.uuid4().hex}", "model": body.get("model") or model.name, "results": results}
        )

    routes.add("POST", "/v1/moderations", moderations)


def _inputs(given: Any) -> list[str]:
    """The texts; content parts are one text together."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise ApiError("'input' must be a string, a list of strings, or content parts", param="input")
    if len(given) > MAX_INPUTS:
        raise ApiError(f"'input' has {len(given)} texts, the bound is {MAX_INPUTS}", param="input")
    if all(isinstance(one, str) for one in given):
        return given
    parts = [one.get("text") for one in given if isinstance(one, dict) and one.get("type") == "text"]
    texts = [one for one in parts if isinstance(one, str)]
    if len(texts) != len(given):
        raise ApiError("'input' must hold texts: images are not supported", param="input")
    return ["\n".join(texts)]


def _model(body: Mapping[str, Any], models: TextModels, asked: Asked) -> TextModel:
    """The model of a body; the only one that moderates where none is named."""
    if body.get("model") is not None:
        return models.find(text(body, "model"), asked)
    found = [model for model in models.all() if model.task == "moderate"]
    if not found:
        raise ApiError(f"no model here moderates: {_NEEDED}", status=404, param="model")
    if len(found) > 1:
        raise ApiError(f"'model' must name one of {', '.join(model.name for model in found)}", param="model")
    return models.find(found[0].name, asked)


def _tensors(model: TextModel) -> tuple[str, str, Sequence[str]]:
    found = texts_to_vector(model) if model.task == "moderate" else None
    labels = model.served.labels.get(found[1], []) if found is not None else []
    if found is None or not labels:
        raise ApiError(f"The model '{model.name}' does not moderate: {_NEEDED}", param="model")
    return *found, labels


def _threshold(model: TextModel) -> float:
    said = model.served.interface.parameters.get(THRESHOLD, "")
    try:
        value = float(said) if said else 0.5
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ApiError(f"parameter '{THRESHOLD}' of '{model.name}' must be a number, got '{said}'", param="model")
    return value


def _result(model: TextModel, labels: Sequence[str], scores: Vector, threshold: float) -> dict[str, Any]:
    values = scores.tolist()
    if len(values) != len(labels) or not all(map(math.isfinite, values)):
        raise InternalError(f"model '{model.name}' gave {len(values)} scores for {len(labels)} categories")
    found = dict(zip(labels, values, strict=True))
    flags = {label: value >= threshold for label, value in found.items()}
    return {
        "flagged": any(flags.values()),
        "categories": flags,
        "category_scores": found,
        "category_applied_input_types": {label: ["text"] for label in labels},
    }
