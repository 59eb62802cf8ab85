"""The native front and clients of HTTP/2 that do what grpc's own client does not, or seldom."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator
from struct import pack
from typing import Any

import pytest
from grpc_calls import LIMIT_S, request
from http2_peer import Peer, ping, widen

from charonia.options.settings import GatewaySettings
from gateway.grpc.native.codec.http2_frames import (
    ACK,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_ID,
    PING,
    RST_STREAM,
    SETTINGS,
    ErrorCode,
    frame,
)
from gateway.grpc.native.native_server import NativeGrpcFront


@pytest.fixture
async def front(handler: Any) -> AsyncIterator[NativeGrpcFront]:
    front = NativeGrpcFront(GatewaySettings(incarnation="test", grpc_address="127.0.0.1", grpc_port=0), handler)
    await front.start()
    yield front
    await front.close(1.0)


async def test_a_client_measures_the_connection_while_it_receives(front: NativeGrpcFront) -> None:
    """grpc's clients ping each time the last one was answered, to find the bandwidth: no abuse (gRPC proposal A8)."""
    message = request("long", size=1_000_000).SerializeToString()
    async with Peer(front.port) as peer:
        peer.send(peer.call(1, "ModelInfer", None))
        await peer.until(SETTINGS)  # and with them a window for the whole message
        rest = pack(">BL", 0, len(message)) + message
        for at in range(0, len(rest), 16_000):
            peer.send(frame(DATA, 0, 1, rest[at : at + 16_000]))
        peer.send(frame(DATA, END_STREAM, 1))
        pings = acknowledged = size = 0
        while True:
            kind, flags, _, payload = await peer.read()
            assert kind != GOAWAY
            acknowledged += kind == PING
            if kind == DATA:
                size += len(payload)
                peer.send(widen(0, len(payload)), widen(1, len(payload)))
                if pings == acknowledged:
                    peer.send(ping())
                    pings += 1
            if kind == HEADERS and flags & END_STREAM:
                break
        assert size > 1_000_000
        assert pings > 8


async def test_pings_while_nothing_is_sent_are_too_many(front: NativeGrpcFront, handler: Any) -> None:
    handler.gate.clear()
    async with Peer(front.port) as peer:
        peer.send(peer.call(1, "ModelInfer", request("long").SerializeToString()), *[ping()] * 4)
        assert await peer.gone() == (ErrorCode.ENHANCE_YOUR_CALM, b"too_many_pings")


async def test_a_client_without_a_table_is_told_that_there_is_none(front: NativeGrpcFront) -> None:
    """Clients of nghttp2 and netty insist on it (RFC 7541, 4.2)."""
    async with Peer(front.port, {HEADER_TABLE_SIZE: 0}) as peer:
        peer.decoder.max_allowed_table_size = 0
        peer.send(peer.call(1))
        assert (":status", "200") in peer.decoder.decode((await peer.until(HEADERS, stream=1))[3])
        assert ("grpc-status", "0") in peer.decoder.decode((await peer.until(HEADERS, stream=1))[3])
        peer.send(peer.call(3, "Nothing"))
        assert ("grpc-status", "12") in peer.decoder.decode((await peer.until(HEADERS, stream=3))[3])
    async with Peer(front.port, {HEADER_TABLE_SIZE: 0}) as peer:
        peer.decoder.max_allowed_table_size = 0
        fields = [(":method", "GET"), (":scheme", "http"), (":path", "/")]
        peer.send(frame(HEADERS, 5, 1, peer.encoder.encode(fields)))
        assert (":status", "405") in peer.decoder.decode((await peer.until(HEADERS, stream=1))[3])


async def test_answers_share_the_window_of_the_connection(front: NativeGrpcFront, handler: Any) -> None:
    """A long answer that has waited longer does not take all of it."""
    message = request("long", size=256 * 1024).SerializeToString()
    async with Peer(front.port, {INITIAL_WINDOW_SIZE: 1 << 20}) as peer:
        peer.send(peer.call(1, "ModelInfer", None))
        rest = pack(">BL", 0, len(message)) + message
        for at in range(0, len(rest), 16_000):
            peer.send(frame(DATA, 0, 1, rest[at : at + 16_000]))
        peer.send(frame(DATA, END_STREAM, 1))
        size = 0
        while size < 65_535:  # no more of it can come
            size += len((await peer.until(DATA, stream=1))[3])
        peer.send(peer.call(3, "ModelInfer", request("short").SerializeToString()))
        await peer.until(HEADERS, stream=3)
        peer.send(widen(0, 2_000))
        assert (await peer.until(DATA))[2] == 1
        peer.send(widen(0, 2_000))
        assert (await peer.until(DATA))[2] == 3


