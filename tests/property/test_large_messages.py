"""Large messages in frames of any size, in pieces of any size, among others: each comes whole, to where it belongs."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import hpack
from example_counts import examples
from grpc_frames import frames_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.grpc.calling import Context, LargeReply, Unary
from gateway.grpc.native.codec import http2_frames as frames
from gateway.grpc.native.codec.grpc_messages import PREFIX
from gateway.grpc.native.codec.limits import KeepAlive
from gateway.grpc.native.connection import Connection
from gateway.grpc.native.receiving import LargeReader
from gateway.grpc.native.serving import Serving
from gateway.grpc.statuses import Refusal

_SIZES = [0, 10, 5_000, 65_535, 65_536, 100_000, 200_000, 300_000]
_FRAMES = [1, 100, 9_000, 16_384, 40_000, 131_072]


class _Wire(asyncio.Transport):
    """Gives its protocol pieces, as a loop does: a buffered one says where they go."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None
        self.written = bytearray()
        self.buffered = 0

    def bring(self, data: bytes, piece: int) -> None:
        at = 0
        while at < len(data):
            if isinstance(self.protocol, asyncio.BufferedProtocol):
                buffer = self.protocol.get_buffer(-1)
                size = min(len(buffer), piece, len(data) - at)
                assert size > 0
                buffer[:size] = data[at : at + size]
                self.buffered += 1
                self.protocol.buffer_updated(size)
            else:
                size = min(piece, len(data) - at)
                self.protocol.data_received(data[at : at + size])
            at += size

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.written += data

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


def _headers(number: int) -> bytes:
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", "/s/Echo"), (":authority", "x"),
        ("content-type", "application/grpc"), ("te", "trailers"),
    ]  # fmt: skip
    return frames.frame(frames.HEADERS, frames.END_HEADERS, number, hpack.Encoder().encode(fields))


def _parts(number: int, message: bytes, choose: random.Random) -> list[bytes]:
    """The frames of a call."""
    data = PREFIX.pack(0, len(message)) + message
    found = [_headers(number)]
    most = choose.choice(_FRAMES if len(data) < 1000 else _FRAMES[2:])
    at = 0
    while at < len(data):
        part = data[at : at + most]
        at += len(part)
        ends = at == len(data) and choose.random() < 0.5
        if choose.random() < 0.1 and len(part) < 100_000:
            padded = b"\5" + part + bytes(5)
            found.append(frames.frame(frames.DATA, frames.PADDED | (frames.END_STREAM if ends else 0), number, padded))
        else:
            found.append(frames.frame(frames.DATA, frames.END_STREAM if ends else 0, number, part))
        if ends:
            return found
    return [*found, frames.frame(frames.DATA, frames.END_STREAM, number, b"")]


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(st.sampled_from(_SIZES), min_size=1, max_size=5),
    st.sampled_from([7, 1_000, 16_384, 70_000, 1 << 20]),
    st.booleans(),
    st.integers(0, 2**32).map(random.Random),
)
def test_large_messages_come_whole(sizes: list[int], piece: int, interleaved: bool, choose: random.Random) -> None:
    if piece == 7:
        sizes = sizes[:1]
    asyncio.run(_drive(sizes, piece, interleaved, choose))


