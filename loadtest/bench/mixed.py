"""`python -m loadtest.bench.mixed`: a trace of unlike requests, as h2load cannot send them; one process, closed loop.

Ten forms of requests in random order, every one with its own id and tensor: single and batched, binary and JSON (typed
contents over gRPC), with and without named outputs, three models. 5 % ask for the higher priority, 2 % are wrong and
must be refused, 1 % are cancelled right after they were sent (a closed connection over HTTP). Identities and echoed
ids are compared. The log file has the form of h2load's: start in us, status, duration in us; cancels are not in it.

Messages are built once and sent with new ids, and both protocols are written by hand: a generator that takes longer
for a request than the server keeps most of what is in flight to itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import hpack
import numpy as np

from charonia.analyzer.http1_lane import AnswerReader, Head, ProtocolError
from loadtest.bench.cases import Array
from loadtest.bench.h2load import Sample
from loadtest.bench.messages import GRPC_PATH

CANCELLED, PRIORITISED, WRONG = 0.01, 0.05, 0.02
POOL = 64
TIMEOUT_S = 60.0
CONNECTIONS = 4
_NO_ID = "0" * 32
_HEAD = struct.Struct(">HBBBL")
_WIDEST = (1 << 31) - 1
_INVALID_ARGUMENT, _UNAVAILABLE = 3, 14


@dataclass(frozen=True)
class Form:
    """One of the ten kinds of requests."""

    model: str
    rows: int = 1
    text: bool = False
    named: bool = False
    text_answer: bool = False
    timeout: bool = False


FORMS = (
    Form("identity"),
    Form("identity", rows=4),
    Form("identity", text=True),
    Form("identity", named=True),
    Form("identity", named=True, text_answer=True),
    Form("identity", timeout=True),
    Form("identity_levels"),
    Form("identity_py"),
    Form("mlp"),
    Form("mlp", rows=2),
)


@dataclass(frozen=True, eq=False)
class Request:
    """A request of the trace before it has an id: its form, its tensor, and whether it must be refused."""

    form: Form
    tensor: Array
    priority: int
    refused: bool

    @property
    def parameters(self) -> dict[str, int]:
        """Its request parameters."""
        found = {"timeout": 30_000_000} if self.form.timeout else {}
        return found | ({"priority": self.priority} if self.priority else {})

    def is_echo(self) -> bool:
        """Whether the right answer is the request's own tensor."""
        return self.form.model.startswith("identity")


