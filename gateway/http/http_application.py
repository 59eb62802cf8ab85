"""The ASGI application of the HTTP front: answers inference and health itself, passes the rest to FastAPI (`routes`).

FastAPI's routing costs more than an inference may, and its import a third of a second: the first request that needs it
loads it. `request_codec` reads bodies, `response_codec` writes answers; their bounds and compression are in `bodies`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from charonia import failpoints
from charonia.catalog.served import ServedVersion
from charonia.errors import SERVER_EXITING, CharoniaError, Unauthenticated, Unavailable, Unsupported
from charonia.inference import InferenceRequest, Parameters, parse_version
from charonia.offload.pool import OFF_LOOP_BYTES, Offload
from charonia.options.settings import GatewaySettings
from charonia.tasks import Tasks
from gateway.access.restrictions import HeaderForwarding, Restrictions
from gateway.deferral import Accepted, Deferral
from gateway.handler import Handler
from gateway.requests.delivery import ANYONE
from gateway.requests.large_tensors import check_elements
from gateway.requests.preferences import HEADER_NAMES, PREFER, words_of_headers
from gateway.tracing.trace import Trace
from gateway.tracing.tracer import Tracer

from .binary_bodies import AllocateBody
from .bodies import (
    CLIENT_LEFT,
    EXCHANGE,
    RAW_HEADERS,
    AsgiApp,
    ClientGone,
    Message,
    Receive,
    Scope,
    Send,
    check_declared,
    deflate,
    is_quick_to_write,
    read_body,
    reply_whole,
    without_encoding,
    written,
)
from .codec.compression import IDENTITY, choose_encoding
from .codec.conversions import read_template, request_of, template_task
from .codec.error_replies import (
    INTERNAL_BODY,
    JSON_CONTENT_TYPE,
    METHOD_NOT_ALLOWED_BODY,
    TEXT_CONTENT_TYPE,
    HttpRefusal,
    error_body,
    render_error,
)
from .codec.job_json import PREFERENCE_APPLIED, accepted
from .codec.paths import INFER, LIVE, READY, Route, group_of, resolve
from .codec.request_codec import RequestDecoder, parse_header_length
from .codec.response_codec import HEADER_LENGTH, LargeReply, ReplyForm, ResponseEncoder, response_head
from .exchanges import Exchange
from .generate import Generation
from .http_lane import HttpLane
from .trace_headers import HTTP_RECV_END, HTTP_SEND_END, HTTP_SEND_START, TRACEPARENT, begin_trace

logger = logging.getLogger("charonia.gateway.http")

DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
"""Answers an infer call to a decoupled model (H22)."""

_SINGLE_PIECE_BYTES = 65_536
"""A body that arrived in one piece and is no larger needs no bounded reader."""

_SHORT_LENGTH_DIGITS = 4
"""A Content-Length of so few digits is within every bound, and need not be checked before the body has arrived."""

_ROUTES_LIMIT = 4096


class Beside(Protocol):
    """Another interface that is served on the same port."""

    def claims(self, path: str) -> bool:
        """Whether it answers requests for this path."""

    async def answer(self, scope: Scope, receive: Receive, send: Send, *, draining: bool = False) -> None:
        """Answer one request, also one that fails."""


class HttpApplication:
    """The HTTP interface over a `Handler`, as an ASGI callable."""

    def __init__(self, settings: GatewaySettings, handler: Handler) -> None:
        """Raises `StartupError` for invalid restriction or forwarding options."""
        self._settings = settings
        self._handler = handler
        self._max_input_size_bytes = settings.http_max_input_size
        self._unbounded_bytes = min(_SINGLE_PIECE_BYTES, settings.http_max_input_size)
        self._restrictions = Restrictions(settings.http_restricted_api, restricted)
        self._forwarding = HeaderForwarding(settings.http_header_forward_pattern, "--http-header-forward-pattern")
        self._decoder = RequestDecoder(settings.http_max_input_size)
        self._encoder = ResponseEncoder()
        self._deferral = Deferral(handler)
        self._generation = Generation(settings, handler, self._forwarding)
        self._identifies = handler.identifies
        self._rules = handler.routes
        self.lane: HttpLane | None = None
        if handler.lane is not None and handler.lane.is_on:
            self.lane = HttpLane(handler.lane, self._encoder)
        self._tracer = handler.tracer
        self._routes: dict[str, Route] = {}
        self._control: AsgiApp | None = None
        self._loading: asyncio.Future[AsgiApp] | None = None
        self.beside: Beside | None = None
        """Answers the paths that it claims among those that are no inference (`gateway.openai`)."""
        self.http2: Callable[[], asyncio.Protocol] | None = None
        """Makes the protocol of an HTTP/2 connection; None where HTTP/2 is refused."""
        self.body_tasks = Tasks()
        """Each receives a large body in threads."""
        self.draining = False
        """While set, only health is answered; other requests get "Server exiting" (E7)."""

    @property
    def forwards_headers(self) -> bool:
        return self._forwarding.any

    @property
    def allocate_body(self) -> AllocateBody:
        """Allocates memory for a large body."""
        return self._handler.allocate_body

    @property
    def offload(self) -> Offload:
        return self._handler.offload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        route = self._routes.get(path)
        if route is None:
            route = resolve(path)
            if route is not None:
                if len(self._routes) >= _ROUTES_LIMIT:
                    self._routes.clear()
                self._routes[path] = route
        try:
            if route is None and self.beside is not None and self.beside.claims(path):
                await self.beside.answer(scope, receive, send, draining=self.draining)
            elif route is None:
                await self._answer_control(scope, receive, send)
            elif route.kind is INFER and scope["method"] == "POST":
                if self._tracer is not None and self._tracer.on:
                    await self._answer_traced(self._tracer, route, scope, receive, send)
                else:
                    await self._answer_infer(route, scope, receive, send)
            elif route.method == "POST" and scope["method"] == "POST":
                await self._answer_generate(route, scope, receive, send)
            else:
                await self._answer_simple(route, scope, send)
        except (Exception, asyncio.CancelledError) as failure:
            await answer_failure(failure, scope, send)

    # -- inference -----------------------------------------------------------------------------------------------------

    async def _answer_traced(self, tracer: Tracer, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        """As `_answer_infer`, for a request that may be traced."""
        trace = begin_trace(tracer, route.model, scope["headers"])
        try:
            await self._answer_infer(route, scope, receive, send, trace)
        finally:
            if trace is not None:
                trace.mark(HTTP_SEND_END)
                trace.finish()

    async def _answer_infer(
        self, route: Route, scope: Scope, receive: Receive, send: Send, trace: Trace | None = None
    ) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._restrictions.any:
            self._restrictions.check(route.group, scope["headers"])
        if self.draining:
            raise HttpRefusal(503, SERVER_EXITING, close=True)
        if len(headers.get(b"content-length", b"")) > _SHORT_LENGTH_DIGITS:
            check_declared(headers, self._max_input_size_bytes)
        state = scope.get("state", {})
        exchange: Exchange | None = state.get(EXCHANGE)
        received = exchange.received() if exchange is not None else None
        message: Message = {"type": "http.request", "body": received} if received is not None else await receive()
        failpoints.hit("gateway.receiving")
        body: bytes | memoryview = message.get("body", b"")
        if not body and exchange is not None and isinstance(view := exchange.received(), memoryview):
            body = view  # it was received past the parser
        # only such a body, and a short one that arrived whole, need no `read_body`
        elif not isinstance(body, memoryview) and (
            message["type"] != "http.request" or message.get("more_body") or len(body) > self._unbounded_bytes
        ):
            body = await read_body(message, headers, receive, self._max_input_size_bytes)
        served = self._handler.served_model(route.model, route.version)
        decoupled = served.interface.decoupled
        if b"content-encoding" not in headers:
            is_small = len(body) <= OFF_LOOP_BYTES
            if decoupled and is_small and b"prefer" not in headers and PREFER.encode() not in bytes(body):
                raise Unsupported(DECOUPLED)  # whatever else the body says
        else:
            limit = self._max_input_size_bytes
            body = await without_encoding(self._handler.offload, headers[b"content-encoding"], body, limit)
        if trace is not None:
            trace.mark(HTTP_RECV_END)
        version = parse_version(route.version)
        header_length = headers.get(HEADER_LENGTH)
        if len(body) <= OFF_LOOP_BYTES:
            request, form = self._decoder.decode(route.model, version, body, header_length, served)
        else:
            request, form = await self._decode_large(route.model, version, body, header_length, served)
        if self._forwarding.any:
            self._forwarding.forward(state.get(RAW_HEADERS) or scope["headers"], request.parameters)
        request.trace = trace
        request.served = served
        if self._rules:
            request.headers = scope["headers"]
        applied, may_learn = "", self.lane is not None
        says_more = bool(form.delivery) or not HEADER_NAMES.isdisjoint(headers)
        if says_more or self._identifies:
            caller = self._handler.identify(scope["headers"]) if self._identifies else ANYONE
            words = {**form.delivery, **words_of_headers(scope["headers"])}
            note = form.note(batching=served.interface.batching)
            only_later = DECOUPLED if decoupled else ""
            answer = await self._deferral.answer(request, words, caller, note, only_later=only_later)
            if isinstance(answer, Accepted):
                await reply_whole(send, 202, *accepted(answer))
                return
            response, applied = answer.response, answer.applied
            may_learn = may_learn and not says_more
        elif decoupled:
            raise Unsupported(DECOUPLED)
        else:
            response = await self._handler.infer(request)
        learnt = body if may_learn and isinstance(body, bytes) else None
        served = request.served  # a routing rule may have chosen another version
        del body, received, message  # the request is answered: free its memory
        encoded: bytes | LargeReply
        if form.all_binary or is_quick_to_write(response, form):
            reply_headers, encoded = self._encoder.reply(response, form, served)
        else:
            reply_headers, encoded = await written(self._handler.offload, self._encoder, response, form, served)
        reply = encoded
        if applied:
            reply_headers = [*reply_headers, (PREFERENCE_APPLIED, applied.encode())]
        if b"accept-encoding" in headers:
            encoding = choose_encoding(headers[b"accept-encoding"])
            if encoding != IDENTITY:
                reply = await deflate(self._handler.offload, encoding, reply)
                reply_headers = [*reply_headers, (b"content-encoding", encoding.encode())]
        if trace is not None:
            trace.mark(HTTP_SEND_START)
        is_plain = reply is encoded and trace is None and b"expect" not in headers
        if self.lane is not None and learnt is not None and header_length is not None and is_plain:
            whole = exchange.whole() if exchange is not None else None
            if whole is not None:
                json_bytes = parse_header_length(header_length)
                with contextlib.suppress(Unauthenticated):  # its API key was revoked in the meantime
                    tenant = self._handler.identify(scope["headers"]).tenant if self._identifies else ""
                    context = self._trace_context(scope["headers"], tenant)
                    self.lane.learn(whole, learnt, json_bytes, request, form, served, tenant, context)
        if exchange is None or not exchange.respond(response_head(reply_headers, len(reply)), reply):
            await reply_whole(send, 200, reply_headers, reply)

    def _trace_context(self, headers: list[tuple[bytes, bytes]], tenant: str) -> bytes | None:
        """The trace context of a request; None where it is more than that: a key, say, or the model is to see it."""
        found = [value for name, value in headers if name == TRACEPARENT]
        if not found:
            return b""
        others = [header for header in headers if header[0] != TRACEPARENT]
        try:
            self._restrictions.check("inference", others)
            same_tenant = not self._identifies or self._handler.identify(others).tenant == tenant
        except (CharoniaError, HttpRefusal):
            return None
        forwarded: Parameters = {}
        self._forwarding.forward([(name, found[0]) for name in (TRACEPARENT, TRACEPARENT.title())], forwarded)
        return found[0] if len(found) == 1 and same_tenant and not forwarded else None

    async def _decode_large(
        self, model: str, version: int, body: bytes | memoryview, header_length: bytes | None, served: ServedVersion
    ) -> tuple[InferenceRequest, ReplyForm]:
        """As `RequestDecoder.decode`, with large JSON parsed by a worker process."""
        offload, size, limit = self._handler.offload, len(body), self._max_input_size_bytes
        json_size = size if header_length is None else parse_header_length(header_length)
        if not OFF_LOOP_BYTES < json_size <= min(size, limit):
            request, form = self._decoder.decode(model, version, body, header_length, served)
        else:
            text = memoryview(body)[:json_size]
            task = template_task(text, max_input_size_bytes=limit)
            template = read_template(await offload.run(task))
            request, form = request_of(template, model, version, body, json_size), template.reply
        await check_elements(offload, request)
        return request, form

    async def _answer_generate(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        if self._restrictions.any:
            self._restrictions.check(route.group, scope["headers"])
        if self.draining:
            raise HttpRefusal(503, SERVER_EXITING, close=True)
        await self._generation.answer(route, parse_version(route.version), scope, receive, send)

    # -- health and the control application ----------------------------------------------------------------------------

    async def _answer_simple(self, route: Route, scope: Scope, send: Send) -> None:
        if scope["method"] != route.method:
            headers = [TEXT_CONTENT_TYPE, (b"allow", route.method.encode())]
            await reply_whole(send, 405, headers, METHOD_NOT_ALLOWED_BODY)
            return
        if self._restrictions.any:
            self._restrictions.check(route.group, scope["headers"])
        if route.kind is LIVE:
            await reply_whole(send, 200 if self._handler.live() else 400, [], b"")
        elif route.kind is READY:
            await reply_whole(send, 200 if not self.draining and self._handler.ready() else 400, [], b"")
        elif not self.draining and self._handler.model_ready(route.model, route.version):
            await reply_whole(send, 200, [], b"")
        else:
            await reply_whole(send, 400, [JSON_CONTENT_TYPE], error_body("Model version not ready"))

    def _load_control(self) -> AsgiApp:
        from .routes import control_app

        return control_app(self._settings, self._handler)

    async def _loaded_control(self) -> AsgiApp:
        """The control application, imported once, in a thread, so that inferences do not wait for the import."""
        loading = self._loading
        if loading is None:
            loading = self._loading = asyncio.ensure_future(asyncio.to_thread(self._load_control))
        try:
            return await asyncio.shield(loading)
        finally:
            if loading.done() and (loading.cancelled() or loading.exception()):
                self._loading = None

    async def _answer_control(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._restrictions.any:
            self._restrictions.check(group_of(scope["path"]), scope["headers"])
        if self.draining:
            raise HttpRefusal(503, SERVER_EXITING, close=True)
        control = self._control
        if control is None:
            control = self._control = await self._loaded_control()
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await control(scope, receive, send_noted)
        except Exception:
            # FastAPI answers and then raises, for the server to log
            if not started:
                raise
            logger.exception("unexpected failure of %s %r", scope["method"], scope["path"][:256])


async def answer_failure(failure: BaseException, scope: Scope, send: Send) -> None:
    """Answer a request whose handling raised `failure`."""
    match failure:
        case CharoniaError() | HttpRefusal():
            await reply_whole(send, *render_error(failure))
        case ClientGone():
            pass
        case asyncio.CancelledError():
            # cancelled because the client left, or by a shutdown past its grace time
            if not scope.get("state", {}).get(CLIENT_LEFT):
                await reply_whole(send, *render_error(Unavailable(SERVER_EXITING)))
        case _:
            logger.error("unexpected failure of %s %r", scope["method"], scope["path"][:256], exc_info=failure)
            await reply_whole(send, 500, [JSON_CONTENT_TYPE], INTERNAL_BODY)


def restricted(header: str) -> HttpRefusal:
    """The refusal of a restricted API (E9)."""
    return HttpRefusal(403, f"This API is restricted, expecting header '{header}'")
