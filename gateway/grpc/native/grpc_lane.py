"""The express lane of the native gRPC front: recognises calls by the bytes of their frames (docs/adr/0015).

A `ModelInfer` call is two frames: HEADERS with a known block, and DATA with the whole message. Both are compared with
signatures learnt from parsed calls, but for a trace context; the connection parses any other frame. A call
whose headers were recognised, but not its data, becomes an ordinary one, and so does one that is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from struct import Struct
from typing import Protocol

from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.inference import LATEST_VERSION, InferenceResponse
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord, WaveReply
from gateway.grpc.calling import Standing
from gateway.grpc.convert import ResponseEncoder, infer_request, varint
from gateway.grpc.job_calls import JOB_ID
from gateway.grpc.statuses import Refusal, refusal
from gateway.handler import Handler
from gateway.lane.door import Call, Door, values_of
from gateway.lane.doors import MAX_REQUEST_BYTES, Doors
from gateway.lane.layout import CONTEXT_BYTES, NO_CONTEXT, Layout, is_context, is_sampled, protobuf_layout
from gateway.lane.pending_waves import response_in
from gateway.requests.preferences import PARAMETERS as DELIVERY_PARAMETERS
from protos import grpc_service_pb2 as pb

from .codec.call_headers import TRACEPARENT, CallHeaders, HeaderReader, uses_no_table
from .codec.grpc_messages import PREFIX, PREFIX_BYTES
from .codec.http2_frames import DATA, END_HEADERS, END_STREAM, HEAD_BYTES, HEADERS, ConnectionFault
from .codec.limits import MAX_BLOCKED_BYTES, MAX_HTTP2_STREAMS
from .outbox import ANSWER, DONE, ENDS, Outbox, Stream

LANE_HEAD_BYTES = 5
"""Size, type and flags of a frame: the key of `GrpcLane.by_head`."""
_NUMBER = Struct(">L")
_MAX_SIGNATURES = 1024
_MAX_ALIKE = 16
"""Signatures of messages of the same size."""
_MAX_BLOCKS = 512
_MAX_BLOCK_BYTES = 4096
_CONTEXT = bytes((len(TRACEPARENT),)) + TRACEPARENT.encode() + bytes((CONTEXT_BYTES,))
"""The bytes before a trace context in a block, if neither name nor value are compressed."""
_MAX_TIMEOUT_NS = 86_400 * 10**9
"""Longer timeouts take the full way, which checks them."""
_MAX_MESSAGE_BYTES = MAX_REQUEST_BYTES + 4096
_WORDS = DELIVERY_PARAMETERS | {JOB_ID}


_Known = tuple[CallHeaders, Standing, bool]
"""Of a header block: what it means, the same for this server, and whether it uses no table of headers."""
_Blocks = dict[bytes, _Known]


class Calls(Protocol):
    """The calls of a connection by their numbers (`connection_calls.Calls`)."""

    streams: dict[int, Stream | LaneCall]

    def adopt(self, call: LaneCall, *, ended: bool) -> Stream: ...


class Connection(Protocol):
    """A connection, as the lane uses it (`connection.Connection`)."""

    out: Outbox
    last_id: int
    window: int

    @property
    def calls(self) -> Calls: ...

    @property
    def has_table(self) -> bool: ...

    def took(self, last_id: int, size: int, begun: int) -> None: ...

    def answered(self, *, at_once: bool) -> None: ...

    def answer_slowly(self, call: LaneCall, message: bytes) -> None: ...

    def refuse_call(self, call: LaneCall, reason: Refusal) -> None: ...

    def serve_fully(self, call: LaneCall, message: bytes) -> None: ...


class LaneCall(Call):
    """A call in the lane, kept among the connection's streams; fields as in `Stream`."""

    __slots__ = ("connection", "headers", "id", "send_window", "standing")

    pending = ()
    task = tail = None
    closed = False

    def __init__(
        self, connection: Connection, number: int, headers: CallHeaders, standing: Standing, send_window: int
    ) -> None:
        self.connection = connection
        self.id = number
        self.headers = headers
        self.standing = standing
        self.send_window = send_window
        self.gone = False
        self.wave = None
        self.data = ()
        self.client_id = b""
        self.deadline_ns = 0

    @property
    def is_open(self) -> bool:
        stream = self.connection.calls.streams.get(self.id)  # another one after it was adopted
        return stream is not None and stream.tail is None

    @property
    def ended(self) -> bool:
        """Whether its message has arrived."""
        return bool(self.data)


