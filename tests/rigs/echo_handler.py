"""A complete in-memory `Handler` for the fronts' tests: models that answer each input as the output of its number.

It admits like the real one where the wire shows it (unknown models, sizes that do not fit), and records what it got.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
from echo_jobs import EchoJobs

from charonia.catalog.served import ServedVersion
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InvalidArgument, NotFound, Unauthenticated, Unavailable
from charonia.inference import InferenceRequest, InferenceResponse
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.offload.pool import Offload
from charonia.options.settings import EXTENSIONS, SERVER_VERSION
from charonia.releases.route_change import changed_rule
from charonia.releases.route_rule import RouteRule
from charonia.tensors import Tensor
from charonia.traces.trace_settings import Wanted
from gateway.access.restrictions import RawHeaders
from gateway.access.token_bounds import NO_BOUNDS, TokenBounds
from gateway.handler import (
    BatchStatistics,
    Duration,
    MemoryUsage,
    ModelIndexEntry,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
    TensorMetadata,
)
from gateway.regions.client_regions import ClientRegions
from gateway.requests.delivery import Caller, DeliveryOptions
from protos.model_config_pb2 import ModelConfig


def interface(
    name: str, inputs: dict[str, tuple[DataType, tuple[int, ...]]], *, max_batch_size: int = 8, decoupled: bool = False
) -> ModelInterface:
    specs = {n: TensorSpec(n, datatype, dims) for n, (datatype, dims) in inputs.items()}
    outputs = {
        f"OUTPUT{i}": TensorSpec(f"OUTPUT{i}", spec.datatype, spec.dims) for i, spec in enumerate(specs.values())
    }
    return ModelInterface(name, "onnxruntime", "onnxruntime_onnx", max_batch_size, specs, outputs, decoupled=decoupled)


MODELS = {
    m.name: m
    for m in (
        interface("simple", {"INPUT0": (DataType.INT32, (16,)), "INPUT1": (DataType.INT32, (16,))}),
        interface("identity", {"INPUT0": (DataType.FP32, (16,))}, max_batch_size=64),
        interface("wide", {"INPUT0": (DataType.FP32, (-1, 2))}),
        interface("wider", {"INPUT0": (DataType.FP32, (-1, -1))}),
        interface("text", {"INPUT0": (DataType.BYTES, (1,))}),
        interface("texts", {"INPUT0": (DataType.BYTES, (-1,))}),
        interface("stream", {"INPUT0": (DataType.FP32, (1,))}, decoupled=True),
        *(interface(f"any_{t.name}", {"INPUT0": (t, (-1,))}, max_batch_size=0) for t in DataType),
    )
}


class EchoHandler(EchoJobs):
    """See the module. `failure` set is raised by every inference; `gate` closed makes all inferences wait, one of
    `gates` that of its id. `tenants` maps API keys to tenants, `refusal` is raised by submissions."""

    def __init__(self) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self.regions = ClientRegions()
        self.routes: dict[str, RouteRule] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.gates: dict[str, asyncio.Event] = {}
        self.cancelled_ids: list[str] = []
        self.requests: list[InferenceRequest] = []
        self.flush_intervals_s: list[float] = []
        self.response_parameters: dict[str, str | int | bool | float] = {}
        self.outputs: list[Tensor] | None = None
        self.labels: dict[str, list[str]] = {}
        self.is_ready = True
        self.offload = Offload()
        self.trace_changes: list[tuple[str, dict[str, object]]] = []
        self.loads: list[tuple[str, str | None, dict[str, bytes]]] = []
        self.unloads: list[tuple[str, bool]] = []
        self.control_mode = "explicit"
        self.options: list[DeliveryOptions | None] = []
        self.tenants: dict[str, str] = {}
        self.bounds: dict[str, int] = {}
        self.tokens_of: dict[str, TokenBounds] = {}
        self.scripts: dict[str, list[int | asyncio.Event | CharoniaError | InferenceResponse | None]] = {}

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return self.is_ready

    def model_ready(self, name: str, version: str) -> bool:
        return name in MODELS and version in ("", "1")

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata("triton", SERVER_VERSION, EXTENSIONS)

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        view = self.served_model(name, version).interface
        return ModelMetadata(
            name,
            ("1",),
            view.platform,
            tuple(TensorMetadata(s.name, s.datatype.value, view.client_shape(s)) for s in view.inputs.values()),
            tuple(TensorMetadata(s.name, s.datatype.value, view.client_shape(s)) for s in view.outputs.values()),
        )

    def model_config(self, name: str, version: str) -> ModelConfig:
        view = self.served_model(name, version).interface
        return ModelConfig(name=name, backend=view.backend, max_batch_size=view.max_batch_size)

    def version_for(self, name: str, headers: Iterable[tuple[bytes, bytes]], tenant: str) -> ServedVersion:
        return self.served_model(name, "")

    def served_model(self, name: str, version: str) -> ServedVersion:
        view = MODELS.get(name)
        if view is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version not in ("", "1"):
            raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
        return ServedVersion(name, 1, "", ModelConfig(), view, self.labels, {})

    async def infer(
        self,
        request: InferenceRequest,
        *,
        flush_interval_s: float = 0.0,
        options: DeliveryOptions | None = None,
    ) -> InferenceResponse:
        self.requests.append(request)
        self.options.append(options)
        self.flush_intervals_s.append(flush_interval_s)
        self.waiting.set()
        try:
            await self.gate.wait()
            if request.id in self.gates:
                await self.gates[request.id].wait()
        except asyncio.CancelledError:
            self.cancelled_ids.append(request.id)
            self.cancelled.set()
            raise
        if self.failure is not None:
            raise self.failure
        if self.outputs is not None:
            return InferenceResponse(request.model, 1, self.outputs, request.id, dict(self.response_parameters))
        view = MODELS[request.model]
        given = {tensor.name: tensor for tensor in request.inputs}
        outputs = []
        for (name, spec), output in zip(view.inputs.items(), view.outputs, strict=True):
            tensor = given.get(name)
            if tensor is None:
                raise InvalidArgument(f"missing {name}")
            size = spec.datatype.size_bytes * prod(tensor.shape)
            if spec.datatype is not DataType.BYTES and size != len(tensor.data):
                raise InvalidArgument(
                    f"input byte size mismatch for input '{name}' for model '{view.name}'. Expected {size}, got "
                    f"{len(tensor.data)}"
                )
            if not request.outputs or output in request.outputs:
                outputs.append(Tensor(output, tensor.datatype, tensor.shape, tensor.data))
        return InferenceResponse(request.model, 1, outputs, request.id, dict(self.response_parameters))

    async def stream(
        self,
        request: InferenceRequest,
        *,
        flush_interval_s: float = 0.0,
        options: DeliveryOptions | None = None,
    ) -> AsyncGenerator[InferenceResponse]:
        """Model "stream" gives the items of `scripts` under the request's id: a number is a response, an event is
        waited for, an error of `InferenceResponse` is one failed response, any other ends it, None is the end alone.
        Without a script it answers with 0, 1, ... up to its input, and the end alone.
        """
        if not MODELS[request.model].decoupled:
            try:
                yield await self.infer(request, flush_interval_s=flush_interval_s, options=options)
            except CharoniaError as error:
                if error is not self.failure:
                    raise
                yield InferenceResponse(request.model, 1, [], request.id, error=error, place=(1, 0))
            return
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.options.append(options)
        self.waiting.set()
        count = int(request.inputs[0].array().ravel()[0]) if request.inputs else 0
        script = self.scripts.get(request.id, [*range(count), None])
        index = 0
        ended = False
        try:
            for at, item in enumerate(script):
                last = at == len(script) - 1
                if isinstance(item, asyncio.Event):
                    await item.wait()
                    continue
                response = InferenceResponse(request.model, 1, [], request.id, final=last, place=(1, index))
                if isinstance(item, InferenceResponse):
                    response.error, response.parameters = item.error, dict(item.parameters)
                    response.bare = item.bare
                elif isinstance(item, CharoniaError):
                    response.error, response.place, last = item, None, True
                    response.final = True
                elif item is not None:
                    data = np.array([[item]], np.float32).tobytes()
                    response.outputs = [Tensor("OUTPUT0", DataType.FP32, (1, 1), data)]
                    response.parameters = dict(self.response_parameters)
                index += 1
                ended = last
                yield response
        finally:
            if not ended:
                self.cancelled_ids.append(request.id)
                self.cancelled.set()

    def allocate_body(self, size_bytes: int, skew: int) -> memoryview | None:
        return None

    tracer = None

    async def trace_settings(self, model: str) -> dict[str, list[str]]:
        return {"trace_level": ["OFF"], "trace_rate": ["1000"]}

    async def update_trace_settings(self, model: str, wanted: Wanted) -> dict[str, list[str]]:
        self.trace_changes.append((model, dict(wanted)))
        return await self.trace_settings(model)

    @property
    def lane(self) -> None:
        return None

    @property
    def identifies(self) -> bool:
        return bool(self.tenants)

    def identify(self, headers: RawHeaders) -> Caller:
        keys = dict(headers)
        given = keys.get(b"authorization", b"").removeprefix(b"Bearer ") or keys.get(b"x-api-key", b"")
        if given.decode() not in self.tenants:
            raise Unauthenticated("an API key is needed")
        return Caller(self.tenants[given.decode()], scoped=True)

    def token_bounds(self, tenant: str) -> TokenBounds:
        return self.tokens_of.get(tenant, NO_BOUNDS)

    def request_bound(self, caller: Caller) -> int:
        return self.bounds.get(caller.tenant, 0)

    async def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        if name and name not in MODELS:
            raise InvalidArgument(f"requested model '{name}' is not available")
        if version not in ("", "1"):
            raise InvalidArgument(f"requested model version is not available for model '{name}'")
        one = Duration(2, 3000)
        return [
            ModelStatistics(
                *(name or "simple", "1", 5, 2, 1),
                success=one,
                batches=(BatchStatistics(2, one, one, one),),
                memory=(MemoryUsage("GPU", 0, 2**33),),
            )
        ]

    def repository_index(self, *, ready: bool) -> list[ModelIndexEntry]:
        entries = [ModelIndexEntry("simple", "1", "READY")]
        return entries if ready else [*entries, ModelIndexEntry("never")]

    def loads_by_call(self) -> bool:
        if not self.control_mode:
            raise Unavailable("no executor is connected to load or unload models")
        return self.control_mode == "explicit"

    async def load_model(self, name: str, config_json: str | None, files: dict[str, bytes]) -> None:
        if self.failure is not None:
            raise self.failure
        self.loads.append((name, config_json, files))

    def route(self, name: str) -> RouteRule | None:
        return self.routes.get(name)

    async def change_route(self, name: str, wanted: Mapping[str, Any] | None) -> RouteRule | None:
        if name not in MODELS:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if wanted is None:
            self.routes.pop(name, None)
            return None
        rule = self.routes[name] = changed_rule(self.routes.get(name), wanted, (1,), 0)
        return rule

    async def unload_model(self, name: str, *, unload_dependents: bool) -> None:
        self.unloads.append((name, unload_dependents))


__all__ = ["MODELS", "CharoniaError", "EchoHandler", "interface"]
