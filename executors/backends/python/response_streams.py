"""Handlers of the RESPONSE frames of one EXECUTE, on the executor's side.

`Stream` passes responses on at once. `SingleResponses` gathers them for an EXECUTE that is answered as a whole, and
waits for those that come after `execute` has returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from charonia.backend import InstanceDied, ModelResponse, ResponseStream

from .child_process import ChildProcess
from .exchange import response_of
from .protocol.frames import Frame, FrameError


class StreamedResponses:
    """Passes responses on. `ended` is done when each request had its final one, or the process has died."""

    def __init__(self, child: ChildProcess, responses: ResponseStream, count: int) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._child = child
        self._responses = responses
        self._count = count
        self._open = set(range(count))
        self._waiting: asyncio.Task[None] | None = None

    def response(self, frame: Frame) -> None:
        """Take one response. Raises `FrameError`."""
        index, final, response = response_of(frame)
        if index not in self._open:
            raise FrameError(f"a response to request {index}, which has had its final one")
        if final:
            self._open.discard(index)
        elif response is None:
            raise FrameError("a response that is none, and is not final")
        self._responses.send(index, response, final=final)
        if not self._open:
            self._end(None)
        if self._responses.full and self._waiting is None:
            self._child.read(False)
            self._waiting = asyncio.get_running_loop().create_task(self._drain())

    @property
    def blocked(self) -> bool:
        """Whether a sender waits until more responses are wanted."""
        return self._responses.blocked

    def returned(self, responses: Sequence[ModelResponse | None]) -> None:
        """Take the responses that `execute` of a model that is not decoupled returned. None: a sender answers.

        Raises `FrameError`.
        """
        if len(responses) != self._count:
            raise FrameError(f"{len(responses)} replies to {self._count} requests")
        for index, response in enumerate(responses):
            if response is not None and index in self._open:
                self._open.discard(index)
                self._responses.send(index, response, final=True)
        if not self._open:
            self._end(None)

    def died(self, death: InstanceDied) -> None:
        self._end(death)

    def _end(self, death: InstanceDied | None) -> None:
        if self.ended.done():
            return
        if death is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(death)

    async def _drain(self) -> None:
        try:
            await self._responses.drain()
        finally:
            self._waiting = None
            self._child.read(True)


class SingleResponses:
    """Gathers the responses of senders of a model that is not decoupled: at most one per request."""

    def __init__(self) -> None:
        self._found: dict[int, ModelResponse] = {}
        self._death: InstanceDied | None = None
        self._changed: Callable[[], None] | None = None

    def response(self, frame: Frame) -> None:
        """Take one response. Raises `FrameError`."""
        index, _, response = response_of(frame)
        if response is None:
            raise FrameError("a response that is none")
        self._found[index] = response
        self._tell()

    blocked = False

    def died(self, death: InstanceDied) -> None:
        self._death = death
        self._tell()

    def get(self, index: int) -> ModelResponse | None:
        return self._found.get(index)

    async def wait_for(self, indices: set[int]) -> None:
        """Wait until all of these have a response. Raises `InstanceDied`."""
        while not indices <= self._found.keys():
            if self._death is not None:
                raise self._death
            changed = asyncio.Event()
            self._changed = changed.set
            await changed.wait()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed()
