"""The native gRPC front under clients that mean harm: they are bounded or shown out, others are served."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import echo_handler as echo
import http2_client as http2
import pytest
from grpc_calls import LIMIT_S, LIVE, infer, request
from http2_client import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    Wire,
    block,
    call_fields,
    literal,
    message,
    open_call,
    raw,
    rst_stream,
    settings,
    whole_call,
    window_update,
)

from gateway.grpc.native import life
from gateway.grpc.native.codec.limits import MAX_BLOCKED_BYTES, MAX_HTTP2_STREAMS
from gateway.grpc.native.connection import Connection
from gateway.grpc.native.native_server import NativeGrpcFront

TOO_MUCH = "too many frames that bring no call further"
PROMPT_S = 2.0
"""Others wait for no more of this process's work; what else the machine does is not counted."""


@pytest.fixture
def options() -> dict[str, Any]:
    return {"grpc_keepalive": {"grpc.http2.max_ping_strikes": 2}}


def only(front: NativeGrpcFront) -> Connection:
    (connection,) = front._serving.connections
    return connection


def buffered(connection: Connection) -> int:
    """Bytes for a client that does not read, beside those that wait for windows. It is not read from either."""
    transport: Any = connection._transport
    assert not transport.is_reading()
    return int(transport.get_write_buffer_size()) + sum(map(len, connection.out._frames))


async def served_promptly(front: NativeGrpcFront) -> None:
    """Another client has its answer while this goes on."""
    began_s = time.process_time()
    assert await http2.polite_call(front.port) == LIVE
    assert time.process_time() - began_s < PROMPT_S


