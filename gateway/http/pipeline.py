"""The requests of one HTTP connection, answered in turn by one task: a task for each costs more than this."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator

from .asgi import Exchange, FlowControl
from .bodies import CLIENT_LEFT, AsgiApp, Scope

Request = tuple[Exchange, Scope]

MAX_WAITING = 8
"""Requests that may wait behind the one that is answered before no more of the connection is read."""

logger = logging.getLogger("charonia.gateway.http")


class Pipeline:
    """`serving` is answered; iteration gives those that wait for their turn.

    `tasks` has the server's tasks. `emptied` is called when a request is over and none waits.
    """

    def __init__(
        self, app: AsgiApp, transport: asyncio.Transport, tasks: set[asyncio.Task[None]], emptied: Callable[[], None]
    ) -> None:
        self._app = app
        self._transport = transport
        self._tasks = tasks
        self._emptied = emptied
        self._waiting: deque[Request] = deque()
        self.flow = FlowControl(transport, self._waiting, MAX_WAITING)
        self.serving: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[None] | None = None
        """What the task waits for while nothing is served: the next request, or the end of the connection."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def add(self, exchange: Exchange, scope: Scope) -> None:
        """Serve a request when it is its turn."""
        if self.serving is None:
            self._begin((exchange, scope))
            return
        self._waiting.append((exchange, scope))
        if len(self._waiting) >= MAX_WAITING:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def take_back(self, exchange: Exchange) -> None:
        """Do not serve the request that was added last, if it is this one and waits."""
        if self._waiting and self._waiting[-1][0] is exchange:
            self._waiting.pop()

    def disconnect(self) -> None:
        """The client has left: end what is served and waits."""
        for exchange, _ in self._waiting:
            exchange.disconnect()
        self._waiting.clear()
        self._emptied = _nothing  # it holds the connection
        if self.serving is None:
            if self._next is not None and not self._next.done():
                self._next.set_result(None)
            return
        exchange, scope = self.serving
        if not exchange.response_complete and self._task is not None:  # else what is left is the application's own
            scope["state"][CLIENT_LEFT] = True
            exchange.disconnect()
            self._task.cancel()

    def _begin(self, request: Request) -> None:
        self.serving = request
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        else:
            task = self._task = asyncio.get_running_loop().create_task(self._run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        task = self._task
        assert task is not None
        while self.serving is not None:
            await self._answer(*self.serving)
            self.serving = None
            if not self._waiting:
                self._emptied()
            if self._transport.is_closing():
                return
            if self._waiting:
                following = self._waiting.popleft()
                self.flow.resume_reading()
                if task.cancelling():  # the cancellation meant this request; the next ones go on
                    self._begin(following)
                    return
                self.serving = following
            elif task.cancelling():
                return
            else:
                self._next = asyncio.get_running_loop().create_future()
                await self._next

    async def _answer(self, exchange: Exchange, scope: Scope) -> None:
        """Have one request answered, somehow."""
        try:
            await self._app(scope, exchange.receive, exchange.send)
            if exchange.response_complete or exchange.disconnected:
                return
            logger.error("a request of %s ended without a response", scope["path"][:256])
        except (Exception, asyncio.CancelledError):
            logger.exception("unexpected failure of %s", scope["path"][:256])
        finally:
            exchange.large = None  # of a request that was refused for something else
        if exchange.response_started:
            self._transport.close()
        else:
            body = b"Internal Server Error"
            headers = [
                (b"content-type", b"text/plain; charset=utf-8"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            await exchange.send({"type": "http.response.start", "status": 500, "headers": headers})
            await exchange.send({"type": "http.response.body", "body": body})


def _nothing() -> None: ...
