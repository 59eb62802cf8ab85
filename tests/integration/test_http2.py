"""HTTP/2 on the HTTP port: what clients of it get, and what those get that mean no good."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import certificates
import echo_handler
import httpx2
import numpy as np
import pytest
from http2_client import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    NO_ERROR,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    SETTINGS,
    Answer,
    Dial,
    Wire,
    block,
    data_frames,
    dialling,
    raw,
    rst_stream,
    settings,
    window_update,
)

from charonia.options.settings import GatewaySettings, TlsSettings
from gateway.http import protocol
from gateway.http.server import HttpFront
from gateway.http2 import request_streams
from gateway.http2.http_connection import MAX_STREAMS, http2

LIMIT_S = 30
INFER = "/v2/models/wide/infer"


@pytest.fixture(autouse=True)
def only_the_test_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own sweeps would add their seconds to those that a test tells."""
    monkeypatch.setattr("gateway.http.server._SWEEP_INTERVAL_S", 3600.0)


@pytest.fixture
def handler() -> Any:
    return echo_handler.EchoHandler()


@pytest.fixture
def given() -> GatewaySettings:
    return GatewaySettings(incarnation="test", http_address="127.0.0.1", http_port=0)


@pytest.fixture
async def front(given: GatewaySettings, handler: Any) -> AsyncIterator[HttpFront]:
    front = HttpFront(given, handler, http2)
    await front.start()
    yield front
    await front.close(1.0)


@pytest.fixture
async def client(front: HttpFront) -> AsyncIterator[httpx2.AsyncClient]:
    base = f"http://127.0.0.1:{front.port}"
    async with httpx2.AsyncClient(http1=False, http2=True, base_url=base, timeout=LIMIT_S) as asking:
        yield asking


@pytest.fixture
async def dial(front: HttpFront) -> AsyncIterator[Dial]:
    async with dialling(front.port) as dial:
        yield dial


def binary(rows: int) -> tuple[bytes, dict[str, str], bytes]:
    """A request of binary tensors to the model "wide": its body, its headers, and the tensor."""
    tensor = np.arange(2 * rows, dtype=np.float32).tobytes()
    given = {
        "name": "INPUT0",
        "datatype": "FP32",
        "shape": [1, rows, 2],
        "parameters": {"binary_data_size": len(tensor)},
    }
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    return head + tensor, {"inference-header-content-length": str(len(head))}, tensor


def opened(stream: int, method: str = "GET", path: str = "/v2", *more: tuple[str, str], ends: bool = True) -> bytes:
    fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "here"), *more]
    return raw(HEADERS, END_HEADERS | (END_STREAM if ends else 0), stream, block(fields))


def status(answer: Answer) -> str:
    assert answer.ended, answer
    return answer.headers[":status"]


def error(answer: Answer) -> str:
    return str(json.loads(answer.data)["error"])


