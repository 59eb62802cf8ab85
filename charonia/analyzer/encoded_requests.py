"""Whole requests as bytes, built once: HTTP messages with binary tensors, and frames of gRPC. Pure.

Only a request of a sequence is built when it is sent: its tensors' bytes are those built before.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np

from charonia.datatypes import DataType
from charonia.tensors import Tensor
from protos import grpc_service_pb2 as pb

_INFER, _STREAM = (f"/inference.GRPCInferenceService/{name}" for name in ("ModelInfer", "ModelStreamInfer"))


@dataclass(frozen=True, slots=True)
class SentTensor:
    """An input as it is sent: its bytes, or the parameters of its place in shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    place: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of a request in a sequence."""

    correlation_id: int
    start: bool
    end: bool

    def parameters(self) -> dict[str, Any]:
        return {"sequence_id": self.correlation_id, "sequence_start": self.start, "sequence_end": self.end}


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What all requests have in common. `outputs` maps names to places in shared memory, empty for all outputs.

    `authority` is HOST:PORT. `steps` are the requests' inputs by stream.
    """

    model: str
    version: str
    authority: str
    secure: bool
    headers: tuple[tuple[str, str], ...]
    steps: tuple[tuple[tuple[SentTensor, ...], ...], ...]
    parameters: Mapping[str, Any]
    outputs: Mapping[str, Mapping[str, Any]]
    json_inputs: bool = False
    json_outputs: bool = False
    compression: str = "none"
    streaming: bool = False
    decoupled: bool = False

    def packed(self) -> dict[str, Any]:
        """The plan for a worker."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["steps"] = [
            [[(t.name, t.datatype, t.shape, t.data, t.place) for t in step] for step in stream] for stream in self.steps
        ]
        return fields

    @staticmethod
    def unpacked(fields: Mapping[str, Any]) -> RequestPlan:
        """The plan that `packed` gave."""
        steps = tuple(
            tuple(
                tuple(SentTensor(name, kind, tuple(shape), data, place) for name, kind, shape, data, place in step)
                for step in stream
            )
            for stream in fields["steps"]
        )
        headers = tuple((name, value) for name, value in fields["headers"])
        return RequestPlan(**{**fields, "steps": steps, "headers": headers})


class HttpRequests:
    """Messages of HTTP/1.1."""

    def __init__(self, plan: RequestPlan) -> None:
        self._plan = plan
        version = f"/versions/{quote(plan.version, safe='')}" if plan.version else ""
        lines = [
            f"POST /v2/models/{quote(plan.model, safe='')}{version}/infer HTTP/1.1",
            f"Host: {plan.authority}",
            f"Content-Type: application/{'json' if plan.json_inputs else 'octet-stream'}",
            *(f"{name}: {value}" for name, value in plan.headers),
        ]
        self._head = "\r\n".join([*lines, ""]).encode("latin-1", "replace")
        self._documents = [[self._document(step) for step in stream] for stream in plan.steps]
        self._tensors = [
            [b"" if plan.json_inputs else b"".join(t.data for t in step if t.place is None) for step in stream]
            for stream in plan.steps
        ]
        self._whole = [
            [self._message(stream, step, {}) for step in range(len(steps))] for stream, steps in enumerate(plan.steps)
        ]

    def message(self, stream: int, step: int, turn: Turn | None) -> bytes:
        """The request of a step."""
        return self._whole[stream][step] if turn is None else self._message(stream, step, turn.parameters())

    def _message(self, stream: int, step: int, parameters: Mapping[str, Any]) -> bytes:
        document = self._documents[stream][step]
        if parameters:
            document = {**document, "parameters": {**document["parameters"], **parameters}}
        header = json.dumps(document, separators=(",", ":")).encode()
        tensors = self._tensors[stream][step]
        lengths = f"Content-Length: {len(header) + len(tensors)}\r\n"
        if not self._plan.json_inputs:
            lengths += f"Inference-Header-Content-Length: {len(header)}\r\n"
        return b"".join((self._head, lengths.encode(), b"\r\n", header, tensors))

    def _document(self, step: Sequence[SentTensor]) -> dict[str, Any]:
        plan = self._plan
        document: dict[str, Any] = {"parameters": dict(plan.parameters), "inputs": [self._input(t) for t in step]}
        if plan.outputs:
            document["outputs"] = [{"name": name, "parameters": dict(place)} for name, place in plan.outputs.items()]
        elif not plan.json_outputs:
            document["parameters"]["binary_data_output"] = True
        return document

    def _input(self, tensor: SentTensor) -> dict[str, Any]:
        described: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if tensor.place is not None:
            return {**described, "parameters": dict(tensor.place)}
        if not self._plan.json_inputs:
            return {**described, "parameters": {"binary_data_size": len(tensor.data)}}
        kind = DataType.of(tensor.datatype)
        array = Tensor(tensor.name, kind, tensor.shape, tensor.data).array().ravel()
        if kind is DataType.BYTES:
            return {**described, "data": [element.decode(errors="replace") for element in array.tolist()]}
        return {**described, "data": array.astype(np.float64 if kind is DataType.BF16 else array.dtype).tolist()}


class GrpcRequests:
    """The header block of HTTP/2 that every call has, and messages of gRPC with their five bytes in front."""

    def __init__(self, plan: RequestPlan) -> None:
        self._plan = plan
        self.header_block = _header_block(plan)
        self._messages = [[self._serialized(step) for step in stream] for stream in plan.steps]
        self._whole = [[self._framed(message) for message in stream] for stream in self._messages]

    def message(self, stream: int, step: int, turn: Turn | None) -> bytes:
        """The request of a step. Of a sequence, the parameters are put behind the tensors: a message's fields may
        have any order."""
        if turn is None:
            return self._whole[stream][step]
        added = pb.ModelInferRequest()
        added.parameters["sequence_id"].int64_param = turn.correlation_id
        added.parameters["sequence_start"].bool_param = turn.start
        added.parameters["sequence_end"].bool_param = turn.end
        return self._framed(self._messages[stream][step] + added.SerializeToString())

    def _framed(self, message: bytes) -> bytes:
        plan = self._plan
        if plan.compression != "none":
            message = gzip.compress(message, 6) if plan.compression == "gzip" else zlib.compress(message)
            return b"\1" + len(message).to_bytes(4, "big") + message
        return b"\0" + len(message).to_bytes(4, "big") + message

    def _serialized(self, step: Sequence[SentTensor]) -> bytes:
        plan = self._plan
        message = pb.ModelInferRequest(model_name=plan.model, model_version=plan.version)
        for name, value in plan.parameters.items():
            _set(message.parameters[name], value)
        if plan.streaming and plan.decoupled:
            message.parameters["triton_enable_empty_final_response"].bool_param = True
        for tensor in step:
            described = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            if tensor.place is None:
                message.raw_input_contents.append(tensor.data)
            for name, value in (tensor.place or {}).items():
                _set(described.parameters[name], value)
        for output, place in plan.outputs.items():
            asked = message.outputs.add(name=output)
            for name, value in place.items():
                _set(asked.parameters[name], value)
        whole: bytes = message.SerializeToString()
        return whole


def _set(parameter: Any, value: Any) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.int64_param = value


def _header_block(plan: RequestPlan) -> bytes:
    """Literals without indexing (RFC 7541, 6.2.2), so that the block is the same for every request."""
    path = _STREAM if plan.streaming else _INFER
    parts = [b"\x83", b"\x87" if plan.secure else b"\x86", b"\x04" + _text(path), b"\x01" + _text(plan.authority)]
    fields = [("content-type", "application/grpc"), ("te", "trailers"), ("user-agent", "charonia-bench")]
    if plan.compression != "none":
        fields.append(("grpc-encoding", plan.compression))
    fields += [(name.lower(), value) for name, value in plan.headers]
    return b"".join(parts + [b"\x00" + _text(name) + _text(value) for name, value in fields])


def _text(text: str) -> bytes:
    data = text.encode("latin-1", "replace")
    length = len(data)
    if length < 127:
        return bytes((length,)) + data
    prefix = bytearray((127,))
    length -= 127
    while length > 127:
        prefix.append(length & 127 | 128)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + data
