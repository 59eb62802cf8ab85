"""The HTTP front as a thing to start and stop: the listening socket, its connections and the order of shutdown.

What a connection does is `protocol`'s, what a request does `fastpath`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

from uvicorn.config import Config
from uvicorn.server import ServerState

from charonia.errors import StartupError
from charonia.settings import GatewaySettings
from gateway.handler import Handler

from .fastpath import HttpApplication
from .protocol import BoundedHttpProtocol, ForwardingHttpProtocol

_BACKLOG = 2048
_SWEEP_INTERVAL_S = 1.0
_CANCEL_GRACE_S = 1.0


class HttpFront:
    """The HTTP interface of one gateway. Raises `StartupError` for header options that make no sense.

    Order of shutdown: `stop_accepting` (no new connection, nothing new is begun), then `close`, which waits for what is
    under way.
    """

    def __init__(self, settings: GatewaySettings, handler: Handler) -> None:
        self._address = settings.http_address
        self._requested_port = settings.http_port
        self._reuse_port = settings.reuse_http_port
        self._application = HttpApplication(settings, handler)
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.port = 0
        """The real port, once started."""

    @property
    def application(self) -> HttpApplication:
        """The ASGI callable."""
        return self._application

    async def start(self) -> None:
        """Bind and serve in the running loop. Raises `StartupError` when the port cannot be had (V5)."""
        config = Config(
            self._application,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            interface="asgi3",
        )
        config.load()
        protocol_class = ForwardingHttpProtocol if self._application.forwards_headers else BoundedHttpProtocol
        listener = listen(self._address, self._requested_port, reuse_port=self._reuse_port)
        self.port = listener.getsockname()[1]
        self._server = await asyncio.get_running_loop().create_server(
            lambda: protocol_class(config, self._state, {}), sock=listener, backlog=_BACKLOG
        )
        self._sweeper = asyncio.create_task(self._sweep(), name="http-sweeper")

    async def stop_accepting(self) -> None:
        """Close the listening socket; on open connections new work gets "Server exiting" (E7), readiness is off."""
        self._application.draining = True
        if self._server is not None:
            self._server.close()

    async def close(self, grace_s: float) -> None:
        """Wait up to `grace_s` for requests under way, then cancel what is left and close all connections."""
        await self.stop_accepting()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=grace_s)
        leftover = set(self._state.tasks)
        for task in leftover:
            task.cancel()
        if leftover:
            await asyncio.wait(leftover, timeout=_CANCEL_GRACE_S)
        stuck = [task for task in leftover if not task.done()]  # they write to clients that do not read
        for connection in list(self._state.connections):
            if connection.transport is not None and stuck:
                connection.transport.abort()
            elif connection.transport is not None:
                connection.transport.close()
        if stuck:
            await asyncio.wait(stuck, timeout=_CANCEL_GRACE_S)
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
            self._sweeper = None
        self._server = None

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            now = loop.time()
            for connection in list(self._state.connections):
                if isinstance(connection, BoundedHttpProtocol):
                    connection.sweep(now - last)
            last = now


def listen(address: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A bound TCP socket; port 0 picks a free one. Raises `StartupError`, for a taken port with V5's text.

    It is created with IPPROTO_TCP: asyncio sets TCP_NODELAY on accepted connections only of such a socket, and Nagle's
    algorithm would add 40 ms to answers.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"failed to start HTTP service: Unavailable - Socket '{address}:{port}' already in use"
            ) from None
        raise StartupError(
            f"failed to start HTTP service: cannot listen on '{address}:{port}': {error.strerror or error}"
        ) from None
    return listener
