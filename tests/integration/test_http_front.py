"""The HTTP front on real sockets: a stock client, shutdown, disconnects, and senders that mean no good."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from http_calls import exchange, read_reply, request

from charonia.options.settings import GatewaySettings
from gateway.http import protocol
from gateway.http.exchanges import MAX_WAITING
from gateway.http.server import HttpFront


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


class TestStockClient:
    """tritonclient blocks, so it works in a thread while the front runs in the loop."""

    async def test_control_calls(self, front: HttpFront, handler: Any) -> None:
        def calls() -> None:
            with triton.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
                assert client.is_server_live()
                assert client.is_server_ready()
                assert client.is_model_ready("simple")
                assert not client.is_model_ready("nope")
                assert client.get_server_metadata()["name"] == "triton"
                assert client.get_model_metadata("simple", "1")["inputs"][0]["shape"] == [-1, 16]
                assert client.get_model_config("simple")["max_batch_size"] == 8
                assert client.get_inference_statistics("simple")["model_stats"][0]["inference_count"] == 2
                assert client.get_model_repository_index()[1] == {"name": "never"}
                client.load_model("simple", config="{}", files={"file:1/model.onnx": b"\0bytes"})
                client.unload_model("simple", unload_dependents=True)
                assert client.get_log_settings()["log_format"] == "default"
                assert client.get_system_shared_memory_status() == []
                with pytest.raises(triton.InferenceServerException, match="Client shared memory is disabled"):
                    client.register_system_shared_memory("r", "/k", 64)

        await asyncio.to_thread(calls)
        assert handler.loads == [("simple", "{}", {"1/model.onnx": b"\0bytes"})]
        assert handler.unloads == [("simple", True)]

    @pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
    @pytest.mark.parametrize("binary", [True, False])
    async def test_inference(self, front: HttpFront, binary: bool, compression: str | None) -> None:
        values = np.arange(32, dtype=np.int32).reshape(2, 16)

        def calls() -> None:
            with triton.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
                inputs = []
                for name, array in (("INPUT0", values), ("INPUT1", -values)):
                    tensor = triton.InferInput(name, list(array.shape), "INT32")
                    tensor.set_data_from_numpy(array, binary_data=binary)
                    inputs.append(tensor)
                for outputs in (
                    None,
                    [triton.InferRequestedOutput(f"OUTPUT{i}", binary_data=i == 0) for i in range(2)],
                ):
                    result = client.infer(
                        "simple", inputs, outputs=outputs, request_id="r",
                        request_compression_algorithm=compression, response_compression_algorithm=compression,
                    )  # fmt: skip
                    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), values)
                    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), -values)
                    assert result.get_response()["id"] == "r"
                wanted = triton.InferRequestedOutput("OUTPUT0", class_count=2)
                best = client.infer("simple", inputs, outputs=[wanted]).as_numpy("OUTPUT0")
                assert best.tolist() == [[b"15:15", b"14:14"], [b"31:15", b"30:14"]]

        await asyncio.to_thread(calls)

    @pytest.mark.parametrize(
        ("datatype", "dtype"),
        [
            ("BOOL", "?"), ("UINT8", "u1"), ("INT64", "i8"), ("FP16", "f2"), ("FP32", "f4"), ("FP64", "f8"),
            ("BYTES", "O"),
        ],
    )  # fmt: skip
    async def test_every_kind_of_tensor(self, front: HttpFront, datatype: str, dtype: str) -> None:
        values: list[Any] = [b"", b"ab", b"\xff\0", b"x"] if datatype == "BYTES" else [0, 1, 1, 0]
        array = np.array(values, dtype=dtype)

        def calls() -> None:
            with triton.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
                tensor = triton.InferInput("INPUT0", [4], datatype)
                tensor.set_data_from_numpy(array)
                assert client.infer(f"any_{datatype}", [tensor]).as_numpy("OUTPUT0").tolist() == array.tolist()

        await asyncio.to_thread(calls)

    @pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
    async def test_the_asyncio_client(self, front: HttpFront, compression: str | None) -> None:
        values = np.arange(16, dtype=np.float32).reshape(1, 16)
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
            assert await client.is_server_ready()
            assert (await client.get_model_metadata("identity"))["name"] == "identity"
            for binary in (True, False):
                tensor = triton_aio.InferInput("INPUT0", [1, 16], "FP32")
                tensor.set_data_from_numpy(values, binary_data=binary)
                result = await client.infer(
                    "identity", [tensor], request_compression_algorithm=compression,
                    response_compression_algorithm=compression,
                )  # fmt: skip
                np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), values)
            with pytest.raises(triton.InferenceServerException, match="Request for unknown model: 'nope' is not found"):
                await client.infer("nope", [tensor])

    async def test_errors_carry_text_and_status(self, front: HttpFront) -> None:
        def calls() -> None:
            with triton.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
                tensor = triton.InferInput("INPUT0", [1], "FP32")
                tensor.set_data_from_numpy(np.zeros(1, dtype=np.float32))
                with pytest.raises(triton.InferenceServerException) as caught:
                    client.infer("nope", [tensor])
                assert caught.value.message() == "Request for unknown model: 'nope' is not found"
                assert caught.value.status() == "404"

        await asyncio.to_thread(calls)


class TestConnections:
    async def test_one_connection_serves_many_requests(self, front: HttpFront, handler: Any) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        for _ in range(5):
            writer.write(request())
            status, _, body = await read_reply(reader)
            assert (status, body[-64:]) == (200, b"\x01" * 64)
        writer.write(request() * 3)  # pipelined
        for _ in range(3):
            assert (await read_reply(reader))[0] == 200
        writer.close()
        assert len(handler.requests) == 8

    async def test_a_burst_of_requests_is_answered(self, front: HttpFront) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        count = 2 * protocol.MAX_HEADER_BYTES // len(request()) + 500  # many bytes at once, which end within headers
        writer.write(request() * count)
        for _ in range(count):
            assert (await asyncio.wait_for(read_reply(reader), 30))[0] == 200
        writer.close()

    async def test_of_requests_that_wait_few_are_read(self, front: HttpFront, handler: Any) -> None:
        handler.gate.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        count, large = 10, 3_000_000
        one = request(size=large)
        writer.write(request() * (MAX_WAITING + 1) + one * count)
        await asyncio.wait_for(handler.waiting.wait(), 30)
        (connection,) = front._state.connections
        assert isinstance(connection, protocol.BoundedHttpProtocol)
        async with asyncio.timeout(30):
            while not connection.flow.read_paused:
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(connection.pipeline) < MAX_WAITING + 2
        assert sum(len(cycle.body) for cycle, _ in connection.pipeline) < large
        for _ in range(3):
            connection.sweep(protocol.BODY_STALL_S - 1)  # it is not the client that stalls
        handler.gate.set()
        for _ in range(MAX_WAITING + 1 + count):
            assert (await asyncio.wait_for(read_reply(reader), 30))[0] == 200
        writer.close()

    async def test_large_tensors(self, front: HttpFront) -> None:
        size = 4_000_000
        status, _, body = await exchange(front, request("/v2/models/identity/infer", size))
        assert status == 200
        assert body[-size:] == b"\x01" * size

    async def test_answers_do_not_wait_for_more_data(self, front: HttpFront) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request())
        await read_reply(reader)
        (accepted,) = front._state.connections
        accepted_socket = accepted.transport.get_extra_info("socket")
        assert accepted_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()

    async def test_http_1_0_ends_the_connection(self, front: HttpFront) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request().replace(b"HTTP/1.1", b"HTTP/1.0"))
        whole = await asyncio.wait_for(reader.read(), 30)
        assert b"connection: close" in whole
        assert whole.endswith(b"\x01" * 64)
        writer.close()

    async def test_http_1_0_keeps_a_connection_that_it_asks_to_keep(self, front: HttpFront) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        for _ in range(3):
            writer.write(request(extra="Connection: keep-alive\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"))
            status, headers, body = await asyncio.wait_for(read_reply(reader), 30)
            assert (status, headers["connection"], body[-64:]) == (200, "keep-alive", b"\x01" * 64)
        writer.close()

    async def test_http_1_0_reads_a_stream_to_its_end(self, front: HttpFront) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        body = b'{"INPUT0":[1.0]}'
        writer.write(
            b"POST /v2/models/stream/generate_stream HTTP/1.0\r\nConnection: keep-alive\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        whole = await asyncio.wait_for(reader.read(), 30)
        assert whole.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in whole
        writer.close()

    async def test_expect_continue(self, front: HttpFront) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        head, body = request(extra="Expect: 100-continue\r\n").split(b"\r\n\r\n", 1)
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await read_reply(reader))[0] == 200
        writer.close()

    async def test_a_client_that_leaves_cancels_its_request(self, front: HttpFront, handler: Any) -> None:
        handler.gate.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request())
        await asyncio.wait_for(handler.waiting.wait(), 30)
        writer.close()
        await asyncio.wait_for(handler.cancelled.wait(), 30)

    async def test_a_request_whose_task_was_cancelled_takes_no_other_along(
        self, front: HttpFront, handler: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        infer = handler.infer

        async def cancelled_within(*arguments: Any, **more: Any) -> Any:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            return await infer(*arguments, **more)

        monkeypatch.setattr(handler, "infer", cancelled_within)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request() * 3)
        for _ in range(3):
            assert (await asyncio.wait_for(read_reply(reader), 30))[0] == 200
        writer.close()

    async def test_a_client_that_leaves_with_a_request_waiting_is_noticed(self, front: HttpFront, handler: Any) -> None:
        handler.gate.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request() * 2)
        await asyncio.wait_for(handler.waiting.wait(), 30)
        writer.close()
        await asyncio.wait_for(handler.cancelled.wait(), 30)
        assert len(handler.requests) == 1

    @pytest.mark.parametrize("pieces", [1, 2, 3])
    async def test_wishes_for_other_protocols_are_passed_over(self, front: HttpFront, pieces: int) -> None:
        """What clients send that would rather speak HTTP/2: curl --http2, Java's."""
        wish = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        head, body = request(extra=wish).split(b"\r\n\r\n", 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        parts = {
            1: [head + b"\r\n\r\n" + body],
            2: [head + b"\r\n\r\n", body],
            3: [head[:90], head[90:], b"\r\n\r\n" + body],
        }
        for part in parts[pieces]:
            writer.write(part)
            assert (await exchange(front, request()))[0] == 200  # the part has arrived
        status, _, answer = await asyncio.wait_for(read_reply(reader), 30)
        assert (status, answer[-64:]) == (200, b"\x01" * 64)
        writer.write((head + b"\r\n\r\n" + body) * 2 + request())
        for _ in range(3):
            assert (await asyncio.wait_for(read_reply(reader), 30))[0] == 200
        writer.close()

    async def test_a_tunnel_is_refused(self, front: HttpFront) -> None:
        status, headers, body = await exchange(front, b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body) == {"error": "this server is no proxy"}

    async def test_a_percent_encoded_name(self, front: HttpFront) -> None:
        assert (await exchange(front, request("/v2/models/ident%69ty/infer")))[0] == 200
        status, _, body = await exchange(front, request("/v2/models/..%2fidentity/infer"))
        assert (status, body) == (404, b'{"error":"Not Found"}')


class TestForwardedHeaders:
    @pytest.fixture
    def settings(self) -> GatewaySettings:
        return GatewaySettings(
            incarnation="test", http_address="127.0.0.1", http_port=0, http_header_forward_pattern="(?-i)My-.*"
        )

    async def test_names_keep_their_case(self, front: HttpFront, handler: Any) -> None:
        await exchange(front, request(extra="My-Key: a\r\nmy-key2: b\r\n"))
        assert handler.requests[0].parameters == {"My-Key": "a"}

    async def test_names_keep_their_case_beside_a_wish_for_another_protocol(
        self, front: HttpFront, handler: Any
    ) -> None:
        await exchange(front, request(extra="My-Key: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nmy-key2: b\r\n"))
        assert handler.requests[0].parameters == {"My-Key": "a"}


def test_the_wire_numbers_are_what_the_client_packs() -> None:
    assert request()[-64:] == struct.pack("<16I", *[0x01010101] * 16)
