"""One `ModelStreamInfer` call: requests run side by side, answers leave in the order of the requests (G22, G23).

What a request means and how an answer looks is `servicer`'s; here is only who waits for whom. A client that does not
read its answers is not read from: the stream holds a bounded number of requests and bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from charonia.errors import CharoniaError

MAX_OPEN_REQUESTS = 256
MAX_HELD_BYTES = 64 * 1024 * 1024
"""Of requests that run and of answers that wait; one larger than this is still served, alone (faults F5)."""

Answer = bytes | CharoniaError


class _Open:
    """A request that is not answered on the wire yet; `size_bytes` is the message's, then its answer's."""

    __slots__ = ("size_bytes", "task")

    task: asyncio.Task[Answer]

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


class OrderedStream:
    """`answer` makes an answer of a request message and raises nothing; an error it returns ends the stream.

    `write` sends an answer and returns when the transport took it.
    """

    def __init__(
        self,
        answer: Callable[[bytes], Coroutine[Any, Any, Answer]],
        write: Callable[[bytes], Awaitable[None]],
        *,
        max_open_requests: int = MAX_OPEN_REQUESTS,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self._answer = answer
        self._write = write
        self._max_open_requests = max_open_requests
        self._max_held_bytes = max_held_bytes
        self._open: deque[_Open] = deque()
        self._held_bytes = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()

    async def run(self, messages: AsyncIterator[bytes]) -> CharoniaError | None:
        """Until all messages are answered, or the first returned error, which is given back.

        Whatever ends it (an error, a failure of `messages` or `write`, the caller's cancellation), no request of the
        stream goes on (G25, G26).
        """
        reading = asyncio.create_task(self._read(messages))
        reading.add_done_callback(self._reading_ended)
        try:
            while True:
                while self._open:
                    error = await self._write_first()
                    if error is not None:
                        return error
                if reading.done():
                    reading.result()
                    return None
                self._arrived.clear()
                await self._arrived.wait()
        finally:
            reading.cancel()
            for one in self._open:
                one.task.cancel()

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        async for message in messages:
            one = _Open(len(message))
            one.task = asyncio.create_task(self._answer_one(one, message))
            del message  # it may be large, and the next one may be long in coming
            self._open.append(one)
            self._held_bytes += one.size_bytes
            self._arrived.set()
            while len(self._open) >= self._max_open_requests or self._held_bytes >= self._max_held_bytes:
                self._room.clear()
                await self._room.wait()

    def _reading_ended(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled():
            reading.exception()  # seen: `run` raises it, unless the stream has ended before
        self._arrived.set()

    async def _answer_one(self, one: _Open, message: bytes) -> Answer:
        answer = await self._answer(message)
        size = len(answer) if isinstance(answer, bytes) else 0
        self._held_bytes += size - one.size_bytes
        one.size_bytes = size
        self._room.set()
        return answer

    async def _write_first(self) -> CharoniaError | None:
        one = self._open[0]
        answer = await one.task
        if isinstance(answer, CharoniaError):
            return answer
        await self._write(answer)
        self._open.popleft()
        self._held_bytes -= one.size_bytes
        self._room.set()
        return None
