"""The express lane of the HTTP front: recognises requests by their bytes, from the request line to the body.

A client's binary infer request differs from its previous one only in the tensors' bytes and perhaps the id and the
trace context. A request that arrives whole on an idle connection is compared with signatures learnt from parsed ones;
all others are parsed, and so are requests that are traced.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from charonia.catalog.served import ServedVersion
from charonia.errors import CharoniaError, shed
from charonia.inference import InferenceRequest, InferenceResponse
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord, WaveReply
from gateway.lane.door import Call, Door, values_of
from gateway.lane.doors import MAX_REQUEST_BYTES, Doors
from gateway.lane.layout import CONTEXT_BYTES, NO_CONTEXT, Layout, is_context, is_plain, is_sampled
from gateway.lane.pending_waves import response_in

from .codec.error_replies import Headers, render_error
from .codec.response_codec import ReplyForm, ResponseEncoder, response_head

_MAX_SIGNATURES = 1024
_MAX_ALIKE = 16
"""Signatures of requests of the same size."""
_MAX_WHOLE_BYTES = MAX_REQUEST_BYTES + 8192
_POST = b"POST "
_LEADING_ID = b'{"id":'
_TRACEPARENT = b"raceparent: "
"""Clients write the header `traceparent` or `Traceparent`."""

_Size = int | tuple[int, int]
"""Of a request, and where its trace context lies, if it has one."""


class LaneConnection(Protocol):
    """A connection, as the lane uses it; each has at most one request in the lane."""

    signature: HttpSignature | None
    """The one recognised last."""

    def waits_for(self, call: HttpCall) -> bool:
        """Whether this is the request in the lane."""

    def write_answer(self, response: bytes) -> None:
        """Write the answer to the request in the lane."""

    def serve_fully(self, whole: bytes) -> None:
        """Answer the request in the lane, whose bytes these are, on the full way."""


class HttpCall(Call):
    """A request of one connection."""

    __slots__ = ("connection", "context")

    def __init__(
        self,
        connection: LaneConnection,
        signature: HttpSignature,
        data: tuple[bytes, ...],
        client_id: bytes,
        context: bytes,
    ):
        self.signature = signature
        self.data = data
        self.client_id = client_id
        self.gone = False
        self.deadline_ns = self.index = 0
        self.wave = None
        self.connection = connection
        self.context = context

    @property
    def is_open(self) -> bool:
        return self.connection.waits_for(self)


class HttpSignature:
    """The common part of requests of one layout; see `gateway.lane.door.Signature`."""

    __slots__ = (
        "_encoder",
        "_fixed",
        "_form",
        "_outputs",
        "_served",
        "_version",
        "door",
        "head",
        "layout",
        "model",
        "only_part_at",
        "size",
    )

    counted_by_lane = True

    def __init__(
        self,
        door: Door,
        layout: Layout,
        model: str,
        size: _Size,
        encoder: ResponseEncoder,
        form: ReplyForm,
        served: ServedVersion,
    ) -> None:
        """`model` is the name that these requests call it by."""
        self.door = door
        self.layout = layout
        self.model = model
        self.head, self.only_part_at = layout.head, layout.only_part_at
        self.size = size
        self._encoder = encoder
        self._form = form
        self._served = served
        self._outputs: object = None
        self._version = 0
        self._fixed: list[bytes] = []

    def answer(self, calls: list[Call], start: int, reply: WaveReply) -> None:
        if not self._form.all_binary or reply.reference is not None:  # the size of JSON depends on the numbers
            for index, call in enumerate(calls, start):
                if not call.gone:
                    self.respond(call, response_in(reply, index))
            return
        if reply.outputs is not self._outputs or reply.version != self._version:
            self._prepare(reply)
        fixed = self._fixed
        head = fixed[0]
        if not self.layout.id_bytes and len(reply.outputs) == 1:
            column, size = reply.columns[0], reply.outputs[0].size_bytes
            for at, call in enumerate(calls, start):
                if not call.gone:
                    call.connection.write_answer(head + column[at * size : (at + 1) * size])  # type: ignore[attr-defined]
            return
        for call, values in zip(calls, values_of(calls, start, reply, with_ids=self.layout.id_bytes > 0), strict=True):
            if call.gone:
                continue
            assert type(call) is HttpCall
            if self.layout.id_bytes:
                call.connection.write_answer(b"".join((head, values[0], fixed[1], *values[1:])))
            else:
                call.connection.write_answer(b"".join((head, *values)))

    def _prepare(self, reply: WaveReply) -> None:
        """Make the template for answers with these outputs."""
        outputs = [Tensor(p.name, p.datatype, p.shape, bytes(p.size_bytes)) for p in reply.outputs]
        request_id = "x" * self.layout.id_bytes
        response = InferenceResponse(self.door.served.interface.name, reply.version, outputs, request_id)
        headers, body = self._encoder.encode(response, self._form, self._served)
        before = response_head(headers, len(body)) + body[: len(body) - sum(len(t.data) for t in outputs)]
        if request_id:
            begin = b'{"id":"'
            at = before.index(begin + request_id.encode()) + len(begin)
            self._fixed = [before[:at], before[at + len(request_id) :]]
        else:
            self._fixed = [before]
        self._outputs, self._version = reply.outputs, reply.version

    def respond(self, call: Call, record: ResponseRecord) -> None:
        assert isinstance(call, HttpCall)
        status = 200
        headers: Headers
        try:
            if record.error is not None:
                raise record.error
            name, client_id = self.door.served.interface.name, call.client_id.decode()
            response = InferenceResponse(name, record.version, record.outputs, client_id, record.parameters)
            headers, body = self._encoder.encode(response, self._form, self._served)
        except CharoniaError as error:
            status, headers, body = render_error(shed(error))
        call.connection.write_answer(response_head(headers, len(body), status) + body)

    def fail(self, call: Call, error: CharoniaError) -> None:
        self.respond(call, ResponseRecord(b"", self.door.served.model, self.door.served.version, [], {}, error))

    def leave_lane(self, call: Call) -> None:
        assert isinstance(call, HttpCall)
        if not call.gone:
            whole = self.layout.join(call.data, call.client_id)
            if isinstance(self.size, tuple):
                at = self.size[1]
                whole = whole[:at] + call.context + whole[at + CONTEXT_BYTES :]
            call.connection.serve_fully(whole)


class HttpLane:
    """The signatures that connections of the HTTP front recognise."""

    def __init__(self, lane: Doors, encoder: ResponseEncoder) -> None:
        self._lane = lane
        self._waves = lane.waves
        self._loop = asyncio.get_running_loop()
        self._is_due = False
        self._encoder = encoder
        self._by_size: dict[_Size, list[HttpSignature]] = {}
        self._has_contexts = False
        """Whether any of them has a trace context."""
        self.count = 0
        """Number of signatures; without any, no request is recognised."""
        lane.fronts.append(self._forget)

    # -- learning -----------------------------------------------------------------------------------------------------

    def learn(
        self,
        whole: bytes,
        body: bytes,
        json_bytes: int,
        request: InferenceRequest,
        form: ReplyForm,
        served: ServedVersion,
        tenant: str = "",
        context: bytes | None = b"",
    ) -> None:
        """Learn the signature of a tenant's request that was parsed and answered.

        `whole` are its bytes; `body` those of its body, of which the first `json_bytes` are JSON. `context` is its
        trace context if it means nothing but a trace; None if it means more.
        """
        if context is None or len(whole) > _MAX_WHOLE_BYTES or form.classes or not whole.endswith(body):
            return
        if not self._lane.may_learn(request.model, len(whole)):
            return
        size: _Size = len(whole)
        body_at = len(whole) - len(body)
        if context:
            at = _context_at(whole)
            end = at + CONTEXT_BYTES
            if end > body_at or whole[at:end] != context or whole[at - 15 : at - 12] not in (b"\r\nt", b"\r\nT"):
                return
            whole = whole[:at] + NO_CONTEXT + whole[end:]
            size = len(whole), at
        layout = http_layout(whole, body_at, json_bytes, request)
        if layout is None:
            return
        signatures = self._by_size.get(size, [])
        if any(found.layout == layout for found in signatures):
            return
        door = self._lane.door_for(request, tenant)
        if door is None:
            return
        if self.count >= _MAX_SIGNATURES:
            self._by_size.clear()
            self.count, signatures = 0, []
        elif len(signatures) >= _MAX_ALIKE:
            self.count -= len(signatures)
            signatures.clear()
        self.count += 1
        signatures.insert(0, HttpSignature(door, layout, request.model, size, self._encoder, form, served))
        self._by_size[size] = signatures
        self._has_contexts = self._has_contexts or bool(context)

    def _forget(self, door: Door | None) -> None:
        if door is None:
            return  # nothing is cached by API key here: keys are among the bytes of a signature
        for signatures in self._by_size.values():
            before = len(signatures)
            signatures[:] = [found for found in signatures if found.door is not door]
            self.count -= before - len(signatures)
        self._by_size = {size: found for size, found in self._by_size.items() if found}
        self._has_contexts = any(isinstance(size, tuple) for size in self._by_size)

    # -- recognising --------------------------------------------------------------------------------------------------

    def read(self, connection: LaneConnection, data: bytes) -> HttpCall | None:
        """Recognise a request and put it at its door, with all others of this tick; None if it is not recognised."""
        signature = connection.signature
        size: _Size = len(data)
        context = b""
        if self._has_contexts and len(data) <= _MAX_WHOLE_BYTES and (at := _context_at(data)):
            size, context = (len(data), at), data[at : at + CONTEXT_BYTES]
            data = data[:at] + NO_CONTEXT + data[at + CONTEXT_BYTES :]
        if signature is None or signature.size != size or not data.startswith(signature.head):
            for signature in self._by_size.get(size, ()):
                if data.startswith(signature.head):
                    break
            else:
                return None
        if signature.only_part_at:
            call = HttpCall(connection, signature, (data[signature.only_part_at :],), b"", context)
        else:
            parts = signature.layout.cut(data, 0)
            if parts is None:
                for signature in self._by_size.get(size, ()):
                    if data.startswith(signature.head) and (parts := signature.layout.cut(data, 0)) is not None:
                        break
                else:
                    return None
            call = HttpCall(connection, signature, *parts, context)
        door = signature.door
        if door.is_closed:  # since this connection's last request
            connection.signature = None
            return None
        tracer = self._lane.tracer
        if tracer.on and not tracer.passes_over(signature.model, is_sampled=bool(context) and is_sampled(context)):
            return None
        connection.signature = signature
        door.waiting.append(call)
        if not door.touched:
            door.touched = True
            self._waves.touched.append(door)
            if not self._is_due:
                self._is_due = True
                self._loop.call_soon(self._send_waves)
        return call

    def _send_waves(self) -> None:
        """Called once all connections have read what was there in this tick."""
        self._is_due = False
        self._waves.ready()

    def may_become(self, data: bytes) -> bool:
        """Whether these bytes may be the beginning of a request that the lane recognises."""
        size = len(data)
        if not _POST.startswith(data[: len(_POST)]):
            return False
        if self._has_contexts and (at := _context_at(data)):
            data = data[:at] + NO_CONTEXT + data[at + CONTEXT_BYTES :]
        for whole, signatures in self._by_size.items():
            if size < (whole if isinstance(whole, int) else whole[0]):
                for signature in signatures:
                    head = signature.layout.head
                    if head.startswith(data) if size < len(head) else data.startswith(head):
                        return True
        return False


def _context_at(data: bytes) -> int:
    """Where a trace context lies if it is in the headers; 0 where there is none."""
    at = data.find(_TRACEPARENT) + len(_TRACEPARENT)
    return at if at >= len(_TRACEPARENT) and is_context(data[at : at + CONTEXT_BYTES]) else 0


def http_layout(whole: bytes, body_at: int, json_bytes: int, request: InferenceRequest) -> Layout | None:
    """The layout of a binary request whose body begins at `body_at` with `json_bytes` of JSON.

    None if an input is not binary, or an id does not stand first, where clients write it.
    """
    sizes = [len(tensor.data) for tensor in request.inputs]
    raw_at = len(whole) - sum(sizes)
    if raw_at != body_at + json_bytes or not json_bytes or not all(sizes):
        return None
    at = raw_at
    parts = []
    for tensor, size in zip(request.inputs, sizes, strict=True):
        if whole[at : at + size] != tensor.data:
            return None  # it was in the JSON
        parts.append((at, at + size))
        at += size
    id_bytes = 0
    if request.id:
        name = request.id.encode()
        begin = body_at + len(_LEADING_ID)
        if not whole.startswith(_LEADING_ID, body_at) or not is_plain(name):
            return None
        begin += 2 if whole[begin : begin + 2] == b' "' else 1
        if not whole.startswith(b'"' + name + b'"', begin - 1) or whole.find(b'"id"', begin, raw_at) >= 0:
            return None
        if whole.find(b"\\", begin, raw_at) >= 0:
            return None  # "id" may occur again, written with escapes, and the last one counts
        id_bytes = len(name)
        parts.insert(0, (begin, begin + id_bytes))
    return Layout.of(whole, parts, id_bytes)
