"""Calls of the inference service without a stock client, and what they end with."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import grpc_service_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
LIMIT_S = 30
LIVE = pb.ServerLiveResponse(live=True).SerializeToString()


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


def infer(size: int = 64, request_id: str = "", model: str = "identity") -> bytes:
    return request(request_id, model, size).SerializeToString()


def echoed(data: bytes) -> bytes:
    """The output in the data of an answer to `infer`, with its prefix."""
    return pb.ModelInferResponse.FromString(data[5:]).raw_output_contents[0]


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, LIMIT_S)
    return caught.value.code(), caught.value.details()
