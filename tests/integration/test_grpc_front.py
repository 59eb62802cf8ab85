"""The gRPC front on real sockets: the stock clients and raw channels."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from grpc_calls import LIMIT_S, infer_stub, raw, request, status_of, stream_stub
from grpc_fronts import MakeFront
from memory_objects import MemoryObjects

from charonia.errors import CharoniaError, ErrorCode
from charonia.options.settings import GatewaySettings
from gateway.app import Front
from gateway.grpc.statuses import STATUS
from gateway.regions.client_regions import ClientRegions
from protos import grpc_service_pb2 as pb
from protos import health


@pytest.fixture
async def client(front: Front) -> AsyncIterator[triton_aio.InferenceServerClient]:
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
        yield client


def identity_input(values: Any) -> Any:
    tensor = triton.InferInput("INPUT0", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    return tensor


class TestStockClients:
    """The synchronous client blocks, so it works in a thread while the front runs in the loop."""

    async def test_control_calls(self, front: Front, handler: Any) -> None:
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

    async def test_tenants_have_regions_of_their_own(
        self, settings: GatewaySettings, handler: Any, make_front: MakeFront, objects: MemoryObjects
    ) -> None:
        handler.tenants = {"key-a": "a", "key-b": "b"}
        handler.regions = ClientRegions(allowed=True)
        front = make_front(settings, handler)
        await front.start()
        key = objects.make(b"1")
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
            for name, refused in (("none", "API key"), ("key-a", ""), ("key-a", "already in manager"), ("key-b", "")):
                register = client.register_system_shared_memory("r", key, 1, headers={"x-api-key": name})
                if refused:
                    with pytest.raises(triton.InferenceServerException, match=refused):
                        await register
                else:
                    await register
            await client.unregister_system_shared_memory(headers={"x-api-key": "key-b"})
            for name, count in (("key-a", 1), ("key-b", 0)):
                status = await client.get_system_shared_memory_status(headers={"x-api-key": name})
                assert len(status.regions) == count
        await front.close(1.0)
        handler.regions.close()

    @pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
    async def test_inference(self, front: Front, handler: Any, compression: str | None) -> None:
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
            assert caught.value.status() == f"StatusCode.{STATUS[code].name}"
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

    async def test_a_stream_of_the_synchronous_client(self, front: Front) -> None:
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

    async def test_a_message_larger_than_grpcs_default(self, front: Front) -> None:
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

    async def test_a_client_that_leaves_cancels_its_request(self, front: Front, handler: Any) -> None:
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
        assert await client.is_server_live()  # it is connected
        handler.gate.clear()
        for timeout_s in (1.0, 5.0, 20.0):  # more where a busy machine does not let the request come by then
            before_ns, tensor = time.time_ns(), identity_input(np.zeros((1, 16), np.float32))
            with pytest.raises(triton.InferenceServerException) as caught:
                await client.infer("identity", [tensor], client_timeout=timeout_s)
            assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
            if handler.requests:
                break
        deadline_ns = handler.requests[0].deadline_ns
        # the timeout is rounded up on its way, and runs from when the request comes
        assert before_ns < deadline_ns < time.time_ns() + 2_000_000_000
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
