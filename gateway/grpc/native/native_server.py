"""Our own gRPC server: HTTP/2 in the gateway's event loop, without threads (`docs/adr/0014`).

grpcio passes every call through three threads; this server reads and answers many calls at once.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

from charonia.options.settings import GatewaySettings, GrpcDelays
from gateway.grpc.calling import Standing
from gateway.grpc.envelope import raw_at
from gateway.grpc.servicer import MODEL_INFER, Servicer
from gateway.grpc.standard_services import CHANNELZ
from gateway.grpc.statuses import Status
from gateway.grpc.stream_requests import SHUTTING_DOWN
from gateway.handler import Handler
from gateway.listening import BACKLOG, listen, listen_unix, unlink_own
from gateway.tls import ServerTls

from .channelz import Channelz
from .codec.call_headers import CallHeaders
from .codec.limits import KeepAlive
from .connection import Connection
from .grpc_lane import GrpcLane
from .serving import Serving

_LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}
_CANCEL_GRACE_S = 1.0


class NativeGrpcFront:
    """The gRPC interface of one gateway. Raises `StartupError` for invalid options.

    Order of shutdown: `stop_accepting` refuses streams and turns readiness off, then `close` waits for open calls.
    """

    def __init__(self, settings: GatewaySettings, handler: Handler) -> None:
        self._settings = settings
        self._servicer = Servicer(settings, handler, (CHANNELZ,) if settings.grpc_channelz else ())
        self._serving = Serving(
            self._servicer.methods(),
            KeepAlive.of(settings.grpc_keepalive),
            _LEVELS[settings.grpc_infer_response_compression_level],
            settings.http_max_input_size,
            settings.max_pending_per_gateway_bytes,
            allocate_message=lambda size_bytes, begin: handler.allocate_body(size_bytes, raw_at(begin)),
            offload=handler.offload,
        )
        if settings.grpc_channelz:
            self._serving.methods |= Channelz(self._serving, self._listening, self._servicer.allow).methods()
        if handler.lane is not None and handler.lane.is_on and settings.grpc_delays == GrpcDelays():
            lane = GrpcLane(handler.lane, handler, self._servicer.encoder, self._standing)
            self._serving.lane = self._servicer.lane = lane
        self._servers: list[asyncio.Server] = []
        self._inode = 0
        self.port = 0
        """The real port, once started."""

    def _listening(self) -> list[Any]:
        return [one.getsockname() for server in self._servers for one in server.sockets]

    def _standing(self, headers: CallHeaders) -> Standing | None:
        """What the headers say for calls in the lane; None if calls with them may not use it."""
        may_ride = (
            headers.path == MODEL_INFER
            and headers.http_status == 200
            and not headers.malformed
            and headers.refusal is None
            and headers.encoding == "identity"
            and not (headers.accepts_gzip and self._serving.compression_level)
        )
        return self._servicer.standing(headers.metadata) if may_ride else None

    async def start(self) -> None:
        """Bind and serve. Raises `StartupError` if the port cannot be bound (V5) or a certificate cannot be read."""
        settings = self._settings
        tls = ServerTls(settings.grpc_tls, ["h2"]).context if settings.grpc_tls is not None else None
        host = settings.grpc_address.strip("[]")
        listener = listen(host, settings.grpc_port, service="GRPC", reuse_port=settings.reuse_grpc_port)
        self.port = listener.getsockname()[1]
        path, loop = settings.grpc_socket, asyncio.get_running_loop()
        try:
            on_path = listen_unix(path, service="GRPC") if path else None
        except BaseException:
            listener.close()
            raise
        made = partial(Connection, self._serving)
        self._servers = [await loop.create_server(made, sock=listener, backlog=BACKLOG, ssl=tls)]
        if on_path is not None:
            self._inode = os.stat(path).st_ino
            self._servers.append(await loop.create_unix_server(made, sock=on_path))

    async def stop_accepting(self) -> None:
        """Refuse new streams and turn readiness off; open calls continue (G36)."""
        self._servicer.draining = True

    async def close(self, grace_s: float) -> None:
        """Refuse new calls, wait up to `grace_s` for open ones, then cancel them."""
        await self.stop_accepting()
        serving = self._serving
        for server in self._servers:
            server.close()
        self._servers = []
        if self._inode:
            unlink_own(self._settings.grpc_socket, self._inode)
        for connection in list(serving.connections):
            connection.leave()
        if serving.connections:
            serving.left = asyncio.Event()
            try:
                await asyncio.wait_for(serving.left.wait(), grace_s)
            except TimeoutError:
                await self._cut()

    async def _cut(self) -> None:
        """End the calls and connections that did not end by themselves."""
        refusal = (Status.UNAVAILABLE, SHUTTING_DOWN, ())
        connections = list(self._serving.connections)
        tasks = [task for connection in connections for task in connection.cut_all(refusal)]
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_GRACE_S)
        for connection in connections:
            connection.close()
        if self._serving.connections:
            self._serving.left = asyncio.Event()
            try:
                await asyncio.wait_for(self._serving.left.wait(), _CANCEL_GRACE_S)
            except TimeoutError:  # they do not read
                for connection in list(self._serving.connections):
                    connection.abort()