class Trace:
    """An endless, seeded sequence of requests; they come from pools, because making them costs."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        values = np.random.default_rng(seed).random((POOL, 4, 784), dtype=np.float32)
        tensors = [
            [np.ascontiguousarray(one[: form.rows, : 784 if form.model == "mlp" else 16]) for one in values]
            for form in FORMS
        ]
        self._plain = [[Request(form, one, 0, False) for one in tensors[n]] for n, form in enumerate(FORMS)]
        self._wrong = [
            [Request(form, np.ascontiguousarray(one[:, :-1]), 0, True) for one in tensors[n]]
            for n, form in enumerate(FORMS)
        ]
        self._prior = [Request(FORMS[6], one, 1, False) for one in tensors[6]]

    def next(self) -> tuple[Request, bool]:
        """The next request, and whether it is cancelled."""
        draw = self._random.random
        number, index = int(draw() * len(FORMS)), int(draw() * POOL)
        if draw() < WRONG:
            return self._wrong[number][index], draw() < CANCELLED
        if draw() < PRIORITISED:
            return self._prior[index], False
        return self._plain[number][index], draw() < CANCELLED

    def new_id(self) -> str:
        """A random id of 32 hexadecimal digits."""
        return f"{self._random.getrandbits(128):032x}"


def http_bytes(request: Request, request_id: str, host: str) -> bytes:
    """The whole HTTP/1.1 message."""
    form, tensor = request.form, request.tensor
    spec: dict[str, Any] = {"name": "INPUT0", "datatype": "FP32", "shape": list(tensor.shape)}
    content = b"" if form.text else tensor.tobytes()
    if form.text:
        spec["data"] = tensor.ravel().tolist()
    else:
        spec["parameters"] = {"binary_data_size": len(content)}
    document: dict[str, Any] = {"id": request_id, "inputs": [spec], "parameters": request.parameters}
    if form.named:
        document["outputs"] = [{"name": "OUTPUT0", "parameters": {"binary_data": not form.text_answer}}]
    elif not form.text:
        document["parameters"]["binary_data_output"] = True
    head = json.dumps(document, separators=(",", ":")).encode()
    lines = [
        f"POST /v2/models/{form.model}/infer HTTP/1.1", f"Host: {host}", f"Content-Length: {len(head) + len(content)}",
        f"Inference-Header-Content-Length: {len(head)}", "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + head + content


def http_fault(request: Request, request_id: str, status: int, json_length: int | None, body: bytes) -> str | None:
    """What is wrong with an HTTP answer, None when nothing is."""
    if request.refused:
        return None if 400 <= status < 500 else f"a wrong request was answered {status}"
    if status != 200:
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"
    document = json.loads(body if json_length is None else body[:json_length])
    if document.get("id") != request_id:
        return "the id of another request"
    output = document["outputs"][0]
    values = output["data"] if "data" in output else np.frombuffer(body[json_length or 0 :], np.float32)
    return tensor_fault(request, np.asarray(values, np.float32))


def tensor_fault(request: Request, values: Array) -> str | None:
    """What is wrong with an answer's values: an identity's must be the request's own, mlp's be ten a row."""
    if request.is_echo():
        return None if np.array_equal(values.ravel(), request.tensor.ravel()) else "values of another request"
    return None if values.size == 10 * request.form.rows else f"{values.size} values"


def grpc_bytes(request: Request, request_id: str) -> bytes:
    """The serialised ModelInferRequest."""
    from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

    form, tensor = request.form, request.tensor
    message = service_pb2.ModelInferRequest(model_name=form.model, id=request_id)
    spec = message.inputs.add(name="INPUT0", datatype="FP32", shape=tensor.shape)
    if form.text:
        spec.contents.fp32_contents.extend(tensor.ravel().tolist())
    else:
        message.raw_input_contents.append(tensor.tobytes())
    if form.named:
        message.outputs.add(name="OUTPUT0")
    for name, value in request.parameters.items():
        if name == "priority":
            message.parameters[name].uint64_param = value
        else:
            message.parameters[name].int64_param = value
    serialised: bytes = message.SerializeToString()
    return serialised


@dataclass
class Tally:
    """What a run saw."""

    samples: list[Sample] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0


class Templates:
    """Serialised requests without their ids: a request is built once and sent many times, each time with its own id."""

    def __init__(self, build: Callable[[Request, str], bytes]) -> None:
        self._build = build
        self._known: dict[Request, tuple[bytes, bytes]] = {}

    def message(self, request: Request, request_id: str) -> bytes:
        """The message of a request with this id of 32 characters."""
        parts = self._known.get(request)
        if parts is None:
            before, _, after = self._build(request, _NO_ID).partition(_NO_ID.encode())
            parts = self._known[request] = (before, after)
        return parts[0] + request_id.encode() + parts[1]


class Run:
    """One run of the trace: `in_flight` callers, each of which sends a request, takes its answer and goes on."""

    def __init__(self, in_flight: int, seconds: float) -> None:
        self.trace, self.tally = Trace(1), Tally()
        self._stop_s = time.monotonic() + seconds
        self._left = in_flight
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def next(self) -> tuple[Request, str, bool] | None:
        """What a caller sends next: a request, its id, and whether it is cancelled. None when the time is up."""
        if time.monotonic() < self._stop_s:
            request, cancel = self.trace.next()
            self.tally.cancelled += cancel
            return request, self.trace.new_id(), cancel
        self._left -= 1
        if not self._left and not self.over.done():
            self.over.set_result(None)
        return None

    def answered(self, started_us: int, fault: str | None) -> None:
        """A caller has its answer."""
        self.tally.samples.append(Sample(started_us, time.time_ns() // 1000 - started_us, fault is None))
        if fault is not None:
            self.tally.faults[fault] += 1


class HttpCaller(asyncio.Protocol):
    """One keep-alive connection, a new one after each cancel, with one request at a time."""

    def __init__(self, run: Run, address: str, templates: Templates) -> None:
        self._run, self._templates = run, templates
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._transport: asyncio.Transport | None = None
        self._reader = AnswerReader()
        self._request: Request | None = None
        self._id = ""
        self._started_us = 0
        self._tasks: set[asyncio.Task[object]] = set()

    def connect(self) -> None:
        """Go on with a new connection."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.create_connection(lambda: self, self._host, self._port))
        self._tasks.add(task)
        task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._run.over.done():
            self._run.over.set_exception(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._reader = AnswerReader()
        self._send()

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._request is not None:
            self._end("connection closed by the server")
            self.connect()

    def _send(self) -> None:
        transport = self._transport
        assert transport is not None
        drawn = self._run.next()
        if drawn is None:
            transport.close()
            return
        request, self._id, cancel = drawn
        self._started_us = time.time_ns() // 1000
        transport.write(self._templates.message(request, self._id))
        if cancel:
            transport.close()
            self.connect()
        else:
            self._request = request

    def _end(self, fault: str | None) -> None:
        self._request = None
        self._run.answered(self._started_us, fault)

    def data_received(self, data: bytes) -> None:
        request = self._request
        if request is None:
            return  # what follows a cancel
        try:
            answer = self._reader.feed(data)
        except ProtocolError as error:
            self._end(f"not an answer: {error}")
            self.connect()
            return
        if answer is None:
            return
        head, body = answer
        self._end(self._fault(request, head, body))
        if head.close:
            assert self._transport is not None
            self._transport.close()
            self.connect()
        else:
            self._send()

    def _fault(self, request: Request, head: Head, body: bytes) -> str | None:
        size = head.json_length
        is_answer = size is not None and head.status == 200 and not request.refused and request.is_echo()
        mine = f'"id":"{self._id}"'.encode()
        if is_answer and body[size:] == request.tensor.tobytes() and mine in body[:size]:
            return None
        try:
            return http_fault(request, self._id, head.status, size, body)
        except (ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"


class GrpcCaller:
    """One call at a time on a shared connection."""

    def __init__(self, run: Run, connection: GrpcConnection) -> None:
        self._run, self._connection = run, connection
        self._request: Request | None = None
        self._id = ""
        self._started_us = 0

    def send(self) -> None:
        """Begin a call, and another in its stead for each that is cancelled, in the next tick."""
        drawn = self._run.next()
        if drawn is None:
            return
        self._request, self._id, cancel = drawn
        self._started_us = time.time_ns() // 1000
        number = self._connection.begin(self, self._request, self._id)
        if cancel:
            asyncio.get_running_loop().call_soon(self._cancel, number)

    def _cancel(self, number: int) -> None:
        self._connection.cancel(number)
        self.send()

    def answered(self, message: bytes, status: int, reason: str) -> None:
        """The call has ended."""
        request = self._request
        assert request is not None
        self._run.answered(self._started_us, self._fault(request, message, status, reason))
        self.send()

    def _fault(self, request: Request, message: bytes, status: int, reason: str) -> str | None:
        from tritonclient.grpc import service_pb2

        if status:
            return None if request.refused and status == _INVALID_ARGUMENT else f"status {status}: {reason}"
        if request.refused:
            return "a wrong request was answered"
        if request.is_echo() and message.endswith(request.tensor.tobytes()) and self._id.encode() in message:
            return None
        answer = service_pb2.ModelInferResponse.FromString(message)
        if answer.id != self._id:
            return "the id of another request"
        return tensor_fault(request, np.frombuffer(answer.raw_output_contents[0], np.float32))


class GrpcConnection(asyncio.Protocol):
    """One connection: HTTP/2 as far as unary calls of a few KB need it; every call has a deadline."""

    def __init__(self, address: str, templates: Templates) -> None:
        self._templates = templates
        self._transport: asyncio.Transport | None = None
        self._decoder, self._blocks = hpack.Decoder(), dict[bytes, tuple[int, str]]()
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", GRPC_PATH), (":authority", address),
            ("content-type", "application/grpc"), ("te", "trailers"), ("grpc-timeout", f"{TIMEOUT_S:.0f}S"),
            ("user-agent", "charonia-loadtest"),
        ]  # fmt: skip
        encoder = hpack.Encoder()
        encoder.header_table_size = 0
        headers = [hpack.NeverIndexedHeaderTuple(*one) for one in fields]
        self._first = encoder.encode(headers)  # it says as well that there is no table
        self._headers = encoder.encode(headers)
        self._calls: dict[int, tuple[GrpcCaller, bytearray]] = {}
        self._next, self._rest = 1, b""
        self.lost = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        opening += _frame(4, 0, 0, struct.pack(">HLHL", 1, 0, 4, _WIDEST))  # no table, wide streams
        self._transport.write(opening + _frame(8, 0, 0, struct.pack(">L", _WIDEST - 65_535)))

    def connection_lost(self, _exc: Exception | None) -> None:
        self.lost = self.lost or "connection closed by the server"
        for number in list(self._calls):
            self._end(number, _UNAVAILABLE, self.lost)

    def begin(self, caller: GrpcCaller, request: Request, request_id: str) -> int:
        """Send a call; its number."""
        assert self._transport is not None
        number, self._next = self._next, self._next + 2
        self._calls[number] = (caller, bytearray())
        message = self._templates.message(request, request_id)
        data = struct.pack(">BL", 0, len(message)) + message
        block = self._headers if number > 1 else self._first
        self._transport.write(_frame(1, 4, number, block) + _frame(0, 1, number, data))
        return number

    def cancel(self, number: int) -> None:
        """Reset a call, should it not have ended."""
        assert self._transport is not None
        if self._calls.pop(number, None) is not None:
            self._transport.write(_frame(3, 0, number, struct.pack(">L", 8)))

    def _end(self, number: int, status: int, reason: str) -> None:
        caller, message = self._calls.pop(number)
        caller.answered(bytes(message[5:]), status, reason)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at, size = 0, len(data)
        while size - at >= 9:
            high, low, kind, flags, number = _HEAD.unpack_from(data, at)
            end = at + 9 + (high << 8 | low)
            if end > size:
                break
            self._frame(kind, flags, number, data[at + 9 : end])
            at = end
        self._rest = data[at:]

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        call = self._calls.get(number)
        if kind == 0 and call is not None:
            call[1].extend(payload)
        elif kind == 1:
            status, reason = self._status(payload)
            if flags & 1 and call is not None:
                self._end(number, status, reason)
        elif kind == 3 and call is not None:
            self._end(number, _UNAVAILABLE, "the call was reset")
        elif kind == 7:
            self.lost = f"the server left: {payload[8:].decode(errors='replace')}"
        elif kind in (4, 6) and not flags & 1 and self._transport is not None:
            self._transport.write(_frame(kind, 1, 0, payload if kind == 6 else b""))

    def _status(self, block: bytes) -> tuple[int, str]:
        found = self._blocks.get(block)
        if found is None:
            headers = {str(name): str(value) for name, value in self._decoder.decode(block)}
            found = int(headers.get("grpc-status", "0")), headers.get("grpc-message", "")
            if len(self._blocks) < 1024:
                self._blocks[block] = found
        return found


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, number) + payload


