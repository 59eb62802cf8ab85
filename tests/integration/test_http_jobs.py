"""Job endpoints on real sockets: live event streams, many readers, readers that leave or do not read, shutdown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from charonia.facts.jobs import JobState
from charonia.options.settings import GatewaySettings
from gateway.http import event_stream, job_routes
from gateway.http.server import HttpFront

LIMIT_S = 30


@pytest.fixture
async def front(handler: Any) -> AsyncIterator[HttpFront]:
    front = HttpFront(GatewaySettings(incarnation="test", http_address="127.0.0.1", http_port=0), handler)
    await front.start()
    yield front
    await front.close(1.0)


BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.5]}]}
).encode()  # fmt: skip


class Connection:
    """One keep-alive connection, spoken to by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @staticmethod
    async def to(front: HttpFront) -> Connection:
        return Connection(*await asyncio.open_connection("127.0.0.1", front.port, limit=1 << 20))

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str]]:
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        head = "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *lines])
        self.writer.write(head.encode() + b"\r\n\r\n" + body)
        answer = (await self.within(self.reader.readuntil(b"\r\n\r\n"))).decode().split("\r\n")
        return int(answer[0].split()[1]), dict(line.lower().split(": ", 1) for line in answer[1:] if line)

    async def whole(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        status, answered = await self.ask(method, path, body, **headers)
        return status, await self.within(self.reader.readexactly(int(answered["content-length"])))

    async def chunk(self) -> bytes:
        """The next chunk of a stream, empty at its end."""
        size = int(await self.within(self.reader.readline()), 16)
        return (await self.within(self.reader.readexactly(size + 2)))[:-2]

    async def within(self, awaitable: Any) -> Any:
        return await asyncio.wait_for(awaitable, LIMIT_S)

    def close(self) -> None:
        self.writer.close()


async def submit(front: HttpFront) -> str:
    connection = await Connection.to(front)
    status, body = await connection.whole("POST", "/v2/models/identity/infer", BODY, prefer="respond-async")
    assert status == 202
    connection.close()
    return str(json.loads(body)["location"])


async def follow(front: HttpFront, location: str, **headers: str) -> Connection:
    connection = await Connection.to(front)
    status, answered = await connection.ask("GET", location + "/events", **headers)
    assert (status, answered["transfer-encoding"]) == (200, "chunked")
    assert await connection.chunk() == b"retry: 1000\n\n"
    return connection


async def test_two_readers_see_a_job_happen(front: HttpFront, handler: Any) -> None:
    handler.gate.clear()
    location = await submit(front)
    await handler.waiting.wait()
    readers = [await follow(front, location) for _ in range(2)]
    for reader in readers:
        assert (await reader.chunk()).startswith(b"id: 1\nevent: accepted\n")
        assert (await reader.chunk()).startswith(b"id: 2\nevent: batched\n")
    readers[1].close()
    handler.gate.set()
    assert (await readers[0].chunk()).startswith(b"id: 3\nevent: succeeded\n")
    assert await readers[0].chunk() == b""
    # the connection goes on
    status, body = await readers[0].whole("GET", location)
    assert (status, json.loads(body)["state"]) == (200, "succeeded")
    readers[0].close()
    resumed = await follow(front, location, last_event_id="2")
    assert (await resumed.chunk()).startswith(b"id: 3\n")
    assert await resumed.chunk() == b""
    resumed.close()


async def test_silence_is_filled(front: HttpFront, handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_routes, "HEARTBEAT_S", 0.01)
    handler.gate.clear()
    location = await submit(front)
    await handler.waiting.wait()
    reader = await follow(front, location)
    await reader.chunk()
    await reader.chunk()
    for _ in range(3):
        assert (await reader.chunk()).startswith(b":")
    handler.gate.set()
    while not (event := await reader.chunk()).startswith(b"id"):
        assert event.startswith(b":")
    assert b"succeeded" in event
    reader.close()


async def test_a_reader_that_leaves_is_forgotten(front: HttpFront, handler: Any) -> None:
    handler.gate.clear()
    location = await submit(front)
    await handler.waiting.wait()
    reader = await follow(front, location)
    reader.close()

    async def closed() -> None:
        while not handler.followers_closed:
            await asyncio.sleep(0.001)

    await asyncio.wait_for(closed(), LIMIT_S)
    assert not handler.cancelled.is_set()


async def test_a_reader_that_does_not_read_holds_little(front: HttpFront, handler: Any) -> None:
    handler.gate.clear()
    location = await submit(front)
    await handler.waiting.wait()
    (job,) = handler._jobs.values()
    taken = 0
    flood = 5000

    class Events(list[Any]):
        def __getitem__(self, at: Any) -> Any:
            nonlocal taken
            taken_here = super().__getitem__(at)
            if isinstance(at, slice):
                return self._counted(taken_here)
            return taken_here

        def _counted(self, events: list[Any]) -> Any:
            nonlocal taken
            for event in events:
                taken += 1
                yield event

    job.events = Events(job.events)
    for _ in range(flood):
        job.happened("output", JobState.RUNNING, {"text": "x" * 4000})
    reader = await follow(front, location)
    other = await follow(front, location, last_event_id=str(flood))
    while not (await other.chunk()).startswith(b"id: %d\n" % (flood + 2)):  # others go on meanwhile
        pass
    held_bytes = (taken - 2) * 4000
    assert held_bytes < 12 << 20, "events are fetched as they are read, but for what sockets buffer"
    handler.gate.set()
    for number in range(1, flood + 4):
        assert (await reader.chunk()).startswith(b"id: %d\n" % number)
    assert await reader.chunk() == b""
    reader.close()
    other.close()


async def test_streams_end_properly_when_the_server_stops(front: HttpFront, handler: Any) -> None:
    handler.gate.clear()
    location = await submit(front)
    await handler.waiting.wait()
    reader = await follow(front, location)
    await reader.chunk()
    await reader.chunk()
    await front.close(0.01)
    assert await reader.chunk() == b""
    reader.close()


async def test_a_reader_that_does_not_read_does_not_hold_the_server(front: HttpFront, handler: Any) -> None:
    handler.gate.clear()
    location = await submit(front)
    await handler.waiting.wait()
    (job,) = handler._jobs.values()
    for _ in range(5000):
        job.happened("output", JobState.RUNNING, {"text": "x" * 4000})
    reader = await follow(front, location)
    (task,) = front._state.tasks
    await asyncio.wait_for(front.close(0.01), LIMIT_S)
    assert task.done()
    reader.close()


async def test_leaving_a_long_poll_leaves_the_job_alone(front: HttpFront, handler: Any) -> None:
    handler.gate.clear()
    location = await submit(front)
    await handler.waiting.wait()
    gone = await Connection.to(front)
    gone.writer.write(f"GET {location}/result?wait=60 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    staying = await Connection.to(front)
    waiting = asyncio.create_task(staying.whole("GET", location + "/result?wait=60"))
    while len(handler.waits_s) < 2:
        await asyncio.sleep(0.001)
    gone.close()
    handler.gate.set()
    status, body = await waiting
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [1.5, 2.5])
    staying.close()


async def test_leaving_a_wait_cancels_the_job(front: HttpFront, handler: Any) -> None:
    handler.gate.clear()
    connection = await Connection.to(front)
    connection.writer.write(
        b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nPrefer: wait=60\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    )
    await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
    connection.close()
    await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)


def test_the_heartbeat_is_shorter_than_what_proxies_wait() -> None:
    assert event_stream.HEARTBEAT_S <= 30
