"""Jobs over gRPC with the stock client: submitted, fetched, cancelled, refused, left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from grpc_fronts import MakeFront
from tritonclient.utils import InferenceServerException

from charonia.errors import InternalError, ResourceExhausted
from charonia.options.settings import GatewaySettings
from gateway.app import Front
from protos import grpc_service_pb2 as pb

INFER = "/inference.GRPCInferenceService/ModelInfer"
LIMIT_S = 30
ASYNC = {"prefer": "respond-async"}
VALUES = np.array([[1.5, 2.5]], np.float32)


@pytest.fixture
async def client(front: Front) -> AsyncIterator[triton.InferenceServerClient]:
    async with triton.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
        yield client


def tensor(values: Any = VALUES) -> Any:
    made = triton.InferInput("INPUT0", list(values.shape), "FP32")
    made.set_data_from_numpy(values)
    return made


async def submit(client: Any, **arguments: Any) -> dict[str, Any]:
    """What the answer says about the job."""
    arguments = {"headers": ASYNC, **arguments}
    return told(await client.infer("identity", [tensor(arguments.pop("values", VALUES))], **arguments))


def told(result: Any) -> dict[str, Any]:
    response = result.get_response()
    assert not response.outputs
    return {key: getattr(p, str(p.WhichOneof("parameter_choice"))) for key, p in response.parameters.items()}


async def fetch(client: Any, job_id: str, model: str = "identity", **parameters: Any) -> Any:
    return await client.infer(model, [], parameters={"charonia_job_id": job_id, **parameters})


async def refused(call: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        await call
    return caught.value.status(), caught.value.message()


@pytest.mark.parametrize(
    "how",
    [
        {"headers": {"prefer": "respond-async", "charonia-durability": "fsync"}},
        {"headers": {}, "parameters": {"charonia_prefer": "respond-async", "charonia_durability": "fsync"}},
    ],
)
async def test_a_job_there_and_back(client: Any, handler: Any, how: dict[str, Any]) -> None:
    handler.gate.clear()
    job = await submit(client, request_id="mine", **how)
    job_id = job["charonia_job_id"]
    assert job == {
        "charonia_job_id": job_id, "charonia_job_state": "queued", "charonia_durability": "fsync",
        "charonia_position": 1, "charonia_queue_length": 1, "charonia_eta_s": 0.5,
    }  # fmt: skip
    await handler.waiting.wait()
    for parameters in ({}, {"charonia_wait_s": "0.01"}):
        assert told(await fetch(client, job_id, **parameters))["charonia_job_state"] == "running"
    handler.gate.set()
    result = await fetch(client, job_id, charonia_wait_s=5)
    direct = await client.infer("identity", [tensor()], request_id="mine")
    assert result.get_response() == direct.get_response()
    assert result.get_response().id == "mine"
    assert handler.requests[0].parameters == {}


async def test_the_result_of_a_classification(client: Any, handler: Any) -> None:
    handler.labels = {"OUTPUT0": ["small", "large"]}
    job = await submit(client, outputs=[triton.InferRequestedOutput("OUTPUT0", class_count=1)])
    result = await fetch(client, job["charonia_job_id"], charonia_wait_s=5)
    assert result.as_numpy("OUTPUT0").tolist() == [[b"2.500000:1:large"]]


async def test_a_wait(client: Any, handler: Any) -> None:
    result = await client.infer("identity", [tensor()], headers={"prefer": "respond-async, wait=5"}, request_id="a")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), VALUES)
    handler.gate.clear()
    assert (await submit(client, headers={"prefer": "wait=0.01"}))["charonia_job_state"] == "running"


async def test_keys(client: Any, handler: Any) -> None:
    headers = {**ASYNC, "idempotency-key": "k"}
    first = await submit(client, headers=headers)
    assert (await submit(client, headers=headers))["charonia_job_id"] == first["charonia_job_id"]
    assert await refused(submit(client, headers=headers, values=VALUES + 1)) == (
        "StatusCode.FAILED_PRECONDITION", "the key was used for another request",
    )  # fmt: skip
    await client.infer("identity", [tensor()], headers={"idempotency-key": "other"})
    assert (handler.options[-1].idempotency_key, handler.options[-1].respond_async) == ("other", False)


async def test_cancelling(client: Any, handler: Any) -> None:
    handler.gate.clear()
    job_id = (await submit(client))["charonia_job_id"]
    await handler.waiting.wait()
    assert told(await fetch(client, job_id, charonia_cancel=True))["charonia_job_state"] == "cancelled"
    assert await refused(fetch(client, job_id)) == ("StatusCode.CANCELLED", "the job was cancelled")


async def test_a_failure(client: Any, handler: Any) -> None:
    handler.failure = InternalError("it broke")
    job_id = (await submit(client))["charonia_job_id"]
    assert await refused(fetch(client, job_id, charonia_wait_s=5)) == ("StatusCode.INTERNAL", "it broke")


async def test_what_a_fetch_refuses(client: Any, handler: Any) -> None:
    job_id = (await submit(client))["charonia_job_id"]
    invalid = "StatusCode.INVALID_ARGUMENT"
    assert await refused(fetch(client, "0" * 32 + ".identity")) == ("StatusCode.NOT_FOUND", "job not found")
    assert await refused(fetch(client, job_id, model="wide")) == (
        invalid, f"job '{job_id}' is one of model 'identity', not of 'wide'",
    )  # fmt: skip
    assert (await refused(fetch(client, job_id, charonia_wait_s="nan")))[0] == invalid
    assert (await refused(fetch(client, job_id, charonia_wait_s=True)))[0] == invalid
    assert (await refused(fetch(client, job_id, charonia_cancel="yes")))[0] == invalid
    assert (await refused(fetch(client, job_id, own=1)))[0] == invalid
    assert (await refused(fetch(client, 5)))[0] == invalid  # type: ignore[arg-type]
    both = client.infer("identity", [tensor()], parameters={"charonia_job_id": job_id})
    assert await refused(both) == (
        invalid, "a request with parameter 'charonia_job_id' asks for a job and has no inputs and no outputs",
    )  # fmt: skip
    unknown = client.infer("identity", [tensor()], parameters={"charonia_later": True})
    assert await refused(unknown) == (
        invalid, "unknown parameter 'charonia_later': names starting with 'charonia_' are reserved",
    )  # fmt: skip


async def test_a_full_queue_says_when_to_come_again(front: Front, handler: Any) -> None:
    handler.refusal = ResourceExhausted("the queue is full")
    handler.refusal.retry_after_s = 7
    message = pb.ModelInferRequest(model_name="identity", raw_input_contents=[b"\0" * 8])
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 2])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        call = channel.unary_unary(INFER)(message.SerializeToString(), metadata=[("prefer", "respond-async")])
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("retry-after-ms", "7000") in list(await call.trailing_metadata())


async def test_the_deadline_of_a_call_is_no_jobs(client: Any, handler: Any) -> None:
    """A job outlives the call that submits it; one that is waited for does not."""
    before_ns = time.time_ns()
    headers = {"idempotency-key": "k"}
    await client.infer("identity", [tensor()], client_timeout=30, headers=headers)
    assert before_ns + 29 * 10**9 < handler.requests[0].deadline_ns <= time.time_ns() + 31 * 10**9
    job_id = (await submit(client, client_timeout=30))["charonia_job_id"]
    await fetch(client, job_id, charonia_wait_s=5)
    assert handler.requests[1].deadline_ns == 0
    job_id = (await submit(client, headers={**ASYNC, "charonia-timeout-ms": "90000"}, client_timeout=30))[
        "charonia_job_id"
    ]
    await fetch(client, job_id, charonia_wait_s=5)
    assert before_ns + 90 * 10**9 <= handler.requests[2].deadline_ns <= time.time_ns() + 90 * 10**9


@pytest.mark.parametrize("keep", [True, False])
async def test_leaving_while_waiting(front: Front, client: Any, handler: Any, keep: bool) -> None:
    handler.gate.clear()
    message = pb.ModelInferRequest(model_name="identity", raw_input_contents=[b"\0" * 8])
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 2])
    metadata = [("prefer", "wait=30"), ("charonia-on-disconnect", "keep" if keep else "cancel")]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        call = channel.unary_unary(INFER)(message.SerializeToString(), metadata=metadata)
        await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        call.cancel()
        (job,) = handler._jobs.values()
        if keep:
            handler.gate.set()
        await asyncio.wait_for(job.task, LIMIT_S)
    assert job.state.value == ("succeeded" if keep else "cancelled")


async def test_tenants(client: Any, handler: Any, make_front: MakeFront) -> None:
    handler.tenants = {"key-a": "a", "key-b": "b"}
    front = make_front(GatewaySettings(incarnation="test", grpc_address="127.0.0.1", grpc_port=0), handler)
    await front.start()
    try:
        async with triton.InferenceServerClient(f"127.0.0.1:{front.port}") as strict:
            assert (await refused(submit(strict)))[0] == "StatusCode.UNAUTHENTICATED"
            assert (await refused(strict.infer("identity", [tensor()])))[0] == "StatusCode.UNAUTHENTICATED"
            job_id = (await submit(strict, headers={**ASYNC, "authorization": "Bearer key-a"}))["charonia_job_id"]
            foreign = strict.infer(
                "identity", [], parameters={"charonia_job_id": job_id}, headers={"x-api-key": "key-b"}
            )
            assert await refused(foreign) == ("StatusCode.NOT_FOUND", "job not found")
            own = await strict.infer(
                "identity", [], parameters={"charonia_job_id": job_id, "charonia_wait_s": 5},
                headers={"x-api-key": "key-a"},
            )  # fmt: skip
            np.testing.assert_array_equal(own.as_numpy("OUTPUT0"), VALUES)
    finally:
        await front.close(1.0)


async def test_in_a_stream_parameters_speak_and_metadata_does_not(front: Front, handler: Any) -> None:
    def message(**parameters: str) -> bytes:
        made = pb.ModelInferRequest(model_name="identity", raw_input_contents=[b"\0" * 8])
        made.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 2])
        for key, value in parameters.items():
            made.parameters[key].string_param = value
        return made.SerializeToString()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(
            metadata=[("prefer", "respond-async"), ("idempotency-key", "k")]
        )
        await stream.write(message())
        plain = pb.ModelStreamInferResponse.FromString(await stream.read())
        assert plain.infer_response.raw_output_contents == [b"\0" * 8]
        await stream.write(message(charonia_prefer="respond-async"))
        job = pb.ModelStreamInferResponse.FromString(await stream.read())
        assert job.infer_response.parameters["charonia_job_state"].string_param == "queued"
        await stream.done_writing()
    assert handler.options[0] is None
