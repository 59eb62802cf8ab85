"""Hostile senders at the HTTP front, and its shutdown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from http_calls import exchange, read_reply, request

from charonia.errors import StartupError
from charonia.options.settings import GatewaySettings
from gateway.http import lingering, protocol
from gateway.http.server import HttpFront
from gateway.listening import listen


@pytest.fixture(autouse=True)
def only_the_test_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own sweeps would add their seconds to those that a test tells."""
    monkeypatch.setattr("gateway.http.server._SWEEP_INTERVAL_S", 3600.0)


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(incarnation="test", http_address="127.0.0.1", http_port=0)


@pytest.fixture
async def front(settings: GatewaySettings, handler: Any) -> AsyncIterator[HttpFront]:
    front = HttpFront(settings, handler)
    await front.start()
    yield front
    await front.close(1.0)


class TestHostileSenders:
    async def test_millions_of_chunks(self, front: HttpFront) -> None:
        head = b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        status, headers, body = await exchange(front, head + b"1\r\n \r\n" * (protocol.MAX_CHUNKS + 100))
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body) == {"error": "request body has more than 65536 chunks"}

    async def test_a_chunked_body_within_the_cap(self, front: HttpFront) -> None:
        head = b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: 0\r\n"
        status, _, _ = await exchange(
            front, head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n\0\r\n" * 64 + b"0\r\n\r\n"
        )
        assert status == 200

    @pytest.mark.parametrize(
        ("head", "status"),
        [
            (b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
            (b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\na: " + b"b" * 300_000, 431),
            (b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
            (b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
            (
                b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
                b"Transfer-Encoding: gzip, identity\r\n\r\n",
                400,
            ),
            (b"not http at all\r\n\r\n", 400),
            (b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400),
            (b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000000000\r\n\r\n", 400),
        ],
    )
    async def test_broken_and_oversized_framing(self, front: HttpFront, head: bytes, status: int) -> None:
        got, headers, body = await exchange(front, head)
        assert (got, headers["connection"]) == (status, "close")
        assert json.loads(body)["error"]
        assert (await exchange(front, request()))[0] == 200

    async def test_a_body_over_the_limit_gets_its_answer_on_a_living_connection(self, front: HttpFront) -> None:
        size = 70_000_000
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // 1_000_000):
            writer.write(b" " * 1_000_000)
            await writer.drain()
        status, _, body = await asyncio.wait_for(read_reply(reader), 30)
        assert status == 400
        assert json.loads(body)["error"].startswith("request JSON size of 70000000 bytes exceeds")
        writer.write(request())
        assert (await asyncio.wait_for(read_reply(reader), 30))[0] == 200
        writer.close()

    @pytest.mark.parametrize(
        ("sent", "status"),
        [
            (b"", None),
            (b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\n", 408),
            (b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nab", 408),
        ],
    )
    async def test_stalled_connections_are_ended(self, front: HttpFront, sent: bytes, status: int | None) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(sent)
        # an answer on another connection shows that the bytes before it have arrived
        assert (await exchange(front, request()))[0] == 200
        stalled = [c for c in front._state.connections if isinstance(c, protocol.BoundedHttpProtocol)]
        for connection in stalled:
            connection.sweep(protocol.HEADERS_TIMEOUT_S - 1)
        assert not any(c.transport.is_closing() for c in stalled if c._phase != "idle")
        for connection in stalled:
            connection.sweep(protocol.IDLE_TIMEOUT_S)
        if status is not None:
            assert (await asyncio.wait_for(read_reply(reader), 30))[0] == status
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()

    async def test_a_waiting_request_is_no_stall(self, front: HttpFront, handler: Any) -> None:
        handler.gate.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request())
        await handler.waiting.wait()
        for connection in list(front._state.connections):
            connection.sweep(protocol.IDLE_TIMEOUT_S + 1)  # type: ignore[union-attr]
        handler.gate.set()
        assert (await asyncio.wait_for(read_reply(reader), 30))[0] == 200
        writer.close()


class TestClientsThatStillSend:
    """A client that reads only when all is sent gets the answer that came before, and no reset."""

    @pytest.mark.parametrize(
        ("head", "status"),
        [
            (b"POST /v2/models/no/such/place HTTP/1.1\r\nHost: x\r\nConnection: close\r\n", 404),
            (b"POST /v2/models/no/such/place HTTP/1.0\r\n", 404),
            (b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 300, 431),
        ],
    )
    async def test_it_reads_last(self, front: HttpFront, head: bytes, status: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        size = 32 << 20
        writer.write(head + b"Content-Length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(bytes(1 << 16))
            await writer.drain()
        assert (await asyncio.wait_for(read_reply(reader), 30))[0] == status
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()

    @pytest.mark.parametrize(("linger_s", "sends"), [(30.0, False), (0.2, True)])
    async def test_it_is_not_waited_for_for_ever(
        self, front: HttpFront, monkeypatch: pytest.MonkeyPatch, linger_s: float, sends: bool
    ) -> None:
        monkeypatch.setattr(lingering, "SILENCE_S", 0.05)
        monkeypatch.setattr(lingering, "LINGER_S", linger_s)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        head = b"POST /v2/models/no/such/place HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 99999999"
        writer.write(head + b"\r\n\r\n")
        assert (await asyncio.wait_for(read_reply(reader), 30))[0] == 404
        while front._state.connections:
            if sends:
                with suppress(OSError):
                    writer.write(b"x")
            await asyncio.sleep(0.01)
        writer.close()

    async def test_a_shutdown_does_not_wait_for_it(self, front: HttpFront) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"POST /no HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 99999999\r\n\r\n")
        assert (await asyncio.wait_for(read_reply(reader), 30))[0] == 404
        await asyncio.wait_for(front.close(120.0), 30)
        writer.close()


class TestShutdown:
    async def test_a_taken_port_is_a_sentence(self, front: HttpFront, handler: Any) -> None:
        other = HttpFront(GatewaySettings(incarnation="test", http_address="127.0.0.1", http_port=front.port), handler)
        with pytest.raises(StartupError) as caught:
            await other.start()
        assert str(caught.value) == (
            f"failed to start HTTP service: Unavailable - Socket '127.0.0.1:{front.port}' already in use"
        )

    async def test_an_address_that_is_not_ours(self) -> None:
        with pytest.raises(StartupError, match=r"cannot listen on '192\.0\.2\.1:0'"):
            listen("192.0.2.1", 0, service="HTTP")

    async def test_what_is_under_way_finishes_and_nothing_new_begins(self, front: HttpFront, handler: Any) -> None:
        handler.gate.clear()
        idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", front.port)
        idle_writer.write(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await read_reply(idle_reader))[0] == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request())
        await handler.waiting.wait()
        await front.stop_accepting()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", front.port)
        idle_writer.write(request())
        status, headers, body = await read_reply(idle_reader)
        assert (status, headers["connection"], body) == (503, "close", b'{"error":"Server exiting"}')
        closing = asyncio.create_task(front.close(10))
        handler.gate.set()
        status, headers, body = await asyncio.wait_for(read_reply(reader), 30)
        assert (status, body[-64:]) == (200, b"\x01" * 64)
        await asyncio.wait_for(closing, 30)
        assert await reader.read() == b""
        writer.close()
        idle_writer.close()

    async def test_past_the_grace_the_rest_is_told(self, front: HttpFront, handler: Any) -> None:
        handler.gate.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request())
        await handler.waiting.wait()
        await front.close(0)
        status, _, body = await asyncio.wait_for(read_reply(reader), 30)
        assert (status, body) == (503, b'{"error":"Server exiting"}')
        assert handler.cancelled.is_set()
        writer.close()