OPEN = open_call(1, "ModelInfer")
NUMBERS = range(3, 30_000, 2)
FLOODS = {
    "rapid resets": b"".join(whole_call(n, "ModelInfer", infer()) + rst_stream(n) for n in NUMBERS[:6_000]),
    "resets that the server is made to do": b"".join(
        whole_call(n, "ModelInfer", infer()) + window_update(n, 0) for n in NUMBERS[:6_000]
    ),
    "calls with thousands of headers": b"".join(
        raw(HEADERS, 5, n, http2.block([(":method", "POST")]) + literal(b"a", b"") * 1_900) for n in NUMBERS[:6]
    ),
    "malformed calls": b"".join(raw(HEADERS, END_HEADERS, n, b"\x83") for n in NUMBERS[:12_000]),
    "resets of what is over": OPEN + rst_stream(1) * 9_000,
    "settings": settings((http2.INITIAL_WINDOW, 1)) * 1_000,
    "acknowledgements": raw(http2.SETTINGS, http2.ACK, 0) * 1_000,
    "answers to no ping": raw(PING, http2.ACK, 0, bytes(8)) * 20_000,
    "empty data": OPEN + raw(DATA, 0, 1) * 20_000,
    "data of padding": OPEN + raw(DATA, PADDED, 1, b"\1\0") * 20_000,
    "data of what is over": OPEN + rst_stream(1) + raw(DATA, 0, 1, b"a") * 20_000,
    "trailers of what is over": OPEN + rst_stream(1) + raw(HEADERS, 5, 1, literal(b"a", b"b")) * 20_000,
    "priorities": raw(PRIORITY, 0, 1, bytes(5)) * 20_000,
    "broken priorities": raw(PRIORITY, 0, 1, bytes(4)) * 20_000,
    "unknown frames": raw(0x42, 0, 0) * 20_000,
    "goaways": raw(http2.GOAWAY, 0, 0, bytes(8)) * 20_000,
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_ends_the_connection(front: NativeGrpcFront, wire: Wire, handler: Any, flood: str) -> None:
    handler.gate.clear()
    flooding = asyncio.create_task(wire.flood(FLOODS[flood]))
    await served_promptly(front)
    assert await wire.end() == (http2.ENHANCE_YOUR_CALM, TOO_MUCH)
    await flooding


class TestPings:
    async def test_too_many_end_the_connection(self, wire: Wire) -> None:
        wire.write(raw(PING, 0, 0, bytes(8)) * 1_000)
        assert await wire.end() == (http2.ENHANCE_YOUR_CALM, "too_many_pings")
        assert len([frame for frame in wire.frames if frame.kind == PING]) == 3

    async def test_answers_let_the_client_ping_again(self, wire: Wire) -> None:
        for number in range(1, 41, 2):
            assert (await wire.call(number)).status == 0
            for _ in range(3):
                await wire.settle()
        wire.write(raw(PING, 0, 0, bytes(8)) * 4)
        assert await wire.end() == (http2.ENHANCE_YOUR_CALM, "too_many_pings")


class TestHeaders:
    @pytest.mark.parametrize(
        "frames",
        [
            raw(HEADERS, 0, 1, block(call_fields())) + raw(CONTINUATION, 0, 1) * 10_000,
            raw(HEADERS, 0, 1, bytes(16_000)) + raw(CONTINUATION, 0, 1, bytes(16_000)) * 10,
            raw(HEADERS, END_HEADERS, 1, literal(b"a", bytes(100_000))),
            raw(HEADERS, END_HEADERS, 1, block([(f"n{n}", "") for n in range(3_000)])),
            # one entry of 4000 bytes, and then a byte for each time that it is meant
            raw(HEADERS, END_HEADERS, 1, literal(b"a", bytes(4_000), 0x40) + b"\xbe" * 10_000),
        ],
        ids=["empty continuations", "long continuations", "one frame", "many", "of a table"],
    )
    async def test_too_many_end_the_connection(self, front: NativeGrpcFront, wire: Wire, frames: bytes) -> None:
        flooding = asyncio.create_task(wire.flood(frames))
        await served_promptly(front)
        assert await wire.end() == (http2.ENHANCE_YOUR_CALM, "headers of more than 65536 bytes")
        await flooding

    async def test_sixteen_kibibytes_are_taken(self, wire: Wire) -> None:
        metadata = [(f"name-{n}", "v" * 400) for n in range(36)]
        wire.write(open_call(1, "ServerLive", *metadata), raw(DATA, END_STREAM, 1, message()))
        assert (await wire.answer(1)).status == 0

    async def test_what_is_remembered_is_bounded(self, front: NativeGrpcFront, wire: Wire) -> None:
        for number in range(1, 3_001, 2):
            first = b"\x20" if number == 1 else b""
            fields = first + block(call_fields("ServerLive", ("number", str(number))))
            wire.write(raw(HEADERS, END_HEADERS, number, fields), raw(DATA, END_STREAM, number, message()))
        for number in range(1, 3_001, 2):
            assert (await wire.answer(number)).status == 0
        assert 0 < len(front._serving.known_headers) <= 512


class TestManyCalls:
    async def test_more_calls_than_there_may_be_are_refused(
        self, front: NativeGrpcFront, wire: Wire, handler: Any
    ) -> None:
        handler.gate.clear()
        await wire.settle()
        connection = only(front)
        numbers = range(1, 20_001, 2)
        fields = block(call_fields("ModelInfer"))
        flooding = asyncio.create_task(wire.flood(b"".join(raw(HEADERS, END_HEADERS, n, fields) for n in numbers)))
        for number in numbers[MAX_HTTP2_STREAMS:]:
            assert (await wire.answer(number)).reset == http2.REFUSED_STREAM
        await flooding
        await served_promptly(front)
        assert len(connection.calls.streams) == MAX_HTTP2_STREAMS
        # one that ends makes room for another
        wire.write(rst_stream(1), whole_call(20_001))
        assert (await wire.answer(20_001)).status == 0

    async def test_windows_of_many_calls_cost_little(self, front: NativeGrpcFront, dial: http2.Dial) -> None:
        """Thousands of answers wait for windows while the client talks about windows, byte by byte."""
        wire = await dial(PREFACE + settings((http2.INITIAL_WINDOW, 0)))
        numbers = range(1, 2 * 2_000, 2)
        for number in numbers:
            wire.write(whole_call(number))
        for number in numbers:
            while number not in wire.answers:
                await wire.frame()
        began_s = time.process_time()
        wire.write(window_update(0, 1) * 10_000, settings(*((http2.INITIAL_WINDOW, n & 1) for n in range(20_000))))
        await served_promptly(front)
        await wire.data(2_000)  # the last setting was 1
        assert time.process_time() - began_s < 2 * PROMPT_S
        assert [len(wire.answers[number].data) for number in numbers] == [1] * 2_000


class TestClientsThatDoNotRead:
    async def test_answers_wait_for_windows_up_to_a_limit(
        self, front: NativeGrpcFront, dial: http2.Dial, handler: Any
    ) -> None:
        wire = await dial(PREFACE + settings((http2.INITIAL_WINDOW, 0)))
        await wire.settle()
        connection = only(front)
        size = 8 << 20
        handler.outputs = [echo.Tensor("OUTPUT0", echo.DataType.FP32, (1, size // 4), bytes(size))]
        number = 1
        while True:
            wire.write(whole_call(number, "ModelInfer", infer()))
            while number not in wire.answers:
                await wire.frame()
            if wire.answers[number].reset is not None:
                break
            number += 2
        assert wire.answers[number].reset == http2.ENHANCE_YOUR_CALM
        assert MAX_BLOCKED_BYTES < connection.out.blocked_bytes <= MAX_BLOCKED_BYTES + size + 1_000
        await served_promptly(front)
        wire.write(rst_stream(1))
        assert (await wire.call(number + 2, "ModelInfer", infer(), path="/nobody/knows")).status == 12
        for other in range(3, number, 2):
            wire.write(rst_stream(other))
        await wire.settle()
        assert connection.out.blocked_bytes == 0

    async def test_a_full_transport_is_not_read_from(
        self, front: NativeGrpcFront, dial: http2.Dial, handler: Any
    ) -> None:
        """Windows are wide open; what is not read stays within the socket, the transport and a bound."""
        wide = PREFACE + settings((http2.INITIAL_WINDOW, 1 << 30)) + window_update(0, 1 << 30)
        wire = await dial(wide, held_bytes=1 << 12)
        size = 4 << 20
        handler.outputs = [echo.Tensor("OUTPUT0", echo.DataType.FP32, (1, size // 4), bytes(size))]
        await wire.settle()
        connection = only(front)
        wire.write(*(whole_call(number, "ModelInfer", infer()) for number in range(1, 61, 2)))
        while not connection.out.is_paused:
            await asyncio.sleep(0)
        await served_promptly(front)
        assert buffered(connection) < 8 << 20
        # who reads is served again
        assert len((await wire.answer(1)).data) > size

    async def test_words_that_need_no_window_are_bounded_too(self, front: NativeGrpcFront, dial: http2.Dial) -> None:
        wire = await dial(held_bytes=1 << 12)
        await wire.settle()
        connection = only(front)
        body = request(model="m" * 10_000).SerializeToString()  # which is what the answer speaks of
        flooding = asyncio.create_task(
            wire.flood(b"".join(whole_call(n, "ModelInfer", body) for n in range(1, 4_001, 2)))
        )
        while not connection.out.is_paused:
            await asyncio.sleep(0)
        await served_promptly(front)
        assert buffered(connection) < 8 << 20
        flooding.cancel()
        await asyncio.wait([flooding])
        wire.close()
        while connection in front._serving.connections:
            await asyncio.sleep(0)


class TestSilence:
    @pytest.mark.parametrize("first", [b"", PREFACE[:10], PREFACE, PREFACE + settings()[:5]])
    async def test_who_does_not_say_what_it_speaks_is_left(
        self, dial: http2.Dial, monkeypatch: pytest.MonkeyPatch, first: bytes
    ) -> None:
        monkeypatch.setattr(life, "FIRST_WORDS_S", 0.05)
        wire = await dial(first)
        while await wire.frame() is not None:
            pass
        assert {frame.kind for frame in wire.frames} == {http2.SETTINGS, http2.WINDOW_UPDATE}

    async def test_a_client_that_leaves_takes_its_calls_along(
        self, front: NativeGrpcFront, wire: Wire, handler: Any
    ) -> None:
        handler.gate.clear()
        wire.write(*(whole_call(number, "ModelInfer", infer()) for number in range(1, 41, 2)))
        while len(handler.requests) < 20:
            handler.waiting.clear()
            await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        wire.close()
        while len(handler.cancelled_ids) < 20:
            handler.cancelled.clear()
            await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)
        assert not front._serving.connections
