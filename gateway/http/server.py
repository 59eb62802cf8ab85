"""Starts and stops the HTTP front: its listening sockets, its connections and the order of shutdown.

`protocol` handles a connection, `http_application` a request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import cast

from uvicorn import Config, Server
from uvicorn.server import ServerState

from charonia.options.settings import GatewaySettings
from charonia.tasks import Tasks
from gateway.handler import Handler
from gateway.listening import BACKLOG, listen, listen_unix, unlink_own
from gateway.tls import ServerTls

from .bodies import AsgiApp
from .http_application import HttpApplication
from .protocol import BoundedHttpProtocol

_SWEEP_INTERVAL_S = 1.0
_CANCEL_GRACE_S = 1.0


Http2 = Callable[[GatewaySettings, AsgiApp, ServerState], Callable[[], asyncio.Protocol]]
"""Makes the factory of HTTP/2 connections (`gateway.http2`)."""


class HttpFront:
    """The HTTP interface of one gateway. Raises `StartupError` for invalid header options.

    Order of shutdown: `stop_accepting` refuses connections and new requests, then `close` waits for running requests.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        handler: Handler,
        http2: Http2 | None = None,
        *,
        application: HttpApplication | None = None,
        service: str = "HTTP",
    ) -> None:
        """`application` replaces the v2 interface; `service` names the front in errors about its port."""
        self._service = service
        self._address = settings.http_address
        self._requested_port = settings.http_port
        self._reuse_port = settings.reuse_http_port
        self._tls = settings.http_tls
        self._path = settings.http_socket
        self._inode = 0
        self._settings = settings
        self._http2 = http2
        self._application = application or HttpApplication(settings, handler)
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._tasks = Tasks()
        self.port = 0
        """The real port, once started."""

    @property
    def application(self) -> HttpApplication:
        """The ASGI callable."""
        return self._application

    async def start(self) -> None:
        """Bind and serve in the running loop. Raises `StartupError` when the port cannot be bound (V5)."""
        config = Config(
            self._application,
            http=BoundedHttpProtocol,
            backlog=BACKLOG,
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
        if self._tls is not None:
            config.ssl = ServerTls(self._tls, ["h2", "http/1.1"] if self._http2 else ["http/1.1"]).context
        listener = listen(self._address, self._requested_port, service=self._service, reuse_port=self._reuse_port)
        self.port = listener.getsockname()[1]
        # not `serve`: the process handles signals and the two steps of a shutdown
        server = Server(config)
        server.lifespan = config.lifespan_class(config)
        self._state = server.server_state
        if self._http2 is not None:
            self._application.http2 = self._http2(self._settings, self._application, self._state)
        try:
            on_path = listen_unix(self._path, service="HTTP") if self._path else None
        except BaseException:
            listener.close()
            raise
        await server.startup(sockets=[listener])
        self._servers = server.servers
        if on_path is not None:
            self._inode = os.stat(self._path).st_ino
            made = partial(BoundedHttpProtocol, config=config, server_state=self._state, app_state={})
            self._servers.append(await asyncio.get_running_loop().create_unix_server(made, sock=on_path))
        self._tasks.spawn(self._sweep(), "http-sweeper")

    async def stop_accepting(self) -> None:
        """Close the listening sockets; new requests on open connections get "Server exiting" (E7), readiness is off."""
        self._application.draining = True
        for server in self._servers:
            server.close()
        if self._inode:
            unlink_own(self._path, self._inode)

    async def close(self, grace_s: float) -> None:
        """Wait up to `grace_s` for running requests, then cancel the rest and close all connections."""
        await self.stop_accepting()
        for connection in self._connections():
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=grace_s)
        leftover = set(self._state.tasks)
        for task in leftover:
            task.cancel()
        if leftover:
            await asyncio.wait(leftover, timeout=_CANCEL_GRACE_S)
        stuck = [task for task in leftover if not task.done()]  # they write to clients that do not read
        for connection in self._connections():
            if connection.transport is not None and stuck:
                connection.transport.abort()
            elif connection.transport is not None:
                connection.close()
        if stuck:
            await asyncio.wait(stuck, timeout=_CANCEL_GRACE_S)
        await self._tasks.close()

    def _connections(self) -> list[BoundedHttpProtocol]:
        # those of HTTP/2 have the same methods
        return cast(list[BoundedHttpProtocol], list(self._state.connections))

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            now = loop.time()
            for connection in self._connections():
                connection.sweep(now - last)
            last = now
