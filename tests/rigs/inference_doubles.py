"""Both inference fronts over a service that answers every input under its own name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from charonia.catalog.served import ServedVersion
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument, NotFound, ResourceExhausted
from charonia.inference import InferenceRequest, InferenceResponse
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.offload.pool import Offload
from charonia.options.settings import GatewaySettings
from charonia.tensors import check_bytes_elements, element_count, expected_size_bytes
from gateway.grpc.servicer import Servicer
from gateway.grpc.statuses import Refusal
from gateway.http.http_application import HttpApplication
from gateway.regions.client_regions import ClientRegions
from gateway.requests.delivery import JOB_NOT_FOUND, DeliveryOptions, JobReceipt, JobView
from protos.model_config_pb2 import ModelConfig

VIEW = ModelInterface(
    "m", "b", "", 0, {"I": TensorSpec("I", DataType.FP32, (-1,))}, {"I": TensorSpec("I", DataType.FP32, (-1,))}
)
SERVED = ServedVersion("m", 1, "", ModelConfig(), VIEW, {}, {})


class Echo:
    """Only what an inference needs; answers every input under its own name."""

    identifies = False
    lane = None
    routes: ClassVar[dict[str, Any]] = {}
    tracer = None
    offload = Offload()
    regions = ClientRegions()

    def served_model(self, name: str, version: str) -> ServedVersion:
        return SERVED

    async def submit_job(self, _request: InferenceRequest, _options: DeliveryOptions) -> JobReceipt:
        raise ResourceExhausted("full")

    @property
    def jobs(self) -> Echo:
        return self

    @property
    def queries(self) -> Echo:
        return self

    async def view(self, *_: object) -> JobView:
        raise NotFound(JOB_NOT_FOUND)

    cancel = result = view

    async def infer(
        self, request: InferenceRequest, *, flush_interval_s: float = 0.0, options: DeliveryOptions | None = None
    ) -> InferenceResponse:
        for tensor in request.inputs:  # as the service does: no model answers with bytes that are no tensor
            if tensor.datatype is DataType.BYTES:
                check_bytes_elements(tensor.data, element_count(tensor.name, tensor.shape), name=tensor.name, model="m")
            elif tensor.size_bytes != expected_size_bytes(tensor.name, tensor.datatype, tensor.shape):
                raise InvalidArgument(f"input '{tensor.name}' has an unexpected size")
        return InferenceResponse(request.model, 1, request.inputs, request.id)


class Call:
    """A call's context as far as an inference looks at it."""

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    def time_remaining(self) -> float | None:
        return None


APPLICATION = HttpApplication(
    GatewaySettings(incarnation="test", http_max_input_size=1 << 20),
    Echo(),  # type: ignore[arg-type]
)
SERVICER = Servicer(GatewaySettings(incarnation="test"), Echo())  # type: ignore[arg-type]


def post(pieces: Sequence[bytes], headers: dict[bytes, bytes]) -> tuple[int, dict[bytes, bytes], bytes]:
    """What is answered over HTTP to a body that comes in these pieces."""
    sent: list[Any] = []
    rest = list(pieces) or [b""]

    async def receive() -> Any:
        return {"type": "http.request", "body": rest.pop(0), "more_body": bool(rest)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v2/models/m/infer", "headers": list(headers.items())}
    asyncio.run(APPLICATION(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


def infer(data: bytes) -> tuple[bytes, Refusal | None]:
    """What is answered over gRPC to the bytes of a message: a reply, or a refusal."""

    async def run() -> bytes | Refusal:
        return await SERVICER._model_infer(data, Call())

    reply = asyncio.run(run())
    return (reply, None) if isinstance(reply, bytes) else (b"", reply)
