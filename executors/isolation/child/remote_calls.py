"""Calls of other models from the process of an isolated model: a `ModelCalls` that asks the executor for all."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from charonia.backend import ModelResponse, OpenCall
from charonia.errors import Cancelled, CharoniaError, Unavailable
from charonia.inference import InferenceRequest
from charonia.models.interface import ModelInterface
from executors.backends.python.frame_content import answer_of
from executors.backends.python.protocol.frames import Buffer, Frame, Kind

from .link import Link

_SEQUENCE_START, _SEQUENCE_END = 1, 2


@dataclass(frozen=True, slots=True)
class Origin:
    """The `ModelRequest.origin` of a request here: the EXECUTE it came with, and its span if it is traced."""

    call: int
    span_id: bytes = b""


class Answers:
    """The calls of this process that have no last answer, whichever link they were made on."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[Frame]] = {}

    def begin(self) -> tuple[int, asyncio.Queue[Frame]]:
        """Number a call; its answers come into the queue."""
        number = next(self._numbers) & 0xFFFFFFFF
        found = self._waiting[number] = asyncio.Queue()
        return number, found

    def received(self, frame: Frame) -> None:
        """Take an answer."""
        last = frame.kind is Kind.LAST_ANSWER
        queue = self._waiting.pop(frame.call, None) if last else self._waiting.get(frame.call)
        if queue is not None:
            queue.put_nowait(frame)


class RemoteCalls:
    """A `ModelCalls`. It uses `link`, which for an instance over requests is the instance's own."""

    def __init__(self, link: Link, answers: Answers) -> None:
        self.link = link
        self._answers = answers

    async def find(self, model: str, version: int) -> ModelInterface:
        """See `ModelCalls`."""
        found: ModelInterface = msgspec.msgpack.decode(await self._ask(["find", model, version]), type=ModelInterface)
        return found

    async def open(
        self, request: InferenceRequest, model: str, origins: Sequence[object], *, blocks: bool = False
    ) -> OpenCall:
        """See `ModelCalls`. The call is made for all requests of the batch that the first origin came with."""
        made_for = next((origin for origin in origins if isinstance(origin, Origin)), Origin(0))
        tensors, data = [], []
        for tensor in request.inputs:
            tensors.append([tensor.name, tensor.datatype.number, tensor.shape, len(tensor.data)])
            data.append(tensor.data)
        flags = _SEQUENCE_START * request.sequence_start | _SEQUENCE_END * request.sequence_end
        content: list[Any] = [made_for.call, bool(made_for.call), blocks, request.model, request.version]
        content += [request.outputs, request.id, request.sequence_id, flags, request.timeout_us, request.parameters]
        content += [True, tensors, made_for.span_id]
        number, answers = self._send(Kind.CALL, content, data)
        return _RemoteCall(self.link, number, answers)

    async def load(self, model: str, config_json: str, files: dict[str, bytes]) -> None:
        """See `ModelCalls`."""
        described = [[path, len(file)] for path, file in files.items()]
        await self._ask(["load", model, config_json, described], list(files.values()))

    async def unload(self, model: str, *, unload_dependents: bool) -> None:
        """See `ModelCalls`."""
        await self._ask(["unload", model, unload_dependents])

    async def is_ready(self, model: str, version: str) -> bool:
        """See `ModelCalls`."""
        return bool(await self._ask(["is_ready", model, version]))

    def _send(self, kind: Kind, content: Any, data: Sequence[Buffer]) -> tuple[int, asyncio.Queue[Frame]]:
        number, answers = self._answers.begin()
        self.link.send(kind, number, content, data)
        return number, answers

    async def _ask(self, content: list[Any], data: Sequence[Buffer] = ()) -> Any:
        _, answers = self._send(Kind.CONTROL, content, data)
        failure, value = (await answers.get()).content()
        if failure is not None:
            raise CharoniaError.of(*failure)
        return value


class _RemoteCall:
    """An `OpenCall`."""

    def __init__(self, link: Link, number: int, answers: asyncio.Queue[Frame]) -> None:
        self._link = link
        self._number = number
        self._answers = answers
        self._over = False
        self._cancelled = asyncio.Event()

    async def next(self) -> ModelResponse | None:
        """See `OpenCall`."""
        if self._cancelled.is_set():
            raise Cancelled("")
        if self._over:
            raise Unavailable("the call is over")
        coming, ending = asyncio.ensure_future(self._answers.get()), asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait({coming, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (coming, ending):
                one.cancel()
        if self._cancelled.is_set() or not coming.done():
            raise Cancelled("")
        frame = coming.result()
        response = answer_of(frame)
        if frame.kind is Kind.LAST_ANSWER:
            self._over = True
            if response is not None and response.error is not None:
                raise response.error
        return response

    def cancel(self) -> None:
        """See `OpenCall`."""
        if not self._over and not self._cancelled.is_set():
            self._cancelled.set()
            self._link.send(Kind.GIVE_UP, self._number, False)

    def ask_to_end(self) -> None:
        """See `OpenCall`."""
        if not self._over:
            self._link.send(Kind.GIVE_UP, self._number, True)
