"""One `ModelStreamInfer` call: requests run side by side, answers leave in their order or as they come (G22, G23).

What a request means and how an answer looks is `stream_calls`'; here is only who waits for whom. A client that does not
read its answers is not read from: the stream holds a bounded number of requests and bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sized
from functools import partial
from typing import Any, Generic, TypeVar

from charonia.errors import CharoniaError

MAX_OPEN_REQUESTS = 256
MAX_HELD_BYTES = 64 * 1024 * 1024
"""Of requests that run and of answers that wait; one larger than this is still served, alone."""

Answer = bytes | CharoniaError
"""A message, or the error that ends the stream."""

Answering = Coroutine[Any, Any, Answer] | AsyncGenerator[Answer]
"""One answer that leaves in the order of the requests, or several that leave as they come."""


Message = TypeVar("Message", bound=Sized)


class _Open:
    """A request that is not answered on the wire yet; `size_bytes` is the message's, then its answer's."""

    __slots__ = ("size_bytes", "task", "written")

    task: asyncio.Task[Answer] | asyncio.Task[None]

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.written = False


class AnswerStream(Generic[Message]):
    """`answer` takes a request message and raises nothing; an error among its answers ends the stream.

    `write` sends an answer and returns when the transport took it.
    """

    def __init__(
        self,
        answer: Callable[[Message], Answering],
        write: Callable[[bytes], Awaitable[None]],
        *,
        max_open_requests: int = MAX_OPEN_REQUESTS,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self._answer = answer
        self._write = write
        self._max_open_requests = max_open_requests
        self._max_held_bytes = max_held_bytes
        self._ordered: deque[tuple[_Open, asyncio.Task[Answer]]] = deque()
        self._free: set[_Open] = set()
        self._held_bytes = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._writing = asyncio.Lock()
        self._over: asyncio.Future[CharoniaError | None] = asyncio.get_running_loop().create_future()

    async def run(self, messages: AsyncIterator[Message]) -> CharoniaError | None:
        """Until all messages are answered, or the first returned error, which is given back.

        Whatever ends it (an error, a failure of `messages` or `write`, the caller's cancellation), no request of the
        stream goes on (G25, G26).
        """
        reading = asyncio.create_task(self._read(messages))
        reading.add_done_callback(lambda _: self._arrived.set())
        ordering = asyncio.create_task(self._ending_with(partial(self._write_ordered, reading)))
        try:
            return await self._over
        finally:
            for task in (reading, ordering, *(one.task for one, _ in self._ordered), *(one.task for one in self._free)):
                task.cancel()
            if reading.done() and not reading.cancelled():
                reading.exception()  # seen, unless it was raised

    async def _read(self, messages: AsyncIterator[Message]) -> None:
        async for message in messages:
            one = _Open(len(message))
            answering = self._answer(message)
            if isinstance(answering, AsyncGenerator):
                self._free.add(one)
                one.task = asyncio.create_task(self._ending_with(partial(self._write_all, one, answering)))
            else:
                task = one.task = asyncio.create_task(answering)
                task.add_done_callback(partial(self._answered, one))
                self._ordered.append((one, task))
            del message, answering  # they may be large, and the next one may be long in coming
            self._held_bytes += one.size_bytes
            self._arrived.set()
            while (
                len(self._ordered) + len(self._free) >= self._max_open_requests
                or self._held_bytes >= self._max_held_bytes
            ):
                self._room.clear()
                await self._room.wait()

    async def _ending_with(self, work: Callable[[], Awaitable[None]]) -> None:
        """What goes wrong in `work` is how the stream ends. It is not begun when the stream is over before."""
        try:
            await work()
        except asyncio.CancelledError:
            self._over.cancel()
        except Exception as error:
            if not self._over.done():
                self._over.set_exception(error)

    def _end(self, error: CharoniaError | None) -> None:
        if not self._over.done():
            self._over.set_result(error)

    # -- answers in the order of the requests -------------------------------------------------------------------------

    def _answered(self, one: _Open, task: asyncio.Task[Answer]) -> None:
        if one.written or task.cancelled() or task.exception() is not None:
            return
        answer = task.result()
        size = len(answer) if isinstance(answer, bytes) else 0
        self._held_bytes += size - one.size_bytes
        one.size_bytes = size
        self._room.set()

    async def _write_ordered(self, reading: asyncio.Task[None]) -> None:
        """Answers in order, until there are no more requests of any kind."""
        while True:
            while self._ordered:
                one, task = self._ordered[0]
                answer = await task
                if isinstance(answer, CharoniaError):
                    self._end(answer)
                    return
                async with self._writing:
                    await self._write(answer)
                del answer
                self._ordered.popleft()
                one.written = True
                self._held_bytes -= one.size_bytes
                self._room.set()
            if reading.done() and not self._free:
                reading.result()
                self._end(None)
                return
            self._arrived.clear()
            await self._arrived.wait()

    # -- answers as they come -----------------------------------------------------------------------------------------

    async def _write_all(self, one: _Open, answers: AsyncGenerator[Answer]) -> None:
        try:
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    if isinstance(answer, CharoniaError):
                        self._end(answer)
                        return
                    async with self._writing:
                        await self._write(answer)
                    del answer  # the next one may be long in coming
        finally:
            self._free.discard(one)
            self._held_bytes -= one.size_bytes
            self._room.set()
            self._arrived.set()
