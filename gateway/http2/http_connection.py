"""HTTP/2 connections on the HTTP port: with prior knowledge, or chosen by ALPN (RFC 9113, section 3).

`gateway.grpc.native` handles frames and their limits; `request_streams` handles requests and their bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from uvicorn.server import ServerState

from charonia.options.settings import GatewaySettings
from gateway.grpc.native.codec.http2_frames import ErrorCode, goaway
from gateway.grpc.native.codec.limits import KeepAlive
from gateway.grpc.native.connection import Connection
from gateway.grpc.native.serving import Serving
from gateway.http.bodies import AsgiApp
from gateway.http.protocol import HEADERS_TIMEOUT_S, IDLE_TIMEOUT_S

from .request_headers import request_headers
from .request_streams import Requests

MAX_STREAMS = 256
"""Concurrent requests of one connection; announced to clients, whose further requests wait."""

_KEEP_ALIVE = KeepAlive(time_s=IDLE_TIMEOUT_S, permit_without_calls=True, max_pings_without_data=0, max_ping_strikes=0)
"""HTTP clients may ping as often as the patience of `limits` allows."""


class HttpConnection(Connection):
    """One connection. The server calls `sweep` on every connection at a steady interval."""

    calls: Requests

    def __init__(self, serving: Serving, app: AsgiApp, state: ServerState) -> None:
        super().__init__(serving, partial(Requests, app=app, state=state), request_headers)
        self._state = state
        self._waited_s = 0.0
        self._waits_for = 0

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.calls.transport = transport
        self._state.connections.add(self)  # type: ignore[arg-type]
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Accept no more requests than those on their way, and close after them."""
        self.leave()

    def close(self) -> None:
        """Close once all written data is sent."""
        self.out.put(goaway(self.last_id, ErrorCode.NO_ERROR))
        super().close()

    def sweep(self, elapsed_s: float) -> None:
        """End what has stalled: incomplete headers, bodies, and connections without requests."""
        self.calls.sweep(elapsed_s)
        waits_for = self.last_id if self._block is None else -self._block[0]
        if waits_for != self._waits_for or (self._block is None and self.has_calls):
            self._waits_for, self._waited_s = waits_for, 0.0
            return
        self._waited_s += elapsed_s
        if self._waited_s >= (IDLE_TIMEOUT_S if self._block is None else HEADERS_TIMEOUT_S):
            self.close()


def http2(settings: GatewaySettings, app: AsgiApp, state: ServerState) -> Callable[[], HttpConnection]:
    """Returns the factory of one front's connections."""
    serving = Serving({}, _KEEP_ALIVE, 0, 0, settings.max_pending_per_gateway_bytes, max_streams=MAX_STREAMS)
    return partial(HttpConnection, serving, app, state)
