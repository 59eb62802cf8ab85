"""The native gRPC front as HTTP/2 sees it: right and wrong frames on a socket, and what each brings (RFC 9113)."""

from __future__ import annotations

import asyncio
from typing import Any

import http2_client as http2
import pytest
from grpc_calls import LIMIT_S, LIVE, echoed, infer
from http2_client import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Wire,
    block,
    call_fields,
    literal,
    message,
    open_call,
    raw,
    settings,
    whole_call,
    window_update,
)

from gateway.grpc.native.native_server import NativeGrpcFront
from protos import grpc_service_pb2 as pb

GREATEST = (1 << 31) - 1
INFER = open_call(1, "ModelInfer")


class TestBeginning:
    @pytest.mark.parametrize(
        "first", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", PREFACE[:-1] + b"\r", b"\x16\x03\x01\x02\x00", settings() * 3]
    )
    async def test_another_protocol_is_told_so(self, dial: http2.Dial, first: bytes) -> None:
        wire = await dial(first)
        assert await wire.end() == (http2.PROTOCOL_ERROR, "expected the preface of HTTP/2, which gRPC needs")

    @pytest.mark.parametrize("first", [raw(PING, 0, 0, bytes(8)), whole_call(1), window_update(0, 1), raw(77, 0, 0)])
    async def test_settings_come_first(self, dial: http2.Dial, first: bytes) -> None:
        wire = await dial(PREFACE + first)
        assert (await wire.end())[0] == http2.PROTOCOL_ERROR

    async def test_the_server_begins_with_its_settings(self, wire: Wire) -> None:
        first = await wire.frame()
        assert first is not None
        assert (first.kind, first.flags, first.stream) == (SETTINGS, 0, 0)
        said = {
            int.from_bytes(first.payload[at : at + 2]): first.payload[at + 2 : at + 6]
            for at in range(0, len(first.payload), 6)
        }
        assert said[1] == bytes(4)  # no dynamic table
        assert int.from_bytes(said[http2.MAX_STREAMS]) == 4096
        await wire.until(SETTINGS, 0, http2.ACK)

    async def test_bytes_come_one_by_one(self, wire: Wire) -> None:
        sent = b"".join(whole_call(number) for number in (1, 3))
        for at in range(len(sent)):
            wire.write(sent[at : at + 1])
            await wire.writer.drain()
            await asyncio.sleep(0)
        assert [(await wire.answer(number)).data for number in (1, 3)] == [message(LIVE)] * 2

    async def test_the_preface_comes_in_two(self, dial: http2.Dial) -> None:
        wire = await dial(PREFACE[:11])
        await wire.until(SETTINGS)
        wire.write(PREFACE[11:] + settings())
        assert (await wire.call(1)).status == 0

    async def test_all_comes_at_once(self, dial: http2.Dial) -> None:
        wire = await dial(PREFACE + settings() + b"".join(whole_call(2 * n + 1) for n in range(100)))
        assert [(await wire.answer(2 * n + 1)).status for n in range(100)] == [0] * 100

    async def test_a_polite_client_sends_and_gets_much(self, front: NativeGrpcFront) -> None:
        reply = pb.ModelInferResponse.FromString(await http2.polite_call(front.port, "ModelInfer", infer(5 << 20)))
        assert reply.raw_output_contents == [b"\x01" * (5 << 20)]


