"""Streams over the gRPC front, and its shutdown under calls and streams."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_calls import LIMIT_S, SERVICE, infer_stub, raw, request, status_of, stream_stub

from gateway.app import Front
from protos import grpc_service_pb2 as pb
from protos import health


class TestStreams:
    async def test_answers_leave_in_the_order_of_the_requests(self, channel: grpc.aio.Channel, handler: Any) -> None:
        first = handler.gates["0"] = asyncio.Event()
        stream = stream_stub(channel)()
        for number in range(3):
            await stream.write(request(str(number)))
        while len(handler.requests) < 3:
            handler.waiting.clear()
            await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        first.set()
        await stream.done_writing()
        answers = [answer async for answer in stream]
        assert [a.infer_response.id for a in answers] == ["0", "1", "2"]
        for answer in answers:
            assert not answer.error_message
            assert answer.infer_response.parameters["triton_final_response"].bool_param
            assert answer.infer_response.raw_output_contents == [b"\x01" * 64]
        assert await stream.code() is grpc.StatusCode.OK

    async def test_an_error_is_in_band(self, channel: grpc.aio.Channel) -> None:
        stream = stream_stub(channel)()
        wrong = request("w", model="nope")
        wrong.model_version = "1"
        await stream.write(wrong)
        answer = await stream.read()
        assert answer.error_message == "Request for unknown model: 'nope' is not found"
        found = answer.infer_response
        assert (found.id, found.model_name, found.model_version) == ("w", "nope", "1")
        assert found.parameters["triton_final_response"].bool_param
        await stream.write(request("r"))
        assert (await stream.read()).infer_response.id == "r"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK

    async def test_bytes_that_are_no_message_are_in_band_too(self, channel: grpc.aio.Channel) -> None:
        stream = channel.stream_stream(SERVICE + "ModelStreamInfer")()
        await stream.write(b"\xff\xff")
        answer = pb.ModelStreamInferResponse.FromString(await stream.read())
        assert answer.error_message == "failed to parse the ModelInferRequest message"
        await stream.write(request("r").SerializeToString())
        assert pb.ModelStreamInferResponse.FromString(await stream.read()).infer_response.id == "r"
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.OK

    async def test_an_error_ends_the_stream_when_the_client_wants_it(
        self, channel: grpc.aio.Channel, handler: Any
    ) -> None:
        first = handler.gates["first"] = asyncio.Event()
        handler.gates["runs"] = asyncio.Event()
        stream = stream_stub(channel)(metadata=[("triton_grpc_error", "true")])
        for message in (request("first"), request("wrong", model="nope"), request("runs")):
            await stream.write(message)
        while len(handler.requests) < 2:
            handler.waiting.clear()
            await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        first.set()
        assert (await stream.read()).infer_response.id == "first"
        assert await status_of(stream.read()) == (
            grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'nope' is not found",
        )  # fmt: skip
        await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)
        assert handler.cancelled_ids == ["runs"]

    @pytest.mark.parametrize("how", ["cancel", "leave"])
    async def test_a_stream_that_ends_cancels_its_requests(self, front: Front, handler: Any, how: str) -> None:
        handler.gate.clear()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{front.port}")
        stream = stream_stub(channel)()
        for number in range(3):
            await stream.write(request(str(number)))
        while len(handler.requests) < 3:
            handler.waiting.clear()
            await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        if how == "cancel":
            stream.cancel()
        else:
            await channel.close()
        while len(handler.cancelled_ids) < 3:
            handler.cancelled.clear()
            await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)
        assert sorted(handler.cancelled_ids) == ["0", "1", "2"]
        await channel.close()

    async def test_a_client_that_does_not_read_is_not_read_from(self, front: Front, handler: Any) -> None:
        """Each answer is 4 MiB: the transport takes a few, the stream holds 64 MiB, and then writing stalls."""
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{front.port}", options)
        stream = stream_stub(channel)()
        message = request("many", size=4 * 1024 * 1024)

        async def flood() -> None:
            while True:
                await stream.write(message)

        flooding = asyncio.create_task(flood())
        seen = -1
        async with asyncio.timeout(120):
            # no new request within a second: stalled, unless the machine is too busy for the first ones
            while seen < 10 or seen != len(handler.requests):
                seen = len(handler.requests)
                await asyncio.wait([flooding], timeout=1)
        assert 10 <= seen <= 40
        for _ in range(30):
            assert (await stream.read()).infer_response.id == "many"
        assert len(handler.requests) > seen
        flooding.cancel()
        await asyncio.wait([flooding])
        stream.cancel()
        await channel.close()

    async def test_a_client_that_leaves_its_answers_is_no_failure(
        self, front: Front, handler: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        for number in range(1, 4):
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{front.port}", options)
            stream = stream_stub(channel)()
            for _ in range(12):
                await stream.write(request("unread", size=1024 * 1024))
            while len(handler.requests) < 12 * number:
                handler.waiting.clear()
                await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
            stream.cancel()
            await channel.close()
        await front.close(LIMIT_S)
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


class TestShutdown:
    async def test_draining_refuses_streams_and_turns_readiness_off(
        self, front: Front, channel: grpc.aio.Channel, handler: Any
    ) -> None:
        opened = stream_stub(channel)()
        await opened.write(request("a"))
        assert (await opened.read()).infer_response.id == "a"
        await front.stop_accepting()
        assert await status_of(stream_stub(channel)().read()) == (
            grpc.StatusCode.UNAVAILABLE,
            "GRPC server is shutting down and has stopped accepting new requests.",
        )
        ready = await raw(channel, "ServerReady")(b"")
        assert not pb.ServerReadyResponse.FromString(ready).ready
        assert pb.ServerLiveResponse.FromString(await raw(channel, "ServerLive")(b"")).live
        check = channel.unary_unary(f"/{health.SERVICE_NAME}/Check", health.serialize_request, health.parse_response)
        assert await check("") is health.ServingStatus.NOT_SERVING
        await opened.write(request("b"))
        assert (await opened.read()).infer_response.id == "b"
        await opened.done_writing()
        assert await opened.code() is grpc.StatusCode.OK

    async def test_close_waits_for_open_calls(self, front: Front, channel: grpc.aio.Channel, handler: Any) -> None:
        handler.gate.clear()
        call = asyncio.ensure_future(infer_stub(channel)(request("open")))
        await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        closing = asyncio.create_task(front.close(LIMIT_S))
        handler.gate.set()
        assert (await asyncio.wait_for(call, LIMIT_S)).id == "open"
        await asyncio.wait_for(closing, LIMIT_S)

    async def test_close_cancels_what_is_left(self, front: Front, channel: grpc.aio.Channel, handler: Any) -> None:
        handler.gate.clear()
        call = asyncio.ensure_future(infer_stub(channel)(request("left")))
        stream = stream_stub(channel)()
        await stream.write(request("streamed"))
        while len(handler.requests) < 2:
            handler.waiting.clear()
            await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        await asyncio.wait_for(front.close(0.0), LIMIT_S)
        while len(handler.cancelled_ids) < 2:
            handler.cancelled.clear()
            await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)
        assert (await status_of(call))[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
