"""`async_exec`: awaitable calls of other models (P13). Imported with the first call, because asyncio is large."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable
from typing import Any

from .calls import Answer, CallRequest, ResponseIterator, Sink, executing, flag, single, starter
from .errors import TritonModelException
from .response import InferenceResponse


class AsyncResponseIterator(ResponseIterator):
    """Yields the responses of one call, for `for`, which holds up the event loop meanwhile, or for `async for`."""

    def __init__(self, start: Callable[[Sink], int], give_up: Callable[..., None]) -> None:
        self._news = asyncio.Event()
        super().__init__(start, give_up)

    def _sink(self) -> Sink:
        loop, put, wake = asyncio.get_running_loop(), self._answers.put, self._news.set

        def arrived(answer: Answer | None) -> None:
            put(answer)
            with contextlib.suppress(RuntimeError):  # the loop has ended, nothing waits
                loop.call_soon_threadsafe(wake)

        return arrived

    def __aiter__(self) -> AsyncResponseIterator:
        iter(self)
        return self

    async def __anext__(self) -> InferenceResponse:
        while not self._done:
            self._news.clear()
            try:
                answer = self._answers.get_nowait()
            except queue.Empty:
                await self._news.wait()
                continue
            response = self._take(answer)
            if response is not None:
                return response
        response = self._repeat()
        if response is None:
            raise StopAsyncIteration
        return response


def call_async(request: CallRequest, decoupled: bool) -> asyncio.Future[Any]:
    """`InferenceRequest.async_exec`: send the call at once, and return a future of the running event loop.

    Cancelling the future cancels the call.
    """
    decoupled = flag("decoupled", decoupled)
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