async def _drive(sizes: list[int], piece: int, interleaved: bool, choose: random.Random) -> None:
    messages = {2 * at + 1: choose.randbytes(size) for at, size in enumerate(sizes)}
    views: list[int] = []

    async def echo(data: bytes | memoryview, _context: Context) -> bytes | LargeReply | Refusal:
        if isinstance(data, memoryview):
            views.append(len(data))
            await asyncio.sleep(0)
            return LargeReply([b"", data[:10], data[10:]])
        return data

    def allocate(size: int, _begin: memoryview) -> memoryview | None:
        return None if size == 100_000 else memoryview(bytearray(size))

    serving = Serving({"/s/Echo": Unary(echo, takes_views=True)}, KeepAlive(), 0, 1 << 30, allocate_message=allocate)
    wire = _Wire()
    connection = Connection(serving)
    wire.protocol = connection
    connection.connection_made(wire)
    opening = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 24, frames.MAX_FRAME_SIZE: 1 << 15})
    wire.bring(opening + frames.window_update(0, 1 << 24), piece)
    calls = [_parts(number, message, choose) for number, message in messages.items()]
    if interleaved:
        await _interleaved(wire, calls, piece, choose)
    else:
        wire.bring(b"".join(part for call in calls for part in call), piece)
    for _ in range(20):
        await asyncio.sleep(0)
    answers = {number: bytearray() for number in messages}
    for one in frames_of(bytes(wire.written)):
        if one.kind == frames.DATA:
            answers[one.stream] += one.payload
        assert one.kind not in (frames.RST_STREAM, frames.GOAWAY)
    assert {number: bytes(data) for number, data in answers.items()} == {
        number: PREFIX.pack(0, len(message)) + message for number, message in messages.items()
    }
    long = [size for size in sizes if size > 131_072]
    assert sorted(size for size in views if size > 131_072) == sorted(long)
    # one whole frame may hold a message, and 100,000 bytes have no room: they are in memory of their own
    assert set(views) <= {65_536, 100_000, *long}
    assert not isinstance(wire.protocol, LargeReader)  # when no large message is coming the ordinary reader is back
    assert connection.calls.streams == {}
    assert serving.held_bytes == 0
    connection.connection_lost(None)


async def _interleaved(wire: _Wire, calls: list[list[bytes]], piece: int, choose: random.Random) -> None:
    for call in calls:  # in the order of their numbers, as streams must begin
        wire.bring(call.pop(0), piece)
    while calls:
        call = choose.choice(calls)
        wire.bring(call.pop(0), piece)
        if not call:
            calls.remove(call)
        if choose.random() < 0.2:
            wire.bring(frames.frame(frames.PING, 0, 0, b"12345678") if choose.random() < 0.01 else b"", piece)
            await asyncio.sleep(0)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 300_000), st.sampled_from([1_000, 50_000, 1 << 20]), st.sampled_from(["lost", "reset", "fault"]))
def test_what_ends_within_a_large_message_holds_nothing(come: int, piece: int, how: str) -> None:
    async def drive() -> None:
        async def never(_data: bytes | memoryview, _context: Context) -> bytes:
            raise AssertionError

        held: list[memoryview] = []

        def allocate(size: int, _begin: memoryview) -> memoryview | None:
            held.append(memoryview(bytearray(size)))
            return held[-1]

        serving = Serving(
            {"/s/Echo": Unary(never, takes_views=True)}, KeepAlive(), 0, 1 << 30, allocate_message=allocate
        )
        wire = _Wire()
        connection = Connection(serving)
        wire.protocol = connection
        connection.connection_made(wire)
        wire.bring(frames.PREFACE + frames.settings({}) + _headers(1), piece)
        data = PREFIX.pack(0, 400_000) + bytes(come)
        wire.bring(
            b"".join(frames.frame(frames.DATA, 0, 1, data[at : at + 16_384]) for at in range(0, len(data), 16_384)),
            piece,
        )
        if how == "reset":
            wire.bring(frames.rst_stream(1, frames.ErrorCode.CANCEL), piece)
            wire.bring(_headers(3) + frames.frame(frames.DATA, frames.END_STREAM, 3, b"\0\0"), piece)
        elif how == "fault":
            wire.bring(frames.frame(frames.DATA, 0, 0, b"x"), piece)
        else:
            wire.protocol.connection_lost(None)
        assert 1 not in connection.calls.streams or how == "fault"
        assert serving.held_bytes == 0 or how == "fault"
        if how != "lost":
            wire.protocol.connection_lost(None)
        assert connection.calls.streams == {}
        assert serving.held_bytes == 0

    asyncio.run(drive())
