"""The calls of `GRPCInferenceService` and `grpc.health.v1.Health` over the gateway's handler (G1, G17, G22-G28).

Each call translates, asks the handler and translates back. Methods are registered as generic handlers, so that
inference replies are the bytes that `convert` writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from charonia.clock import wall_ns
from charonia.errors import CharoniaError, Unavailable, Unsupported
from charonia.settings import GatewaySettings
from gateway import log_settings
from gateway.handler import Handler
from gateway.request_rules import SHARED_MEMORY_DISABLED, TRACING_UNBUILT
from gateway.restrictions import HeaderForwarding, Restrictions
from protos import grpc_service_pb2 as pb
from protos import health

from . import control_messages as control
from .convert import ResponseEncoder, infer_request
from .errors import STATUS

_log = logging.getLogger(__name__)

SERVICE = "inference.GRPCInferenceService"
DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."
_STREAM_REQUESTS_OPEN = 256
"""Requests of one stream that may be open before the next is read: backpressure on the client (faults F5)."""

Context = Any  # grpc.aio.ServicerContext, generic in types that generic handlers do not have


class Servicer:
    """One gRPC front's calls. Raises `StartupError` for header options that make no sense."""

    def __init__(self, settings: GatewaySettings, handler: Handler) -> None:
        self._handler = handler
        self._flush_interval_s = settings.grpc_flush_interval_us / 1e6
        self._encoder = ResponseEncoder()
        self._forwarding = HeaderForwarding(settings.grpc_header_forward_pattern, "--grpc-header-forward-pattern")
        self._restrictions = Restrictions(
            settings.grpc_restricted_protocol,
            lambda header: Unavailable(f"This protocol is restricted, expecting header '{header}'"),
            word="protocol",
            header_prefix="triton-grpc-protocol-",
        )
        self.draining = False

    def handlers(self) -> list[Any]:
        """What a `grpc.aio.server` registers."""
        inference = {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(
                self._model_infer, pb.ModelInferRequest.FromString, _as_it_is
            ),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
                self._model_stream_infer,
                pb.ModelInferRequest.FromString,
                pb.ModelStreamInferResponse.SerializeToString,
            ),
        }
        for name, (group, call) in self._control_calls().items():
            inference[name] = grpc.unary_unary_rpc_method_handler(
                self._unary(group, call),
                getattr(pb, f"{name}Request").FromString,
                getattr(pb, f"{name}Response").SerializeToString,
            )
        check = grpc.unary_unary_rpc_method_handler(
            self._unary("health", self._health_check), health.parse_request, health.serialize_response
        )
        return [
            grpc.method_handlers_generic_handler(SERVICE, inference),
            grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check}),
        ]

    # -- inference ----------------------------------------------------------------------------------------------------

    async def _model_infer(self, message: pb.ModelInferRequest, context: Context) -> bytes:
        try:
            return await self._infer(message, context)
        except CharoniaError as error:
            await context.abort(STATUS[error.code], error.message)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            _log.exception("an inference call failed")
            await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")
        raise AssertionError("abort always raises")

    async def _infer(self, message: pb.ModelInferRequest, context: Context) -> bytes:
        if self._restrictions:
            self._restrictions.check("inference", _headers(context))
        served = self._handler.served_model(message.model_name, message.model_version)
        if served.interface.decoupled:
            raise Unsupported(DECOUPLED)
        request, classes = infer_request(message, served.version)
        if self._forwarding:
            self._forwarding.forward(_headers(context), request.parameters)
        remaining_s = context.time_remaining()
        if remaining_s is not None and not request.deadline_ns:
            request.deadline_ns = wall_ns() + int(remaining_s * 1e9)
        response = await self._handler.infer(request, flush_interval_s=self._flush_interval_s)
        return self._encoder.encode(response, classes, served)

    async def _model_stream_infer(
        self, messages: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Each request on its own, answers in request order, errors in-band (G22-G25)."""
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        ends_on_error = any(name == "triton_grpc_error" and value == "true" for name, value in _metadata(context))
        answers: asyncio.Queue[asyncio.Task[pb.ModelStreamInferResponse | CharoniaError] | None] = asyncio.Queue(
            _STREAM_REQUESTS_OPEN
        )
        open_tasks: set[asyncio.Task[Any]] = set()

        async def read() -> None:
            async for message in messages:
                task = asyncio.create_task(self._stream_answer(message, context, ends_on_error))
                open_tasks.add(task)
                task.add_done_callback(open_tasks.discard)
                await answers.put(task)
            await answers.put(None)

        reading = asyncio.create_task(read())
        reading.add_done_callback(lambda task: _wake_writer(task, answers))
        try:
            while (task := await answers.get()) is not None:
                answer = await task
                if isinstance(answer, CharoniaError):
                    await context.abort(STATUS[answer.code], answer.message)
                else:
                    yield answer
        finally:
            # a client that left, or an error that ends the stream, cancels the stream's requests (G25, G26)
            for pending in (reading, *open_tasks):
                pending.cancel()

    async def _stream_answer(
        self, message: pb.ModelInferRequest, context: Context, ends_on_error: bool
    ) -> pb.ModelStreamInferResponse | CharoniaError:
        answer = pb.ModelStreamInferResponse()
        try:
            answer.infer_response.MergeFromString(await self._infer(message, context))
            answer.infer_response.parameters["triton_final_response"].bool_param = True
        except CharoniaError as error:
            if ends_on_error:
                return error
            answer.error_message = error.message
            answer.infer_response.id = message.id
            answer.infer_response.model_name = message.model_name
            answer.infer_response.model_version = message.model_version
        except asyncio.CancelledError:
            raise
        except Exception as error:
            _log.exception("a request of a stream failed")
            answer.error_message = f"internal error: {type(error).__name__}"
            answer.infer_response.id = message.id
        return answer

    # -- control ------------------------------------------------------------------------------------------------------

    def _unary(self, group: str, call: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        """A control call with its restriction and its errors."""

        async def handle(message: Any, context: Context) -> Any:
            try:
                if self._restrictions:
                    self._restrictions.check(group, _headers(context))
                return await call(message)
            except CharoniaError as error:
                await context.abort(STATUS[error.code], error.message)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                _log.exception("a control call failed")
                await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")

        return handle

    def _control_calls(self) -> dict[str, tuple[str, Callable[[Any], Awaitable[Any]]]]:
        """Method to (restriction group, call)."""
        return {
            "ServerLive": ("health", self._server_live),
            "ServerReady": ("health", self._server_ready),
            "ModelReady": ("health", self._model_ready),
            "ServerMetadata": ("metadata", self._server_metadata),
            "ModelMetadata": ("metadata", self._model_metadata),
            "ModelConfig": ("model-config", self._model_config),
            "ModelStatistics": ("statistics", self._model_statistics),
            "RepositoryIndex": ("model-repository", self._repository_index),
            "RepositoryModelLoad": ("model-repository", self._load),
            "RepositoryModelUnload": ("model-repository", self._unload),
            "SystemSharedMemoryStatus": ("shared-memory", self._system_shared_memory_status),
            "SystemSharedMemoryRegister": ("shared-memory", self._no_shared_memory),
            "SystemSharedMemoryUnregister": ("shared-memory", self._no_shared_memory),
            "CudaSharedMemoryStatus": ("shared-memory", self._cuda_shared_memory_status),
            "CudaSharedMemoryRegister": ("shared-memory", self._no_shared_memory),
            "CudaSharedMemoryUnregister": ("shared-memory", self._no_shared_memory),
            "TraceSetting": ("trace", self._trace_setting),
            "LogSettings": ("logging", self._log_settings),
        }

    async def _health_check(self, _service: str) -> health.ServingStatus:
        ready = self._handler.ready() and not self.draining
        return health.ServingStatus.SERVING if ready else health.ServingStatus.NOT_SERVING

    async def _server_live(self, _message: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._handler.live())

    async def _server_ready(self, _message: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._handler.ready() and not self.draining)

    async def _model_ready(self, message: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._handler.model_ready(message.name, message.version))

    async def _server_metadata(self, _message: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return control.server_metadata(self._handler.server_metadata())

    async def _model_metadata(self, message: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        return control.model_metadata(self._handler.model_metadata(message.name, message.version))

    async def _model_config(self, message: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        return pb.ModelConfigResponse(config=self._handler.model_config(message.name, message.version))

    async def _model_statistics(self, message: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        return control.model_statistics(await self._handler.statistics(message.name, message.version))

    async def _repository_index(self, message: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        _check_repository(message.repository_name)
        return control.repository_index(self._handler.repository_index(ready=message.ready))

    async def _load(self, message: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        _check_repository(message.repository_name)
        config, files = control.read_load(message)
        await self._handler.load_model(message.model_name, config, files)
        return pb.RepositoryModelLoadResponse()

    async def _unload(self, message: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        _check_repository(message.repository_name)
        dependents = control.read_unload(message)
        await self._handler.unload_model(message.model_name, unload_dependents=dependents)
        return pb.RepositoryModelUnloadResponse()

    async def _system_shared_memory_status(self, _message: Any) -> pb.SystemSharedMemoryStatusResponse:
        return pb.SystemSharedMemoryStatusResponse()

    async def _cuda_shared_memory_status(self, _message: Any) -> pb.CudaSharedMemoryStatusResponse:
        return pb.CudaSharedMemoryStatusResponse()

    async def _no_shared_memory(self, _message: Any) -> Any:
        raise Unsupported(SHARED_MEMORY_DISABLED)

    async def _trace_setting(self, _message: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        raise Unsupported(TRACING_UNBUILT)

    async def _log_settings(self, message: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        switches = log_settings.current()
        wanted = control.read_log_settings(message)
        if wanted:
            switches = switches.changed(wanted)
            log_settings.apply(switches)
        return control.log_settings(switches)


def _as_it_is(data: bytes) -> bytes:
    return data


def _wake_writer(reading: asyncio.Task[None], answers: asyncio.Queue[Any]) -> None:
    """A reader that ended by an error must not leave the writer waiting."""
    if not reading.cancelled() and reading.exception() is not None and not answers.full():
        answers.put_nowait(None)


def _check_repository(name: str) -> None:
    if name:
        raise Unsupported("'repository_name' specification is not supported")


def _metadata(context: Context) -> list[tuple[str, str | bytes]]:
    return list(context.invocation_metadata() or ())


def _headers(context: Context) -> list[tuple[bytes, bytes]]:
    return [
        (name.encode("latin-1", "replace"), value if isinstance(value, bytes) else value.encode())
        for name, value in _metadata(context)
    ]
