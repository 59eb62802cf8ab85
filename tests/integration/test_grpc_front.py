"""The gRPC front on real sockets: the stock clients, raw channels, streams, shutdown and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import echo_handler as echo
import grpc
import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from charonia.errors import CharoniaError, ErrorCode, StartupError
from charonia.settings import GatewaySettings
from gateway.grpc.errors import STATUS
from gateway.grpc.server import GrpcFront
from protos import grpc_service_pb2 as pb
from protos import health

SERVICE = "/inference.GRPCInferenceService/"
LIMIT_S = 10


@pytest.fixture
def handler() -> Any:
    return echo.EchoHandler()


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(incarnation="test", grpc_address="127.0.0.1", grpc_port=0)


@pytest.fixture
async def front(settings: GatewaySettings, handler: Any) -> AsyncIterator[GrpcFront]:
    front = GrpcFront(settings, handler)
    await front.start()
    yield front
    await front.close(1.0)


@pytest.fixture
async def channel(front: GrpcFront) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        yield channel


@pytest.fixture
async def client(front: GrpcFront) -> AsyncIterator[triton_aio.InferenceServerClient]:
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
        yield client


def raw(channel: grpc.aio.Channel, method: str) -> Any:
    return channel.unary_unary(SERVICE + method)


def infer_stub(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary(
        SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
    )


def stream_stub(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(
        SERVICE + "ModelStreamInfer", pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )


def request(request_id: str = "", model: str = "identity", size: int = 64) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[b"\x01" * size])
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, size // 4])
    return message


def identity_input(values: Any) -> Any:
    tensor = triton.InferInput("INPUT0", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    return tensor


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, LIMIT_S)
    return caught.value.code(), caught.value.details()


class TestStockClients:
    """The synchronous client blocks, so it works in a thread while the front runs in the loop."""

    async def test_control_calls(self, front: GrpcFront, handler: Any) -> None:
        def calls() -> None:
            with triton.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
                assert client.is_server_live()
                assert client.is_server_ready()
                assert client.is_model_ready("simple")
                assert not client.is_model_ready("nope")
                assert client.get_server_metadata().name == "triton"
                assert list(client.get_model_metadata("simple", "1").inputs[0].shape) == [-1, 16]
                assert client.get_model_config("simple").config.max_batch_size == 8
                statistics = client.get_inference_statistics("simple").model_stats[0]
                assert (statistics.inference_count, statistics.inference_stats.success.ns) == (2, 3000)
                rows = [(m.name, m.version, m.state) for m in client.get_model_repository_index().models]
                assert rows == [("simple", "1", "READY"), ("never", "", "")]
                client.load_model("simple", config="{}", files={"file:1/model.onnx": b"\0bytes"})
                client.unload_model("simple", unload_dependents=True)
                assert client.get_log_settings().settings["log_format"].string_param == "default"
                assert not client.get_system_shared_memory_status().regions
                assert not client.get_cuda_shared_memory_status().regions
                with pytest.raises(triton.InferenceServerException, match="Client shared memory is disabled"):
                    client.register_system_shared_memory("r", "/k", 64)
                assert client.get_trace_settings().settings["trace_level"].value == ["OFF"]
                client.update_trace_settings("simple", {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": None})

        await asyncio.to_thread(calls)
        assert handler.loads == [("simple", "{}", {"1/model.onnx": b"\0bytes"})]
        assert handler.unloads == [("simple", True)]
        assert handler.trace_changes == [("simple", {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": []})]

    @pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
    async def test_inference(self, front: GrpcFront, handler: Any, compression: str | None) -> None:
        values = np.arange(32, dtype=np.int32).reshape(2, 16)

        def calls() -> None:
            with triton.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
                inputs = []
                for name, array in (("INPUT0", values), ("INPUT1", -values)):
                    tensor = triton.InferInput(name, list(array.shape), "INT32")
                    tensor.set_data_from_numpy(array)
                    inputs.append(tensor)
                for outputs in (None, [triton.InferRequestedOutput(f"OUTPUT{i}") for i in range(2)]):
                    result = client.infer(
                        "simple", inputs, outputs=outputs, request_id="r", compression_algorithm=compression,
                        parameters={"own": 5}, priority=3, timeout=7,
                    )  # fmt: skip
                    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), values)
                    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), -values)
                    assert result.get_response().id == "r"
                wanted = triton.InferRequestedOutput("OUTPUT0", class_count=2)
                best = client.infer("simple", inputs, outputs=[wanted]).as_numpy("OUTPUT0")
                assert best.tolist() == [[b"15:15", b"14:14"], [b"31:15", b"30:14"]]

        await asyncio.to_thread(calls)
        first = handler.requests[0]
        assert (first.parameters, first.priority, first.timeout_us, first.deadline_ns) == ({"own": 5}, 3, 7, 0)
        assert set(handler.flush_intervals_s) == {0.001}

    @pytest.mark.parametrize(
        ("datatype", "dtype"),
        [
            ("BOOL", "?"), ("UINT8", "u1"), ("INT64", "i8"), ("FP16", "f2"), ("FP32", "f4"), ("FP64", "f8"),
            ("BYTES", "O"),
        ],
    )  # fmt: skip
    async def test_datatypes(self, client: triton_aio.InferenceServerClient, datatype: str, dtype: str) -> None:
        values = np.array([b"a", b"", b"\xff\0"] if datatype == "BYTES" else [0, 1, 1], dtype=dtype)
        tensor = triton_aio.InferInput("INPUT0", [3], datatype)
        tensor.set_data_from_numpy(values)
        result = await client.infer(f"any_{datatype}", [tensor])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), values)

    async def test_errors_carry_their_code_and_text(
        self, client: triton_aio.InferenceServerClient, handler: Any
    ) -> None:
        values = np.zeros((1, 16), np.float32)
        for code in ErrorCode:
            handler.failure = CharoniaError.of(code, f"went wrong: {code.name} ü %")
            with pytest.raises(triton.InferenceServerException) as caught:
                await client.infer("identity", [identity_input(values)])
            assert caught.value.status() == str(STATUS[code])
            assert caught.value.message() == f"went wrong: {code.name} ü %"

    async def test_unknown_models_and_versions(self, client: triton_aio.InferenceServerClient) -> None:
        tensor = identity_input(np.zeros((1, 16), np.float32))
        unknown = "Request for unknown model: 'nope' is not found"
        for call in (
            client.infer("nope", [tensor]), client.get_model_metadata("nope"), client.get_model_config("nope"),
        ):  # fmt: skip
            with pytest.raises(triton.InferenceServerException) as caught:
                await call
            assert (caught.value.status(), caught.value.message()) == ("StatusCode.NOT_FOUND", unknown)
        with pytest.raises(triton.InferenceServerException) as caught:
            await client.get_inference_statistics("nope")
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert caught.value.message() == "requested model 'nope' is not available"

    async def test_a_decoupled_model_is_refused(self, client: triton_aio.InferenceServerClient) -> None:
        with pytest.raises(triton.InferenceServerException) as caught:
            await client.infer("stream", [identity_input(np.zeros((1, 1), np.float32))])
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
        assert caught.value.message() == "ModelInfer RPC doesn't support models with decoupled transaction policy"

    async def test_a_stream_of_the_synchronous_client(self, front: GrpcFront) -> None:
        def calls() -> list[tuple[Any, Any]]:
            answers: list[tuple[Any, Any]] = []
            with triton.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
                client.start_stream(lambda result, error: answers.append((result, error)))
                for number in range(5):
                    values = np.full((1, 16), number, np.float32)
                    model = "nope" if number == 2 else "identity"
                    client.async_stream_infer(model, [identity_input(values)], request_id=str(number))
                client.stop_stream()
            return answers

        answers = await asyncio.to_thread(calls)
        assert len(answers) == 5
        for number, (result, error) in enumerate(answers):
            if number == 2:
                assert error.message() == "Request for unknown model: 'nope' is not found"
            else:
                assert result.as_numpy("OUTPUT0")[0, 0] == number
                assert result.get_response().parameters["triton_final_response"].bool_param


class TestCalls:
    async def test_typed_contents(self, channel: grpc.aio.Channel) -> None:
        message = pb.ModelInferRequest(model_name="any_INT16", id="t")
        message.inputs.add(name="INPUT0", datatype="INT16", shape=[3]).contents.int_contents.extend([1, -2, 3])
        reply = await infer_stub(channel)(message)
        assert reply.raw_output_contents == [np.array([1, -2, 3], "<i2").tobytes()]
        assert not reply.outputs[0].HasField("contents")
        assert (reply.id, reply.model_name, reply.model_version) == ("t", "any_INT16", "1")

    async def test_a_message_larger_than_grpcs_default(self, front: GrpcFront) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}", options) as channel:
            reply = await infer_stub(channel)(request(size=8_000_000))
        assert reply.raw_output_contents[0] == b"\x01" * 8_000_000

    async def test_health(self, channel: grpc.aio.Channel, handler: Any) -> None:
        check = channel.unary_unary(f"/{health.SERVICE_NAME}/Check", health.serialize_request, health.parse_response)
        assert await check("") is health.ServingStatus.SERVING
        assert await check("anything") is health.ServingStatus.SERVING
        handler.is_ready = False
        assert await check("") is health.ServingStatus.NOT_SERVING
        watch = channel.unary_stream(f"/{health.SERVICE_NAME}/Watch")
        assert (await status_of(watch(b"").read()))[0] is grpc.StatusCode.UNIMPLEMENTED

    @pytest.mark.parametrize(
        "method",
        [
            "ModelInfer", "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig",
            "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "LogSettings",
            "TraceSetting", "SystemSharedMemoryStatus", "CudaSharedMemoryUnregister",
        ],
    )  # fmt: skip
    async def test_bytes_that_are_no_message(self, channel: grpc.aio.Channel, method: str) -> None:
        code, details = await status_of(raw(channel, method)(b"\xff\xff\xff"))
        assert (code, details) == (grpc.StatusCode.INTERNAL, f"failed to parse the {method}Request message")

    async def test_health_bytes_that_are_no_message(self, channel: grpc.aio.Channel) -> None:
        code, details = await status_of(channel.unary_unary(f"/{health.SERVICE_NAME}/Check")(b"\xff"))
        assert (code, details) == (grpc.StatusCode.INTERNAL, "malformed health check request")

    async def test_an_unexpected_failure_says_nothing_of_itself(self, channel: grpc.aio.Channel, handler: Any) -> None:
        handler.failure = RuntimeError("secret")
        assert await status_of(infer_stub(channel)(request())) == (
            grpc.StatusCode.INTERNAL, "internal server error",
        )  # fmt: skip
        load = pb.RepositoryModelLoadRequest(model_name="m").SerializeToString()
        assert await status_of(raw(channel, "RepositoryModelLoad")(load)) == (
            grpc.StatusCode.INTERNAL, "internal server error",
        )  # fmt: skip
        stream = stream_stub(channel)()
        await stream.write(request("a"))
        assert (await stream.read()).error_message == "internal server error"
        handler.failure = None
        await stream.write(request("b"))
        assert (await stream.read()).infer_response.id == "b"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF

    @pytest.mark.parametrize("name", ["x" * 100_000, "ü%" * 20_000])
    async def test_a_text_too_long_for_the_trailers_is_cut(self, channel: grpc.aio.Channel, name: str) -> None:
        code, details = await status_of(infer_stub(channel)(request(model=name)))
        assert code is grpc.StatusCode.NOT_FOUND
        assert details.startswith(f"Request for unknown model: '{name[:400]}")
        assert details.endswith("...")

    async def test_a_cancelled_call_cancels_its_request(self, channel: grpc.aio.Channel, handler: Any) -> None:
        handler.gate.clear()
        call = infer_stub(channel)(request("gone"))
        await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        assert call.cancel()
        await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)
        assert handler.cancelled_ids == ["gone"]
        handler.gate.set()
        assert (await infer_stub(channel)(request("next"))).id == "next"

    async def test_a_client_that_leaves_cancels_its_request(self, front: GrpcFront, handler: Any) -> None:
        handler.gate.clear()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{front.port}")
        call = asyncio.ensure_future(infer_stub(channel)(request("gone")))
        await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        await channel.close()
        await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)
        with pytest.raises(asyncio.CancelledError):
            await call

    async def test_a_client_timeout_is_the_requests_deadline(
        self, client: triton_aio.InferenceServerClient, handler: Any
    ) -> None:
        handler.gate.clear()
        before_ns = time.time_ns()
        with pytest.raises(triton.InferenceServerException) as caught:
            await client.infer("identity", [identity_input(np.zeros((1, 16), np.float32))], client_timeout=0.2)
        assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        deadline_ns = handler.requests[0].deadline_ns
        assert before_ns < deadline_ns < before_ns + 1_200_000_000  # the timeout is rounded up on its way
        await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)

    async def test_the_nearer_of_two_deadlines_counts(self, channel: grpc.aio.Channel, handler: Any) -> None:
        near, far = request(), request()
        near.parameters["charonia_deadline_us"].int64_param = 5
        far.parameters["charonia_deadline_us"].int64_param = 2**62
        for message in (near, far):
            await infer_stub(channel)(message, timeout=60)
        assert handler.requests[0].deadline_ns == 5000
        far_ns = handler.requests[1].deadline_ns - time.time_ns()
        assert 0 < far_ns < 61_000_000_000  # the timeout is rounded up on its way

    async def test_a_timeout_of_ages(self, channel: grpc.aio.Channel, handler: Any) -> None:
        await infer_stub(channel)(request(), timeout=1e9)
        assert 0 <= handler.requests[0].deadline_ns < 2**63


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
        assert not found.parameters
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
        handler.gates["runs"] = asyncio.Event()
        stream = stream_stub(channel)(metadata=[("triton_grpc_error", "true")])
        await stream.write(request("good"))
        assert (await stream.read()).infer_response.id == "good"
        handler.waiting.clear()
        wrong = request("wrong", model="nope")
        await stream.write(wrong)
        await stream.write(request("runs"))
        assert await status_of(stream.read()) == (
            grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'nope' is not found",
        )  # fmt: skip
        if "runs" in [r.id for r in handler.requests]:
            await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)

    @pytest.mark.parametrize("how", ["cancel", "leave"])
    async def test_a_stream_that_ends_cancels_its_requests(self, front: GrpcFront, handler: Any, how: str) -> None:
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

    async def test_a_client_that_does_not_read_is_not_read_from(self, front: GrpcFront, handler: Any) -> None:
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
        while seen != len(handler.requests):  # no new request within a second: stalled
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
        self, front: GrpcFront, handler: Any, caplog: pytest.LogCaptureFixture
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
        self, front: GrpcFront, channel: grpc.aio.Channel, handler: Any
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

    async def test_close_waits_for_open_calls(self, front: GrpcFront, channel: grpc.aio.Channel, handler: Any) -> None:
        handler.gate.clear()
        call = asyncio.ensure_future(infer_stub(channel)(request("open")))
        await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        closing = asyncio.create_task(front.close(LIMIT_S))
        handler.gate.set()
        assert (await asyncio.wait_for(call, LIMIT_S)).id == "open"
        await asyncio.wait_for(closing, LIMIT_S)

    async def test_close_cancels_what_is_left(self, front: GrpcFront, channel: grpc.aio.Channel, handler: Any) -> None:
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

    def test_options_that_make_no_sense(self, settings: GatewaySettings, handler: Any) -> None:
        twice = (*settings.grpc_restricted_protocol, (("health",), "k", "v"))
        with pytest.raises(StartupError, match="protocol 'health' can not be specified in multiple config groups"):
            GrpcFront(replace(settings, grpc_restricted_protocol=twice), handler)
        with pytest.raises(StartupError, match="invalid --grpc-header-forward-pattern"):
            GrpcFront(replace(settings, grpc_header_forward_pattern="("), handler)
        with pytest.raises(StartupError, match="--grpc-infer-response-compression-level must be none, low"):
            GrpcFront(replace(settings, grpc_infer_response_compression_level="max"), handler)


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
    async def test_a_taken_port(self, settings: GatewaySettings, front: GrpcFront, handler: Any) -> None:
        with pytest.raises(StartupError) as caught:
            await GrpcFront(replace(settings, grpc_port=front.port), handler).start()
        expected = f"failed to start GRPC service: Unavailable - Socket '127.0.0.1:{front.port}' already in use"
        assert str(caught.value) == expected

    async def test_a_shared_port(self, settings: GatewaySettings, handler: Any) -> None:
        first = GrpcFront(replace(settings, reuse_grpc_port=True), handler)
        await first.start()
        second = GrpcFront(replace(settings, reuse_grpc_port=True, grpc_port=first.port), handler)
        await second.start()
        assert first.port == second.port
        await first.close(0.0)
        await second.close(0.0)

    async def test_an_address_that_is_not_here(self, settings: GatewaySettings, handler: Any) -> None:
        with pytest.raises(StartupError, match=r"failed to start GRPC service: cannot listen on '192\.0\.2\.1:"):
            await GrpcFront(replace(settings, grpc_address="192.0.2.1"), handler).start()

    @pytest.mark.parametrize("address", ["::1", "[::1]"])
    async def test_ipv6(self, settings: GatewaySettings, handler: Any, address: str) -> None:
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 loopback here: {error}")
        front = GrpcFront(replace(settings, grpc_address=address), handler)
        await front.start()
        async with grpc.aio.insecure_channel(f"[::1]:{front.port}") as channel:
            assert (await infer_stub(channel)(request("six"))).id == "six"
        await front.close(1.0)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate of localhost and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on PATH to make a certificate with")
    made, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
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
        self, settings: GatewaySettings, handler: Any, certificate: tuple[Path, Path]
    ) -> None:
        made, key = certificate
        secured = replace(settings, grpc_use_ssl=True, grpc_server_cert=str(made), grpc_server_key=str(key))
        front = GrpcFront(secured, handler)
        await front.start()
        credentials = grpc.ssl_channel_credentials(made.read_bytes())
        options = [("grpc.ssl_target_name_override", "localhost")]
        async with grpc.aio.secure_channel(f"127.0.0.1:{front.port}", credentials, options) as channel:
            assert (await infer_stub(channel)(request("safe"))).id == "safe"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            assert (await status_of(infer_stub(channel)(request())))[0] is grpc.StatusCode.UNAVAILABLE
        await front.close(1.0)

    async def test_mutual_tls_needs_the_clients_certificate(
        self, settings: GatewaySettings, handler: Any, certificate: tuple[Path, Path]
    ) -> None:
        made, key = certificate
        secured = replace(
            settings, grpc_use_ssl=True, grpc_use_ssl_mutual=True, grpc_server_cert=str(made),
            grpc_server_key=str(key), grpc_root_cert=str(made),
        )  # fmt: skip
        front = GrpcFront(secured, handler)
        await front.start()
        options = [("grpc.ssl_target_name_override", "localhost")]
        known = grpc.ssl_channel_credentials(made.read_bytes(), key.read_bytes(), made.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{front.port}", known, options) as channel:
            assert (await infer_stub(channel)(request("known"))).id == "known"
        unknown = grpc.ssl_channel_credentials(made.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{front.port}", unknown, options) as channel:
            assert (await status_of(infer_stub(channel)(request())))[0] is grpc.StatusCode.UNAVAILABLE
        await front.close(1.0)
        with pytest.raises(StartupError, match="--grpc-use-ssl-mutual needs --grpc-root-cert"):
            await GrpcFront(replace(secured, grpc_root_cert=""), handler).start()

    async def test_files_that_are_not_there(self, settings: GatewaySettings, handler: Any) -> None:
        secured = replace(settings, grpc_use_ssl=True, grpc_server_cert="/nowhere/c", grpc_server_key="/nowhere/k")
        with pytest.raises(StartupError, match="--grpc-server-key: '/nowhere/k' cannot be read: No such file"):
            await GrpcFront(secured, handler).start()


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
async def test_answers_are_compressed_as_configured(settings: GatewaySettings, handler: Any, level: str) -> None:
    front = GrpcFront(replace(settings, grpc_infer_response_compression_level=level), handler)
    await front.start()
    sizes: list[int] = []
    async with relay(front.port, sizes.append) as port:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", compression=grpc.Compression.Gzip) as channel:
            reply = await infer_stub(channel)(request(size=1_000_000))
            assert reply.raw_output_contents == [b"\x01" * 1_000_000]
        await front.close(1.0)
    assert sum(sizes) > 1_000_000 if level == "none" else sum(sizes) < 50_000
