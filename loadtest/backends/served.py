"""The same requests to a running server: gRPC, so many in flight all the time, and what its processes need for them.

The generator is this process, whose CPU does not count. Its calls end in the threads of the gRPC library.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadtest.bench.messages import GRPC_PATH
from loadtest.bench.processes import Usage, load_roles, members, usage_by_role
from loadtest.bench.scrape import fetch
from loadtest.bench.servers import Endpoints
from loadtest.model import LoadTestError

from .subjects import Array, Subject

_TIMEOUT_S = 60.0
_CONNECTIONS = 4
_WARM_S = 0.4
_SETTLE_S = 0.5
_LEAST_ANSWERS = 4
"""For each request in flight, so that what was begun before a window weighs little."""
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]


@dataclass(frozen=True)
class Window:
    """What was measured: rows a second, CPU microseconds a row of each role of the server, rows of an execution."""

    rate: float
    cpu_us: Mapping[str, float] = field(default_factory=dict)
    rows_per_execution: float | None = None

    @property
    def total_us(self) -> float:
        """CPU microseconds a row of all processes of the server."""
        return sum(self.cpu_us.values())


def request_bytes(subject: Subject, model: str, tensor: Array) -> bytes:
    """A serialised ModelInferRequest."""
    from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

    message = service_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name=subject.tensors[0], datatype="FP32", shape=tensor.shape)
    message.raw_input_contents.append(tensor.tobytes())
    serialised: bytes = message.SerializeToString()
    return serialised


def values_of(answer: bytes) -> Array:
    """The first output's values."""
    from tritonclient.grpc import service_pb2

    return np.frombuffer(service_pb2.ModelInferResponse.FromString(answer).raw_output_contents[0], np.float32)


def executed(text: str, model: str) -> tuple[float, float]:
    """Rows and executions of a model so far, from the metrics page."""
    found = []
    for name in ("nv_inference_count", "nv_inference_exec_count"):
        lines = re.findall(rf'^{name}\{{[^}}]*model="{re.escape(model)}"[^}}]*\}} (\S+)', text, re.MULTILINE)
        found.append(sum(map(float, lines)))
    return found[0], found[1]


def roles_of(endpoints: Endpoints) -> dict[int, str]:
    """Role of every process of the server; processes of models, and those that keep heartbeats, have their own."""
    assert endpoints.processes_file is not None
    entries = json.loads(endpoints.processes_file.read_bytes())
    beating = {int(one["pid"]): "heartbeats" for one in entries if "parent" in one and one["role"] == "beats"}
    return members(load_roles(endpoints.processes_file, models=True) | beating)


def idle_us(endpoints: Endpoints, seconds: float) -> float:
    """CPU microseconds a second of a server that has no requests, once it has settled what it had."""
    time.sleep(_SETTLE_S)
    roles = roles_of(endpoints)
    before, began = usage_by_role(roles), time.perf_counter()
    time.sleep(seconds)
    after, wall_s = usage_by_role(roles), time.perf_counter() - began
    return sum(one.since(before.get(role, Usage())).cpu_ns for role, one in after.items()) / 1e3 / wall_s


class Served:
    """One model of a running server."""

    def __init__(self, endpoints: Endpoints, subject: Subject, isolation: str) -> None:
        import grpc

        self._endpoints = endpoints
        self._subject = subject
        self._model = subject.model(isolation)
        self._bodies = [request_bytes(subject, self._model, tensor) for tensor in subject.contents()]
        count = min(_CONNECTIONS, subject.in_flight)
        self._channels = [grpc.insecure_channel(str(endpoints.grpc), _OPTIONS) for _ in range(count)]
        self._calls = [channel.unary_unary(GRPC_PATH, None, None) for channel in self._channels]
        self._ok = grpc.StatusCode.OK

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            channel.close()

    def check(self, right: list[float]) -> None:
        """Compare the answer to the first request with the library's. Raises LoadTestError."""
        import grpc

        try:
            values = values_of(self._calls[0](self._bodies[0], timeout=_TIMEOUT_S))
        except grpc.RpcError as error:
            raise LoadTestError(f"{self._model}: {error.code().name}: {error.details()}") from None
        wanted = np.asarray(right, np.float32)
        if values.shape != wanted.shape or not np.allclose(values, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max()):
            raise LoadTestError(f"{self._model} answers otherwise than its library")

    def measure(self, seconds: float) -> Window:
        """One window under load, longer than `seconds` for a slow model. Raises LoadTestError for wrong answers."""
        load = _Load(self)
        roles = roles_of(self._endpoints)
        load.begin(self._subject.in_flight)
        try:
            time.sleep(_WARM_S)
            metrics = self._metrics()
            began, count, usage = time.perf_counter(), load.answered, usage_by_role(roles)
            end = began + seconds
            time.sleep(seconds)
            while load.answered - count < _LEAST_ANSWERS * self._subject.in_flight and time.perf_counter() < end + 30:
                time.sleep(0.05)
            wall_s, answered, used = time.perf_counter() - began, load.answered - count, usage_by_role(roles)
            rows, executions = (after - before for after, before in zip(self._metrics(), metrics, strict=True))
        finally:
            load.stop()
        if load.fault or not answered:
            raise LoadTestError(f"{self._model}: {load.fault or 'no answers'}")
        total = answered * self._subject.rows
        cpu = {role: one.since(usage.get(role, Usage())).cpu_ns / 1e3 / total for role, one in used.items()}
        return Window(total / wall_s, cpu, rows / executions if executions else None)

    def _metrics(self) -> tuple[float, float]:
        return executed(fetch(str(self._endpoints.metrics), "/metrics")[1].decode(), self._model)


class _Load:
    """Requests in flight; an answer sends the next."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._numbers = itertools.count()
        self._left = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._stops = False
        self.answered = 0
        self.fault = ""

    def begin(self, in_flight: int) -> None:
        self._left = in_flight
        for number in range(in_flight):
            self._send(number)

    def stop(self) -> None:
        """Wait for what is in flight."""
        self._stops = True
        self._over.wait(_TIMEOUT_S)

    def _send(self, lane: int) -> None:
        served = self._served
        body = served._bodies[next(self._numbers) % len(served._bodies)]
        future = served._calls[lane % len(served._calls)].future(body, timeout=_TIMEOUT_S)
        future.add_done_callback(lambda done: self._answered(lane, done))

    def _answered(self, lane: int, done: Any) -> None:
        if done.code() is not self._served._ok:
            self.fault, self._stops = f"{done.code().name}: {done.details()}", True
        with self._lock:
            self.answered += 1
            if self._stops:
                self._left -= 1
                if not self._left:
                    self._over.set()
                return
        self._send(lane)
