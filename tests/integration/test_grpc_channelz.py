"""Channelz of the native front, asked by its stock stubs over real connections."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import echo_handler as echo
import grpc
import grpc.aio
import pytest
from certificates import authority, certificate
from grpc_calls import LIMIT_S, LIVE, infer_stub, raw, request, status_of, stream_stub
from grpc_channelz.v1 import channelz_pb2 as pb
from grpc_channelz.v1 import channelz_pb2_grpc

from charonia.options.settings import GatewaySettings, TlsSettings
from gateway.grpc.native.native_server import NativeGrpcFront
from protos import health

Stub = channelz_pb2_grpc.ChannelzStub
NO_POOL = [("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture
async def front(settings: GatewaySettings) -> AsyncIterator[NativeGrpcFront]:
    front = NativeGrpcFront(settings, echo.EchoHandler())
    await front.start()
    yield front
    await front.close(0.0)


@pytest.fixture
async def asking(front: NativeGrpcFront) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}", NO_POOL) as channel:
        yield channel


async def server(stub: Any) -> pb.Server:
    (found,) = (await stub.GetServers(pb.GetServersRequest(), timeout=LIMIT_S)).server
    return found


async def listed(stub: Any) -> list[pb.SocketRef]:
    return list((await stub.GetServerSockets(pb.GetServerSocketsRequest(server_id=1), timeout=LIMIT_S)).socket_ref)


async def sockets(stub: Any) -> list[pb.Socket]:
    """What is told of each; none may end meanwhile."""
    refs = await listed(stub)
    return [(await stub.GetSocket(pb.GetSocketRequest(socket_id=ref.socket_id))).socket for ref in refs]


async def until(met: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await met():
            await asyncio.sleep(0.001)


async def test_a_connection_and_its_server_count_calls_and_messages(
    front: NativeGrpcFront, asking: grpc.aio.Channel
) -> None:
    stub = Stub(asking)
    before_s = time.time()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}", NO_POOL) as channel:
        for _ in range(3):
            assert await raw(channel, "ServerLive")(b"") == LIVE
        await infer_stub(channel)(request("large", size=1 << 21))
        assert (await status_of(raw(channel, "NoSuchMethod")(b"")))[0] is grpc.StatusCode.UNIMPLEMENTED
        stream = stream_stub(channel)()
        for _ in range(2):
            await stream.write(request("s"))
            await asyncio.wait_for(stream.read(), LIMIT_S)
        await stream.done_writing()
        assert await asyncio.wait_for(stream.read(), LIMIT_S) is grpc.aio.EOF
        watching = channel.unary_stream("/grpc.health.v1.Health/Watch", response_deserializer=health.parse_response)(
            b""
        )
        await asyncio.wait_for(watching.read(), LIMIT_S)
        (mine, other) = await sockets(stub)
        if mine.data.streams_started != 7:
            mine, other = other, mine
        data = mine.data
        assert (data.streams_started, data.streams_succeeded, data.streams_failed) == (7, 6, 0)
        # three and a large one; two of a stream; the watcher's first
        assert data.messages_sent == 4 + 2 + 1
        # those, the refused call's, the watcher's question
        assert data.messages_received in (4 + 2 + 1, 4 + 1 + 2 + 1)  # whether that came before it was refused
        for moment in ("remote_stream_created", "message_sent", "message_received"):
            assert before_s - 1 < getattr(data, f"last_{moment}_timestamp").ToNanoseconds() / 1e9 < time.time() + 1
        assert data.local_flow_control_window.value > 1 << 20
        assert data.remote_flow_control_window.value > 0
        assert (mine.local.tcpip_address.ip_address, mine.local.tcpip_address.port) == (b"\x7f\0\0\1", front.port)
        assert mine.remote.tcpip_address.ip_address == b"\x7f\0\0\1"
        assert mine.remote.tcpip_address.port not in (0, front.port, other.remote.tcpip_address.port)
        assert mine.ref.name == f"127.0.0.1:{mine.remote.tcpip_address.port}"
        assert not mine.HasField("security")
        watching.cancel()

        async def reset() -> bool:
            found = (await stub.GetSocket(pb.GetSocketRequest(socket_id=mine.ref.socket_id))).socket.data
            return (found.streams_succeeded, found.streams_failed) == (6, 1)

        await until(reset)
        asked = (await server(stub)).data
        assert (asked.calls_failed, asked.calls_started - asked.calls_succeeded) == (2, 3)  # and this one
    del stream, watching  # which keep the connection

    async def gone() -> bool:
        gc.collect()  # what a call was made of holds itself
        return len(await listed(stub)) == 1

    await until(gone)
    after = (await server(stub)).data  # what a connection counted stays
    assert after.calls_failed == 2
    assert after.calls_started - after.calls_succeeded == 3
    assert after.calls_started > asked.calls_started


async def test_pages_of_sockets(front: NativeGrpcFront, asking: grpc.aio.Channel) -> None:
    stub = Stub(asking)
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{front.port}", NO_POOL) for _ in range(4)]
    for channel in channels:
        await raw(channel, "ServerLive")(b"")
    whole = await stub.GetServerSockets(pb.GetServerSocketsRequest(server_id=1))
    ids = [ref.socket_id for ref in whole.socket_ref]
    assert (len(ids), ids, whole.end) == (5, sorted(set(ids)), True)
    start, pages = 0, []
    while True:
        asked = pb.GetServerSocketsRequest(server_id=1, start_socket_id=start, max_results=2)
        page = await stub.GetServerSockets(asked)
        pages.append([ref.socket_id for ref in page.socket_ref])
        if page.end:
            break
        start = pages[-1][-1] + 1
    assert pages == [ids[:2], ids[2:4], ids[4:]]
    exact = await stub.GetServerSockets(pb.GetServerSocketsRequest(server_id=1, max_results=5))
    assert (len(exact.socket_ref), exact.end) == (5, True)
    for channel in channels:
        await channel.close()


async def test_what_there_is_not(asking: grpc.aio.Channel) -> None:
    stub = Stub(asking)
    top = await stub.GetTopChannels(pb.GetTopChannelsRequest())
    assert (list(top.channel), top.end) == ([], True)
    assert list((await stub.GetServers(pb.GetServersRequest(start_server_id=2))).server) == []
    for call, text in (
        (stub.GetChannel(pb.GetChannelRequest(channel_id=3)), "there is no channel 3"),
        (stub.GetSubchannel(pb.GetSubchannelRequest(subchannel_id=4)), "there is no subchannel 4"),
        (stub.GetServer(pb.GetServerRequest(server_id=7)), "there is no server 7"),
        (stub.GetServerSockets(pb.GetServerSocketsRequest(server_id=7)), "there is no server 7"),
        (stub.GetSocket(pb.GetSocketRequest(socket_id=-1)), "there is no socket -1"),
    ):
        assert await status_of(call) == (grpc.StatusCode.NOT_FOUND, text)
    negative = pb.GetServerSocketsRequest(server_id=1, max_results=-1)
    assert (await status_of(stub.GetServerSockets(negative)))[0] is grpc.StatusCode.INVALID_ARGUMENT
    garbage = asking.unary_unary("/grpc.channelz.v1.Channelz/GetSocket")(b"\xff")
    assert (await status_of(garbage))[0] is grpc.StatusCode.INTERNAL


async def test_listening_sockets_paths_and_tls(settings: GatewaySettings, tmp_path: Path) -> None:
    authority(tmp_path, "authority")
    certificate(tmp_path, "server", "authority")
    tls = TlsSettings("grpc", str(tmp_path / "server.crt"), str(tmp_path / "server.key"))
    path = str(tmp_path / "s")
    front = NativeGrpcFront(replace(settings, grpc_tls=tls, grpc_socket=path), echo.EchoHandler())
    await front.start()
    credentials = grpc.ssl_channel_credentials((tmp_path / "authority.crt").read_bytes())
    options = [("grpc.ssl_target_name_override", "localhost")]
    try:
        async with (
            grpc.aio.secure_channel(f"127.0.0.1:{front.port}", credentials, options) as safe,
            grpc.aio.insecure_channel(f"unix:{path}") as local,
        ):
            assert await raw(local, "ServerLive")(b"") == LIVE
            stub = Stub(safe)
            listening = {ref.name: ref.socket_id for ref in (await server(stub)).listen_socket}
            assert set(listening) == {f"127.0.0.1:{front.port}", f"unix:{path}"}
            found = (await stub.GetSocket(pb.GetSocketRequest(socket_id=listening[f"unix:{path}"]))).socket
            assert (found.local.uds_address.filename, found.HasField("remote")) == (path, False)
            by_local = {one.local.WhichOneof("address"): one for one in await sockets(stub)}
            assert by_local["uds_address"].local.uds_address.filename == path
            assert not by_local["uds_address"].HasField("security")
            secured = by_local["tcpip_address"].security.tls
            assert secured.standard_name.startswith("TLS_") or secured.other_name
    finally:
        await front.close(0.0)


async def test_it_is_restricted_like_statistics_and_may_be_off(settings: GatewaySettings) -> None:
    for more, code in (
        ({"grpc_restricted_protocol": ((("statistics",), "admin", "x"),)}, grpc.StatusCode.UNAVAILABLE),
        ({"grpc_channelz": False}, grpc.StatusCode.UNIMPLEMENTED),
    ):
        front = NativeGrpcFront(replace(settings, **more), echo.EchoHandler())
        await front.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}", NO_POOL) as channel:
                stub = Stub(channel)
                assert (await status_of(stub.GetServers(pb.GetServersRequest())))[0] is code
                if code is grpc.StatusCode.UNAVAILABLE:
                    key = [("triton-grpc-protocol-admin", "x")]
                    assert (await stub.GetServers(pb.GetServersRequest(), metadata=key)).end
        finally:
            await front.close(0.0)
