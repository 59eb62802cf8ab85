"""What the gRPC front does by its settings: restricted protocols, forwarded headers, ports, TLS, compression."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_calls import LIMIT_S, SERVICE, infer_stub, raw, request, status_of, stream_stub
from grpc_fronts import MakeFront

from charonia.errors import StartupError
from charonia.options.settings import GatewaySettings, GrpcDelays, TlsSettings
from gateway.app import Front
from protos import health


class TestRestrictedProtocols:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        groups = ("inference", "health", "model-repository")
        return replace(settings, grpc_restricted_protocol=((groups, "admin-Key", "x"),))

    async def test_every_method_of_a_group(self, channel: grpc.aio.Channel) -> None:
        refusal = (
            grpc.StatusCode.UNAVAILABLE,
            "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-Key'",
        )
        key = [("triton-grpc-protocol-admin-key", "x")]
        check = f"/{health.SERVICE_NAME}/Check"
        for method, message in (
            (SERVICE + "ModelInfer", request().SerializeToString()), (SERVICE + "ServerLive", b""),
            (SERVICE + "ModelReady", b""), (SERVICE + "RepositoryIndex", b""), (check, b""),
        ):  # fmt: skip
            call = channel.unary_unary(method)
            assert await status_of(call(message)) == refusal
            assert await status_of(call(message, metadata=[("triton-grpc-protocol-admin-key", "y")])) == refusal
            await call(message, metadata=key)
        assert await status_of(stream_stub(channel)().read()) == refusal
        stream = stream_stub(channel)(metadata=key)
        await stream.write(request("r"))
        assert (await stream.read()).infer_response.id == "r"
        await stream.done_writing()
        await raw(channel, "ServerMetadata")(b"")

    def test_options_that_make_no_sense(self, settings: GatewaySettings, handler: Any, make_front: MakeFront) -> None:
        twice = (*settings.grpc_restricted_protocol, (("health",), "k", "v"))
        with pytest.raises(StartupError, match="protocol 'health' can not be specified in multiple config groups"):
            make_front(replace(settings, grpc_restricted_protocol=twice), handler)
        with pytest.raises(StartupError, match="invalid --grpc-header-forward-pattern"):
            make_front(replace(settings, grpc_header_forward_pattern="("), handler)


class TestForwardedHeaders:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return replace(settings, grpc_header_forward_pattern="my_.*|timeout")

    async def test_they_become_parameters(self, channel: grpc.aio.Channel, handler: Any) -> None:
        message = request()
        message.parameters["own"].int64_param = 1
        await infer_stub(channel)(message, metadata=[("my_key", "v"), ("other", "w")])
        stream = stream_stub(channel)(metadata=[("my_other", "s")])
        await stream.write(request())
        await stream.read()
        await stream.done_writing()
        assert [r.parameters for r in handler.requests] == [{"own": 1, "my_key": "v"}, {"my_other": "s"}]

    async def test_reserved_names(self, channel: grpc.aio.Channel) -> None:
        assert await status_of(infer_stub(channel)(request(), metadata=[("timeout", "1")])) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "Header 'timeout' is reserved for Triton usage and cannot be forwarded.",
        )


class TestStart:
    async def test_a_taken_port(
        self, settings: GatewaySettings, front: Front, handler: Any, make_front: MakeFront
    ) -> None:
        with pytest.raises(StartupError) as caught:
            await make_front(replace(settings, grpc_port=front.port), handler).start()
        expected = f"failed to start GRPC service: Unavailable - Socket '127.0.0.1:{front.port}' already in use"
        assert str(caught.value) == expected

    async def test_a_shared_port(self, settings: GatewaySettings, handler: Any, make_front: MakeFront) -> None:
        first = make_front(replace(settings, reuse_grpc_port=True), handler)
        await first.start()
        second = make_front(replace(settings, reuse_grpc_port=True, grpc_port=first.port), handler)
        await second.start()
        assert first.port == second.port
        await first.close(0.0)
        await second.close(0.0)

    async def test_an_address_that_is_not_here(
        self, settings: GatewaySettings, handler: Any, make_front: MakeFront
    ) -> None:
        with pytest.raises(StartupError, match=r"failed to start GRPC service: cannot listen on '192\.0\.2\.1:"):
            await make_front(replace(settings, grpc_address="192.0.2.1"), handler).start()

    @pytest.mark.parametrize("address", ["::1", "[::1]"])
    async def test_ipv6(self, settings: GatewaySettings, handler: Any, address: str, make_front: MakeFront) -> None:
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 loopback here: {error}")
        front = make_front(replace(settings, grpc_address=address), handler)
        await front.start()
        async with grpc.aio.insecure_channel(f"[::1]:{front.port}") as channel:
            assert (await infer_stub(channel)(request("six"))).id == "six"
        await front.close(1.0)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of localhost and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on PATH to make a certificate with")
    folder = tmp_path_factory.mktemp("certificates")
    made, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(made),
        ],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return made, key


class TestTls:
    async def test_a_call_over_tls(
        self, settings: GatewaySettings, handler: Any, certificate: tuple[Path, Path], make_front: MakeFront
    ) -> None:
        made, key = certificate
        secured = replace(settings, grpc_tls=TlsSettings("grpc", str(made), str(key)))
        front = make_front(secured, handler)
        await front.start()
        credentials = grpc.ssl_channel_credentials(made.read_bytes())
        options = [("grpc.ssl_target_name_override", "localhost")]
        async with grpc.aio.secure_channel(f"127.0.0.1:{front.port}", credentials, options) as channel:
            assert (await infer_stub(channel)(request("safe"))).id == "safe"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            assert (await status_of(infer_stub(channel)(request())))[0] is grpc.StatusCode.UNAVAILABLE
        await front.close(1.0)

    async def test_mutual_tls_needs_the_clients_certificate(
        self, settings: GatewaySettings, handler: Any, certificate: tuple[Path, Path], make_front: MakeFront
    ) -> None:
        made, key = certificate
        secured = replace(settings, grpc_tls=TlsSettings("grpc", str(made), str(key), str(made), is_mutual=True))
        front = make_front(secured, handler)
        await front.start()
        options = [("grpc.ssl_target_name_override", "localhost")]
        known = grpc.ssl_channel_credentials(made.read_bytes(), key.read_bytes(), made.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{front.port}", known, options) as channel:
            assert (await infer_stub(channel)(request("known"))).id == "known"
        unknown = grpc.ssl_channel_credentials(made.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{front.port}", unknown, options) as channel:
            assert (await status_of(infer_stub(channel)(request())))[0] is grpc.StatusCode.UNAVAILABLE
        await front.close(1.0)
        without = TlsSettings("grpc", str(made), str(key), is_mutual=True)
        with pytest.raises(StartupError, match="--grpc-use-ssl-mutual needs --grpc-root-cert"):
            await make_front(replace(settings, grpc_tls=without), handler).start()

    async def test_files_that_are_not_there(
        self, settings: GatewaySettings, handler: Any, make_front: MakeFront
    ) -> None:
        secured = replace(settings, grpc_tls=TlsSettings("grpc", "/nowhere/c", "/nowhere/k"))
        with pytest.raises(StartupError, match="--grpc-server-key: '/nowhere/k' cannot be read: No such file"):
            await make_front(secured, handler).start()


@contextlib.asynccontextmanager
async def relay(port: int, count: Callable[[int], None]) -> AsyncIterator[int]:
    """A port before `port` that tells how many bytes the server behind it sends."""
    connections: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Callable[[int], None]) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                seen(len(data))
                writer.write(data)
            writer.write_eof()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, to_writer, lambda size: None), pump(to_reader, writer, count))
        for one in (writer, to_writer):
            one.close()
            with contextlib.suppress(OSError):
                await one.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.create_task(carry(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await asyncio.wait_for(asyncio.gather(*connections), LIMIT_S)
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("level", ["none", "low", "medium", "high"])
async def test_answers_are_compressed_as_configured(
    settings: GatewaySettings, handler: Any, level: str, make_front: MakeFront
) -> None:
    front = make_front(replace(settings, grpc_infer_response_compression_level=level), handler)
    await front.start()
    sizes: list[int] = []
    async with relay(front.port, sizes.append) as port:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", compression=grpc.Compression.Gzip) as channel:
            reply = await infer_stub(channel)(request(size=1_000_000))
            assert reply.raw_output_contents == [b"\x01" * 1_000_000]
        await front.close(1.0)
    assert sum(sizes) > 1_000_000 if level == "none" else sum(sizes) < 50_000


class TestDelays:
    """Triton's variables for tests of clients (G33). A wait is never shorter than it was asked for."""

    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return replace(settings, grpc_delays=GrpcDelays(0.1, 0.2, 0.3, 0.4, 0.5))

    async def test_calls_take_their_time(self, channel: grpc.aio.Channel) -> None:
        clock = asyncio.get_running_loop().time
        for stub, message, wanted_s in (
            (infer_stub(channel), request("r"), 0.3),
            (raw(channel, "ServerLive"), b"", 0.5),
        ):
            began_s = clock()
            await stub(message)
            assert clock() - began_s >= wanted_s
        stream, began_s = stream_stub(channel)(), clock()
        await stream.write(request("r"))
        assert (await stream.read()).infer_response.id == "r"
        assert clock() - began_s >= 0.4
        await stream.done_writing()

    async def test_a_call_hears_later_that_its_client_has_left(self, channel: grpc.aio.Channel, handler: Any) -> None:
        handler.gate.clear()
        call = infer_stub(channel)(request("r"))
        async with asyncio.timeout(LIMIT_S):
            await handler.waiting.wait()
            began_s = asyncio.get_running_loop().time()
            call.cancel()
            await handler.cancelled.wait()
        assert asyncio.get_running_loop().time() - began_s >= 0.4