class TestRequests:
    async def test_control_health_and_errors(self, client: httpx2.AsyncClient) -> None:
        reply = await client.get("/v2")
        assert (reply.http_version, reply.status_code, reply.json()["name"]) == ("HTTP/2", 200, "triton")
        assert (await client.get("/v2/health/ready")).status_code == 200
        assert (await client.head("/v2/nothing")).status_code == 404
        missing = await client.get("/v2/models/nope")
        assert (missing.status_code, "unknown model" in missing.json()["error"]) == (400, True) or (
            missing.status_code == 404
        )
        assert (await client.post("/v2/models/simple/ready")).status_code == 405

    async def test_many_at_once_on_one_connection(
        self, client: httpx2.AsyncClient, handler: Any, front: HttpFront
    ) -> None:
        handler.gate.clear()
        body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1, 2], "data": [1, 2]}]}
        asked = [asyncio.create_task(client.post(INFER, json=body | {"id": str(at)})) for at in range(100)]
        while len(handler.requests) < 100:
            await asyncio.sleep(0)
        assert len(front._state.connections) == 1
        handler.gate.set()
        replies = await asyncio.gather(*asked)
        assert [reply.json()["id"] for reply in replies] == [str(at) for at in range(100)]
        assert front._state.total_requests == 100

    @pytest.mark.parametrize("rows", [1, 1 << 19], ids=["small", "more than any window"])
    @pytest.mark.parametrize("has_length", [True, False])
    async def test_bodies_both_ways(self, client: httpx2.AsyncClient, rows: int, has_length: bool) -> None:
        body, headers, tensor = binary(rows)

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(body), 50_000):
                yield body[at : at + 50_000]

        reply = await client.post(INFER, content=body if has_length else pieces(), headers=headers)
        assert reply.status_code == 200
        assert reply.content[int(reply.headers["inference-header-content-length"]) :] == tensor

    async def test_compression(self, client: httpx2.AsyncClient) -> None:
        body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1, 2], "data": [1, 2]}]}
        reply = await client.post(INFER, json=body, headers={"accept-encoding": "gzip"})
        assert reply.headers["content-encoding"] == "gzip"
        assert reply.json()["outputs"][0]["data"] == [1.0, 2.0]

    async def test_a_body_over_the_limit(self, handler: Any) -> None:
        front = HttpFront(
            GatewaySettings(incarnation="t", http_address="127.0.0.1", http_port=0, http_max_input_size=100_000),
            handler, http2,
        )  # fmt: skip
        await front.start()
        async with dialling(front.port) as dial:
            wire = await dial()
            wire.write(opened(1, "POST", INFER, ends=False), data_frames(1, bytes(300_000)))
            answer = await wire.answer(1)
            assert (status(answer), "exceeds the maximum" in error(answer)) == ("400", True)
            assert "connection" not in answer.headers  # which is no word of HTTP/2
            wire.write(opened(3))
            assert status(await wire.answer(3)) == "200"
        await front.close(1.0)

    @pytest.mark.parametrize("expect", ["100-continue", "100-Continue"])
    async def test_expect_continue(self, dial: Dial, expect: str) -> None:
        wire = await dial()
        body, headers, tensor = binary(1)
        wire.write(opened(1, "POST", INFER, ("expect", expect), *headers.items(), ends=False))
        await wire.until(HEADERS, 1)
        assert wire.answers[1].headers == {":status": "100"}
        wire.answers.clear()
        wire.write(data_frames(1, body))
        answer = await wire.answer(1)
        assert (status(answer), answer.data.endswith(tensor)) == ("200", True)

    async def test_a_stream_of_events(self, client: httpx2.AsyncClient, handler: Any) -> None:
        halfway = asyncio.Event()
        handler.scripts["r"] = [0, halfway, 1, None]
        async with client.stream("POST", "/v2/models/stream/generate_stream", json={"INPUT0": 2.0, "id": "r"}) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = reply.aiter_lines()
            first = [line async for line in _until(lines, "data: ")]
            assert json.loads(first[-1][6:])["OUTPUT0"] == 0.0
            halfway.set()
            rest = [json.loads(line[6:]) async for line in lines if line.startswith("data: ")]
            assert rest[0]["OUTPUT0"] == 1.0

    async def test_a_client_that_cancels(self, dial: Dial, handler: Any) -> None:
        handler.gate.clear()
        wire = await dial()
        body, headers, _ = binary(1)
        wire.write(opened(1, "POST", INFER, *headers.items(), ends=False), data_frames(1, body))
        await handler.waiting.wait()
        wire.write(rst_stream(1))
        await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)
        handler.gate.set()
        wire.write(opened(3))
        assert status(await wire.answer(3)) == "200"
        assert 1 not in wire.answers

    async def test_a_connection_that_is_lost(self, dial: Dial, handler: Any, front: HttpFront) -> None:
        handler.gate.clear()
        wire = await dial()
        body, headers, _ = binary(1)
        wire.write(opened(1, "POST", INFER, *headers.items(), ends=False), data_frames(1, body))
        await handler.waiting.wait()
        wire.close()
        await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)
        while front._state.tasks or front._state.connections:
            await asyncio.sleep(0)