class GrpcSignature:
    """The common part of calls of one layout; see `gateway.lane.door.Signature`."""

    __slots__ = (
        "_encoder",
        "_fixed",
        "_outputs",
        "_version",
        "_whole",
        "_write",
        "door",
        "layout",
        "model",
        "standing",
    )

    counted_by_lane = True

    def __init__(self, door: Door, layout: Layout, model: str, standing: Standing, encoder: ResponseEncoder) -> None:
        """`model` is the name that these calls call it by."""
        self.door = door
        self.layout = layout
        self.model = model
        self.standing = standing
        self._encoder = encoder
        self._outputs: object = None
        self._version = self._whole = 0
        self._fixed: list[bytes] = []
        self._write: Callable[[int, tuple[bytes, ...]], bytes] = _nothing

    def answer(self, calls: list[Call], start: int, reply: WaveReply) -> None:
        if reply.reference is not None:  # large
            for index, call in enumerate(calls, start):
                if not call.gone:
                    self.respond(call, response_in(reply, index))
            return
        if reply.outputs is not self._outputs or reply.version != self._version:
            self._prepare(reply)
        write, whole = self._write, self._whole
        touched: dict[Outbox, Connection] = {}
        values_of_calls = values_of(calls, start, reply, with_ids=self.layout.id_bytes > 0)
        try:
            for call, values in zip(calls, values_of_calls, strict=True):
                if call.gone:
                    continue
                assert type(call) is LaneCall
                connection = call.connection
                out = connection.out
                if whole > out.window or whole > call.send_window or whole > out.frame_bytes or out.is_paused:
                    connection.answer_slowly(call, self._message(values))
                    continue
                number = call.id
                out.put_answer(write(number, values), whole)
                del connection.calls.streams[number]  # from now on it has its answer, also if the next one fails
                touched[out] = connection
        finally:
            for connection in touched.values():
                connection.answered(at_once=len(calls) == 1)

    def _prepare(self, reply: WaveReply) -> None:
        """Make the template for answers with these outputs."""
        outputs = [Tensor(p.name, p.datatype, p.shape, b"") for p in reply.outputs]
        response = InferenceResponse(self.door.served.interface.name, reply.version, outputs)
        shared = self._encoder.shared(response, outputs)
        self._outputs, self._version = reply.outputs, reply.version
        id_bytes = self.layout.id_bytes
        fixed = [shared + (b"\x1a" + varint(id_bytes) if id_bytes else b"")]
        sizes = [id_bytes] if id_bytes else []
        for place in reply.outputs:
            tag = b"\x32" + varint(place.size_bytes)
            if len(fixed) > len(sizes):
                fixed[-1] += tag
            else:
                fixed.append(tag)
            sizes.append(place.size_bytes)
        self._fixed = fixed
        length = sum(map(len, fixed)) + sum(sizes)
        self._whole = length + PREFIX_BYTES
        middle = "".join(f"{len(part)}s{size}s" for part, size in zip(fixed, sizes, strict=True))
        pack = Struct(f">5sL{len(ANSWER)}s5sLBL{middle}5sL{len(DONE)}s").pack
        begin = _frame_head(len(ANSWER), HEADERS, END_HEADERS)
        data = _frame_head(self._whole, DATA, 0)
        end = _frame_head(len(DONE), HEADERS, ENDS)
        if len(fixed) == 1:
            only = fixed[0]

            def write(number: int, values: tuple[bytes, ...]) -> bytes:
                return pack(begin, number, ANSWER, data, number, 0, length, only, *values, end, number, DONE)

        elif len(fixed) == 2:
            first, second = fixed

            def write(number: int, values: tuple[bytes, ...]) -> bytes:
                parts = first, values[0], second, values[1]
                return pack(begin, number, ANSWER, data, number, 0, length, *parts, end, number, DONE)

        else:

            def write(number: int, values: tuple[bytes, ...]) -> bytes:
                parts = [part for pair in zip(fixed, values, strict=True) for part in pair]
                return pack(begin, number, ANSWER, data, number, 0, length, *parts, end, number, DONE)

        self._write = write

    def _message(self, values: tuple[bytes, ...]) -> bytes:
        return b"".join([part for pair in zip(self._fixed, values, strict=True) for part in pair])

    def respond(self, call: Call, record: ResponseRecord) -> None:
        assert isinstance(call, LaneCall)
        if record.error is not None:
            call.connection.refuse_call(call, refusal(record.error))
            return
        client_id = call.client_id.decode() if call.client_id else ""
        response = InferenceResponse(
            self.door.served.interface.name, record.version, record.outputs, client_id, record.parameters
        )
        call.connection.answer_slowly(call, self._encoder.encode(response, {}, None))

    def fail(self, call: Call, error: CharoniaError) -> None:
        self.respond(call, ResponseRecord(b"", self.door.served.model, self.door.served.version, [], {}, error))

    def leave_lane(self, call: Call) -> None:
        assert isinstance(call, LaneCall)
        framed = self.layout.join(call.data, call.client_id)
        call.connection.serve_fully(call, framed[PREFIX_BYTES:])


