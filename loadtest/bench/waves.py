"""Sends requests in waves: so many leave together, and the next ones when all are answered; nothing is timed.

A closed loop of independent callers would meet in the log as the machine's speed has it. A wave always meets, so that
what it costs can be compared between machines: gRPC as one write on one connection, HTTP/1.1 on a connection for each
request. Every request of an identity carries its own tensor, and its answer is compared with it.
"""

from __future__ import annotations

import itertools
import math
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Protocol

import h2.config
import h2.connection
import h2.events

from charonia.analyzer.http1_lane import AnswerReader, ProtocolError
from loadtest.bench.cases import Case
from loadtest.bench.messages import grpc_message, http_message
from loadtest.model import LoadTestError, split_url

TIMEOUT_S = 60.0


class Callers(Protocol):
    """Callers of one model over one protocol."""

    def wave(self, tensors: Sequence[bytes]) -> None:
        """Sends a request for each tensor and compares all answers. Raises LoadTestError."""

    def close(self) -> None:
        """Closes the connections."""


def _connect(address: str) -> socket.socket:
    try:
        connection = socket.create_connection(split_url(address, 0), TIMEOUT_S)
    except OSError as error:
        raise LoadTestError(f"cannot connect to {address}: {error}") from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _received(connection: socket.socket) -> bytes:
    try:
        data = connection.recv(1 << 18)
    except OSError as error:
        raise LoadTestError(f"no answer: {error}") from None
    if not data:
        raise LoadTestError("the server closed a connection")
    return data


class HttpCallers:
    """One keep-alive connection for each request of a wave."""

    def __init__(self, address: str, case: Case, count: int) -> None:
        message = http_message(case, "v2bin")
        head_bytes = int(message.headers["Inference-Header-Content-Length"])
        lines = [f"POST {message.path} HTTP/1.1", f"Host: {address}", f"Content-Length: {len(message.body)}"]
        lines += [f"{name}: {value}" for name, value in message.headers.items()]
        self._prefix = "\r\n".join([*lines, "", ""]).encode() + message.body[:head_bytes]
        self._connections = [(_connect(address), AnswerReader()) for _ in range(count)]

    def wave(self, tensors: Sequence[bytes]) -> None:
        """See `Callers`."""
        for (connection, _), tensor in zip(self._connections, tensors, strict=False):
            connection.sendall(self._prefix + tensor)
        for (connection, reader), tensor in zip(self._connections, tensors, strict=False):
            try:
                while (answer := reader.feed(_received(connection))) is None:
                    pass
            except ProtocolError as error:
                raise LoadTestError(f"not an HTTP answer: {error}") from None
            head, body = answer
            if head.status != 200 or not body.endswith(tensor):
                raise LoadTestError(f"a wrong answer, HTTP {head.status}: {body[:200]!r}")

    def close(self) -> None:
        """See `Callers`."""
        for connection, _ in self._connections:
            connection.close()


class GrpcCallers:
    """One HTTP/2 connection; a wave is one write."""

    def __init__(self, address: str, case: Case) -> None:
        message = grpc_message(case)
        # raw contents are the last field, so that the tensor is the end of the message
        self._prefix = message.body[: -4 * math.prod(case.shape)]
        self._headers = [
            (":method", "POST"), (":scheme", "http"), (":path", message.path), (":authority", address),
            *message.headers.items(),
        ]  # fmt: skip
        self._connection = _connect(address)
        self._state = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._state.initiate_connection()
        self._connection.sendall(self._state.data_to_send())

    def wave(self, tensors: Sequence[bytes]) -> None:
        """See `Callers`."""
        answers: dict[int, tuple[bytes, bytearray]] = {}
        for tensor in tensors:
            stream = self._state.get_next_available_stream_id()
            self._state.send_headers(stream, self._headers)
            self._state.send_data(stream, self._prefix + tensor, end_stream=True)
            answers[stream] = (tensor, bytearray())
        self._connection.sendall(self._state.data_to_send())
        while answers:
            for event in self._state.receive_data(_received(self._connection)):
                self._take(event, answers)
            self._connection.sendall(self._state.data_to_send())

    def _take(self, event: h2.events.Event, answers: dict[int, tuple[bytes, bytearray]]) -> None:
        if isinstance(event, h2.events.DataReceived):
            self._state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            answers[event.stream_id][1].extend(event.data)
        elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
            headers = {str(name): str(value) for name, value in event.headers}
            if headers.get("grpc-status", "0") != "0":
                raise LoadTestError(f"a call was refused: {headers}")
        elif isinstance(event, h2.events.StreamEnded):
            tensor, body = answers.pop(event.stream_id)
            if not body.endswith(tensor):
                raise LoadTestError(f"a wrong answer: {bytes(body[:200])!r}")
        elif isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
            raise LoadTestError(f"the server ended a call: {event}")

    def close(self) -> None:
        """See `Callers`."""
        self._connection.close()


def tensors_of(case: Case) -> Iterator[bytes]:
    """Endless tensors for a case, all different: FP32 serial numbers and zeros."""
    rest = bytes(4 * (math.prod(case.shape) - 1))
    return (struct.pack("<f", number % (1 << 24)) + rest for number in itertools.count(1))


def callers(address: str, case: Case, protocol: str, count: int) -> Callers:
    """Callers for waves of so many requests. Raises LoadTestError without a connection."""
    return GrpcCallers(address, case) if protocol == "grpc" else HttpCallers(address, case, count)


def send_waves(address: str, case: Case, protocol: str, in_flight: int, requests: int) -> None:
    """Sends so many requests, rounded down to whole waves. Raises LoadTestError when an answer is wrong."""
    tensors = tensors_of(case)
    with closing(callers(address, case, protocol, in_flight)) as together:
        for _ in range(requests // in_flight):
            together.wave(list(itertools.islice(tensors, in_flight)))
