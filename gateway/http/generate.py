"""`generate` and `generate_stream`: one JSON object in, one response or server-sent events out (H30-H37).

`generate_codec` reads and writes the JSON. A client that leaves cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from charonia.errors import SERVER_EXITING, CharoniaError, InvalidArgument
from charonia.inference import RECEIPT, InferenceResponse
from charonia.models.interface import ModelInterface
from charonia.offload.pool import OFF_LOOP_BYTES, Offload
from charonia.options.settings import GatewaySettings
from charonia.tensors import Buffer
from gateway.access.restrictions import HeaderForwarding
from gateway.deferral import Accepted, Deferral
from gateway.handler import Handler
from gateway.requests.delivery import ANYONE
from gateway.requests.preferences import HEADER_NAMES, words_of_headers
from gateway.tracing.trace import Trace

from .bodies import CLIENT_LEFT, RAW_HEADERS, Receive, Scope, Send, check_declared, read_body, reply_whole
from .codec.conversions import generate_task, generated_task, read_template, request_of
from .codec.error_replies import (
    INTERNAL_BODY,
    JSON_CONTENT_TYPE,
    STATUS,
    Headers,
    error_body,
    error_event,
    render_error,
)
from .codec.generate_codec import decode_generate, encode_generate
from .codec.job_json import accepted
from .codec.paths import GENERATE_STREAM, Route
from .event_stream import in_chunks
from .trace_headers import HTTP_RECV_END, HTTP_SEND_END, begin_trace

EVENT_CONTENT_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")

NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)

logger = logging.getLogger("charonia.gateway.http")


class Generation:
    """The two endpoints of one front."""

    def __init__(self, settings: GatewaySettings, handler: Handler, forwarding: HeaderForwarding) -> None:
        self._handler = handler
        self._forwarding = forwarding
        self._deferral = Deferral(handler)
        self._max_input_size_bytes = settings.http_max_input_size

    async def answer(self, route: Route, version: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises `CharoniaError` and `HttpRefusal` before the response has begun."""
        tracer = self._handler.tracer
        trace = None
        if tracer is not None and tracer.on:
            trace = begin_trace(tracer, route.model, scope["headers"])
        try:
            await self._answer(route, version, scope, receive, send, trace)
        finally:
            if trace is not None:
                trace.mark(HTTP_SEND_END)
                trace.finish()

    async def _answer(
        self, route: Route, version: int, scope: Scope, receive: Receive, send: Send, trace: Trace | None
    ) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        check_declared(headers, self._max_input_size_bytes)
        body = await read_body(await receive(), headers, receive, self._max_input_size_bytes)
        if trace is not None:
            trace.mark(HTTP_RECV_END)
        served = self._handler.served_model(route.model, route.version)
        if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        limit = self._max_input_size_bytes
        if len(body) <= OFF_LOOP_BYTES:
            request, template = decode_generate(route.model, version, bytes(body), served.interface, limit)
        else:
            template = read_template(await self._handler.offload.run(generate_task(body, served.interface, limit)))
            request = request_of(template, route.model, version)
        del body
        if self._forwarding.any:
            self._forwarding.forward(scope.get("state", {}).get(RAW_HEADERS) or scope["headers"], request.parameters)
        handler = self._handler
        caller = handler.identify(scope["headers"]) if handler.identifies else ANYONE
        words = template.reply.delivery
        if not HEADER_NAMES.isdisjoint(headers):
            words = {**words, **words_of_headers(scope["headers"])}
        request.trace = trace
        request.served = served
        if handler.routes:
            request.headers = scope["headers"]
        responses = self._deferral.stream(request, words, caller, {})
        async with contextlib.aclosing(responses):
            if route.kind == GENERATE_STREAM:
                await _Events(send, handler.offload, served.interface).write_all(responses, scope)
            else:
                await _answer_once(responses, send, handler.offload, served.interface)


def _is_flag(response: InferenceResponse, interface: ModelInterface) -> bool:
    """Whether it says only that there are no more. The one answer of other models is one, even without outputs."""
    return interface.decoupled and response.is_flag


