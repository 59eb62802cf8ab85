"""Reads large messages: splits raw tensors off, and has a worker process parse what is still large.

Protobuf makes an object of each element of typed contents while it holds the interpreter's lock. A worker process
(`charonia.offload`) does that, and returns tensors in raw form and the rest of the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from charonia.datatypes import DataType
from charonia.errors import CharoniaError, ErrorCode, InvalidArgument
from charonia.inference import check_rest
from charonia.offload.pool import OFF_LOOP_BYTES, Offload, Task
from charonia.tensors import Buffer
from gateway.requests.large_tensors import check_elements, complaint
from protos import grpc_service_pb2 as pb

from .control_messages import check_repository, read_load
from .convert import CountedTensors, infer_request, parse
from .envelope import NoEnvelope, split

_MAX_MEMBERS = 10_000
"""Inputs, outputs and parameters of a request in total: the event loop iterates over them."""


@dataclass(frozen=True, slots=True)
class LargeMessage:
    """A message without its raw tensors, the raw tensors, and the error that it is refused with."""

    message: pb.ModelInferRequest
    raw: Sequence[Buffer]
    size_bytes: int
    error: CharoniaError | None = None

    def __len__(self) -> int:
        return self.size_bytes


async def read_large(offload: Offload, data: bytes | memoryview) -> LargeMessage:
    """Split and parse a message. Its `error` is one of `convert.infer_request`, unless that raises it again.

    Raises if nothing of the message can be parsed.
    """
    size = len(data)
    try:
        rest, raw = split(memoryview(data), _MAX_MEMBERS)
    except NoEnvelope:
        rest, raw = [memoryview(data)], []
    del data
    if sum(map(len, rest)) > OFF_LOOP_BYTES:
        (failure, elements), buffers = await offload.run(Task(f"{__name__}:read", len(raw), rest))
        message = parse(pb.ModelInferRequest, buffers[0])
        if failure is not None:
            return LargeMessage(message, (), size, CharoniaError.of(ErrorCode(failure[0]), failure[1]))
        if not raw:
            return LargeMessage(message, CountedTensors(buffers[1:], elements), size)
    else:
        message = parse(pb.ModelInferRequest, b"".join(rest))
    try:
        request, _ = infer_request(message, raw=raw)
    except CharoniaError:  # raised again when the request is read for its model
        return LargeMessage(message, raw, size)
    # not only in admission: in a stream, later messages must not overtake this one while its elements are counted
    await check_elements(offload, request)
    return LargeMessage(message, CountedTensors(raw, request.elements or {}), size)


def read(split_off: Any, buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    """In a worker process: the message without its contents, and these as raw tensors, except those in shared memory.

    `split_off` is the number of raw tensors found before; if there are any the message must have no contents.
    """
    message = parse(pb.ModelInferRequest, b"".join(buffers))
    if len(message.inputs) + len(message.outputs) + len(message.parameters) > _MAX_MEMBERS:
        raise InvalidArgument(f"request has more than {_MAX_MEMBERS} inputs, outputs and parameters")
    raw: list[Buffer] = [b""] * split_off or list(message.raw_input_contents)
    if len(raw) > _MAX_MEMBERS:
        raise InvalidArgument(f"request has more than {_MAX_MEMBERS} raw_input_contents")
    failure, tensors = None, []
    try:
        request, _ = infer_request(message, raw=raw)
        in_regions = request.regions.inputs if request.regions is not None else {}
        tensors = [tensor for at, tensor in enumerate(request.inputs) if at not in in_regions]
    except CharoniaError as error:
        failure = [int(error.code), error.message]
    elements = {
        tensor.name: complaint(tensor.data, prod(tensor.shape), tensor.name, message.model_name)
        for tensor in tensors
        if tensor.datatype is DataType.BYTES and not split_off
    }
    for item in message.inputs:
        item.ClearField("contents")
    message.ClearField("raw_input_contents")
    rest = message.SerializeToString()
    check_rest(len(rest))
    return [failure, elements], (rest, *(tensor.data for tensor in tensors))


@dataclass(frozen=True, slots=True)
class Load:
    """The values of a `RepositoryModelLoadRequest`."""

    model: str
    config: str | None
    files: Mapping[str, Buffer]


def load_of(data: Buffer) -> Load:
    """Parse a load request. Raises `InvalidArgument` with G12's texts, and `Unsupported` if it names a repository."""
    message = parse(pb.RepositoryModelLoadRequest, bytes(data))
    check_repository(message.repository_name)
    return Load(message.model_name, *read_load(message))


async def read_large_load(offload: Offload, data: Buffer) -> Load:
    """As `load_of`, in a worker process; the files are views of memory."""
    note, buffers = await offload.run(Task(f"{__name__}:take_load", None, (data,)))
    model, config, names = note
    return Load(model, config, dict(zip(names, buffers, strict=True)))


def take_load(_note: Any, buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    """In a worker process."""
    load = load_of(buffers[0])
    return [load.model, load.config, list(load.files)], list(load.files.values())


async def read_ahead(offload: Offload, data: bytes | memoryview) -> LargeMessage:
    """A large message of a stream; one that cannot be parsed has an error, and is answered with it."""
    try:
        return await read_large(offload, data)
    except CharoniaError as error:
        return LargeMessage(pb.ModelInferRequest(), (), len(data), error)
