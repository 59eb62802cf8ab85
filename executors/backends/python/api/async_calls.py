"""`async_exec`: awaitable calls of other models (P13). Imported with the first call, because asyncio is large."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from .calls import Answer, CallRequest, Sink, executing, response_of, single, starter
from .errors import TritonModelException
from .response import InferenceResponse


class AsyncResponseIterator:
    """Yields the responses of one call, for `async for`. An error is a response, and the last one."""

    def __init__(self, start: Callable[[Sink], int], give_up: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()
        self._give_up = give_up
        self._done = False

        def arrived(answer: Answer | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, nothing waits
                loop.call_soon_threadsafe(self._answers.put_nowait, answer)

        self._number = start(arrived)

    def __aiter__(self) -> AsyncResponseIterator:
        return self

    async def __anext__(self) -> InferenceResponse:
        while not self._done:
            answer = await self._answers.get()
            self._done = answer is None or answer[2]
            response = response_of(answer)
            if response is not None:
                return response
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Cancel the call; the last response may have the error CANCELLED."""
        if not self._done:
            self._give_up(self._number)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.cancel()


def call_async(request: CallRequest, decoupled: bool) -> asyncio.Future[Any]:
    """`InferenceRequest.async_exec`: send the call at once, and return a future of the running event loop.

    Cancelling the future cancels the call.
    """
    exchange = executing()
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    start = starter(exchange, request, decoupled)
    if decoupled:
        future.set_result(AsyncResponseIterator(start, exchange.give_up))
        return future

    def resolve(answer: Answer | None) -> None:
        if not future.done():
            try:
                future.set_result(single(answer))
            except TritonModelException as error:
                future.set_exception(error)

    def arrived(answer: Answer | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, nothing waits
            loop.call_soon_threadsafe(resolve, answer)

    number = start(arrived)
    future.add_done_callback(lambda done: exchange.give_up(number) if done.cancelled() else None)
    return future
