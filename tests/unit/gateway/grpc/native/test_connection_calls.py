"""Calls of one connection where what was refused cannot leave yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_frames import Written, frames_of
from hpack import Decoder

from gateway.grpc.calling import Streaming, Unary
from gateway.grpc.native.codec.call_headers import CallHeaders
from gateway.grpc.native.codec.http2_frames import DATA
from gateway.grpc.native.codec.limits import KeepAlive
from gateway.grpc.native.connection_calls import STREAM_WINDOW, Calls
from gateway.grpc.native.outbox import Outbox
from gateway.grpc.native.serving import Serving
from gateway.grpc.statuses import Status


async def test_nothing_is_read_after_a_message_that_cannot_be() -> None:
    got: list[bytes] = []

    async def echo(messages: AsyncIterator[bytes], write: Any, _context: Any) -> None:
        writing = []
        async for message in messages:
            got.append(message)
            writing.append(asyncio.ensure_future(write(message)))
        await asyncio.gather(*writing)

    loop = asyncio.get_running_loop()
    keep_alive = KeepAlive()
    out, written = Outbox(loop), Written()
    out.connect(written)
    out.resize([], 0)
    calls = Calls(Serving({"/s/m": Streaming(echo)}, keep_alive, 0, 1000), out)
    calls.begin(1, CallHeaders("/s/m"), ended=False)
    stream = calls.streams[1]
    calls.feed(stream, b"\0\0\0\0\1a")
    while not stream.pending:
        await asyncio.sleep(0)
    calls.feed(stream, b"\1\0\0\0\1x")  # compressed, by nothing
    calls.feed(stream, b"\0\0\0\0\1b")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not stream.closed
    out.widen_stream(stream, 100)
    assert stream.closed
    while stream.task is not None:
        await asyncio.sleep(0)
    out.flush()
    headers, data, end, reset = frames_of(written.taken())
    assert (data.kind, data.payload) == (DATA, b"\0\0\0\0\1a")
    decoder = Decoder()
    decoder.decode(headers.payload)
    assert dict(decoder.decode(end.payload))["grpc-status"] == str(int(Status.INTERNAL))
    assert reset.payload == b"\0\0\0\0"
    assert got == [b"a"]


async def test_what_messages_that_are_not_whole_hold_is_bounded_together() -> None:
    async def never(_data: bytes, _context: Any) -> bytes:
        raise AssertionError("no message is whole")

    keep_alive = KeepAlive()
    out, written = Outbox(asyncio.get_running_loop()), Written()
    out.connect(written)
    serving = Serving({"/s/m": Unary(never)}, keep_alive, 0, 1000, 2 * STREAM_WINDOW)
    calls = Calls(serving, out)
    for number in (1, 3):
        calls.begin(number, CallHeaders("/s/m"), ended=False)
        calls.feed(calls.streams[number], b"\0\x7f\0\0\0")

    def receive(number: int, size: int) -> None:
        stream = calls.streams[number]
        stream.uncredited += size
        calls.feed(stream, b"x" * size)
        calls.credit(stream)

    receive(1, STREAM_WINDOW)
    receive(3, STREAM_WINDOW)
    assert serving.held_bytes == 2 * STREAM_WINDOW
    receive(3, STREAM_WINDOW // 4)  # too little for a word about windows
    assert list(calls.streams) == [1, 3]
    receive(3, STREAM_WINDOW // 4)
    assert list(calls.streams) == [1]
    assert serving.held_bytes == STREAM_WINDOW
    out.flush()
    *_, end, _reset = frames_of(written.taken())
    assert dict(Decoder().decode(end.payload))["grpc-status"] == str(int(Status.RESOURCE_EXHAUSTED))
    calls.abandon(calls.streams[1])
    assert serving.held_bytes == 0


async def test_what_comes_for_a_refused_call_is_neither_held_nor_asked_for() -> None:
    async def answer(_messages: AsyncIterator[bytes], write: Any, _context: Any) -> None:
        await write(b"a")

    keep_alive = KeepAlive()
    out, written = Outbox(asyncio.get_running_loop()), Written()
    out.connect(written)
    out.resize([], 0)
    serving = Serving({"/s/m": Streaming(answer)}, keep_alive, 0, 1000, STREAM_WINDOW)
    calls = Calls(serving, out)
    calls.begin(1, CallHeaders("/s/m"), ended=False)
    stream = calls.streams[1]
    while not stream.pending:
        await asyncio.sleep(0)
    calls.feed(stream, b"\0\x7f\0\0\0")
    calls.refuse(stream, (Status.INTERNAL, "", ()))  # which waits behind the answer
    before = stream.receive_window
    for _ in range(10):
        stream.uncredited += STREAM_WINDOW
        calls.feed(stream, b"x")
        calls.credit(stream)
    assert serving.held_bytes == 0
    assert stream.receive_window == before
    calls.abandon(stream)
    while stream.task is not None:
        await asyncio.sleep(0)