async def run(protocol: str, address: str, in_flight: int, seconds: float) -> Tally:
    """Runs the trace with so many callers, for so long. Raises OSError without a connection, TimeoutError."""
    loop = asyncio.get_running_loop()
    going = Run(in_flight, seconds)
    connections: list[GrpcConnection] = []
    if protocol == "grpc":
        host, _, port = address.rpartition(":")
        templates = Templates(grpc_bytes)
        for _ in range(min(CONNECTIONS, in_flight)):
            _, made = await loop.create_connection(lambda: GrpcConnection(address, templates), host, int(port))
            connections.append(made)
        for number in range(in_flight):
            GrpcCaller(going, connections[number % len(connections)]).send()
    else:
        templates = Templates(lambda request, request_id: http_bytes(request, request_id, address))
        for _ in range(in_flight):
            HttpCaller(going, address, templates).connect()
    await asyncio.wait_for(going.over, seconds + TIMEOUT_S)
    return going.tally


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 1 when an answer was wrong; counts go to standard output as JSON."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.mixed", description=__doc__.split("\n\n")[0])
    parser.add_argument("--protocol", choices=["grpc", "http"], required=True)
    parser.add_argument("--url", required=True, metavar="HOST:PORT")
    parser.add_argument("--in-flight", type=int, default=1, metavar="N")
    parser.add_argument("--duration", type=float, default=1.0, metavar="S")
    parser.add_argument("--log-file", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        import uvloop

        uvloop.install()
    except ImportError:
        pass
    options.log_file.with_name(options.log_file.name + ".started").touch()
    tally = asyncio.run(run(options.protocol, options.url, options.in_flight, options.duration))
    with options.log_file.open("w") as log:
        for one in tally.samples:
            print(one.start_us, 200 if one.ok else 500, one.latency_us, file=log)
    faults = dict(tally.faults.most_common(5))
    print(json.dumps({"answers": len(tally.samples), "cancelled": tally.cancelled, "faults": faults}))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
