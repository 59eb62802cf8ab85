"""Large messages read in worker processes mean what they mean when they are read here (G18, G20, H49)."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest

from charonia.errors import InvalidArgument
from charonia.inference import InferenceRequest
from charonia.offload.pool import OFF_LOOP_BYTES, Offload
from gateway.grpc.convert import CountedTensors, infer_request
from gateway.grpc.large_messages import LargeMessage, read_ahead, read_large
from gateway.grpc.stream_requests import AnswerStream
from protos import grpc_service_pb2 as pb

MANY = 40_000


@pytest.fixture
def offload() -> Iterator[Offload]:
    made = Offload()
    yield made
    made.close()


def tensor(name: str, datatype: str, count: int, **members: Any) -> Any:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=(count,), **members)


def in_region(name: str, datatype: str = "BYTES", count: int = MANY) -> Any:
    place = {
        "shared_memory_region": pb.InferParameter(string_param="r"),
        "shared_memory_byte_size": pb.InferParameter(int64_param=8),
    }
    return tensor(name, datatype, count, parameters=place)


def numbers(name: str, count: int = MANY) -> Any:
    return tensor(name, "INT64", count, contents=pb.InferTensorContents(int64_contents=range(count)))


def strings(name: str, given: int = MANY, count: int = MANY) -> Any:
    return tensor(name, "BYTES", count, contents=pb.InferTensorContents(bytes_contents=[b"ab"] * given))


def message(*inputs: Any, raw: tuple[bytes, ...] = ()) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name="m", id="mine", inputs=inputs, raw_input_contents=raw)


def described(request: InferenceRequest) -> Any:
    return [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs], request.regions, request.id


@pytest.mark.parametrize(
    "inputs",
    [
        (in_region("R"), numbers("N")),
        (numbers("N"), in_region("R"), strings("S")),
        (in_region("R", "FP32"), strings("S")),
        (in_region("R"), in_region("Q"), numbers("N")),
    ],
)
async def test_inputs_in_regions_beside_typed_contents(offload: Offload, inputs: tuple[Any, ...]) -> None:
    whole = message(*inputs)
    large = await read_large(offload, whole.SerializeToString())
    assert large.error is None
    assert described(infer_request(large.message, raw=large.raw)[0]) == described(infer_request(whole)[0])
    assert isinstance(large.raw, CountedTensors)
    assert large.raw.elements == {item.name: "" for item in inputs if item.name == "S"}, "no others were looked at"


async def test_elements_are_counted_before_the_next_message_of_a_stream(offload: Offload) -> None:
    good = struct.pack("<I2s", 2, b"ab") * MANY
    first = message(tensor("S", "BYTES", MANY), raw=(good,)).SerializeToString()
    second = message(tensor("S", "BYTES", MANY), in_region("R"), raw=(good[:-1],)).SerializeToString()
    assert len(first) > OFF_LOOP_BYTES
    answered: list[bytes | LargeMessage] = []

    async def messages() -> AsyncIterator[bytes]:
        yield first
        yield second
        yield b"small"

    async def answer() -> bytes:
        return b""

    def answering(one: bytes | LargeMessage) -> Coroutine[Any, Any, bytes]:
        answered.append(one)
        return answer()

    async def write(_answer: bytes) -> None:
        pass

    stream = AnswerStream[bytes | LargeMessage](answering, write, read_large=partial(read_ahead, offload))
    assert await stream.run(messages()) is None
    assert answered[2] == b"small", "in their order"
    read = [one.raw for one in answered if isinstance(one, LargeMessage)]
    found = [raw.elements for raw in read if isinstance(raw, CountedTensors)]
    assert [list(elements) for elements in found] == [["S"], ["S"]]
    assert not found[0]["S"]
    assert "S" in found[1]["S"]


async def test_what_is_wrong_is_said_of_a_named_request(offload: Offload) -> None:
    wrong = tensor("N", "INT32", MANY, contents=pb.InferTensorContents(int64_contents=range(MANY)))
    with pytest.raises(InvalidArgument) as small:
        infer_request(message(wrong))

    named = await read_ahead(offload, message(wrong).SerializeToString())
    broken = await read_ahead(offload, b"\xff" * (OFF_LOOP_BYTES + 1))
    assert (named.message.id, named.message.model_name) == ("mine", "m")
    assert named.error is not None
    assert named.error.message == small.value.message
    assert broken.error is not None


async def test_another_number_of_strings_is_told_at_admission(offload: Offload) -> None:
    large = await read_large(offload, message(strings("S", MANY - 1)).SerializeToString())
    assert large.error is None
    assert isinstance(large.raw, CountedTensors)
    assert large.raw.elements["S"]