CONNECTION_FAULTS = {
    "settings of seven bytes": (raw(SETTINGS, 0, 0, bytes(7)), http2.FRAME_SIZE_ERROR),
    "settings of a stream": (raw(SETTINGS, 0, 1), http2.PROTOCOL_ERROR),
    "acknowledged settings with a payload": (raw(SETTINGS, 1, 0, bytes(6)), http2.FRAME_SIZE_ERROR),
    "push of 2": (settings((2, 2)), http2.PROTOCOL_ERROR),
    "an initial window that is too large": (settings((4, 1 << 31)), http2.FLOW_CONTROL_ERROR),
    "frames that are too short": (settings((5, 16383)), http2.PROTOCOL_ERROR),
    "frames that are too long": (settings((5, 1 << 24)), http2.PROTOCOL_ERROR),
    "an initial window that is too large for a stream": (
        INFER + window_update(1, GREATEST - 65_535) + settings((4, 65_536)), http2.FLOW_CONTROL_ERROR,
    ),
    "a ping of seven bytes": (raw(PING, 0, 0, bytes(7)), http2.FRAME_SIZE_ERROR),
    "a ping of a stream": (raw(PING, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
    "goaway of a stream": (raw(GOAWAY, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
    "goaway of seven bytes": (raw(GOAWAY, 0, 0, bytes(7)), http2.FRAME_SIZE_ERROR),
    "a pushed stream": (INFER + raw(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), http2.PROTOCOL_ERROR),
    "a priority of no stream": (raw(PRIORITY, 0, 0, bytes(5)), http2.PROTOCOL_ERROR),
    "a frame longer than we take": (raw(DATA, 0, 1, bytes((1 << 17) + 1)), http2.FRAME_SIZE_ERROR),
    "headers of padding": (raw(HEADERS, END_HEADERS | PADDED, 1, b"\x05" + bytes(4)), http2.PROTOCOL_ERROR),
    "headers without the length of their padding": (raw(HEADERS, END_HEADERS | PADDED, 1), http2.FRAME_SIZE_ERROR),
    "half a priority": (raw(HEADERS, END_HEADERS | WITH_PRIORITY, 1, bytes(4)), http2.FRAME_SIZE_ERROR),
    "data of padding": (INFER + raw(DATA, PADDED, 1, b"\x05" + bytes(4)), http2.PROTOCOL_ERROR),
    "data without the length of its padding": (INFER + raw(DATA, PADDED, 1), http2.FRAME_SIZE_ERROR),
    "a continuation of nothing": (raw(CONTINUATION, END_HEADERS, 1, b""), http2.PROTOCOL_ERROR),
    "a continuation of whole headers": (INFER + raw(CONTINUATION, END_HEADERS, 1), http2.PROTOCOL_ERROR),
    "a continuation of another stream": (
        raw(HEADERS, 0, 1) + raw(CONTINUATION, END_HEADERS, 3), http2.PROTOCOL_ERROR,
    ),
    "a ping among headers": (raw(HEADERS, 0, 1) + raw(PING, 0, 0, bytes(8)), http2.PROTOCOL_ERROR),
    "an unknown frame among headers": (raw(HEADERS, 0, 1) + raw(99, 0, 1), http2.PROTOCOL_ERROR),
    "headers of no stream": (open_call(0), http2.PROTOCOL_ERROR),
    "headers of an even stream": (open_call(2), http2.PROTOCOL_ERROR),
    "headers of an even stream that was passed": (open_call(5) + open_call(2), http2.PROTOCOL_ERROR),
    "headers of a stream that was passed": (open_call(5) + open_call(3), http2.PROTOCOL_ERROR),
    "data of no stream": (raw(DATA, 0, 0, b"a"), http2.PROTOCOL_ERROR),
    "data of an idle stream": (raw(DATA, 0, 1, b"a"), http2.PROTOCOL_ERROR),
    "data of an even stream": (open_call(5) + raw(DATA, 0, 2, b"a"), http2.PROTOCOL_ERROR),
    "a window of an idle stream": (window_update(1, 1), http2.PROTOCOL_ERROR),
    "a window of three bytes": (raw(WINDOW_UPDATE, 0, 0, bytes(3)), http2.FRAME_SIZE_ERROR),
    "a window wider by nothing": (window_update(0, 0), http2.PROTOCOL_ERROR),
    "a window too wide": (window_update(0, GREATEST), http2.FLOW_CONTROL_ERROR),
    "a reset of an idle stream": (http2.rst_stream(1), http2.PROTOCOL_ERROR),
    "a reset of no stream": (http2.rst_stream(0), http2.PROTOCOL_ERROR),
    "a reset of three bytes": (INFER + raw(RST_STREAM, 0, 1, bytes(3)), http2.FRAME_SIZE_ERROR),
    "an index of nothing": (raw(HEADERS, END_HEADERS, 1, b"\x80"), http2.COMPRESSION_ERROR),
    "an index that is too large": (raw(HEADERS, END_HEADERS, 1, b"\xff\x7f"), http2.COMPRESSION_ERROR),
    "half a literal": (raw(HEADERS, END_HEADERS, 1, literal(b"a", b"bcd")[:-1]), http2.COMPRESSION_ERROR),
    "an integer without end": (raw(HEADERS, END_HEADERS, 1, b"\x7f" + b"\xff" * 60_000), http2.COMPRESSION_ERROR),
    "a Huffman code that ends wrong": (raw(HEADERS, END_HEADERS, 1, b"\x00\x81\x00\x00"), http2.COMPRESSION_ERROR),
    "a table that is too large": (raw(HEADERS, END_HEADERS, 1, b"\x3f\xe2\x1f"), http2.COMPRESSION_ERROR),
    "a size of the table among headers": (
        raw(HEADERS, END_HEADERS, 1, b"\x83\x20"), http2.COMPRESSION_ERROR,
    ),
    "three sizes of the table": (
        raw(HEADERS, END_HEADERS, 1, b"\x20" * 3 + block(call_fields())), http2.COMPRESSION_ERROR,
    ),
    "trailers that cannot be decoded": (
        INFER + raw(HEADERS, END_HEADERS | END_STREAM, 1, b"\x80"), http2.COMPRESSION_ERROR,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", CONNECTION_FAULTS)
async def test_a_fault_of_the_connection_ends_it(wire: Wire, fault: str) -> None:
    frames, code = CONNECTION_FAULTS[fault]
    wire.write(frames)
    found, text = await wire.end()
    assert found == code, text
    assert 0 < len(text) <= 1024


WAITS = whole_call(1, "ModelInfer", infer())
STREAM_FAULTS = {
    "data after the end": (WAITS + raw(DATA, 0, 1, b"a"), http2.STREAM_CLOSED),
    "headers after the end": (WAITS + open_call(1), http2.STREAM_CLOSED),
    "trailers after the end": (
        WAITS + raw(HEADERS, END_HEADERS | END_STREAM, 1, block([("a", "b")])), http2.STREAM_CLOSED,
    ),
    "headers amid": (INFER + raw(HEADERS, END_HEADERS, 1, block([("a", "b")])), http2.PROTOCOL_ERROR),
    "a call as trailers": (
        INFER + raw(HEADERS, END_HEADERS | END_STREAM, 1, block(call_fields())), http2.PROTOCOL_ERROR,
    ),
    "a window wider by nothing": (INFER + window_update(1, 0), http2.PROTOCOL_ERROR),
    "a window too wide": (INFER + window_update(1, GREATEST), http2.FLOW_CONTROL_ERROR),
    "a priority of four bytes": (INFER + raw(PRIORITY, 0, 1, bytes(4)), http2.FRAME_SIZE_ERROR),
    "a name in capitals": (open_call(1, "ServerLive", ("Name", "a")), http2.PROTOCOL_ERROR),
    "a name with a blank": (open_call(1, "ServerLive", ("na me", "a")), http2.PROTOCOL_ERROR),
    "a name with a line's end": (open_call(1, "ServerLive", ("na\nme", "a")), http2.PROTOCOL_ERROR),
    "no name": (open_call(1, "ServerLive", ("", "a")), http2.PROTOCOL_ERROR),
    "a value of two lines": (open_call(1, "ServerLive", ("name", "a\r\nb: c")), http2.PROTOCOL_ERROR),
    "a value with a NUL": (open_call(1, "ServerLive", ("name", "a\0")), http2.PROTOCOL_ERROR),
    "a header of connections": (open_call(1, connection="close"), http2.PROTOCOL_ERROR),
    "another transfer": (open_call(1, transfer_encoding="chunked"), http2.PROTOCOL_ERROR),
    "other trailers": (open_call(1, te="gzip"), http2.PROTOCOL_ERROR),
    "no method": (open_call(1, method=None), http2.PROTOCOL_ERROR),
    "no scheme": (open_call(1, scheme=None), http2.PROTOCOL_ERROR),
    "no path": (open_call(1, path=None), http2.PROTOCOL_ERROR),
    "an empty path": (open_call(1, path=""), http2.PROTOCOL_ERROR),
    "two paths": (raw(HEADERS, END_HEADERS, 1, block([(":path", "/a"), *call_fields()])), http2.PROTOCOL_ERROR),
    "a late pseudo-header": (
        raw(HEADERS, END_HEADERS, 1, block([("a", "b"), *call_fields()])), http2.PROTOCOL_ERROR,
    ),
    "an unknown pseudo-header": (
        raw(HEADERS, END_HEADERS, 1, block([(":protocol", "x"), *call_fields()])), http2.PROTOCOL_ERROR,
    ),
    "a pseudo-header of answers": (
        raw(HEADERS, END_HEADERS, 1, block([(":status", "200"), *call_fields()])), http2.PROTOCOL_ERROR,
    ),
    "no headers at all": (raw(HEADERS, END_HEADERS, 1), http2.PROTOCOL_ERROR),
}  # fmt: skip


@pytest.mark.parametrize("fault", STREAM_FAULTS)
async def test_a_fault_of_a_stream_ends_that_alone(wire: Wire, handler: Any, fault: str) -> None:
    frames, code = STREAM_FAULTS[fault]
    handler.gate.clear()
    wire.write(frames)
    assert (await wire.answer(1)).reset == code
    assert (await wire.call(3)).status == 0
    if handler.requests:
        await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)


class TestFrames:
    async def test_what_is_unknown_is_ignored(self, wire: Wire) -> None:
        wire.write(
            raw(200, 0xFF, 0, b"anything"), raw(0xB, 0, 7, bytes(16)), settings((99, 1 << 31), (2, 0), (2, 1)),
            raw(PRIORITY, 0xFF, 9, bytes(5)), raw(PING, http2.ACK, 0, bytes(8)), raw(SETTINGS, http2.ACK, 0),
            raw(GOAWAY, 0, 0, bytes(12)),
        )  # fmt: skip
        assert (await wire.call(11)).status == 0

    async def test_a_ping_is_answered_with_what_it_says(self, wire: Wire) -> None:
        wire.write(raw(PING, 0, 0, b"12345678"))
        assert (await wire.until(PING)).payload == b"12345678"

    async def test_the_reserved_bit_is_ignored(self, wire: Wire) -> None:
        wire.write(raw(HEADERS, END_HEADERS, 0x80000001, block(call_fields())), raw(DATA, 1, 0x80000001, message()))
        assert (await wire.answer(1)).status == 0

    async def test_padding_and_priority_are_taken_off(self, wire: Wire) -> None:
        fields = block(call_fields("ModelInfer"))
        wire.write(raw(HEADERS, END_HEADERS | PADDED | WITH_PRIORITY, 1, b"\xff" + bytes(5) + fields + bytes(255)))
        body = message(infer())
        for at in range(0, len(body), 50):
            wire.write(raw(DATA, PADDED, 1, b"\x07" + body[at : at + 50] + bytes(7)))
        wire.write(raw(DATA, PADDED | END_STREAM, 1, b"\x03" + bytes(3)))
        assert echoed((await wire.answer(1)).data) == b"\x01" * 64

    async def test_headers_go_on(self, wire: Wire) -> None:
        fields = block(call_fields())
        parts = [fields[at : at + 3] for at in range(0, len(fields), 3)]
        wire.write(raw(HEADERS, 0, 1, parts[0]), *(raw(CONTINUATION, 0, 1, part) for part in parts[1:]))
        wire.write(raw(CONTINUATION, END_HEADERS, 1), raw(DATA, END_STREAM, 1, message()))
        assert (await wire.answer(1)).status == 0

    async def test_trailers_end_a_call(self, wire: Wire) -> None:
        wire.write(open_call(1), raw(DATA, 0, 1, message()))
        wire.write(raw(HEADERS, END_HEADERS | END_STREAM, 1, block([("checksum", "1")])))
        assert (await wire.answer(1)).status == 0

    async def test_what_comes_for_a_call_that_is_over_is_ignored(self, wire: Wire) -> None:
        assert (await wire.call(1)).status == 0
        wire.write(raw(DATA, 0, 1, bytes(100)), window_update(1, 7), http2.rst_stream(1), window_update(1, 0))
        wire.write(raw(HEADERS, END_HEADERS | END_STREAM, 1, block([("late", "1")])))
        assert await wire.settle() == []
        assert (await wire.call(3)).status == 0

    async def test_an_answer_before_the_end_of_the_call_tells_the_client_to_stop(self, wire: Wire) -> None:
        wire.write(open_call(1, "/nobody/knows"))
        answer = await wire.answer(1)
        assert (answer.status, answer.details, answer.blocks) == (12, "Method not found!", 1)
        assert (await wire.until(RST_STREAM, 1)).word == http2.NO_ERROR


class TestLeaving:
    async def test_what_was_begun_is_ended(self, front: NativeGrpcFront, wire: Wire, handler: Any) -> None:
        handler.gate.clear()
        wire.write(whole_call(1, "ModelInfer", infer()))
        await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        for connection in front._serving.connections:
            connection.leave()
        assert (await wire.until(GOAWAY)).payload == b"\x7f\xff\xff\xff" + bytes(4)
        asked = await wire.until(PING)
        # what a client sends before it knows is served
        wire.write(whole_call(3), raw(PING, http2.ACK, 0, asked.payload), whole_call(5))
        assert (await wire.answer(5)).reset == http2.REFUSED_STREAM
        assert wire.frames[-2].payload == b"\0\0\0\3" + bytes(4)
        assert (await wire.answer(3)).status == 0
        handler.gate.set()
        assert (await wire.answer(1)).status == 0
        assert await wire.frame() is None

    async def test_an_early_answer_is_whole_before_the_connection_ends(
        self, front: NativeGrpcFront, wire: Wire
    ) -> None:
        """The word that the client may stop has to leave before the connection does."""
        wire.write(open_call(1, grpc_timeout="3S"))
        await wire.settle()
        for connection in front._serving.connections:
            connection.leave()
        wire.write(raw(PING, http2.ACK, 0, (await wire.until(PING)).payload))
        assert (await wire.answer(1)).status == 4
        assert (await wire.until(RST_STREAM, 1)).word == http2.NO_ERROR
        assert await wire.frame() is None

    async def test_the_last_word_is_heard_by_who_still_sends(self, wire: Wire) -> None:
        """Closing a socket with something unread would take it back."""
        flooding = asyncio.create_task(wire.flood(settings((2, 2)) + raw(99, 0, 0, bytes(10_000)) * 500))
        assert (await wire.end())[0] == http2.PROTOCOL_ERROR
        await flooding