async def _until(lines: AsyncIterator[str], start: str) -> AsyncIterator[str]:
    async for line in lines:
        yield line
        if line.startswith(start):
            return


class TestBeginning:
    @pytest.mark.parametrize("cut", range(1, len(PREFACE) + 1))
    async def test_a_preface_in_two_pieces(self, dial: Dial, cut: int) -> None:
        wire = await dial(PREFACE[:cut])
        await asyncio.sleep(0.01)
        wire.write(PREFACE[cut:] + settings(), opened(1))
        assert status(await wire.answer(1)) == "200"

    async def test_a_preface_with_much_behind_it(self, dial: Dial) -> None:
        """Headers of a first piece of 16 KB are parsed by themselves in HTTP/1.1."""
        wire = await dial(b"")
        body, headers, tensor = binary(5_000)
        wire.write(PREFACE + settings(), opened(1, "POST", INFER, *headers.items(), ends=False), data_frames(1, body))
        answer = await wire.answer(1)
        assert (status(answer), answer.data.endswith(tensor)) == ("200", True)

    @pytest.mark.parametrize(
        "sent", [b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", b"PRI * HTTP/2.0\r\nHost: x\r\n\r\n",
                 b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n" + PREFACE + settings()]
    )  # fmt: skip
    async def test_what_is_no_preface_is_refused_as_ever(self, front: HttpFront, sent: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(sent)
        said = await asyncio.wait_for(reader.read(), LIMIT_S)
        assert b"HTTP/1.1 400 Bad Request" in said
        assert said.endswith(b'{"error":"Invalid HTTP request received."}')
        writer.close()

    async def test_http_1_stays(self, front: HttpFront) -> None:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.port}") as asking:
            assert (await asking.get("/v2")).http_version == "HTTP/1.1"

    @pytest.mark.skipif(not certificates.HAS_OPENSSL, reason="no openssl to make certificates")
    @pytest.mark.parametrize(
        ("offered", "chosen"), [(["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1"), (None, None)]
    )
    async def test_tls(self, handler: Any, tmp_path: Path, offered: list[str] | None, chosen: str | None) -> None:
        certificates.authority(tmp_path, "root")
        certificates.certificate(tmp_path, "server", "root")
        tls = TlsSettings("http", str(tmp_path / "server.crt"), str(tmp_path / "server.key"), "", False)
        front = HttpFront(
            GatewaySettings(incarnation="t", http_address="127.0.0.1", http_port=0, http_tls=tls), handler, http2
        )
        await front.start()
        context = ssl.create_default_context(cafile=str(tmp_path / "root.crt"))
        if offered is not None:
            context.set_alpn_protocols(offered)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port, ssl=context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == chosen
        writer.close()
        if chosen != "h2":  # over TLS nobody knows before
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port, ssl=context)
            writer.write(PREFACE + settings())
            assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
            writer.close()
        if chosen == "h2":
            body, headers, tensor = binary(1 << 16)
            async with httpx2.AsyncClient(
                http2=True, verify=context, base_url=f"https://127.0.0.1:{front.port}"
            ) as asking:
                reply = await asking.post(INFER, content=body, headers=headers)
                assert (reply.http_version, reply.content.endswith(tensor)) == ("HTTP/2", True)
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port, ssl=context)
            writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), LIMIT_S)) == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        await front.close(1.0)

    async def test_a_unix_socket(self, handler: Any, tmp_path: Path) -> None:
        path = str(tmp_path / "http")
        front = HttpFront(
            GatewaySettings(incarnation="t", http_address="127.0.0.1", http_port=0, http_socket=path), handler, http2
        )
        await front.start()
        transport = httpx2.AsyncHTTPTransport(uds=path, http1=False, http2=True)
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as asking:
            assert (await asking.get("/v2")).http_version == "HTTP/2"
        await front.close(1.0)


