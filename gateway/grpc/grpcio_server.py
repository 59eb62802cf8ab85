"""The gRPC front over grpcio, the reference implementation: port, TLS, keep-alive, compression (G29-G31, V5)."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from charonia.errors import StartupError
from charonia.options.settings import GatewaySettings, TlsSettings
from gateway.handler import Handler
from gateway.listening import bound, listen_unix
from gateway.tls import ChangingFiles, certificates

from .calling import Methods, Reply, Streaming, Unary
from .servicer import Servicer

_log = logging.getLogger(__name__)

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_COMPRESSION = {
    "none": (grpc.Compression.NoCompression, -1),
    "low": (grpc.Compression.Gzip, 1),
    "medium": (grpc.Compression.Gzip, 2),
    "high": (grpc.Compression.Gzip, 3),
}
_UNLIMITED = -1


class GrpcFront:
    """The gRPC interface of one gateway. Raises `StartupError` for invalid options.

    Order of shutdown: `stop_accepting` refuses streams and turns readiness off, then `close` waits for open calls.
    """

    def __init__(self, settings: GatewaySettings, handler: Handler) -> None:
        self._settings = settings
        self._servicer = Servicer(settings, handler)
        self._server: grpc.aio.Server | None = None
        self._compression, self._level = _COMPRESSION[settings.grpc_infer_response_compression_level]
        self.port = 0
        """The real port, once started."""

    async def start(self) -> None:
        """Bind and serve. Raises `StartupError` if the port cannot be bound (V5) or a certificate cannot be read."""
        settings = self._settings
        options: list[tuple[str, int]] = [
            ("grpc.so_reuseport", int(settings.reuse_grpc_port)),
            ("grpc.max_receive_message_length", _UNLIMITED),
            ("grpc.max_send_message_length", _UNLIMITED),
            *settings.grpc_keepalive.items(),
        ]
        if self._level >= 0:
            options.append(("grpc.default_compression_level", self._level))
        host = settings.grpc_address
        address = f"[{host}]:{settings.grpc_port}" if ":" in host and host[0] != "[" else f"{host}:{settings.grpc_port}"
        if settings.grpc_port and not settings.reuse_grpc_port:
            # grpc's own error for a port in use names neither the port nor the reason (V5)
            bound(host.strip("[]"), settings.grpc_port, service="GRPC").close()
        server = grpc.aio.server(options=options, compression=self._compression)
        server.add_generic_rpc_handlers(_handlers(self._servicer.methods()))
        try:
            if settings.grpc_tls is not None:
                self.port = server.add_secure_port(address, _credentials(settings.grpc_tls))
            else:
                self.port = server.add_insecure_port(address)
            if settings.grpc_socket:
                listen_unix(settings.grpc_socket, service="GRPC").close()  # frees its file, or raises why not
                os.unlink(settings.grpc_socket)
                server.add_insecure_port(f"unix:{settings.grpc_socket}")
        except RuntimeError as error:
            raise StartupError(f"failed to start GRPC service: cannot listen on '{address}': {error}") from None
        if not self.port:
            raise StartupError(f"failed to start GRPC service: cannot listen on '{address}'")
        self._server = server
        await server.start()

    async def stop_accepting(self) -> None:
        """Refuse new streams and turn readiness off; open calls continue (G36)."""
        self._servicer.draining = True

    async def close(self, grace_s: float) -> None:
        """Refuse new calls, wait up to `grace_s` for open ones, then cancel them."""
        await self.stop_accepting()
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None


def _credentials(settings: TlsSettings) -> grpc.ServerCredentials:
    """Credentials that are read again when their files change. Raises `StartupError`."""

    def read() -> grpc.ServerCertificateConfiguration:
        found = certificates(settings)
        return grpc.ssl_server_certificate_configuration([(found.key, found.certificate)], found.root or None)

    first, files = read(), ChangingFiles(settings)

    def newest() -> Any:
        """Called by grpc at each handshake; None keeps the credentials."""
        try:
            return read() if files.changed() else None
        except StartupError as error:
            files.doubt()
            _log.warning("the new certificates cannot be used yet: %s", error)
            return None

    return grpc.dynamic_ssl_server_credentials(first, newest, require_client_authentication=settings.is_mutual)


def _handlers(methods: Methods) -> tuple[Any, ...]:
    services: dict[str, dict[str, Any]] = {}
    for path, method in methods.items():
        _, service, name = path.split("/")
        services.setdefault(service, {})[name] = _unary(method) if isinstance(method, Unary) else _streaming(method)
    return tuple(grpc.method_handlers_generic_handler(service, calls) for service, calls in services.items())


def _unary(method: Unary) -> Any:
    async def handle(data: bytes, context: Any) -> bytes:
        reply = await method.call(data, context)
        if not isinstance(reply, tuple):
            return reply if isinstance(reply, bytes) else b"".join(reply.parts)
        # the exception of `abort` forms a cycle with the context, which would keep this frame's values
        data = b""
        code, details, metadata = reply
        await context.abort(_CODES[code], details, metadata)
        raise AssertionError("abort always raises")

    return grpc.unary_unary_rpc_method_handler(handle)


def _streaming(method: Streaming) -> Any:
    async def handle(messages: AsyncIterator[bytes], context: Any) -> None:
        async def write(reply: Reply) -> None:
            try:
                await context.write(reply if isinstance(reply, bytes) else b"".join(reply.parts))
            except grpc.aio.BaseError:  # the client left; grpc may cancel the stream only later
                raise asyncio.CancelledError from None

        refusal = await method.call(messages, write, context)
        if refusal is not None:
            code, details, metadata = refusal
            await context.abort(_CODES[code], details, metadata)

    return grpc.stream_stream_rpc_method_handler(handle)
