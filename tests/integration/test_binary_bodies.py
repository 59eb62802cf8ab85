"""Large bodies over HTTP on real sockets: any pieces, among small ones, and what is not received past the parser."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import socket
import struct
import weakref
from collections.abc import AsyncIterator

import echo_handler as echo
import pytest
from few_turns import FewTurns
from http_calls import read_reply

from charonia.options.settings import GatewaySettings
from gateway.http import protocol
from gateway.http.server import HttpFront


class _Handler(echo.EchoHandler):
    """Has room, and remembers what it lent."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: list[tuple[int, int]] = []
        self.has_room = True

    def allocate_body(self, size_bytes: int, skew: int) -> memoryview | None:
        self.lent.append((size_bytes, skew))
        return memoryview(bytearray(size_bytes)) if self.has_room else None

    async def until_lent(self) -> None:
        async with asyncio.timeout(30):
            while not self.lent:
                await asyncio.sleep(0.005)


@pytest.fixture(params=[protocol.APART_BYTES, 1 << 14], ids=["loop", "threads"], autouse=True)
def apart_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who receives the bodies of this module: the event loop, or threads those of 16 KB and more."""
    monkeypatch.setattr(protocol, "APART_BYTES", request.param)


@pytest.fixture
def handler() -> _Handler:
    return _Handler()


@pytest.fixture
async def front(handler: _Handler) -> AsyncIterator[HttpFront]:
    settings = GatewaySettings(incarnation="test", http_address="127.0.0.1", http_port=0)
    front = HttpFront(settings, handler)
    await front.start()
    yield front
    await front.close(1.0)


def _request(data: bytes, *more: str, path: str = "any_UINT8") -> bytes:
    head = (
        b'{"inputs":[{"name":"INPUT0","datatype":"UINT8","shape":[%d],"parameters":{"binary_data_size":%d}}],'
        b'"parameters":{"binary_data_output":true}}'
    ) % (len(data), len(data))
    lines = [
        f"POST /v2/models/{path}/infer HTTP/1.1",
        "Host: x",
        f"Content-Length: {len(head) + len(data)}",
        f"Inference-Header-Content-Length: {len(head)}",
        *more,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + head + data


async def _send(writer: asyncio.StreamWriter, data: bytes, choose: random.Random) -> None:
    """In pieces that the other side may see one by one."""
    at = 0
    while at < len(data):
        size = choose.choice([1, 50, 300, 5_000, 40_000, 300_000])
        writer.write(data[at : at + size])
        await writer.drain()
        at += size
        if choose.random() < 0.3:
            await asyncio.sleep(0.001)


def _tensor(reply: tuple[int, dict[str, str], bytes]) -> bytes:
    _, headers, body = reply
    return body[int(headers["inference-header-content-length"]) :]


@pytest.mark.parametrize("seed", range(8))
async def test_bodies_of_any_size_in_any_pieces(front: HttpFront, handler: _Handler, seed: int) -> None:
    choose = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    sizes = [choose.choice([0, 10, 16_000, 65_000, 66_000, 200_000, 700_000]) for _ in range(8)]
    for size in sizes:
        data = choose.randbytes(size)
        await _send(writer, _request(data), choose)
        reply = await asyncio.wait_for(read_reply(reader), 30)
        assert reply[0] == 200
        assert _tensor(reply) == data
    assert len(handler.lent) <= sum(size >= 65_000 for size in sizes)
    writer.close()


async def test_a_large_body_is_a_view_of_its_memory(front: HttpFront, handler: _Handler) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    data = random.Random(1).randbytes(600_000)
    sent = _request(data)
    writer.write(sent)
    assert _tensor(await read_reply(reader)) == data
    (tensor,) = handler.requests[0].inputs
    assert isinstance(tensor.data, memoryview)
    head = len(sent) - sent.index(b"\r\n\r\n") - 4 - len(data)
    assert handler.lent == [(len(data) + head, head)]
    writer.close()


async def test_requests_sent_at_once_are_told_apart(front: HttpFront, handler: _Handler) -> None:
    choose = random.Random(2)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    bodies = [choose.randbytes(size) for size in (10, 300_000, 20, 100_000, 300_000, 0)]
    writer.write(b"".join(map(_request, bodies)))
    for data in bodies:
        assert _tensor(await asyncio.wait_for(read_reply(reader), 30)) == data
    writer.close()


@pytest.mark.parametrize(
    "more", [("Expect: 100-continue",), ("Connection: close",), ("Content-Encoding: identity",), ("Upgrade: x",)]
)
async def test_what_needs_more_than_its_bytes_goes_the_long_way(
    front: HttpFront, handler: _Handler, more: tuple[str, ...]
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    data = random.Random(3).randbytes(200_000)
    writer.write(_request(data, *more))
    if more[0].startswith("Expect"):
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert _tensor(await asyncio.wait_for(read_reply(reader), 30)) == data
    writer.close()


async def test_without_room_the_body_comes_all_the_same(front: HttpFront, handler: _Handler) -> None:
    handler.has_room = False
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    data = random.Random(4).randbytes(300_000)
    for _ in range(2):
        writer.write(_request(data))
        assert _tensor(await asyncio.wait_for(read_reply(reader), 30)) == data
    assert handler.lent
    writer.close()


async def test_what_is_refused_before_its_body_came_leaves_the_connection_in_order(
    front: HttpFront, handler: _Handler
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    data = random.Random(5).randbytes(400_000)
    sent = _request(data, path="unknown")
    writer.write(sent[:100_000])
    await asyncio.sleep(0.05)
    writer.write(sent[100_000:] + _request(data))
    assert (await asyncio.wait_for(read_reply(reader), 30))[0] == 404
    assert _tensor(await asyncio.wait_for(read_reply(reader), 30)) == data
    writer.close()


async def test_the_body_of_a_refused_request_is_not_another_ones(handler: _Handler) -> None:
    settings = GatewaySettings(
        incarnation="test",
        http_address="127.0.0.1",
        http_port=0,
        http_restricted_api=((("inference",), "key", "open"),),
    )
    front = HttpFront(settings, handler)
    await front.start()
    choose = random.Random(6)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    for size in (300_000, 100_000, 400_000):  # refused before anybody asks for the body
        await _send(writer, _request(choose.randbytes(size)), choose)
        assert (await asyncio.wait_for(read_reply(reader), 30))[0] == 403
        data = choose.randbytes(choose.choice([20, 100_000, 300_000]))
        await _send(writer, _request(data, "key: open"), choose)
        assert _tensor(await asyncio.wait_for(read_reply(reader), 30)) == data
    writer.close()
    await front.close(1.0)


async def test_requests_refused_with_their_bodies_here_leave_nothing_to_the_next(
    front: HttpFront, handler: _Handler
) -> None:
    choose = random.Random(7)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    for path in ("unknown", "any_UINT8", "unknown", "any_UINT8"):
        data = choose.randbytes(choose.choice([100_000, 400_000]))
        await _send(writer, _request(data, path=path), choose)
        reply = await asyncio.wait_for(read_reply(reader), 30)
        assert reply[0] == (404 if path == "unknown" else 200)
        if path != "unknown":
            assert _tensor(reply) == data
    writer.close()


async def test_a_client_that_leaves_within_its_body_is_forgotten(front: HttpFront, handler: _Handler) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(_request(bytes(400_000))[:200_000])
    await handler.until_lent()
    writer.close()
    async with asyncio.timeout(30):
        while front._state.connections:
            await asyncio.sleep(0.005)
    assert handler.requests == []


@pytest.mark.parametrize("resets", [False, True])
async def test_the_memory_of_a_body_is_free_once_its_client_has_left(
    front: HttpFront, handler: _Handler, resets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the garbage collector, which comes by late: a slot, or a file of which there may be 64 at a time."""

    class Held(bytearray):
        pass

    lent: list[weakref.ref[Held]] = []

    def allocate(size_bytes: int, _skew: int) -> memoryview:
        held = Held(size_bytes)
        lent.append(weakref.ref(held))
        return memoryview(held)

    monkeypatch.setattr(handler, "allocate_body", allocate)
    gc.disable()
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(_request(bytes(400_000))[:200_000])
        async with asyncio.timeout(30):
            while not lent:
                await asyncio.sleep(0.005)
        if resets:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        async with asyncio.timeout(30):
            while lent[0]() is not None:
                await asyncio.sleep(0.005)
    finally:
        gc.enable()


