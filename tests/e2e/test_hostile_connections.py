"""Hostile connections and messages against a running server.

Each attack runs while a well-behaved client asks on; its answers must all come and be its own. The attacker gets a
typed refusal or a closed connection, and memory stays within bounds.
"""

from __future__ import annotations

import json
import queue
import re
import time
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import grpc
import numpy as np
import pytest
from e2e_asking import client, inputs
from e2e_models import WIDTH
from hostile_bench import Connection, attacked, head, neighbour_asks, scale_body

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with attacked(tmp_path_factory) as server:
        yield server


@pytest.fixture(autouse=True)
def _neighbour(server: Any) -> Iterator[None]:
    with neighbour_asks(server):
        yield


# -- connections -------------------------------------------------------------------------------------------------------


def test_h16_slow_and_idle_clients_cost_only_their_connections(server: Any) -> None:
    """Two hundred clients that begin and never end: all are served notice, while the neighbour goes on."""
    request = head(Content_Length="100")
    beginnings = [b"", b"P", request[:30], request, request + b"{"]
    connections = [Connection(server) for _ in range(200)]
    try:
        for connection, beginning in zip(connections, repeat_each(beginnings), strict=False):
            connection.send(beginning)
        stalled = [c for c, beginning in zip(connections, repeat_each(beginnings), strict=False) if beginning]
        began = time.monotonic()
        for connection in stalled:
            status, answer = connection.answer()
            assert status == 408, answer
            assert connection.is_closed()
        assert time.monotonic() - began < 60
        # idle ones are kept: clients have pools of them
        connections[0].send(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connections[0].answer()[0] == 200
    finally:
        for connection in connections:
            connection.socket.close()


def repeat_each(items: list[bytes]) -> Iterator[bytes]:
    for _ in repeat(None):
        yield from items


@pytest.mark.parametrize(
    "lines",
    [
        "".join(f"h{number}: x\r\n" for number in range(10_000)),
        "h: " + "x" * (1 << 20) + "\r\n",
        "".join(f"h{number}: {'x' * 3000}\r\n" for number in range(250)),
        "h" * 200_000 + ": x\r\n",
    ],
    ids=["10k headers", "1 MB header", "750 kB of headers", "long name"],
)
def test_h17_too_many_or_too_long_headers(lines: str, server: Any) -> None:
    with Connection(server) as connection:
        connection.send(f"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
        status, answer = connection.answer()
        # a server that closes with unread bytes may take its answer with it
        assert status in (0, 400, 431), answer[:200]
        assert connection.is_closed()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /v2 HTTP/1.1\r\nHost: x\r\nevil\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: x\r\na\0b: c\r\n\r\n",
        b"GET /v2 HTTP/9.9\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=range(7),
)
def test_h17_broken_framing_ends_the_connection(request_bytes: bytes, server: Any) -> None:
    with Connection(server) as connection:
        connection.send(request_bytes)
        status, answer = connection.answer()
        assert status in (0, 400, 404, 414, 431, 505), answer[:200]
        if status != 404:
            assert connection.is_closed()


def test_pipelined_requests_are_answered_in_order(server: Any) -> None:
    body = json.dumps(scale_body()).encode()
    one = head(Content_Length=str(len(body))) + body
    with Connection(server) as connection:
        connection.send(one + b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = b""
        while more := connection.socket.recv(65536):
            data += more
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", data)] == [200, 200]
    assert data.index(b"OUTPUT0") < data.rindex(b"HTTP/1.1")


def _raw_call(server: Any, method: str, message: bytes, **options: Any) -> Any:
    with grpc.insecure_channel(server.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        return call(message, timeout=60, **options)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


# -- gRPC --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        b"\xff" * 64,
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x0a\x05sc",
        b"\x2a" + _varint(2**31) + b"x",
        b"\x0b" * 10_000,
        b"\x0a\x02\xff\xfe",
    ],
    ids=["noise", "overlong", "truncated", "2 GiB declared", "nested groups", "not UTF-8"],
)
def test_h19_malformed_messages_are_refused(message: bytes, server: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        _raw_call(server, "ModelInfer", message)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "Traceback" not in caught.value.details()


def test_h19_unknown_fields_are_ignored_and_unknown_calls_refused(server: Any) -> None:
    def flood(count: int) -> bytes:
        return b"".join(_varint(number << 3) + b"\x01" for number in range(1000, 1000 + count))

    assert _raw_call(server, "ServerLive", flood(15_000)) == b"\x08\x01"
    with pytest.raises(grpc.RpcError) as caught:
        _raw_call(server, "ServerLive", flood(50_000))  # a control call has at most 64 KB
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for method in ("Nonsense", "../ServerLive", ""):
        with pytest.raises(grpc.RpcError):
            _raw_call(server, method, b"")


def test_h19_compressed_messages_are_bounded_too(server: Any) -> None:
    # zeros in the raw contents of one input that is 16 bytes
    contents = bytes(16 << 20)
    message = (
        b"\x0a\x05scale\x2a\x12\x0a\x06INPUT0\x12\x04FP32\x1a\x02\x01\x04" + b"\x3a" + _varint(len(contents)) + contents
    )
    for compression in 8 * [grpc.Compression.NoCompression, grpc.Compression.Gzip]:
        with pytest.raises(grpc.RpcError) as caught:
            _raw_call(server, "ModelInfer", message, compression=compression)
        assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_failed_requests_leave_nothing_in_memory(server: Any) -> None:
    """The fixture's bound is the assertion: what fails in the model and what is refused are 256 MiB each."""
    words = np.array([[b"fail", bytes(16 << 20)]], dtype=object)
    with client("grpc", server) as asking:
        for _ in range(16):
            with pytest.raises(Exception, match="ValueError: as you wish"):
                asking.infer("echo", inputs("grpc", IN=words))
        answers: queue.Queue[Any] = queue.Queue()
        asking.start_stream(lambda result, error: answers.put(error))
        zeros = np.zeros((1 << 20, WIDTH), np.float32)
        for _ in range(16):
            asking.async_stream_infer("scale", inputs("grpc", INPUT0=zeros))
            assert "batch-size must be <= 8" in str(answers.get(timeout=60))
        asking.stop_stream()


def test_h19_raw_and_typed_contents_do_not_mix(server: Any) -> None:
    tensor = inputs("grpc", INPUT0=np.zeros((1, WIDTH), np.float32))[0]
    tensor._get_tensor().contents.fp32_contents[:] = [1.0] * WIDTH
    with client("grpc", server) as asking, pytest.raises(Exception, match="contents field must not be specified"):
        asking.infer("scale", [tensor])
