"""Drives lanes over gRPC: requests and answers are opaque bytes, lanes advance in the channels' own threads.

Completion callbacks of futures cost less client CPU per call than either grpc.aio or a thread per lane.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

from .closed_loop import RECONNECT_DELAY_S, Gate, Plan, Recorder
from .measurement import Tally, merge
from .model import ELEMENT_SIZES, LoadTestError, Model
from .payloads import Bodies

METHOD = "/inference.GRPCInferenceService/ModelInfer"
DEFAULT_CHANNELS = 2
CONNECT_TIMEOUT_S = 10
_PREFIXES_KEPT = 1024
_RAW_INPUT_TAG = b"\x3a"  # field 7, length-delimited
_RAW_OUTPUT_TAG = b"\x32"  # field 6, length-delimited


def varint(value: int) -> bytes:
    """A non-negative integer as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class GrpcRequests:
    """Serialised ModelInferRequests, each with the tail its answer must have if the model is an identity."""

    def __init__(self, model: Model, bodies: Bodies) -> None:
        message = service_pb2.ModelInferRequest(model_name=model.name, model_version=model.version)
        for spec in model.inputs:
            message.inputs.add(name=spec.name, datatype=spec.datatype, shape=spec.shape)
        sizes = [varint(len(content)) for content in bodies.pool[0]]
        # Raw contents come last on the wire, so everything before the first tensor's bytes never changes.
        self._prefix = message.SerializeToString() + _RAW_INPUT_TAG + sizes[0]
        self._answer_prefix = _RAW_OUTPUT_TAG + sizes[0]
        self._rests = [
            (
                b"".join([body[0], *(_RAW_INPUT_TAG + s + c for s, c in zip(sizes[1:], body[1:], strict=True))]),
                b"".join([body[0], *(_RAW_OUTPUT_TAG + s + c for s, c in zip(sizes[1:], body[1:], strict=True))]),
            )
            for body in bodies.pool
        ]
        self._serial = bodies.serial

    def numbered(self, number: int) -> tuple[bytes, bytes]:
        """Request `number` and the tail of its identity answer."""
        rest, answer = self._rests[number % len(self._rests)]
        if self._serial is None:
            return self._prefix + rest, self._answer_prefix + answer
        size = self._serial.size_bytes
        stamp = self._serial.format.pack(number % self._serial.modulus)
        return self._prefix + stamp + rest[size:], self._answer_prefix + stamp + answer[size:]

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        number = 0
        while True:
            yield self.numbered(number)
            number += 1


class GrpcAnswers:
    """Checks serialised ModelInferResponses."""

    def __init__(self, outputs: Sequence[str]) -> None:
        self._outputs = set(outputs)
        self._known: set[bytes] = set()

    def fault(self, answer: bytes, expected_tail: bytes | None) -> str | None:
        """What is wrong with an answer, None when nothing is."""
        if expected_tail is None:
            return self._parsed_fault(answer)
        prefix = answer[: -len(expected_tail)]
        if not answer.endswith(expected_tail):
            return self._parsed_fault(answer) or "output bytes differ from the bytes of the request"
        if prefix in self._known:
            return None
        fault = self._parsed_fault(answer)
        if fault is None and service_pb2.ModelInferResponse.FromString(prefix).raw_output_contents:
            fault = "output bytes differ from the bytes of the request"
        if fault is None:
            if len(self._known) >= _PREFIXES_KEPT:
                self._known.clear()
            self._known.add(prefix)
        return fault

    def _parsed_fault(self, answer: bytes) -> str | None:
        try:
            message = service_pb2.ModelInferResponse.FromString(answer)
        except Exception as error:  # protobuf's DecodeError differs between its implementations
            return f"answer is no ModelInferResponse: {error}"
        if {output.name for output in message.outputs} != self._outputs:
            return f"outputs {sorted(output.name for output in message.outputs)} are not the model's"
        if len(message.raw_output_contents) != len(message.outputs):
            return f"{len(message.raw_output_contents)} raw contents for {len(message.outputs)} outputs"
        for output, content in zip(message.outputs, message.raw_output_contents, strict=True):
            element = ELEMENT_SIZES.get(output.datatype)
            if element is not None and len(content) != math.prod(output.shape) * element:
                return f"output '{output.name}' has {len(content)} bytes for shape {list(output.shape)}"
        return None


