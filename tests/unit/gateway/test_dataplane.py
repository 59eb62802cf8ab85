"""What a gateway gives back when a request cannot go on its way."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from memory_log.log import MemoryLog

from charonia.calls.admission import Admission
from charonia.calls.payload_transfer import Payloads
from charonia.catalog.served import ServedVersion
from charonia.errors import ResourceExhausted
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory
from charonia.inference import InferenceRequest
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.options.settings import GatewaySettings
from charonia.tensors import Tensor
from executors.configuration.config import normalise
from gateway.dataplane import AdmittedRequest, DataPlane

CONFIG = """
name: "m" backend: "onnxruntime" max_batch_size: 4
input { name: "x" data_type: TYPE_UINT8 dims: -1 }
output { name: "y" data_type: TYPE_UINT8 dims: -1 }
"""


class CountingLog(MemoryLog):
    """Knows the blobs it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[str] = set()

    async def put_blob(self, blob_id: str, data: object, ttl_s: int) -> None:
        self.held.add(blob_id)
        await super().put_blob(blob_id, data, ttl_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_was_lent_for_a_request_without_room_is_taken_back(streamed: bool) -> None:
    log = CountingLog()
    settings = GatewaySettings("g", max_pending_per_gateway_bytes=BY_REFERENCE_BYTES)
    plane = DataPlane(log, settings, payloads=Payloads(log, PayloadDirectory("", "g"), {}, "g"))
    config = normalise(parse(CONFIG))
    served = ServedVersion("m", 1, "h", config, ModelInterface.of(config), {}, {"e": 1})
    tensor = Tensor.of("x", np.zeros((1, BY_REFERENCE_BYTES), np.uint8))
    request = InferenceRequest("m", -1, [tensor])
    admitted = Admission(served.interface, 1, "h").admit(request)
    one = AdmittedRequest(request, served, admitted, 0)
    sent = anext(plane.stream(one)) if streamed else plane.infer(one)
    with pytest.raises(ResourceExhausted):
        await sent
    (name,) = log.held
    async with asyncio.timeout(30):
        while await log.blob(name) is not None:
            await asyncio.sleep(0)
    await plane.close()


class HeldLog(CountingLog):
    """Takes blobs once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.asked = asyncio.Event()

    async def put_blob(self, blob_id: str, data: object, ttl_s: int) -> None:
        self.asked.set()
        await self.go.wait()
        await super().put_blob(blob_id, data, ttl_s)


async def test_a_request_whose_tensors_are_on_their_way_is_waited_for() -> None:
    log = HeldLog()
    plane = DataPlane(log, GatewaySettings("g"), payloads=Payloads(log, PayloadDirectory("", "g"), {}, "g"))
    config = normalise(parse(CONFIG))
    served = ServedVersion("m", 1, "h", config, ModelInterface.of(config), {}, {"e": 1})
    request = InferenceRequest("m", -1, [Tensor.of("x", np.zeros((1, BY_REFERENCE_BYTES), np.uint8))])
    admitted = Admission(served.interface, 1, "h").admit(request)
    async with asyncio.timeout(30):
        sending = asyncio.create_task(plane.infer(AdmittedRequest(request, served, admitted, 0)))
        await log.asked.wait()
        idle = asyncio.create_task(plane.requester.wait_idle())
        await asyncio.sleep(0)
        assert not idle.done()
        log.go.set()
        while not plane.pending_requests:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not idle.done(), "it waits for its answer now"
        sending.cancel()
        await idle
    await plane.close()
