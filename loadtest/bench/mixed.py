"""`python -m loadtest.bench.mixed`: a trace of unlike requests, as h2load cannot send them; one process, closed loop.

Ten forms of requests in random order, every one with its own id and tensor: single and batched, binary and JSON (typed
contents over gRPC), with and without named outputs, three models. 5 % ask for the higher priority, 2 % are wrong and
must be refused, 1 % are cancelled right after they were sent (a closed connection over HTTP). Identities and echoed
ids are compared. The log file has the form of h2load's: start in us, status, duration in us; cancels are not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from loadtest.bench.cases import Array
from loadtest.bench.h2load import Sample
from loadtest.bench.messages import GRPC_PATH
from loadtest.http1 import ResponseReader

CANCELLED, PRIORITISED, WRONG = 0.01, 0.05, 0.02
POOL = 64
TIMEOUT_S = 60.0


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


@dataclass(frozen=True)
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
    """An endless, seeded sequence of requests; tensors come from a pool, because making them costs."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        values = np.random.default_rng(seed).random((POOL, 4, 784), dtype=np.float32)
        self._pool = [
            [np.ascontiguousarray(one[: form.rows, : 784 if form.model == "mlp" else 16]) for one in values]
            for form in FORMS
        ]

    def next(self) -> tuple[Request, bool]:
        """The next request, and whether it is cancelled."""
        draw = self._random
        number = draw.randrange(len(FORMS))
        form, tensor = FORMS[number], self._pool[number][draw.randrange(POOL)]
        refused = draw.random() < WRONG
        if refused:
            tensor = np.ascontiguousarray(tensor[:, :-1])
        elif draw.random() < PRIORITISED:
            form, tensor = FORMS[6], self._pool[6][draw.randrange(POOL)]
            return Request(form, tensor, 1, False), False
        return Request(form, tensor, 0, refused), draw.random() < CANCELLED

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


Send = Callable[[Request, bool], Awaitable[str | None]]
"""Sends a request, cancelling it if asked; what was wrong with the answer."""


class HttpLane:
    """One keep-alive connection."""

    def __init__(self, address: str, trace: Trace) -> None:
        self._host, _, port = address.rpartition(":")
        self._port, self._address, self._trace = int(port), address, trace
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: Request, cancel: bool) -> str | None:
        """See `Send`."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        reader, writer = self._streams
        request_id = self._trace.new_id()
        writer.write(http_bytes(request, request_id, self._address))
        if cancel:
            await writer.drain()
            writer.close()
            self._streams = None
            return None
        answers = ResponseReader()
        while True:
            data = await asyncio.wait_for(reader.read(1 << 18), TIMEOUT_S)
            if not data:
                self._streams = None
                return "connection closed by the server"
            answer = answers.feed(data)
            if answer is not None:
                head, body = answer
                if head.close:
                    writer.close()
                    self._streams = None
                return http_fault(request, request_id, head.status, head.json_length, body)


class GrpcLane:
    """One call at a time on a shared channel."""

    def __init__(self, call: Any, trace: Trace) -> None:
        self._call, self._trace = call, trace

    async def send(self, request: Request, cancel: bool) -> str | None:
        """See `Send`."""
        from tritonclient.grpc import service_pb2

        request_id = self._trace.new_id()
        call = self._call(grpc_bytes(request, request_id), timeout=TIMEOUT_S)
        if cancel:
            await asyncio.sleep(0)  # the call's task sends in the next tick
            call.cancel()
            return None
        try:
            answer = service_pb2.ModelInferResponse.FromString(await call)
        except grpc.aio.AioRpcError as error:
            if request.refused and error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return None
            return f"{error.code().name}: {error.details()}"
        if request.refused:
            return "a wrong request was answered"
        if answer.id != request_id:
            return "the id of another request"
        return tensor_fault(request, np.frombuffer(answer.raw_output_contents[0], np.float32))


async def run(protocol: str, address: str, in_flight: int, seconds: float) -> Tally:
    """Runs the trace with so many callers, for so long."""
    trace, tally, stop_s = Trace(1), Tally(), time.monotonic() + seconds
    channels = [grpc.aio.insecure_channel(address) for _ in range(min(4, in_flight))] if protocol == "grpc" else []
    calls = [channel.unary_unary(GRPC_PATH, None, None) for channel in channels]

    async def caller(send: Send) -> None:
        while time.monotonic() < stop_s:
            request, cancel = trace.next()
            start_us, started_ns = time.time_ns() // 1000, time.perf_counter_ns()
            try:
                fault = await send(request, cancel)
            except (TimeoutError, OSError, ValueError, KeyError) as error:
                fault = f"{type(error).__name__}: {error}"
            if cancel and fault is None:
                tally.cancelled += 1
                continue
            took_us = (time.perf_counter_ns() - started_ns) // 1000
            tally.samples.append(Sample(start_us, took_us, fault is None))
            if fault is not None:
                tally.faults[fault] += 1

    lanes: list[HttpLane | GrpcLane] = [
        GrpcLane(calls[number % len(calls)], trace) if calls else HttpLane(address, trace)
        for number in range(in_flight)
    ]
    await asyncio.gather(*(caller(lane.send) for lane in lanes))
    for channel in channels:
        await channel.close(None)
    return tally


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