async def test_compressed_messages_wait_as_they_are(front: NativeGrpcFront, handler: Any) -> None:
    """A window of them would be hundreds of MiB, for each stream of a client."""
    handler.gate.clear()
    packed = gzip.compress(request("large", size=40 * 1024 * 1024).SerializeToString(), 9)
    message = pack(">BL", 1, len(packed)) + packed
    rest = message * (1_000_000 // len(message))
    assert len(rest) > 15 * len(message)
    tracemalloc.start()
    try:
        async with Peer(front.port) as peer:
            peer.send(peer.call(1, "ModelStreamInfer", None, (("grpc-encoding", "gzip"),)))
            await peer.until(SETTINGS)  # and with them a window for all
            for at in range(0, len(rest), 16_000):
                peer.send(frame(DATA, 0, 1, rest[at : at + 16_000]))
            peer.send(frame(DATA, END_STREAM, 1), ping())
            await peer.until(PING)
            while len(handler.requests) < 2:  # as many as a stream holds
                handler.waiting.clear()
                await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
            held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 300 * 1024 * 1024


async def test_a_stream_ends_with_a_message_that_cannot_be_unpacked(front: NativeGrpcFront) -> None:
    good = gzip.compress(request("good").SerializeToString())
    async with Peer(front.port) as peer:
        peer.send(peer.call(1, "ModelStreamInfer", None, (("grpc-encoding", "gzip"),)))
        peer.send(frame(DATA, 0, 1, pack(">BL", 1, len(good)) + good))
        peer.decoder.decode((await peer.until(HEADERS))[3])
        assert b"good" in (await peer.until(DATA))[3]
        peer.send(frame(DATA, 0, 1, pack(">BL", 1, 3) + b"bad" + pack(">BL", 1, len(good)) + good))
        ending = dict(peer.decoder.decode((await peer.until(HEADERS, flags=END_STREAM))[3]))
        assert ending["grpc-status"] == "13"
        assert "failed to decompress the message" in ending["grpc-message"]
        peer.send(frame(HEADERS, 4, 3, peer.encoder.encode([
            (":method", "POST"), (":scheme", "http"), (":path", "/inference.GRPCInferenceService/ModelInfer"),
            ("content-type", "application/grpc"), ("grpc-encoding", "gzip"),
        ])))  # fmt: skip
        peer.send(frame(DATA, END_STREAM, 3, pack(">BL", 1, 3) + b"bad"))
        ending = dict(peer.decoder.decode((await peer.until(HEADERS, stream=3, flags=END_STREAM))[3]))
        assert ending["grpc-status"] == "13"


async def test_calls_that_are_on_their_way_are_served_before_a_connection_ends(front: NativeGrpcFront) -> None:
    """Otherwise calls fail for no reason when a connection has its age or a gateway leaves (gRPC proposal A9)."""
    async with Peer(front.port) as peer:
        peer.send(peer.call(1))
        await peer.until(HEADERS, flags=END_STREAM)
        closing = asyncio.create_task(front.close(LIMIT_S))
        assert (await peer.until(GOAWAY))[3] == pack(">LL", LARGEST_ID, ErrorCode.NO_ERROR)
        word = (await peer.until(PING))[3]
        peer.send(peer.call(3), frame(PING, ACK, 0, word), peer.call(5))
        refused = await peer.until(RST_STREAM)
        assert refused[2:] == (5, pack(">L", ErrorCode.REFUSED_STREAM))
        await asyncio.wait_for(closing, LIMIT_S)


async def test_a_call_that_came_with_the_end_of_a_connection_is_answered(front: NativeGrpcFront) -> None:
    async with Peer(front.port) as peer:
        peer.send(peer.call(1))
        await peer.until(HEADERS, flags=END_STREAM)
        closing = asyncio.create_task(front.close(LIMIT_S))
        word = (await peer.until(PING))[3]
        peer.send(peer.call(3), frame(PING, ACK, 0, word))
        told = await peer.rest()
        assert [found[3] for found in told if found[0] == GOAWAY] == [pack(">LL", 3, ErrorCode.NO_ERROR)]
        assert any(kind == HEADERS and flags & END_STREAM and stream == 3 for kind, flags, stream, _ in told)
        await asyncio.wait_for(closing, LIMIT_S)