def _frame_head(size: int, kind: int, flags: int) -> bytes:
    return bytes((size >> 16, size >> 8 & 0xFF, size & 0xFF, kind, flags))


def _nothing(_number: int, _values: tuple[bytes, ...]) -> bytes:
    return b""


class GrpcLane:
    """The signatures that connections of a native front recognise.

    `standing` interprets the headers of calls; None if such calls may not use the lane.
    """

    def __init__(
        self,
        lane: Doors,
        handler: Handler,
        encoder: ResponseEncoder,
        standing: Callable[[CallHeaders], Standing | None],
    ) -> None:
        self._lane = lane
        self._waves = lane.waves
        self._handler = handler
        self._encoder = encoder
        self._standing = standing
        self.by_head: dict[bytes, tuple[int, _Blocks | None, list[GrpcSignature]]] = {}
        """By the first five bytes of a frame: its size and, of HEADERS, the known blocks, of DATA, the signatures."""
        self.count = 0
        """Number of signatures; without any, no call is recognised."""
        self.touched, self.ready = lane.waves.touched, lane.waves.ready
        """The doors that calls were put at, and the function to call once a connection has read all its data."""
        self._blocks = 0
        self._has_contexts = False
        """Whether any of the blocks has a trace context."""
        self._generation = 0
        """Counts changes of the tenants' keys: calls with headers recognised before a change match no later ones."""
        lane.fronts.append(self._forget)

    # -- learning -----------------------------------------------------------------------------------------------------

    def learn_block(self, block: bytes, headers: CallHeaders) -> None:
        """Learn the header block of an ordinary call; it has the same meaning whenever it is repeated."""
        if headers.timeout_ns is not None and not 0 < headers.timeout_ns <= _MAX_TIMEOUT_NS:
            return
        standing = self._standing(headers) if len(block) <= _MAX_BLOCK_BYTES else None
        if standing is None:
            return
        has_context = any(name == TRACEPARENT for name, _ in headers.metadata)
        if has_context:
            without = without_context(block, headers)
            if without is None or self._standing(without[1]) != standing:
                return
            block, headers = without
        standing = standing._replace(generation=self._generation)
        head = _frame_head(len(block), HEADERS, END_HEADERS)
        known = self.by_head.get(head)
        if known is not None and known[1] is not None and block in known[1]:
            return
        if self._blocks >= _MAX_BLOCKS:
            self._forget_blocks()
            known = None
        if known is None or known[1] is None:
            known = self.by_head[head] = (HEAD_BYTES + len(block), {}, [])
        blocks = known[1]
        assert blocks is not None
        self._blocks += 1
        self._has_contexts = self._has_contexts or has_context
        blocks[block] = headers, standing, uses_no_table(block)

    def learn(self, data: bytes, message: pb.ModelInferRequest, standing: Standing) -> None:
        """Learn a message that was parsed and answered. `standing` is the meaning of its metadata."""
        standing = standing._replace(generation=self._generation)
        if len(data) > _MAX_MESSAGE_BYTES or not self._lane.may_learn(message.model_name, len(data)):
            return
        if message.parameters and not _WORDS.isdisjoint(message.parameters):
            return  # delivery parameters, which models do not see: such a call is a job
        layout = protobuf_layout(data, len(message.inputs))
        door = None
        if layout is not None and not any("classification" in output.parameters for output in message.outputs):
            try:
                served = self._handler.served_model(message.model_name, message.model_version)
                version = LATEST_VERSION if not message.model_version else served.version
                request, classes = infer_request(message, version)
                request.parameters.update(standing.forwarded)
                found = layout.cut(data, 0)
                if not classes and found is not None and found[0] == tuple([tensor.data for tensor in request.inputs]):
                    door = self._lane.door_for(request, standing.tenant)
            except (CharoniaError, ValueError):
                door = None
        if door is None or layout is None:
            return
        size = PREFIX_BYTES + len(data)
        head = _frame_head(size, DATA, END_STREAM)
        _, _, signatures = self.by_head.setdefault(head, (HEAD_BYTES + size, None, []))
        prefix = PREFIX.pack(0, len(data))
        layout = layout.behind(prefix)
        if any(found.layout == layout and found.standing == standing for found in signatures):
            return
        if self.count >= _MAX_SIGNATURES:
            self.by_head = {first: found for first, found in self.by_head.items() if found[1] is not None}
            self.count, signatures = 0, []
            self.by_head[head] = (HEAD_BYTES + size, None, signatures)
        elif len(signatures) >= _MAX_ALIKE:
            self.count -= len(signatures)
            signatures.clear()
        self.count += 1
        signatures.insert(0, GrpcSignature(door, layout, message.model_name, standing, self._encoder))

    def _forget_blocks(self) -> None:
        self.by_head = {first: found for first, found in self.by_head.items() if found[1] is None}
        self._blocks = 0
        self._has_contexts = False

    def _forget(self, door: Door | None) -> None:
        if door is None:  # the tenants' keys have changed
            self._generation += 1
            self._forget_blocks()
            return
        for _, blocks, signatures in self.by_head.values():
            if blocks is None and signatures:
                before = len(signatures)
                signatures[:] = [found for found in signatures if found.door is not door]
                self.count -= before - len(signatures)
        self.by_head = {first: found for first, found in self.by_head.items() if found[1] is not None or found[2]}

    # -- recognising --------------------------------------------------------------------------------------------------

    def _in_context(self, blocks: _Blocks, block: bytes) -> _Known | None:
        """The headers in a block that is known but for its trace context."""
        at = block.find(_CONTEXT) + len(_CONTEXT)
        value = block[at : at + CONTEXT_BYTES]
        if at < len(_CONTEXT) or not is_context(value):
            return None
        known = blocks.get(block[:at] + NO_CONTEXT + block[at + CONTEXT_BYTES :])
        if known is None:
            return None
        headers, standing, uses_none = known
        context = TRACEPARENT, value.decode()
        metadata = tuple([context if item[0] == TRACEPARENT else item for item in headers.metadata])
        return replace(headers, metadata=metadata), standing, uses_none

    def read(self, connection: Connection, data: bytes, at: int) -> int:
        """Take the frames from `at` on that are recognised; returns where the first unrecognised one begins."""
        size = len(data)
        by_head = self.by_head
        streams = connection.calls.streams
        out = connection.out
        room = room_before = MAX_HTTP2_STREAMS - len(streams)
        if out.blocked_bytes > MAX_BLOCKED_BYTES:
            return at
        last_id = connection.last_id
        window = connection.window
        initial_window = out.initial_window
        used = now_ns = earliest_ns = 0
        timed: list[LaneCall] = []
        begun = at
        touched = self.touched
        tracer = self._lane.tracer if self._lane.tracer.on else None
        while size - at >= HEAD_BYTES:
            found = by_head.get(data[at : at + LANE_HEAD_BYTES])
            if found is None:
                break
            length, blocks, signatures = found
            end = at + length
            if end > size:
                break
            (number,) = _NUMBER.unpack_from(data, at + 5)
            if blocks is not None:
                known = blocks.get(data[at + HEAD_BYTES : end])
                if known is None and self._has_contexts:
                    known = self._in_context(blocks, data[at + HEAD_BYTES : end])
                if known is None or number <= last_id or not number & 1 or number >> 31 or room <= 0:
                    break
                headers, standing, uses_none = known
                if not uses_none and connection.has_table:
                    break
                last_id = number
                room -= 1
                begun_call = streams[number] = LaneCall(connection, number, headers, standing, initial_window)
                if headers.timeout_ns is not None:
                    now_ns = now_ns or wall_ns()
                    begun_call.deadline_ns = deadline_ns = now_ns + headers.timeout_ns
                    if not earliest_ns or deadline_ns < earliest_ns:
                        earliest_ns = deadline_ns
                    timed.append(begun_call)
            else:
                call = streams.get(number)
                if type(call) is not LaneCall or call.data:
                    break
                used += length - HEAD_BYTES
                if used > window:
                    used -= length - HEAD_BYTES
                    break
                start = at + HEAD_BYTES
                for signature in signatures:
                    layout = signature.layout
                    if data.startswith(layout.head, start) and signature.standing == call.standing:
                        if layout.only_part_at:
                            call.data = (data[start + layout.only_part_at : end],)
                            break
                        parts = layout.cut(data, start)
                        if parts is not None:
                            call.data, call.client_id = parts
                            break
                else:
                    used -= length - HEAD_BYTES
                    break
                if tracer is not None and not tracer.passes_over(signature.model, is_sampled=_is_sampled(call.headers)):
                    call.data, call.client_id = (), b""
                    used -= length - HEAD_BYTES
                    break
                call.signature = signature
                door = signature.door
                door.waiting.append(call)
                if not door.touched:
                    door.touched = True
                    touched.append(door)
            at = end
        if at != begun:
            connection.took(last_id, used, room_before - room)
        if timed:
            self._waves.expiry.watch(earliest_ns)
            for one in timed:
                if not one.data:  # its message has not arrived, and may miss its deadline
                    connection.calls.adopt(one, ended=False)
        return at