class _Channel:
    """A channel with its lanes; its callbacks run in one thread, so its recorder needs no lock."""

    def __init__(self, driver: GrpcDriver, channel: grpc.Channel, lanes: int) -> None:
        self.driver, self.channel, self.lanes = driver, channel, lanes
        self.recorder = Recorder(driver.gate)
        # No serialisers: bytes go and come as they are.
        self._call = channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)

    def send(self) -> None:
        driver = self.driver
        started_ns = time.perf_counter_ns()
        if not driver.gate.may_send(started_ns):
            driver.lane_finished()
            return
        message, tail = driver.next_message()
        try:
            future = self._call.future(message, timeout=driver.timeout_s, metadata=driver.metadata)
        except ValueError as error:  # the channel was closed
            self.recorder.wrong(str(error))
            driver.lane_finished()
            return
        future.add_done_callback(functools.partial(self._answered, started_ns, tail if driver.verify else None))

    def _answered(self, started_ns: int, expected_tail: bytes | None, future: Any) -> None:
        now_ns = time.perf_counter_ns()
        if future.code() is grpc.StatusCode.OK:
            fault = self.driver.answers.fault(future.result(), expected_tail)
            if fault is None:
                self.recorder.right(started_ns, now_ns)
            else:
                self.recorder.wrong(fault)
            self.send()
            return
        self.recorder.wrong(f"{future.code().name}: {future.details()}")
        if future.code() is grpc.StatusCode.UNAVAILABLE:
            # Without a pause a dead server would be asked thousands of times a second.
            timer = threading.Timer(RECONNECT_DELAY_S, self.send)
            timer.daemon = True
            timer.start()
        else:
            self.send()


class GrpcDriver:
    """Runs a plan over gRPC; see `closed_loop.Driver`."""

    def __init__(
        self, host: str, port: int, model: Model, bodies: Bodies, plan: Plan, verify: bool,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:  # fmt: skip
        count = min(plan.connections or DEFAULT_CHANNELS, plan.concurrency)
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.gate = Gate(plan)
        self.verify = verify
        self.timeout_s = plan.timeout_s
        self.metadata = tuple((name.lower(), value) for name, value in headers) or None
        self.answers = GrpcAnswers(model.outputs)
        self._requests = GrpcRequests(model, bodies)
        self._lock = threading.Lock()
        self._numbers = iter(range(1 << 62))
        self._running = plan.concurrency
        self._done = threading.Event()
        # Channels of equal arguments share one connection unless each has its own subchannel pool.
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_http_proxy", 0),
        ]
        base, extra = divmod(plan.concurrency, count)
        self._channels = [
            _Channel(self, grpc.insecure_channel(self._address, options), base + (index < extra))
            for index in range(count)
        ]

    def next_message(self) -> tuple[bytes, bytes]:
        return self._requests.numbered(next(self._numbers))

    def connect(self) -> None:
        for channel in self._channels:
            try:
                grpc.channel_ready_future(channel.channel).result(timeout=CONNECT_TIMEOUT_S)
            except grpc.FutureTimeoutError:
                raise LoadTestError(f"cannot connect to {self._address} within {CONNECT_TIMEOUT_S} s") from None

    def run(self, progress: Callable[[int, int], None] | None) -> Tally:
        cpu_ns = time.process_time_ns()
        self.gate.open(time.perf_counter_ns())
        for channel in self._channels:
            for _ in range(channel.lanes):
                channel.send()
        try:
            while not self._done.wait(1.0):
                if progress is not None:
                    tallies = [channel.recorder.tally for channel in self._channels]
                    progress(
                        sum(tally.completed_total for tally in tallies),
                        sum(sum(list(tally.errors.values())) for tally in tallies),
                    )
        except KeyboardInterrupt:
            self.gate.shut()
        tally = merge([channel.recorder.finish() for channel in self._channels])
        tally.cpu_ns = time.process_time_ns() - cpu_ns
        return tally

    def lane_finished(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._done.set()

    def close(self) -> None:
        for channel in self._channels:
            channel.channel.close()
