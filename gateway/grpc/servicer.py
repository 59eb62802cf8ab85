"""The methods of `GRPCInferenceService` and `grpc.health.v1.Health` over the gateway's handler (G1, G17, G22-G28).

Each method converts its message, calls the handler and converts the result. Methods take and return bytes, so that
`convert` can write inference replies by itself. `calling` has the interface to servers, `stream_requests` the streams.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InternalError, Unavailable, Unsupported
from charonia.inference import Parameters, earlier
from charonia.offload.pool import MAX_CONTROL_BYTES, OFF_LOOP_BYTES
from charonia.options.settings import GatewaySettings
from charonia.tensors import Buffer
from gateway.access.restrictions import GRPC_KEY_PREFIX, HeaderForwarding, Restrictions
from gateway.handler import Handler
from gateway.reports import log_settings
from gateway.requests.delivery import ANYONE
from gateway.requests.large_tensors import classify_large
from gateway.tracing.trace import Trace
from protos import grpc_service_pb2 as pb
from protos import health

from . import control_messages as control
from .calling import (
    USUAL,
    Context,
    Methods,
    Reply,
    Standing,
    Streaming,
    Unary,
    Write,
    delayed,
    headers_of,
    raw_headers,
    too_large,
)
from .convert import RequestReader, ResponseEncoder, parse
from .job_calls import JobCalls, asks_for_job, words_of_metadata, words_of_parameters
from .large_messages import LargeMessage, load_of, read_ahead, read_large, read_large_load
from .region_calls import RegionCall, RegionCalls
from .standard_services import StandardServices
from .statuses import INTERNAL, Refusal, Status, refusal
from .stream_requests import SHUTTING_DOWN, AnswerStream, StreamRequests
from .trace_metadata import SEND_START, begin_trace, sent

_log = logging.getLogger(__name__)

SERVICE = "inference.GRPCInferenceService"
DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
MODEL_INFER = f"/{SERVICE}/ModelInfer"
_LEARNT_BYTES = 32_768


class Learner(Protocol):
    """Learns messages that it can recognise by their bytes from then on."""

    def learn(self, data: bytes, message: pb.ModelInferRequest, standing: Standing) -> None: ...


_FAILED: Refusal = (Status.INTERNAL, INTERNAL, ())


class Servicer:
    """The methods of one gRPC front. Raises `StartupError` for invalid header options."""

    def __init__(self, settings: GatewaySettings, handler: Handler, more: tuple[str, ...] = ()) -> None:
        """`more` are further services of the server, for reflection."""
        self._handler = handler
        self._more = more
        # stock clients send one call at a time, and grpcio delivers calls one by one (docs/adr/0003)
        self.flush_interval_s = settings.grpc_flush_interval_us / 1e6
        self.encoder = ResponseEncoder()
        self._jobs = JobCalls(handler, self.encoder, self.flush_interval_s)
        self._regions = RegionCalls(handler)
        self._identifies = handler.identifies
        self._tracer = handler.tracer
        self._forwarding = HeaderForwarding(settings.grpc_header_forward_pattern, "--grpc-header-forward-pattern")
        self.reader = RequestReader(self._forwarding, handler.routes)
        self._restrictions = Restrictions(
            settings.grpc_restricted_protocol,
            lambda header: Unavailable(f"This protocol is restricted, expecting header '{header}'"),
            word="protocol",
            header_prefix=GRPC_KEY_PREFIX,
        )
        self._delays = settings.grpc_delays
        self.draining = False
        self.lane: Learner | None = None
        """Learns from messages that were parsed and answered."""

    def standing(self, metadata: Iterable[tuple[str, str | bytes]]) -> Standing | None:
        """What the metadata of an inference call means; None if it has delivery preferences, or is refused."""
        if words_of_metadata(metadata):
            return None
        if not (self._restrictions.any or self._identifies or self._forwarding.any):
            return USUAL
        forwarded: Parameters = {}
        headers = raw_headers(metadata)
        try:
            self._restrictions.check("inference", headers)
            tenant = self._handler.identify(headers).tenant
            self._forwarding.forward(headers, forwarded)
        except CharoniaError:
            return None
        return Standing(tenant, tuple(forwarded.items())) if tenant or forwarded else USUAL

    def methods(self) -> Methods:
        """The methods for a gRPC server."""
        # messages are parsed here: a server would answer a broken one with the exception's text
        prefix = f"/{SERVICE}/"
        methods: Methods = {
            prefix + "ModelInfer": Unary(self._model_infer, takes_views=True),
            prefix + "ModelStreamInfer": Streaming(self._model_stream_infer, takes_views=True),
            prefix + "RepositoryModelLoad": Unary(self._load, takes_views=True),
        }
        calls = {name: (group, _of_anyone(call)) for name, (group, call) in self._control_calls().items()}
        for name, region_call in self._regions.calls().items():
            calls[name] = ("shared-memory", self._of_tenant(region_call))
        for name, (group, call) in calls.items():
            methods[prefix + name] = self._unary(
                group,
                partial(parse, getattr(pb, f"{name}Request")),
                call,
                getattr(pb, f"{name}Response").SerializeToString,
            )
        check = self._unary("health", _parse_health, _of_anyone(self._health_check), health.serialize_response)
        methods[f"/{health.SERVICE_NAME}/Check"] = check
        standard = StandardServices((SERVICE, *self._more), self._status, lambda: self.draining, self.allow)
        return delayed(methods | standard.methods(), self._delays, SERVICE)

    def allow(self, group: str, context: Context) -> None:
        """Raises if the caller lacks the key of a restricted group."""
        if self._restrictions.any:
            self._restrictions.check(group, headers_of(context))

    # -- inference ----------------------------------------------------------------------------------------------------

    async def _model_infer(self, data: bytes | memoryview, context: Context) -> Reply | Refusal:
        try:
            if self._restrictions.any:
                self._restrictions.check("inference", headers_of(context))
            metadata = context.invocation_metadata() or ()
            came_ns = wall_ns() if self._tracer is not None and self._tracer.on else 0
            raw: Sequence[Buffer] = ()
            if len(data) > OFF_LOOP_BYTES:
                large = await read_large(self._handler.offload, data)
                if large.error is not None:
                    return refusal(large.error)
                call, raw = large.message, large.raw
                del large
            else:
                call = parse(pb.ModelInferRequest, data)
            learnt = data if self.lane is not None and isinstance(data, bytes) and len(data) <= _LEARNT_BYTES else None
            del data  # free its memory: the answer may take long
            if came_ns and self._tracer is not None:
                trace = begin_trace(self._tracer, call.model_name, metadata, came_ns)
                if trace is not None:
                    return await self.infer_traced(call, context, metadata, trace, raw)
            reply = await self.infer(call, context, metadata, None, raw)
            if learnt is not None and self.lane is not None:
                standing = self.standing(metadata)
                if standing is not None:
                    self.lane.learn(learnt, call, standing)
            return reply
        except CharoniaError as error:
            return refusal(error)
        except Exception:
            _log.exception("an inference call failed")
            return _FAILED

    async def infer(
        self,
        message: pb.ModelInferRequest,
        context: Context,
        metadata: Iterable[tuple[str, str | bytes]] = (),
        trace: Trace | None = None,
        raw: Sequence[Buffer] = (),
    ) -> Reply:
        """The serialised reply.

        `metadata` may hold delivery preferences: those of a stream do not hold for its requests. `raw` are the
        request's raw tensors if they are not in the message.
        """
        caller = self._handler.identify(headers_of(context)) if self._identifies else ANYONE
        if message.parameters and asks_for_job(message):
            return await self._jobs.fetch(message, caller)
        served = self._handler.served_model(message.model_name, message.model_version)
        words = words_of_metadata(metadata)
        if message.parameters:
            words = {**words_of_parameters(message), **words}
        if served.interface.decoupled and not words:
            raise Unsupported(DECOUPLED)
        request, classes, deadline_ns = self.reader.read(message, served, context, raw)
        del raw
        request.trace = trace
        if words or self._identifies:
            refusal_text = DECOUPLED if served.interface.decoupled else ""
            return await self._jobs.answer(request, classes, served, words, caller, deadline_ns, refusal_text)
        request.deadline_ns = earlier(request.deadline_ns, deadline_ns)
        response = await self._handler.infer(request, flush_interval_s=self.flush_interval_s)
        if classes:
            served = request.served  # a routing rule may have chosen another version
            response, left = await classify_large(self._handler.offload, response, classes, served)
            return self.encoder.reply(response, dict(left), served)
        return self.encoder.reply(response, classes, served)

    async def infer_traced(
        self,
        message: pb.ModelInferRequest,
        context: Context,
        metadata: Iterable[tuple[str, str | bytes]],
        trace: Trace,
        raw: Sequence[Buffer] = (),
    ) -> Reply:
        """As `infer`, for a request that is traced."""
        try:
            reply = await self.infer(message, context, metadata, trace, raw)
            trace.mark(SEND_START)
            return reply
        finally:
            sent(trace)

    async def _model_stream_infer(
        self, messages: AsyncIterator[bytes | memoryview], write: Write, context: Context
    ) -> Refusal | None:
        """Answer each request by itself, errors in-band (G22-G25)."""
        if self.draining:
            return Status.UNAVAILABLE, SHUTTING_DOWN, ()
        calls = StreamRequests(self, self._handler, self._jobs, context)
        try:
            if self._restrictions.any:
                self._restrictions.check("inference", headers_of(context))
            read = partial(read_ahead, self._handler.offload)
            error = await AnswerStream[bytes | LargeMessage](calls.answer, write, read_large=read).run(messages)
        except CharoniaError as known:
            error = known
        except Exception:
            _log.exception("a stream failed")
            error = InternalError(INTERNAL)
        return refusal(error) if error is not None else None

    # -- control ------------------------------------------------------------------------------------------------------

    def _unary(
        self,
        group: str,
        parse: Callable[[bytes], Any],
        call: Callable[[Any, Context], Awaitable[Any]],
        serialize: Callable[[Any], bytes],
    ) -> Unary:
        """A control call with its restriction and its errors. The event loop parses it, so it must not be large."""

        async def answer(data: bytes | memoryview, context: Context) -> bytes | Refusal:
            if len(data) > MAX_CONTROL_BYTES:
                return Status.RESOURCE_EXHAUSTED, too_large(len(data), MAX_CONTROL_BYTES), ()
            return await self._controlled(group, context, lambda: call(parse(bytes(data)), context), serialize)

        return Unary(answer, largest_bytes=MAX_CONTROL_BYTES)

    async def _controlled(
        self, group: str, context: Context, call: Callable[[], Awaitable[Any]], serialize: Callable[[Any], bytes]
    ) -> bytes | Refusal:
        try:
            if self._restrictions.any:
                self._restrictions.check(group, headers_of(context))
            return serialize(await call())
        except CharoniaError as error:
            return refusal(error)
        except Exception:
            _log.exception("a control call failed")
            return _FAILED

    def _of_tenant(self, call: RegionCall) -> Callable[[Any, Context], Awaitable[Any]]:
        """A call whose answer depends on the caller's tenant."""

        def of_tenant(message: Any, context: Context) -> Awaitable[Any]:
            identify = self._handler.identify
            return call(message, identify(headers_of(context)).tenant if self._identifies else "")

        return of_tenant

    def _control_calls(self) -> dict[str, tuple[str, Callable[[Any], Awaitable[Any]]]]:
        """Restricted group and call, by method."""
        return {
            "ServerLive": ("health", self._server_live),
            "ServerReady": ("health", self._server_ready),
            "ModelReady": ("health", self._model_ready),
            "ServerMetadata": ("metadata", self._server_metadata),
            "ModelMetadata": ("metadata", self._model_metadata),
            "ModelConfig": ("model-config", self._model_config),
            "ModelStatistics": ("statistics", self._model_statistics),
            "RepositoryIndex": ("model-repository", self._repository_index),
            "RepositoryModelUnload": ("model-repository", self._unload),
            "TraceSetting": ("trace", self._trace_setting),
            "LogSettings": ("logging", self._log_settings),
        }

    async def _health_check(self, _service: str) -> health.ServingStatus:
        return self._status()

    def _status(self) -> health.ServingStatus:
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
        control.check_repository(message.repository_name)
        return control.repository_index(self._handler.repository_index(ready=message.ready))

    async def _load(self, data: bytes | memoryview, context: Context) -> bytes | Refusal:
        async def load() -> pb.RepositoryModelLoadResponse:
            large = len(data) > OFF_LOOP_BYTES
            asked = await read_large_load(self._handler.offload, data) if large else load_of(data)
            await self._handler.load_model(asked.model, asked.config, asked.files)
            return pb.RepositoryModelLoadResponse()

        serialize = pb.RepositoryModelLoadResponse.SerializeToString
        return await self._controlled("model-repository", context, load, serialize)

    async def _unload(self, message: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        control.check_repository(message.repository_name)
        dependents = control.read_unload(message)
        await self._handler.unload_model(message.model_name, unload_dependents=dependents)
        return pb.RepositoryModelUnloadResponse()

    async def _trace_setting(self, message: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        wanted = {name: list(setting.value) for name, setting in message.settings.items()}
        change, ask = self._handler.update_trace_settings, self._handler.trace_settings
        setting = await (change(message.model_name, wanted) if wanted else ask(message.model_name))
        return control.trace_settings(setting)

    async def _log_settings(self, message: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        switches = log_settings.current()
        wanted = control.read_log_settings(message)
        if wanted:
            switches = switches.changed(wanted)
            log_settings.apply(switches)
        return control.log_settings(switches)


def _of_anyone(call: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    """A call whose answer is the same for all callers."""
    return lambda message, _context: call(message)


def _parse_health(data: bytes) -> str:
    try:
        return health.parse_request(data)
    except ValueError as error:
        raise InternalError(str(error)) from None
