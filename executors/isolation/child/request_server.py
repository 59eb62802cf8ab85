"""Runs an instance over requests in the process's event loop: takes the python backend's frames and answers them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgpack

from charonia.backend import (
    CancellableInstance,
    InstanceDied,
    ModelRequest,
    ModelResponse,
    RequestInstance,
    SelfCheckingInstance,
    StreamingInstance,
    WindowedInstance,
)
from charonia.datatypes import DataType
from charonia.errors import InternalError, error_of_model
from charonia.tasks import ends_caller
from charonia.tensors import Buffer, Tensor
from executors.backends.given_objects import code_of_models
from executors.backends.python.frame_content import answer_content
from executors.backends.python.protocol.frames import Frame, Kind, packed_list, padding
from executors.backends.python.protocol.shared_slots import ModelSlots
from executors.batches.answers import check_parameters
from executors.isolation.forms import in_frame

from .link import Link
from .remote_calls import Answers, Origin
from .unusable import end_process

_SPAN, _WINDOW, _PROGRESS, _PRIORITY = 7, 9, 10, 11
"""Where a request of an EXECUTE has its span, its window, its progress and its level (`frame_content`)."""


class _Ends(Protocol):
    async def close_instance(self) -> None: ...


class RequestServer:
    """One instance, its socket and the memory that it shares with the executor."""

    def __init__(self, instance: _Ends, model: str, slots: ModelSlots | None, answers: Answers) -> None:
        self.link = Link(self._received, lambda: None)
        self._instance = instance
        self.model = model
        self._slots = slots
        self._answers = answers
        self._stored: list[memoryview] | None = None
        self._free: list[tuple[int, int]] = []
        self._running: dict[int, Responses | None] = {}
        self._requests: dict[int, list[ModelRequest]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, connection: socket.socket) -> None:
        """Begin to serve."""
        await self.link.connect(connection)

    def send(self, kind: Kind, call: int, meta: bytes, data: Sequence[Buffer] = ()) -> None:
        """Send a frame with a packed content, and large data in a slot that the executor has allowed to be filled."""
        total = sum(len(buffer) + padding(len(buffer)) for buffer in data)
        if self._slots is not None and self._free:
            index, generation = self._free[-1]
            views = self._slots.output_views(index, [total])
            if views is not None:
                at = 0
                for buffer in data:
                    views[0][at : at + len(buffer)] = buffer
                    at += len(buffer) + padding(len(buffer))
                self._free.pop()
                self._slots.done(index, generation)
                self.link.send(Kind.STORED, call, [index, total])
                data = ()
        self.link.send_packed(kind, call, meta, data)

    # -- frames --------------------------------------------------------------------------------------------------------

    def _received(self, frame: Frame) -> None:
        kind = frame.kind
        if kind in (Kind.ANSWER, Kind.LAST_ANSWER):
            self._answers.received(frame)
        elif kind is Kind.SLOT:
            index, generation = frame.content()
            self._free.append((index, generation))
        elif kind is Kind.STORED:
            assert self._slots is not None
            self._stored = self._slots.columns(*frame.content())
        elif kind in (Kind.CANCEL, Kind.WINDOW):
            # a call whose EXECUTE came in the same read has not begun yet
            asyncio.get_running_loop().call_soon(self._changed, kind, frame.call, frame.content())
        elif kind in (Kind.EXECUTE, Kind.EXECUTE_STREAM):
            parts, self._stored = self._stored, None
            requests = self._requests[frame.call] = _requests_of(frame, parts)
            self._spawn(frame, self._run(frame, requests))
        else:
            self._spawn(frame, self._command(frame))

    def _spawn(self, frame: Frame, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _changed(self, kind: Kind, call: int, content: Any) -> None:
        """Some requests of a call are cancelled, or more of their responses are wanted."""
        requests, responses = self._requests.get(call), self._running.get(call)
        if requests is None:
            return
        if kind is Kind.CANCEL:
            if isinstance(self._instance, CancellableInstance):
                self._instance.cancel_requests([requests[index] for index in content])
            if responses is not None:
                responses.unlimit(content)
            return
        for index, count in content:
            if isinstance(self._instance, WindowedInstance):
                self._instance.allow_responses(requests[index], count)
            elif responses is not None:
                responses.allow(index, count)

    async def _command(self, frame: Frame) -> None:
        try:
            content = None
            with code_of_models():
                if frame.kind is Kind.FINALIZE:
                    await self._instance.close_instance()
                else:
                    assert isinstance(self._instance, SelfCheckingInstance)
                    content = await self._instance.check_health()
            self.link.send(Kind.DONE, frame.call, content)
        except InstanceDied as death:
            end_process(self.model, death)
        except Exception as error:
            self._fail(frame.call, error)
        if frame.kind is Kind.FINALIZE:
            self.link.close()

    async def _run(self, frame: Frame, requests: list[ModelRequest]) -> None:
        call = frame.call
        try:
            if frame.kind is Kind.EXECUTE:
                await self._answer(call, requests)
            else:
                await self._stream(call, requests)
        except InstanceDied as death:
            end_process(self.model, death)
        except BaseException as error:
            if ends_caller(error):
                raise
            self._fail(call, error)
        finally:
            self._requests.pop(call, None)
            self._running.pop(call, None)

    def _fail(self, call: int, error: BaseException) -> None:
        known = error_of_model(error)
        self.link.send(Kind.FAILED, call, [int(known.code), known.message])

    async def _answer(self, call: int, requests: list[ModelRequest]) -> None:
        assert isinstance(self._instance, RequestInstance)
        responses = await self._instance.execute_requests(requests)
        if len(responses) != len(requests):
            raise InternalError(f"model '{self.model}' answered {len(responses)} of {len(requests)} requests")
        content, data = [], []
        for response in responses:
            described, buffers = _packed(response, self.model)
            content.append(described)
            data += buffers
        self.send(Kind.DONE, call, packed_list(content), data)

    async def _stream(self, call: int, requests: list[ModelRequest]) -> None:
        assert isinstance(self._instance, StreamingInstance)
        responses = self._running[call] = Responses(
            self, call, [0 if isinstance(self._instance, WindowedInstance) else one.window for one in requests]
        )
        failure: Exception | None = None
        try:
            await self._instance.execute_stream(requests, responses)
        except InstanceDied:
            raise
        except Exception as error:
            failure = error
        if responses.open and failure is None:
            failure = InternalError(f"model '{self.model}' ended without a final response")
        if failure is not None and not responses.freed:
            raise failure
        for index in sorted(responses.open):
            assert failure is not None
            responses.send(index, ModelResponse(error=error_of_model(failure)), final=True)
        responses.free()


class Responses:
    """The `ResponseStream` of one call. `windows` are how many responses each request may have for now, 0: any."""

    def __init__(self, server: RequestServer, call: int, windows: list[int]) -> None:
        self.open = set(range(len(windows)))
        self.freed = False
        self._server = server
        self._call = call
        self._windows = windows
        self._sent = [0] * len(windows)
        self._more = asyncio.Event()

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        """See `ResponseStream`."""
        if index not in self.open:
            raise InternalError("a response after the final one")
        if response is None and not final:
            raise ValueError("neither a response nor a final flag")
        if final:
            self.open.discard(index)
        self._sent[index] += response is not None
        if self._server.link.respond(self._call, index, response, final=final):
            return
        content, data = _packed(response, self._server.model) if response is not None else (msgpack.packb(None), [])
        meta = packed_list([msgpack.packb(index), msgpack.packb(final), content])
        self._server.send(Kind.RESPONSE, self._call, meta, data)

    def hold(self) -> AbstractContextManager[None]:
        """Send the responses of all calls of this instance at the end of the context, at once."""
        return self._server.link.hold()

    @property
    def full(self) -> bool:
        """See `ResponseStream`."""
        return self._server.link.full

    @property
    def blocked(self) -> bool:
        """See `ResponseStream`."""
        return any(0 < self._windows[index] <= self._sent[index] for index in self.open)

    async def drain(self) -> None:
        """See `ResponseStream`."""
        await self._server.link.drained()
        while self.blocked:
            self._more.clear()
            await self._more.wait()

    def free(self) -> None:
        """See `ResponseStream`."""
        if not self.freed:
            self.freed = True
            self._server.link.send(Kind.DONE, self._call, None)

    def allow(self, index: int, count: int) -> None:
        """More responses are wanted."""
        self._windows[index] = max(count, self._windows[index])
        self._more.set()

    def unlimit(self, indices: Sequence[int]) -> None:
        """These requests are cancelled: nothing waits for them."""
        for index in indices:
            self._windows[index] = 0
        self._more.set()


def _packed(response: ModelResponse, model: str) -> tuple[bytes, list[Buffer]]:
    """Packed content and data of a response, or of an error in its place where it cannot be sent."""
    try:
        if response.parameters:
            check_parameters(model, response.parameters)
        content, data = _content_of(response)
        return msgpack.packb(content), data
    except Exception as error:  # a plug-in may give anything
        known = getattr(response, "error", None) or error_of_model(error)
        return msgpack.packb(_content_of(ModelResponse(error=known))[0]), []


def _content_of(response: ModelResponse) -> tuple[list[Any], list[Buffer]]:
    content, data = answer_content(response)
    if response.tokens:
        content += [response.again, response.progress, int(response.tokens)]
    elif response.progress:
        content += [response.again, response.progress]
    elif response.again:
        content.append(True)
    return content, data


def _requests_of(frame: Frame, parts: list[memoryview] | None) -> list[ModelRequest]:
    content = frame.content()
    if parts is None:
        parts = in_frame(frame, [size for item in content for *_, size in item[6]])
    data = iter(parts)
    requests = []
    for item in content:
        request_id, correlation_id, outputs, parameters, timeout_us, flags, tensors = item[:_SPAN]
        inputs = [
            Tensor(name, DataType.of_number(number), tuple(shape), next(data)) for name, number, shape, _ in tensors
        ]
        request = ModelRequest(
            *(request_id, correlation_id, inputs, tuple(outputs), json.loads(parameters or "{}"), timeout_us, flags),
            origin=Origin(frame.call, item[_SPAN] if len(item) > _SPAN else b""),
            window=item[_WINDOW] if len(item) > _WINDOW else 0,
            progress=item[_PROGRESS] if len(item) > _PROGRESS else (),
            priority=item[_PRIORITY] if len(item) > _PRIORITY else 0,
        )
        requests.append(request)
    return requests
