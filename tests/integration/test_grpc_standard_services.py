"""Watching health, and reflection, on both fronts with the stock clients of these services."""

from __future__ import annotations

import asyncio
from typing import Any

import echo_handler as echo
import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_calls import LIMIT_S
from grpc_fronts import MakeFront
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from charonia.options.settings import GatewaySettings
from gateway.app import Front
from gateway.grpc.native.native_server import NativeGrpcFront
from gateway.grpc.standard_services import CHANNELZ, REFLECTION
from protos import health

WATCH = "/grpc.health.v1.Health/Watch"


class Readiness(echo.EchoHandler):
    is_ready = True

    def ready(self) -> bool:
        return self.is_ready


@pytest.fixture
def handler() -> Readiness:
    return Readiness()


def watch(channel: grpc.aio.Channel, request: bytes = b"", **options: Any) -> Any:
    return channel.unary_stream(WATCH, response_deserializer=health.parse_response)(request, **options)


async def read(call: Any) -> Any:
    return await asyncio.wait_for(call.read(), LIMIT_S)


async def test_a_watcher_sees_each_change_once(channel: grpc.aio.Channel, handler: Readiness) -> None:
    call = watch(channel, health.serialize_request("any service"))
    assert await read(call) is health.ServingStatus.SERVING
    handler.is_ready = False
    assert await read(call) is health.ServingStatus.NOT_SERVING
    handler.is_ready = True
    assert await read(call) is health.ServingStatus.SERVING
    call.cancel()


async def test_a_watcher_is_told_that_the_server_stops(channel: grpc.aio.Channel, front: Front) -> None:
    call = watch(channel)
    assert await read(call) is health.ServingStatus.SERVING
    await front.stop_accepting()
    assert await read(call) is health.ServingStatus.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_what_is_no_request_is_refused(channel: grpc.aio.Channel) -> None:
    for path in (WATCH, f"/{REFLECTION[0]}/ServerReflectionInfo"):
        call = channel.unary_stream(path)(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(call)
        assert caught.value.code() is grpc.StatusCode.INTERNAL


def _describe(port: int) -> tuple[list[str], list[str], bytes]:
    """Services, the methods of inference, and a request made from the description alone."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = list(database.get_services())
        pool = DescriptorPool(database)
        service = pool.FindServiceByName("inference.GRPCInferenceService")
        pool.FindServiceByName("grpc.health.v1.Health")
        request: Any = GetMessageClass(pool.FindMessageTypeByName("inference.ModelReadyRequest"))(name="simple")
        return services, [method.name for method in service.methods], request.SerializeToString()


def _services(front: Front) -> list[str]:
    own = [CHANNELZ] if isinstance(front, NativeGrpcFront) else []
    return [*own, "grpc.health.v1.Health", *REFLECTION, "inference.GRPCInferenceService"]


async def test_a_client_without_proto_files_finds_all(front: Front, channel: grpc.aio.Channel) -> None:
    services, methods, request = await asyncio.to_thread(_describe, front.port)
    assert services == _services(front)
    assert {"ModelInfer", "ModelStreamInfer", "ServerLive"} <= set(methods)
    answer = await channel.unary_unary("/inference.GRPCInferenceService/ModelReady")(request, timeout=LIMIT_S)
    assert answer == b"\x08\x01"


@pytest.mark.parametrize("service", REFLECTION)
async def test_both_names_of_reflection(front: Front, channel: grpc.aio.Channel, service: str) -> None:
    call = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    assert [one.name for one in (await read(call)).list_services_response.service] == _services(front)
    if isinstance(front, NativeGrpcFront):
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=CHANNELZ))
        assert (await read(call)).HasField("file_descriptor_response")
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Symbol"))
    assert (await read(call)).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    await call.done_writing()
    assert await read(call) is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_restricted_groups_hold_for_both(make_front: MakeFront, handler: Any) -> None:
    restricted = ((("health", "metadata"), "admin", "x"),)
    settings = GatewaySettings(
        incarnation="test", grpc_address="127.0.0.1", grpc_port=0, grpc_restricted_protocol=restricted
    )
    front = make_front(settings, handler)
    await front.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            for path in (WATCH, f"/{REFLECTION[0]}/ServerReflectionInfo"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await read(channel.unary_stream(path)(b""))
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            key = [("triton-grpc-protocol-admin", "x")]
            call = watch(channel, metadata=key)
            assert await read(call) is health.ServingStatus.SERVING
            call.cancel()
    finally:
        await front.close(0.0)