async def test_a_head_in_two_parts_with_bodies_behind_it(front: HttpFront, handler: _Handler) -> None:
    """The parser has some of the first body then, and has paused reading for it."""
    choose = random.Random(8)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    bodies = [choose.randbytes(3_000_000), choose.randbytes(2_000_000), b"small"]
    sent = b"".join(map(_request, bodies))
    writer.write(sent[:40])
    async with asyncio.timeout(30):
        while not front._state.connections or next(iter(front._state.connections))._phase == protocol._IDLE:  # type: ignore[union-attr]
            await asyncio.sleep(0.005)
    writer.write(sent[40:])
    for data in bodies:
        assert _tensor(await asyncio.wait_for(read_reply(reader), 30)) == data
    writer.close()


@pytest.mark.parametrize("turns", [0, 1])
async def test_what_threads_cannot_receive_the_loop_receives(
    front: HttpFront, handler: _Handler, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = FewTurns(handler.offload, turns)
    monkeypatch.setattr(handler.offload, "transfer", few)
    choose = random.Random(9)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    for size in (900_000, 10, 700_000):
        data = choose.randbytes(size)
        await _send(writer, _request(data), choose)
        assert _tensor(await asyncio.wait_for(read_reply(reader), 30)) == data
        few.left = turns
    writer.close()


async def test_a_client_that_stalls_within_its_body_is_refused(
    front: HttpFront, handler: _Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    sent = _request(bytes(400_000))
    writer.write(sent[:200_000])
    await handler.until_lent()
    (connection,) = front._state.connections
    answer = asyncio.ensure_future(reader.read())
    async with asyncio.timeout(30):
        while not answer.done():  # the server's own sweeps do so too, once a second
            connection.sweep(1.0)  # type: ignore[union-attr]
            await asyncio.sleep(0.005)
    assert b"408" in (await answer).split(b"\r\n")[0]
    assert connection._receiving is None  # type: ignore[union-attr]
    async with asyncio.timeout(30):
        await front.application.body_tasks.settled()
    writer.close()
    async with asyncio.timeout(30):
        while front._state.connections:
            await asyncio.sleep(0.005)


async def test_a_client_that_sends_slowly_is_read_on(
    front: HttpFront, handler: _Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    data = random.Random(10).randbytes(200_000)
    sent = _request(data)
    at = 100_000
    writer.write(sent[:at])
    await handler.until_lent()
    (connection,) = front._state.connections
    begin = len(sent) - handler.lent[0][0]
    for _ in range(12):
        writer.write(sent[at : at + 2_000])
        at += 2_000
        async with asyncio.timeout(30):
            while begin + connection._large.at < at:  # type: ignore[union-attr]
                await asyncio.sleep(0.001)
        connection.sweep(2.0)  # type: ignore[union-attr]  # of 10 s
    writer.write(sent[at:])
    assert _tensor(await asyncio.wait_for(read_reply(reader), 30)) == data
    writer.close()


async def test_a_connection_that_the_server_ends_within_a_body_leaves_nothing(
    front: HttpFront, handler: _Handler
) -> None:
    files = len(os.listdir("/proc/self/fd"))
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(_request(bytes(400_000))[:200_000])
    await handler.until_lent()
    (connection,) = front._state.connections
    connection.transport.abort()  # type: ignore[union-attr]
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        await front.application.body_tasks.settled()
        while len(os.listdir("/proc/self/fd")) > files:
            await asyncio.sleep(0.005)
    assert handler.requests == []


async def test_the_server_ends_with_a_body_that_has_not_come(front: HttpFront, handler: _Handler) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(_request(bytes(400_000))[:200_000])
    await handler.until_lent()
    async with asyncio.timeout(30):
        await front.close(0.1)
        await reader.read()
    writer.close()


async def test_large_json_is_received_past_the_parser_too(
    front: HttpFront, handler: _Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[int] = []
    allocate = protocol.handed_memory

    def noted(size_bytes: int) -> memoryview | None:
        lent.append(size_bytes)
        return allocate(size_bytes) if len(lent) < 3 else None

    monkeypatch.setattr(protocol, "handed_memory", noted)
    choose = random.Random(5)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    for count in (5, 700_000, 3, 300_000, 400_000, 500_000, 2):
        values = [number % 10 for number in range(count)]
        body = b'{"inputs":[{"name":"INPUT0","datatype":"UINT8","shape":[%d],"data":[%b]}]}' % (
            count,
            b", ".join(b"%d" % value for value in values),
        )
        head = f"POST /v2/models/any_UINT8/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        await _send(writer, head.encode() + body, choose)
        status, _, answer = await read_reply(reader)
        assert status == 200
        assert json.loads(answer)["outputs"][0]["data"] == values
    assert len(lent) == 3, "of 2.1, 1.2 and 1.5 MB, which has no room; 0.9 MB go through the parser"
    assert handler.lent == []
    writer.close()
