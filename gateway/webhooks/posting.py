"""One POST to an endpoint, at an address that was checked.

A name is resolved once, all its addresses are checked, and the connection is made to a checked address, with the name
only in `Host` and the TLS handshake: a later change of the name has no effect. Redirects are answers like any other,
proxies of the environment are not used, and only the head of an answer is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import h11

from charonia import failpoints

from .addresses import Address, Allowed, Endpoint
from .turns import Turns

_MAX_HEAD_BYTES = 16_384
_MAX_READ_BYTES = 32_768
_READ_BYTES = 1024
_MAX_ADDRESSES = 4
_RESOLVERS = 16

Resolve = Callable[[str, int], Sequence[str]]
"""Resolves a host to addresses, in a thread. Raises `OSError`."""


class _Name(NamedTuple):
    """A name that is resolved for a tenant."""

    tenant: bytes
    host: str
    port: int


class AddressRefused(Exception):
    """An endpoint has no address that webhooks may connect to."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`status` 0: there was no answer, for the reason in `error`. `retry_after_s` is the endpoint's Retry-After."""

    status: int
    error: str = ""
    retry_after_s: int = 0


class Poster:
    """Posts to endpoints. `tls` is for endpoints with private certificates; by default the system's CAs count."""

    def __init__(
        self,
        allowed: Allowed,
        *,
        timeout_s: float = 15.0,
        agent: str = "charonia",
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._allowed = allowed
        self._timeout_s = timeout_s
        self._agent = agent
        self._resolve = resolve or _resolve
        self._tls = tls
        self._resolvers = Turns(_RESOLVERS, _RESOLVERS)
        self._resolving: dict[_Name, asyncio.Task[Sequence[str]]] = {}

    async def post(
        self, endpoint: Endpoint, headers: Sequence[tuple[str, str]], body: bytes, tenant: bytes = b""
    ) -> Answer:
        """The answer to one POST, or its failure, within the time limit. Tenants take turns at resolving names.

        Raises `AddressRefused`.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._post(endpoint, headers, body, tenant)
        except TimeoutError:
            return Answer(0, f"no answer within {self._timeout_s:g} s")
        except ssl.SSLCertVerificationError as error:
            return Answer(0, f"certificate not accepted: {error.verify_message}")
        except ssl.SSLError as error:
            return Answer(0, f"TLS failed: {error.reason or 'handshake'}")
        except socket.gaierror as error:
            return Answer(0, f"name cannot be resolved: {error.strerror or error}")
        except (OSError, EOFError) as error:
            return Answer(0, f"connection failed: {getattr(error, 'strerror', None) or error or 'closed'}")
        except h11.ProtocolError as error:
            return Answer(0, f"not an HTTP answer: {error}")

    def close(self) -> None:
        """Abandon name resolutions; their threads end with the process."""
        for asking in self._resolving.values():
            asking.cancel()

    async def _post(self, endpoint: Endpoint, headers: Sequence[tuple[str, str]], body: bytes, tenant: bytes) -> Answer:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        request = h11.Request(
            method="POST",
            target=endpoint.target,
            headers=[
                ("host", endpoint.authority),
                ("user-agent", self._agent),
                ("content-length", str(len(body))),
                ("connection", "close"),
                *headers,
            ],
        )
        message = b"".join(connection.send(e) or b"" for e in (request, h11.Data(data=body), h11.EndOfMessage()))
        reader, writer = await self._connect(endpoint, tenant)
        try:
            failpoints.hit("webhooks.posting")
            writer.write(message)
            await writer.drain()
            response = await _head(connection, reader)
        finally:
            # not closed in order: the rest of the answer does not matter, however slowly it comes
            writer.transport.abort()
        return Answer(response.status_code, retry_after_s=_retry_after_s(response))

    async def _connect(self, endpoint: Endpoint, tenant: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        failed: OSError | None = None
        addresses = (await self._addresses(endpoint, tenant))[:_MAX_ADDRESSES]
        for left, address in zip(range(len(addresses) - 1, -1, -1), addresses, strict=True):
            # one that drops packets leaves time for the others; the last one has the rest
            patience_s = self._timeout_s / len(addresses) if left else None
            try:
                async with asyncio.timeout(patience_s):
                    return await asyncio.open_connection(
                        str(address),
                        endpoint.port,
                        limit=_READ_BYTES,
                        ssl=self._context() if endpoint.scheme == "https" else None,
                        server_hostname=endpoint.host if endpoint.scheme == "https" else None,
                    )
            except ssl.SSLError:
                raise
            except OSError as error:  # TimeoutError is one
                failed = error
        raise failed or ConnectionError("no address")

    async def _addresses(self, endpoint: Endpoint, tenant: bytes) -> list[Address]:
        literal = endpoint.address
        if literal is not None:
            found = [literal]
        else:
            found = [
                ipaddress.ip_address(text) for text in await self._resolved(_Name(tenant, endpoint.host, endpoint.port))
            ]
        permitted = [address for address in found if self._allowed.permits(endpoint.host, address)]
        if not permitted:
            raise AddressRefused(f"'{endpoint.host}' has no address that webhooks may reach")
        return permitted

    async def _resolved(self, name: _Name) -> Sequence[str]:
        """Resolve a name once for all concurrent callers of a tenant."""
        asked = self._resolving.get(name)
        if asked is None:
            asked = self._resolving[name] = asyncio.create_task(self._ask(name), name=f"resolve {name.host}")
            asked.add_done_callback(lambda done: self._forget(name, done))
        return await asyncio.shield(asked)

    def _forget(self, name: _Name, done: asyncio.Task[Sequence[str]]) -> None:
        del self._resolving[name]
        if not done.cancelled():
            done.exception()  # its waiters may be gone: it must not be reported as unhandled

    async def _ask(self, name: _Name) -> Sequence[str]:
        """In its own thread, so that a name server that does not answer blocks no other delivery and no exit."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Sequence[str]] = loop.create_future()

        def answer(addresses: Sequence[str], error: Exception | None) -> None:
            if found.done():
                return
            if error is not None:
                found.set_exception(error)
            else:
                found.set_result(addresses)

        def work() -> None:
            addresses: Sequence[str] = ()
            failed: Exception | None = None
            try:
                addresses = self._resolve(name.host, name.port)
            except OSError as error:
                failed = error
            except Exception as error:
                failed = OSError(f"resolver failed: {error}")
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answer, addresses, failed)

        async with self._resolvers.turn(name.tenant, name.host.encode()):
            threading.Thread(target=work, name=f"resolve {name.host}", daemon=True).start()
            return await found

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


async def _head(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Response:
    read = 0
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Response):
            return event
        if event is h11.NEED_DATA:
            data = await reader.read(_READ_BYTES)
            read += len(data)
            if not data:
                raise EOFError("closed without an answer")
            if read > _MAX_READ_BYTES:
                raise h11.RemoteProtocolError("no end of interim answers")
            connection.receive_data(data)


def _retry_after_s(response: h11.Response) -> int:
    for name, value in response.headers:
        if name == b"retry-after" and value.isdigit() and len(value) < 10:
            return int(value)
    return 0


def _resolve(host: str, port: int) -> Sequence[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
