"""Clients of a gateway with the express lane that send what they send in the same bytes each time."""

from __future__ import annotations

import asyncio
import json

import http2_client as h2
import numpy as np
from http_calls import read_reply
from lane_pair import LanePair, http_request, raw_inputs

from protos import grpc_service_pb2 as pb

MODEL = "of_tenants"
_NO_TABLE = b"\x20"


def infer(model: str, value: int) -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="INT32", shape=[1, 2])
    request.raw_input_contents.extend(raw_inputs(model, value))
    return request.SerializeToString(deterministic=True)


class HttpClient:
    """A connection whose requests have the same key."""

    def __init__(self, pair: LanePair, *headers: tuple[str, str]) -> None:
        self._port = pair.http_port(pair.with_lane)
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers)
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, value: int, model: str = MODEL, *more: tuple[str, str]) -> int | str:
        """The first number of the answer, or what refused the request."""
        if self._open is None:
            self._open = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._open
        head = self._head + "".join(f"{name}: {value}\r\n" for name, value in more)
        writer.write(http_request(model, value, head=head))
        status, headers, body = await read_reply(reader)
        if status != 200:
            return f"{status} {json.loads(body)['error']}"
        names = {name.lower(): number for name, number in headers.items()}
        return int(np.frombuffer(body[int(names["inference-header-content-length"]) :], np.int32)[0])

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()


class GrpcClient:
    """A connection whose calls have the same metadata."""

    def __init__(self, pair: LanePair, *metadata: tuple[str, str]) -> None:
        self._port = pair.grpc_port(pair.with_lane)
        self._metadata = metadata
        self._wire: h2.Wire | None = None
        self._stream = 1

    async def ask(self, value: int, model: str = MODEL, *more: tuple[str, str]) -> int | str:
        return await self.finish(await self.begin(*more), value, model)

    async def begin(self, *more: tuple[str, str]) -> int:
        """Begin a call without its message; its number."""
        if self._wire is None:
            first = h2.raw(h2.HEADERS, h2.END_HEADERS, 1, _NO_TABLE + h2.block(h2.call_fields("ServerLive")))
            hello = h2.PREFACE + h2.settings() + first + h2.raw(h2.DATA, h2.END_STREAM, 1, h2.message())
            self._wire = await h2.Wire.connect(self._port, hello)
        self._stream += 2
        block = h2.block(h2.call_fields("ModelInfer", *self._metadata, *more))
        self._wire.write(h2.raw(h2.HEADERS, h2.END_HEADERS, self._stream, block))
        return self._stream

    async def finish(self, number: int, value: int, model: str = MODEL) -> int | str:
        """Send the message of a call; its answer."""
        assert self._wire is not None
        self._wire.write(h2.raw(h2.DATA, h2.END_STREAM, number, h2.message(infer(model, value))))
        answer = await self._wire.answer(number)
        if answer.status != 0:
            return f"{answer.status} {answer.details}"
        message = answer.data[5:]
        return int(np.frombuffer(pb.ModelInferResponse.FromString(message).raw_output_contents[0], np.int32)[0])

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
