"""Large `ModelInferRequest`s: raw tensors are split off, and what is large without them is read by a worker process.

Protobuf parses typed contents into one object for each element, and keeps the interpreter's lock meanwhile. A worker
(`charonia.offload`) does that and gives the tensors in their raw form, with the message that is left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from charonia.calls.admission import request_prefix
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InvalidArgument
from charonia.offload.pool import OFF_LOOP_BYTES, Offload, Task
from charonia.tensors import Buffer
from gateway.requests.large_tensors import complaint
from protos import grpc_service_pb2 as pb

from .convert import infer_request, parse
from .envelope import NoEnvelope, split

_MAX_MEMBERS = 10_000
"""Inputs, outputs and parameters of a request: what the loop has to go through, however small each is."""


class CountedTensors(list[Buffer]):
    """Raw tensors of a message whose BYTES elements a worker has counted already."""


@dataclass(frozen=True, slots=True)
class LargeMessage:
    """A message of a stream that was read before its turn, or what is wrong with it."""

    message: pb.ModelInferRequest
    raw: Sequence[Buffer]
    size_bytes: int
    error: CharoniaError | None = None

    def __len__(self) -> int:
        return self.size_bytes


async def read_large(offload: Offload, data: bytes | memoryview) -> tuple[pb.ModelInferRequest, Sequence[Buffer]]:
    """The message without its raw tensors, and those. Raises what `convert.infer_request` raises of its contents."""
    raw: Sequence[Buffer] = ()
    try:
        data, raw = split(memoryview(data), _MAX_MEMBERS)
    except NoEnvelope:
        pass
    if len(data) <= OFF_LOOP_BYTES:
        return parse(pb.ModelInferRequest, data), raw
    task = Task(f"{__name__}:read", len(raw), (data,))
    counted, buffers = await offload.run(task)
    message = parse(pb.ModelInferRequest, buffers[0])
    if raw:
        return message, raw
    return message, CountedTensors(buffers[1:]) if counted else buffers[1:]


def read(split_off: Any, buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    """In a worker: the message with its contents taken out, and those in their raw form.

    `split_off` raw tensors were found before: then the message must have no contents, and is only read.
    """
    message = parse(pb.ModelInferRequest, buffers[0])
    if len(message.inputs) + len(message.outputs) + len(message.parameters) > _MAX_MEMBERS:
        raise InvalidArgument(f"request has more than {_MAX_MEMBERS} inputs, outputs and parameters")
    raw: list[Buffer] = [b""] * split_off or list(message.raw_input_contents)
    if len(raw) > _MAX_MEMBERS:
        raise InvalidArgument(f"request has more than {_MAX_MEMBERS} raw_input_contents")
    tensors = infer_request(message, raw=raw)[0].inputs
    if not raw:
        for tensor in tensors:
            if tensor.datatype is DataType.BYTES and (
                why := complaint(tensor.data, prod(tensor.shape), tensor.name, message.model_name)
            ):
                raise InvalidArgument(request_prefix(message.id) + why)
    for item in message.inputs:
        item.ClearField("contents")
    message.ClearField("raw_input_contents")
    return not raw, (message.SerializeToString(), *(tensor.data for tensor in tensors))


async def read_ahead(offload: Offload, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes | LargeMessage]:
    """The messages of a stream, large ones read; those behind one that is being read wait, and its sender with them."""
    async for data in messages:
        if len(data) <= OFF_LOOP_BYTES:
            yield data
            continue
        size = len(data)
        try:
            message, raw = await read_large(offload, data)
        except CharoniaError as error:
            yield LargeMessage(pb.ModelInferRequest(), (), size, error)
        else:
            yield LargeMessage(message, raw, size)
        del data
