"""A call that leaves the express lane of the gRPC front is served as the message that its client sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gateway.grpc.calling import USUAL
from gateway.grpc.native.codec.grpc_messages import PREFIX, PREFIX_BYTES
from gateway.grpc.native.grpc_lane import GrpcSignature, LaneCall
from gateway.lane.layout import protobuf_layout
from protos import grpc_service_pb2 as pb


def test_it_is_the_message_without_the_length_before_it() -> None:
    request = pb.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"12345678"])
    request.inputs.add(name="x", datatype="FP32", shape=[2])
    message = request.SerializeToString()
    layout = protobuf_layout(message, 1)
    assert layout is not None
    framed = PREFIX.pack(0, len(message)) + message
    anything: Any = SimpleNamespace()
    signature = GrpcSignature(anything, layout.behind(framed[:PREFIX_BYTES]), "m", USUAL, anything)
    served: list[bytes] = []
    connection: Any = SimpleNamespace(serve_fully=lambda _call, whole: served.append(whole))
    call = LaneCall(connection, 1, None, USUAL, 65_535)  # type: ignore[arg-type]
    parts = signature.layout.cut(framed, 0)
    assert parts is not None
    call.data, call.client_id = parts

    signature.leave_lane(call)

    assert served == [message]