class TestOtherClients:
    @pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
    async def test_curl(self, front: HttpFront) -> None:
        said = await _run(
            "curl", "-sS", "--http2-prior-knowledge", "-w", " %{http_version}", f"127.0.0.1:{front.port}/v2"
        )
        assert said.startswith('{"name":"triton"')
        assert said.endswith(" 2")

    @pytest.mark.skipif(shutil.which("h2load") is None, reason="no h2load")
    async def test_h2load(self, front: HttpFront, tmp_path: Path) -> None:
        body, headers, _ = binary(1000)
        (tmp_path / "body").write_bytes(body)
        words = [f"-H{name}: {value}" for name, value in headers.items()]
        said = await _run(
            "h2load", "-n500", "-c5", "-m20", f"-d{tmp_path / 'body'}", *words, f"http://127.0.0.1:{front.port}{INFER}"
        )
        assert "500 succeeded, 0 failed, 0 errored, 0 timeout" in said
        assert "status codes: 500 2xx" in said


async def _run(*words: str) -> str:
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    said, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0
    return said.decode()


class TestFaults:
    @pytest.mark.parametrize(
        "fields",
        [
            [(":method", "GET"), (":scheme", "http")],
            [(":method", "GET"), (":scheme", "http"), (":path", "/v2"), ("Upper", "x")],
            [(":method", "GET"), (":scheme", "http"), (":path", "/v2"), ("connection", "close")],
            [(":method", "GET"), (":scheme", "http"), (":path", "/v2"), ("transfer-encoding", "chunked")],
            [(":method", "GET"), (":scheme", "http"), (":path", "/v2"), ("a", "b\r\nc: d")],
            [
                (":method", "GET"),
                (":scheme", "http"),
                (":path", "/v2"),
                ("content-length", "1"),
                ("content-length", "2"),
            ],
            [(":method", "GET"), (":scheme", "http"), (":path", "/v2"), ("content-length", "-1")],
            [(":method", "GET"), (":scheme", "http"), (":path", "/v2"), ("content-length", "5")],
            [(":method", "CONNECT"), (":authority", "elsewhere:1")],
        ],
        ids=["no path", "upper case", "connection", "coding", "two lines", "lengths", "length", "no body", "proxy"],
    )
    async def test_malformed_requests(self, dial: Dial, handler: Any, fields: list[tuple[str, str]]) -> None:
        wire = await dial()
        wire.write(raw(HEADERS, END_HEADERS | END_STREAM, 1, block(fields)), opened(3))
        assert (await wire.answer(1)).reset == PROTOCOL_ERROR
        assert status(await wire.answer(3)) == "200"

    @pytest.mark.parametrize("size", [4, 6])
    async def test_a_body_of_another_length(self, dial: Dial, handler: Any, size: int) -> None:
        wire = await dial()
        wire.write(opened(1, "POST", INFER, ("content-length", "5"), ends=False), data_frames(1, bytes(size)))
        assert (await wire.answer(1)).reset == PROTOCOL_ERROR
        assert handler.requests == []

    async def test_a_body_longer_than_was_said_is_refused_before_it_ends(self, dial: Dial, handler: Any) -> None:
        """What it said is what it reserves, as an upload of a file does: it may bring no more."""
        wire = await dial()
        wire.write(opened(1, "POST", INFER, ("content-length", "5"), ends=False), raw(DATA, 0, 1, bytes(5)))
        wire.write(opened(3))
        assert status(await wire.answer(3)) == "200"
        assert not wire.answers.get(1)
        wire.write(raw(DATA, 0, 1, b"x"))
        assert (await wire.answer(1)).reset == PROTOCOL_ERROR
        assert handler.requests == []

    @pytest.mark.parametrize("path", ["no/slash", "http://[", "/\x01", "*"])
    async def test_paths_of_nothing(self, dial: Dial, path: str) -> None:
        wire = await dial()
        wire.write(opened(1, "GET", path), opened(3))
        assert status(await wire.answer(1)) in ("400", "404")
        assert status(await wire.answer(3)) == "200"

    async def test_too_many_headers(self, dial: Dial) -> None:
        wire = await dial()
        wire.write(opened(1, "GET", "/v2", *((f"n{at}", "") for at in range(protocol.MAX_HEADERS))))
        answer = await wire.answer(1)
        assert (status(answer), error(answer)) == ("431", "request has more than 256 headers")

    async def test_too_much_of_headers(self, dial: Dial) -> None:
        wire = await dial()
        wire.write(raw(HEADERS, END_STREAM, 1, b"\0" * 16_000))
        await wire.flood(raw(CONTINUATION, 0, 1, b"\0" * 16_000) * 8)
        assert (await wire.end())[0] == ENHANCE_YOUR_CALM

    async def test_small_continuations_without_end(self, dial: Dial) -> None:
        wire = await dial()
        wire.write(raw(HEADERS, END_STREAM, 1))
        await wire.flood(raw(CONTINUATION, 0, 1) * 100_000)
        assert (await wire.end())[0] == ENHANCE_YOUR_CALM

    @pytest.mark.parametrize(
        "frames",
        [settings() * 400, raw(PING, 0, 0, b"12345678") * 20_000, raw(99, 0, 0) * 20_000, raw(DATA, 0, 1) * 20_000],
        ids=["settings", "pings", "unknown", "empty data"],
    )
    async def test_floods(self, dial: Dial, handler: Any, frames: bytes) -> None:
        wire = await dial()
        wire.write(opened(1, "POST", INFER, ends=False))
        await wire.flood(frames)
        assert (await wire.end())[0] == ENHANCE_YOUR_CALM

    async def test_rapid_resets(self, dial: Dial, handler: Any, front: HttpFront) -> None:
        handler.gate.clear()
        wire = await dial()
        body, headers, _ = binary(1)
        await wire.flood(
            b"".join(
                opened(at, "POST", INFER, *headers.items(), ends=False) + data_frames(at, body) + rst_stream(at)
                for at in range(1, 10_001, 2)
            )
        )
        assert (await wire.end())[0] == ENHANCE_YOUR_CALM
        assert len(handler.requests) < 3000
        while front._state.tasks:
            await asyncio.sleep(0)

    async def test_streams_at_once(self, dial: Dial, handler: Any) -> None:
        handler.gate.clear()
        wire = await dial()
        said = await wire.until(SETTINGS)
        assert said.payload[6:12] == b"\0\3" + MAX_STREAMS.to_bytes(4)
        body, headers, _ = binary(1)
        for at in range(1, 2 * MAX_STREAMS + 2, 2):
            wire.write(opened(at, "POST", INFER, *headers.items(), ends=False), data_frames(at, body))
        last = 2 * MAX_STREAMS + 1
        assert (await wire.answer(last)).reset == REFUSED_STREAM
        handler.gate.set()
        for at in range(1, last, 2):
            assert status(await wire.answer(at)) == "200"

    async def test_pieces_without_end(self, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(request_streams, "MAX_CHUNKS", 100)
        wire = await dial()
        wire.write(opened(1, "POST", INFER, ends=False), raw(DATA, 0, 1, b"x") * 101)
        answer = await wire.answer(1)
        assert (status(answer), error(answer)) == ("400", "request body has more than 100 chunks")

    async def test_many_pieces_of_a_large_body(self, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(request_streams, "MAX_CHUNKS", 2)
        wire = await dial()
        body, headers, tensor = binary(7_500)
        parts = [body[at : at + 1024] for at in range(0, len(body), 1024)]
        assert len(parts) > 50
        wire.write(opened(1, "POST", INFER, *headers.items(), ends=False))
        wire.write(*(raw(DATA, 0, 1, part) for part in parts[:-1]), raw(DATA, END_STREAM, 1, parts[-1]))
        answer = await wire.answer(1)
        assert status(answer) == "200"
        assert answer.data.endswith(tensor)
        # tiny ones are few, whatever came before them
        wire.write(opened(3, "POST", INFER, ends=False), raw(DATA, 0, 3, bytes(10_000)), raw(DATA, 0, 3, b"x") * 11)
        answer = await wire.answer(3)
        assert (status(answer), error(answer)) == ("400", "request body has more than 2 chunks")

    async def test_bodies_that_take_too_much_memory_together(self, handler: Any) -> None:
        front = HttpFront(
            GatewaySettings(
                incarnation="t", http_address="127.0.0.1", http_port=0, max_pending_per_gateway_bytes=1_000_000
            ),
            handler, http2,
        )  # fmt: skip
        await front.start()
        async with dialling(front.port) as dial:
            wires = [await dial() for _ in range(3)]
            part = raw(DATA, 0, 1, bytes(10_000))
            for wire in wires:
                wire.write(opened(1, "POST", INFER, ends=False), part * 40)
                if wire is not wires[2]:
                    await wire.settle()
            answer = await wires[2].answer(1)
            assert (status(answer), "too much memory" in error(answer)) == ("429", True)
            for wire in wires[:2]:
                wire.write(rst_stream(1))
                await wire.settle()
            body, headers, tensor = binary(5_000)
            wires[0].write(opened(3, "POST", INFER, *headers.items(), ends=False), data_frames(3, body))
            assert (await wires[0].answer(3)).data.endswith(tensor)
        await front.close(1.0)

    async def test_a_client_that_does_not_read(self, dial: Dial, handler: Any, front: HttpFront) -> None:
        body, headers, tensor = binary(1 << 17)
        wire = await dial(PREFACE + settings((INITIAL_WINDOW, 1000)))
        wire.write(opened(1, "POST", INFER, *headers.items(), ends=False))
        for at in range(0, len(body), 16_384):
            wire.write(raw(DATA, END_STREAM if at + 16_384 >= len(body) else 0, 1, body[at : at + 16_384]))
            await wire.settle()
            if at == 16_384 * 30:
                await asyncio.sleep(0)
        await wire.data(1000)
        wire.write(opened(3))
        await wire.until(HEADERS, 3)  # others go on
        assert len(front._state.tasks) >= 1  # a shutdown would wait for it
        wire.write(settings((INITIAL_WINDOW, 1 << 24)), window_update(0, 1 << 24))
        assert (await wire.answer(1)).data.endswith(tensor)
        assert status(await wire.answer(3)) == "200"

    async def test_what_the_application_did_not_take_is_not_asked_for(self, dial: Dial, handler: Any) -> None:
        """The window of a stream is that of a body which nobody reads."""
        wire = await dial()
        wire.write(opened(1, "POST", "/v2/health/live", ends=False))
        answer = await wire.answer(1)  # it reads no body
        assert (status(answer), answer.reset) == ("405", None)
        assert (await wire.settle())[-1:] == [] or wire.answers[1].reset == NO_ERROR

    async def test_stalled_bodies(self, dial: Dial, front: HttpFront, monkeypatch: pytest.MonkeyPatch) -> None:
        wire = await dial()
        wire.write(opened(1, "POST", INFER, ends=False), raw(DATA, 0, 1, b"x"))
        await wire.settle()
        (connection,) = front._connections()
        for _ in range(protocol.BODY_STALL_S):
            wire.write(raw(DATA, 0, 1, b"x"))
            await wire.settle()
            connection.sweep(1.0)
        answer = await wire.answer(1)
        assert (status(answer), error(answer)) == ("408", "request was not received in time")

    async def test_headers_that_stall_and_connections_without_requests(self, dial: Dial, front: HttpFront) -> None:
        wire = await dial()
        wire.write(raw(HEADERS, END_STREAM, 1, block([(":method", "GET")])))
        while not (found := front._connections()) or getattr(found[0], "_block", None) is None:
            await asyncio.sleep(0)
        for _ in range(protocol.HEADERS_TIMEOUT_S + 2):
            found[0].sweep(1.0)
        assert (await wire.end())[0] == NO_ERROR
        wire.close()
        while front._connections():
            await asyncio.sleep(0)
        idle = await dial()
        idle.write(opened(1))
        await idle.answer(1)
        (connection,) = front._connections()
        for _ in range(protocol.IDLE_TIMEOUT_S - 1):
            connection.sweep(1.0)
        idle.write(opened(3))
        await idle.answer(3)  # which is a sign of life
        for _ in range(protocol.IDLE_TIMEOUT_S + 2):
            connection.sweep(1.0)
        assert (await idle.end())[0] == NO_ERROR


class TestEnd:
    async def test_what_is_under_way_finishes(self, front: HttpFront, handler: Any, dial: Dial) -> None:
        handler.gate.clear()
        wire = await dial()
        body, headers, tensor = binary(1)
        wire.write(opened(1, "POST", INFER, *headers.items(), ends=False), data_frames(1, body))
        await handler.waiting.wait()
        closing = asyncio.create_task(front.close(LIMIT_S))
        assert (await wire.until(GOAWAY)).payload[4:8] == bytes(4)
        wire.write(opened(3))  # it had not heard of it yet
        answer = await wire.answer(3)
        assert (status(answer), error(answer)) == ("503", "Server exiting")
        handler.gate.set()
        assert (await wire.answer(1)).data.endswith(tensor)
        assert (await wire.end())[0] == NO_ERROR
        await asyncio.wait_for(closing, LIMIT_S)

    async def test_past_the_grace_the_rest_is_told(self, front: HttpFront, handler: Any, dial: Dial) -> None:
        handler.gate.clear()
        wire = await dial()
        body, headers, _ = binary(1)
        wire.write(opened(1, "POST", INFER, *headers.items(), ends=False), data_frames(1, body))
        await handler.waiting.wait()
        await front.close(0.05)
        answer = await wire.answer(1)
        assert (status(answer), error(answer)) == ("503", "Server exiting")

    async def test_a_connection_without_requests(self, front: HttpFront, dial: Dial) -> None:
        wire = await dial()
        await wire.settle()
        await front.close(LIMIT_S)
        assert (await wire.until(GOAWAY)).payload[:4] == b"\x7f\xff\xff\xff"
        assert (await wire.until(GOAWAY)).payload == bytes(8)
        assert await wire.frame() is None


async def test_a_response_that_fails_in_the_middle(handler: Any) -> None:
    """The stream is reset, never ended as if it were whole, and the connection goes on."""
    front = HttpFront(GatewaySettings(incarnation="t", http_address="127.0.0.1", http_port=0), handler, http2)

    async def broken(scope: Any, _receive: Any, send: Any) -> None:
        if scope["path"] == "/never":
            raise ValueError("before")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        if scope["path"] == "/half":
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise ValueError("within")
        await send({"type": "http.response.body", "body": b"whole one"})

    await front.start()
    front._application.http2 = http2(GatewaySettings(incarnation="t"), broken, front._state)
    async with dialling(front.port) as dial:
        wire: Wire = await dial()
        wire.write(opened(1, path="/half"), opened(3, path="/never"), opened(5, path="/whole"))
        assert ((await wire.answer(1)).reset, wire.answers[1].data) == (2, b"half")
        answer = await wire.answer(3)
        assert (status(answer), error(answer)) == ("500", "internal server error")
        assert (await wire.answer(5)).data == b"whole one"
    await front.close(1.0)
