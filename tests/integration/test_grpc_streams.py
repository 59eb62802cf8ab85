"""Models that answer more than once, through `ModelStreamInfer` on real sockets (G21-G26, G36)."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator
from typing import Any

import echo_handler as echo
import grpc
import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc as sync_triton
import tritonclient.grpc.aio as triton
from grpc_fronts import MakeFront

from charonia.errors import DeadlineExceeded, InternalError, StreamInterrupted
from charonia.inference import InferenceResponse
from charonia.options.settings import GatewaySettings
from gateway.app import Front
from protos import grpc_service_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
LIMIT_S = 90


def opened(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> Any:
    call = channel.stream_stream(
        SERVICE + "ModelStreamInfer",
        pb.ModelInferRequest.SerializeToString,
        pb.ModelStreamInferResponse.FromString,
    )
    return call(metadata=list(metadata), timeout=LIMIT_S)


def request(request_id: str, count: int = 0, model: str = "stream", *, empty_final: bool = False) -> Any:
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    shape = [1, 1] if model == "stream" else [1, 16]
    message.inputs.add(name="INPUT0", datatype="FP32", shape=shape)
    message.raw_input_contents.append(np.full(shape, count, np.float32).tobytes())
    if empty_final:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def said(answer: Any) -> tuple[str, float | None, bool]:
    """(id, value or None for no outputs, final)."""
    assert not answer.error_message, answer
    response = answer.infer_response
    values = [float(np.frombuffer(raw, np.float32)[0]) for raw in response.raw_output_contents]
    assert len(values) == len(response.outputs) <= 1
    return response.id, values[0] if values else None, response.parameters["triton_final_response"].bool_param


async def test_every_response_has_its_flag_and_the_empty_one_is_asked_for(channel: grpc.aio.Channel) -> None:
    stream = opened(channel)
    await stream.write(request("a", 2))
    assert [said(await stream.read()) for _ in range(2)] == [("a", 0, False), ("a", 1, False)]
    await stream.write(request("b", 1, empty_final=True))
    assert [said(await stream.read()) for _ in range(2)] == [("b", 0, False), ("b", None, True)]
    await stream.write(request("none", 0, empty_final=True))
    assert said(await stream.read()) == ("none", None, True)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


async def test_a_last_response_that_says_so(channel: grpc.aio.Channel, handler: Any) -> None:
    handler.scripts["a"] = [5, 6]
    handler.response_parameters = {"note": "kept"}
    stream = opened(channel)
    await stream.write(request("a", empty_final=True))
    await stream.done_writing()
    answers = [answer async for answer in stream]
    assert [said(answer) for answer in answers] == [("a", 5, False), ("a", 6, True)]
    assert [a.infer_response.parameters["note"].string_param for a in answers] == ["kept", "kept"]
    assert {(a.infer_response.model_name, a.infer_response.model_version) for a in answers} == {("stream", "1")}


async def test_responses_of_different_requests_interleave_and_others_keep_their_order(
    channel: grpc.aio.Channel, handler: Any
) -> None:
    gates = [asyncio.Event() for _ in range(4)]
    handler.scripts["a"] = [gates[0], 1, gates[2], 2, None]
    handler.scripts["b"] = [gates[1], 3, gates[3], 4, None]
    held = handler.gates["o1"] = asyncio.Event()
    stream = opened(channel)
    for each in (request("a"), request("o1", model="identity"), request("b"), request("o2", model="identity")):
        await stream.write(each)
    seen = []
    for number in (1, 0, 3, 2):
        gates[number].set()
        seen.append(said(await stream.read())[:2])
    assert seen == [("b", 3), ("a", 1), ("b", 4), ("a", 2)]
    held.set()
    assert [said(await stream.read())[::2] for _ in range(2)] == [("o1", True), ("o2", True)]
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_errors_are_in_band_and_the_stream_goes_on(channel: grpc.aio.Channel, handler: Any) -> None:
    handler.scripts["a"] = [1, InferenceResponse("stream", 1, [], error=InternalError("this one")), 2, None]
    handler.scripts["b"] = [1, StreamInterrupted("lost")]
    stream = opened(channel)
    await stream.write(request("a"))
    assert said(await stream.read()) == ("a", 1, False)
    answer = await stream.read()
    assert (answer.error_message, answer.infer_response.id) == ("this one", "a")
    assert said(await stream.read()) == ("a", 2, False)
    await stream.write(request("b"))
    assert said(await stream.read()) == ("b", 1, False)
    answer = await stream.read()
    assert answer.error_message == "STREAM_INTERRUPTED: lost"
    assert (answer.infer_response.id, answer.infer_response.model_name) == ("b", "stream")
    await stream.write(request("c", 1))
    assert said(await stream.read()) == ("c", 0, False)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_the_first_error_ends_a_stream_that_wants_it_so(channel: grpc.aio.Channel, handler: Any) -> None:
    handler.scripts["waits"] = [asyncio.Event(), 1]
    handler.scripts["fails"] = [1, DeadlineExceeded("too late")]
    stream = opened(channel, ("triton_grpc_error", "true"))
    await stream.write(request("waits"))
    await stream.write(request("fails"))
    assert said(await stream.read()) == ("fails", 1, False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
    await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)
    assert handler.cancelled_ids == ["waits"]


async def test_a_client_that_leaves_cancels_all_it_asked_for(channel: grpc.aio.Channel, handler: Any) -> None:
    for name in ("a", "b"):
        handler.scripts[name] = [1, asyncio.Event(), 2]
    stream = opened(channel)
    for name in ("a", "b"):
        await stream.write(request(name))
        await stream.read()
    stream.cancel()
    async with asyncio.timeout(LIMIT_S):
        while len(handler.cancelled_ids) < 2:
            handler.cancelled.clear()
            await handler.cancelled.wait()
    assert sorted(handler.cancelled_ids) == ["a", "b"]


async def test_a_client_that_reads_nothing_holds_its_request_back(channel: grpc.aio.Channel, handler: Any) -> None:
    """The responses are taken from the handler only as the transport takes them."""
    taken = 0

    async def responses(*_: Any, **__: Any) -> Any:
        nonlocal taken
        for index in range(400):
            taken += 1
            data = bytes(256 * 1024)
            tensor = echo.Tensor("OUTPUT0", echo.DataType.FP32, (1, len(data) // 4), data)
            yield InferenceResponse("stream", 1, [tensor], "big", final=index == 399, place=(1, index))

    handler.stream = responses
    stream = opened(channel)
    await stream.write(request("big"))
    await stream.read()
    before = -1
    async with asyncio.timeout(LIMIT_S):
        while before != taken:  # until it stands still
            before = taken
            await asyncio.sleep(0.1)
    assert taken < 200
    await stream.done_writing()
    count = 1
    while await stream.read() is not grpc.aio.EOF:
        count += 1
    assert count == 400
    assert taken == 400


async def test_a_unary_call_of_a_decoupled_model(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary(SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(request("a"))
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.UNIMPLEMENTED,
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )


async def test_new_requests_of_an_open_stream_while_the_server_drains(
    front: Front, channel: grpc.aio.Channel, handler: Any
) -> None:
    more = asyncio.Event()
    handler.scripts["a"] = [1, more, 2]
    stream = opened(channel)
    await stream.write(request("a"))
    assert said(await stream.read()) == ("a", 1, False)
    await front.stop_accepting()
    await stream.write(request("b"))
    answer = await stream.read()
    assert answer.error_message == "GRPC server is shutting down and has stopped accepting new requests."
    more.set()
    assert said(await stream.read()) == ("a", 2, True)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


def test_the_stock_client(make_front: MakeFront) -> None:
    """Driven as its users do, from a thread of its own."""
    got: queue.Queue[Any] = queue.Queue()

    async def serve(work: Any) -> None:
        front = make_front(
            GatewaySettings(incarnation="test", grpc_address="127.0.0.1", grpc_port=0), echo.EchoHandler()
        )
        await front.start()
        await asyncio.to_thread(work, front.port)
        await front.close(1.0)

    def use(port: int) -> None:
        tensor = sync_triton.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.full((1, 1), 3, np.float32))
        with sync_triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.start_stream(lambda result, error: got.put((result, error)))
            client.async_stream_infer("stream", [tensor], request_id="r", enable_empty_final_response=True)
            for index in range(4):
                result, error = got.get(timeout=LIMIT_S)
                assert error is None
                response = result.get_response()
                assert response.parameters["triton_final_response"].bool_param is (index == 3)
                assert (result.as_numpy("OUTPUT0") is None) == (index == 3)
            client.stop_stream()

    asyncio.run(serve(use))


async def test_the_stock_asynchronous_client(front: Front) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        tensor = triton.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.full((1, 1), 2, np.float32))
        yield {"model_name": "stream", "inputs": [tensor], "request_id": "r"}

    async with triton.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
        values = [result.as_numpy("OUTPUT0")[0, 0] async for result, _ in client.stream_infer(requests())]
    assert values == [0, 1]


async def test_tenants_are_told_apart_in_streams(handler: Any, make_front: MakeFront) -> None:
    handler.tenants = {"key": "acme"}
    front = make_front(GatewaySettings(incarnation="test", grpc_address="127.0.0.1", grpc_port=0), handler)
    await front.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        stream = opened(channel)
        await stream.write(request("a", 1))
        assert (await stream.read()).error_message == "an API key is needed"
        stream.cancel()
        stream = opened(channel, ("x-api-key", "key"))
        await stream.write(request("a", 1))
        assert said(await stream.read()) == ("a", 0, False)
        assert handler.options[-1].caller.tenant == "acme"
        stream.cancel()
    await front.close(1.0)


async def test_jobs_through_a_stream(channel: grpc.aio.Channel, handler: Any) -> None:
    stream = opened(channel)
    message = request("mine", 1)
    message.parameters["charonia_prefer"].string_param = "respond-async"
    await stream.write(message)
    receipt = (await stream.read()).infer_response
    job_id = receipt.parameters["charonia_job_id"].string_param
    assert (receipt.id, receipt.model_name) == ("mine", "stream")
    assert receipt.parameters["triton_final_response"].bool_param
    for wrong, text in (
        ({"charonia_job_id": "none"}, "job not found"),
        ({"charonia_job_id": job_id, "charonia_after_index": "x"},
         "parameter 'charonia_after_index' must be the index of a response, or -1"),
        ({"charonia_job_id": job_id, "other": "x"}, "parameter 'other' has no meaning beside 'charonia_job_id'"),
    ):  # fmt: skip
        asking = pb.ModelInferRequest(id="f")
        for key, value in wrong.items():
            asking.parameters[key].string_param = value
        await stream.write(asking)
        answer = await stream.read()
        assert (answer.error_message, answer.infer_response.id) == (text, "f")
    message = request("k", 1)
    message.parameters["charonia_idempotency_key"].string_param = "k"
    await stream.write(message)
    response = (await stream.read()).infer_response
    assert handler.options[-1].idempotency_key == "k"
    assert [response.parameters[f"charonia_{name}"].int64_param for name in ("attempt", "index")] == [1, 0]
    stream.cancel()