def without_context(block: bytes, headers: CallHeaders) -> tuple[bytes, CallHeaders] | None:
    """A block with `NO_CONTEXT`, and its headers; None where bytes alone do not say where the trace context lies."""
    contexts = [value for name, value in headers.metadata if name == TRACEPARENT]
    others = str([item for item in headers.metadata if item[0] != TRACEPARENT])
    at = block.find(_CONTEXT) + len(_CONTEXT)
    found = block[at : at + CONTEXT_BYTES]
    if at < len(_CONTEXT) or not is_context(found) or contexts != [found.decode()] or TRACEPARENT in others:
        return None
    no_context = TRACEPARENT, NO_CONTEXT.decode()
    metadata = tuple([no_context if item[0] == TRACEPARENT else item for item in headers.metadata])
    block, headers = block[:at] + NO_CONTEXT + block[at + CONTEXT_BYTES :], replace(headers, metadata=metadata)
    try:  # the same bytes may lie in a compressed value
        return (block, headers) if HeaderReader({}).read(block) == headers else None
    except ConnectionFault:
        return None


def _is_sampled(headers: CallHeaders) -> bool:
    """Whether the caller's span is, if it may have one."""
    for name, value in headers.metadata:
        if name == TRACEPARENT:
            return isinstance(value, str) and is_sampled(value.encode())
    return False
