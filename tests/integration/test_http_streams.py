"""`generate_stream` on real sockets: readers who are slow or leave, servers that stop, connections used again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import echo_handler as echo
import pytest

from charonia.inference import InferenceResponse
from charonia.options.settings import GatewaySettings
from gateway.http.server import HttpFront

LIMIT_S = 30
RESPONSES = 300


@pytest.fixture
async def front(handler: Any) -> AsyncIterator[HttpFront]:
    front = HttpFront(GatewaySettings(incarnation="test", http_address="127.0.0.1", http_port=0), handler)
    await front.start()
    yield front
    await front.close(1.0)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, front: HttpFront) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", front.port, limit=2**22))

    async def ask(self, body: dict[str, Any], path: str = "generate_stream") -> bytes:
        """The head of the answer."""
        text = json.dumps(body).encode()
        self.writer.write(
            b"POST /v2/models/stream/%b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
            % (path.encode(), len(text), text)
        )
        return await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), LIMIT_S)

    async def chunk(self) -> bytes:
        """The next chunk, empty at the end."""
        async with asyncio.timeout(LIMIT_S):
            size = int(await self._reader.readline(), 16)
            data = await self._reader.readexactly(size)
            assert await self._reader.readexactly(2) == b"\r\n"
            return data


async def test_http_1_0_gets_the_stream_without_chunks_and_its_end_by_the_connection(
    front: HttpFront, handler: Any
) -> None:
    handler.scripts["a"] = [1, 2, None]
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    text = json.dumps({"INPUT0": 1, "id": "a"}).encode()
    head = b"POST /v2/models/stream/generate_stream HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n%b" % (len(text), text))
    async with asyncio.timeout(LIMIT_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    events = [json.loads(event.removeprefix(b"data: ")) for event in body.split(b"\n\n") if event]
    assert [event["id"] for event in events] == ["a"] * len(events)
    assert body.startswith(b"data: {")
    assert len(events) >= 2
    writer.close()


async def test_chunks_come_one_by_one_and_the_connection_goes_on(front: HttpFront, handler: Any) -> None:
    more = asyncio.Event()
    handler.scripts["a"] = [1, more, 2, None]
    client = await Client.connect(front)
    head = await client.ask({"INPUT0": 1, "id": "a"})
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding: chunked\r\n" in head
    assert json.loads((await client.chunk()).removeprefix(b"data: "))["OUTPUT0"] == 1
    more.set()
    assert json.loads((await client.chunk()).removeprefix(b"data: "))["OUTPUT0"] == 2
    assert await client.chunk() == b""
    head = await client.ask({"INPUT0": 1}, "generate")
    assert b"transfer-encoding: chunked\r\n" in head
    assert json.loads(await client.chunk())["OUTPUT0"] == 0
    assert await client.chunk() == b""
    client.writer.close()


async def test_a_reader_who_does_not_read_holds_its_request_back(front: HttpFront, handler: Any) -> None:
    taken = 0
    standing = asyncio.Event()

    async def responses(*_: Any, **__: Any) -> AsyncIterator[InferenceResponse]:
        nonlocal taken
        text = echo.Tensor("OUTPUT0", echo.DataType.BYTES, (1,), (65536).to_bytes(4, "little") + b"x" * 65536)
        for index in range(RESPONSES):
            taken += 1
            yield InferenceResponse("stream", 1, [text], final=index == RESPONSES - 1, place=(1, index))
        standing.set()

    handler.stream = responses
    client = await Client.connect(front)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    asking = asyncio.create_task(client.ask({"INPUT0": 1}))
    async with asyncio.timeout(LIMIT_S):
        while not taken:
            await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(standing.wait(), 1.0)
    assert 0 < taken < RESPONSES
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    await asking
    count = 0
    while await client.chunk():
        count += 1
    assert count == taken == RESPONSES
    client.writer.close()


async def test_a_reader_who_leaves(front: HttpFront, handler: Any) -> None:
    handler.scripts["a"] = [1, asyncio.Event(), 2]
    client = await Client.connect(front)
    await client.ask({"INPUT0": 1, "id": "a"})
    await client.chunk()
    client.writer.transport.abort()
    await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)
    assert handler.cancelled_ids == ["a"]


async def test_a_server_that_stops_ends_the_stream_with_a_word(front: HttpFront, handler: Any) -> None:
    handler.scripts["a"] = [1, asyncio.Event(), 2]
    client = await Client.connect(front)
    await client.ask({"INPUT0": 1, "id": "a"})
    await client.chunk()
    closing = asyncio.create_task(front.close(0.05))
    assert await client.chunk() == b'data: {"error":"Server exiting"}\n\n'
    assert await client.chunk() == b""
    await closing
    client.writer.close()
