"""`/v1/audio/transcriptions`: the text of a recording, by a model that takes the file as it was uploaded.

The model has the parameter `charonia.openai_task: "transcribe"`, the BYTES input `audio` with the file's bytes, and the
BYTES output `text_output`; it may have the BYTES inputs `language` and `prompt` and the FP32 input `temperature`. A
decoupled model gives its text in parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from functools import partial

import numpy as np

from charonia.datatypes import DataType
from charonia.inference import LATEST_VERSION, InferenceRequest
from charonia.tensors import Tensor
from gateway.handler import Handler
from gateway.requests.delivery import ANYONE, Caller, DeliveryOptions

from .api_calls import ApiCall, RouteTable
from .shapes.api_errors import ApiError
from .shapes.text_answers import read_delta
from .stored.multipart_forms import UploadForm, boundary_of
from .text_metrics import TextCounts
from .text_models import TextModel, TextModels
from .text_serving import element, shape_of

TRANSCRIPTION = "transcription"
AUDIO, TEXT = "audio", "text_output"
FORMATS = ("json", "text")


def add_transcriptions(routes: RouteTable, handler: Handler, models: TextModels, counts: TextCounts) -> None:
    """Add the path of this module."""

    async def transcriptions(call: ApiCall) -> None:
        boundary = boundary_of(call.headers.get(b"content-type", b""))
        fields, audio = await call.read(partial(_read_form, boundary))
        wanted = fields.get("response_format") or "json"
        if wanted not in FORMATS:
            raise ApiError(f"'response_format' must be {' or '.join(FORMATS)}", param="response_format")
        name = fields.get("model")
        if not name:
            raise ApiError("Missing required parameter: 'model'", param="model", code="missing_required_parameter")
        request = _request(models.find(name, call.asked), audio, fields)
        streams = fields.get("stream", "").lower() in ("true", "1")
        parts: list[str] = []
        with counts.call(TRANSCRIPTION, request.model, call.caller.tenant, 0):
            async with contextlib.aclosing(_parts(handler, request, call.caller)) as found:
                async for part in found:
                    parts.append(part)
                    if streams and part:
                        await call.event({"type": "transcript.text.delta", "delta": part})
        whole = "".join(parts)
        if streams:
            await call.event({"type": "transcript.text.done", "text": whole})
            await call.end_events()
        elif wanted == "text":
            await call.reply_bytes(f"{whole}\n".encode(), headers=[(b"content-type", b"text/plain; charset=utf-8")])
        else:
            await call.reply({"text": whole})

    routes.add("POST", "/v1/audio/transcriptions", transcriptions)


def _read_form(boundary: bytes, body: bytes | memoryview) -> tuple[dict[str, str], bytes]:
    """The fields of a form, and its file as a BYTES element. Raises `ApiError`."""
    form = UploadForm(boundary)
    audio = element(form.feed(bytes(body)))
    form.end()
    return {name: value.encode("latin-1").decode("utf-8", "replace") for name, value in form.fields.items()}, audio


def _request(model: TextModel, audio: bytes, fields: dict[str, str]) -> InferenceRequest:
    """The request; `audio` is an element."""
    interface = model.served.interface
    output = interface.outputs.get(TEXT)
    takes = interface.inputs.get(AUDIO)
    if (
        model.task != "transcribe"
        or takes is None
        or takes.datatype is not DataType.BYTES
        or output is None
        or output.datatype is not DataType.BYTES
        or interface.required_inputs - {AUDIO}
    ):
        raise ApiError(
            f"The model '{model.name}' does not transcribe: it needs the parameter charonia.openai_task 'transcribe', "
            f"the BYTES input '{AUDIO}' and the BYTES output '{TEXT}'",
            param="model",
        )
    tensors = [Tensor(AUDIO, DataType.BYTES, shape_of(interface, AUDIO, 1), audio)]
    for name, datatype in (("language", DataType.BYTES), ("prompt", DataType.BYTES), ("temperature", DataType.FP32)):
        spec, given = interface.inputs.get(name), fields.get(name)
        if spec is None or spec.datatype is not datatype or not given:
            continue
        data = element(given.encode("utf-8", "replace")) if datatype is DataType.BYTES else _number(name, given)
        tensors.append(Tensor(name, datatype, shape_of(interface, name, 1), data))
    return InferenceRequest(interface.name, LATEST_VERSION, tensors, outputs=(TEXT,), served=model.served)


def _number(name: str, given: str) -> bytes:
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1:
        raise ApiError(f"'{name}' must be a number between 0 and 1", param=name)
    return np.array([value], "<f4").tobytes()


async def _parts(handler: Handler, request: InferenceRequest, caller: Caller) -> AsyncGenerator[str]:
    """The text of each response. Raises the request's error."""
    options = DeliveryOptions(caller=caller) if caller is not ANYONE else None
    async with contextlib.aclosing(handler.stream(request, options=options)) as responses:
        async for response in responses:
            if response.error is not None:
                raise response.error
            yield read_delta(response).text