async def _answer_once(
    responses: AsyncGenerator[InferenceResponse | Accepted], send: Send, offload: Offload, interface: ModelInterface
) -> None:
    """Write the one response, or H34's error with the status of the first response."""
    given: list[InferenceResponse] = []
    async for response in responses:
        if isinstance(response, Accepted):
            await reply_whole(send, 202, *accepted(response))
            return
        if given and _is_receipt(response):
            given[-1].parameters = {**given[-1].parameters, **response.parameters}
        elif not _is_flag(response, interface) and not _is_receipt(response):
            given.append(response)
        if len(given) > 1:
            break  # the error is certain: cancel the rest
    status, headers = 200, [JSON_CONTENT_TYPE]
    body: Buffer = b""
    if given:
        status, headers, body = await _rendered(given[0], offload)
    if len(given) != 1:
        headers, body = [JSON_CONTENT_TYPE], error_body(NOT_ONE)
    await _start(send, status, headers)
    await send({"type": "http.response.body", "body": body})


def _is_receipt(response: InferenceResponse) -> bool:
    """Whether it says only that there are no more responses, and what the request has used."""
    if not response.final or response.bare or response.outputs or response.error is not None:
        return False
    return response.parameters.keys() == {RECEIPT}


async def _rendered(response: InferenceResponse, offload: Offload) -> tuple[int, Headers, Buffer]:
    """Status, headers and JSON of one response."""
    error = response.error
    if error is None:
        try:
            if sum([len(tensor.data) for tensor in response.outputs]) <= OFF_LOOP_BYTES:
                return 200, [JSON_CONTENT_TYPE], encode_generate(response)
            _, (body,) = await offload.run(generated_task(response), may_refuse=False)
            return 200, [JSON_CONTENT_TYPE], body
        except CharoniaError as unfit:
            error = unfit
    return render_error(error)


class _Events:
    """The events of one stream; the first response decides the status (H35)."""

    def __init__(self, send: Send, offload: Offload, interface: ModelInterface) -> None:
        self._interface = interface
        self._send = send
        self._offload = offload
        self._started = False

    async def write_all(self, responses: AsyncGenerator[InferenceResponse | Accepted], scope: Scope) -> None:
        try:
            async for response in responses:
                if isinstance(response, Accepted):
                    await reply_whole(self._send, 202, *accepted(response))
                    return
                if not self._started and response.error is not None and response.place is None:
                    raise response.error  # there was no response: an ordinary error
                if not _is_flag(response, self._interface):
                    await self._write(response)
                del response  # free its memory while waiting for the next one
        except asyncio.CancelledError:
            if not self._started or scope.get("state", {}).get(CLIENT_LEFT):
                raise
            await self._event(error_body(SERVER_EXITING))
        except CharoniaError as error:
            if not self._started:
                raise
            await self._event(error_event(error))
        except Exception:
            if not self._started:
                raise
            logger.exception("a stream of responses failed")
            await self._event(INTERNAL_BODY)
        if not self._started:
            await _start(self._send, 200, [EVENT_CONTENT_TYPE])
        await self._send({"type": "http.response.body", "body": b""})

    async def _write(self, response: InferenceResponse) -> None:
        status, _, body = await _rendered(response, self._offload)
        if response.error is not None and response.error.receipt:
            body = error_event(response.error)
        if not self._started:
            self._started = True
            error = response.error
            await _start(self._send, STATUS[error.code] if error is not None else status, [EVENT_CONTENT_TYPE])
        await self._event(body)

    async def _event(self, body: Buffer) -> None:
        if len(body) <= OFF_LOOP_BYTES:
            await self._send(
                {"type": "http.response.body", "body": b"".join((b"data: ", body, b"\n\n")), "more_body": True}
            )
            return
        for part in in_chunks((b"data: ", body, b"\n\n")):
            await self._send({"type": "http.response.body", "body": part, "more_body": True})


async def _start(send: Send, status: int, headers: Headers) -> None:
    """Begin a response without Content-Length, so that the body is chunked (H26)."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
