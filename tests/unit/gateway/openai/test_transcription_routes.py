"""Uploads of recordings."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from charonia.datatypes import DataType
from charonia.inference import InferenceRequest
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.offload.pool import OFF_LOOP_BYTES

PATH = "/v1/audio/transcriptions"


@pytest.fixture
def asked(handler: Any) -> list[InferenceRequest]:
    """The requests that the model `hears` was sent; it hears nothing."""
    handler.models["hears"] = ModelInterface(
        *("hears", "python", "", 0),
        {"audio": TensorSpec("audio", DataType.BYTES, (1,))},
        {"text_output": TensorSpec("text_output", DataType.BYTES, (1,))},
        parameters={"charonia.openai_task": "transcribe"},
    )
    requests: list[InferenceRequest] = []

    async def stream(request: InferenceRequest, **_: Any) -> Any:
        requests.append(request)
        return
        yield

    handler.stream = stream
    return requests


@pytest.mark.parametrize(("size", "in_thread"), [(1000, 0), (OFF_LOOP_BYTES, 1)])
async def test_a_large_upload_is_read_outside_the_event_loop(
    client: httpx2.AsyncClient, handler: Any, asked: list[InferenceRequest], size: int, in_thread: int
) -> None:
    sound = bytes(range(250)) * (size // 250) + b"\r\n--"
    reply = await client.post(PATH, files={"file": ("a.wav", sound)}, data={"model": "hears"})
    assert (reply.status_code, reply.json()) == (200, {"text": ""})
    ((audio,),) = [request.inputs for request in asked]
    assert audio.array().tolist() == [sound]
    assert handler.offload.tasks + handler.offload.done == in_thread


async def test_a_large_upload_that_is_no_form_is_refused(client: httpx2.AsyncClient) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    reply = await client.post(PATH, content=b"x" * (OFF_LOOP_BYTES + 1), headers=headers)
    assert reply.status_code == 400
    assert "does not begin with the boundary" in reply.json()["error"]["message"]
