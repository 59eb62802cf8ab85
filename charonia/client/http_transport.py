"""HTTP over httpx2, blocking and for asyncio: pools of connections, times, streams of events."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Mapping
from typing import Any

import httpcore2
import httpx2

from charonia.errors import DEADLINE_EXCEEDED, CharoniaError, DeadlineExceeded, InvalidArgument

from .http_form import HttpAnswer, HttpCall
from .results import ConnectionLost, Incomprehensible, NotConnected, Tls

CONNECT_WITHIN_S = 5.0
_PIECE_BYTES = 256 * 1024


def _options(url: str, path: str, connections: int, headers: Mapping[str, str], tls: Tls | None) -> dict[str, Any]:
    """Options of a client; `path` is that of a Unix socket in the place of the URL's host, "" without one."""
    server = httpx2.URL("http://localhost" if path else url)
    return {
        # not in the URL, which httpx2 logs with each request
        "auth": (server.username, server.password) if server.userinfo else None,
        "base_url": server.copy_with(username="", password=""),
        # Tensors hardly shrink, and a server that compresses them is busy for a long time.
        "headers": {"user-agent": "charonia-client", "accept-encoding": "identity", **headers},
        "limits": httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
        "verify": _context(tls) if url.startswith("https") else False,
        "trust_env": False,
    }


def _context(tls: Tls | None) -> ssl.SSLContext:
    files = tls or Tls()
    try:
        context = ssl.create_default_context(cafile=files.ca_file or None)
        if files.certificate_file:
            context.load_cert_chain(files.certificate_file, files.key_file or None)
    except OSError as error:  # `SSLError` is one
        raise InvalidArgument(f"the certificates of {files} cannot be used: {error}") from None
    return context


def _times(timeout_s: float | None) -> httpx2.Timeout:
    connect_s = CONNECT_WITHIN_S if timeout_s is None else min(timeout_s, CONNECT_WITHIN_S)
    return httpx2.Timeout(timeout_s, connect=connect_s)


def _failure(error: Exception) -> CharoniaError:
    """What an error of httpx2 says of the request."""
    words = str(error) or type(error).__name__
    if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
        return NotConnected(f"the server cannot be reached: {words}")
    if isinstance(error, httpx2.PoolTimeout):
        return NotConnected("no connection of the pool became free in time")
    if isinstance(error, httpx2.TimeoutException):
        return DeadlineExceeded(DEADLINE_EXCEEDED)
    if isinstance(error, httpx2.SSEError):
        return Incomprehensible(words)
    if isinstance(error, (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)):
        return InvalidArgument(words)
    if isinstance(error, httpx2.RemoteProtocolError) and words.startswith("illegal"):
        return ConnectionLost(f"the answer is not HTTP/1.1 ({words}): is this the server's gRPC port?")
    return ConnectionLost(f"the connection was lost: {words}")


_FAILURES = (httpx2.HTTPError, httpx2.InvalidURL)


class _Deadline(threading.local):
    """When the present exchange of this thread has to be over. httpx2 bounds each wait for the network by itself."""

    until_s: float | None = None

    @contextlib.contextmanager
    def set(self, left_s: float | None) -> Iterator[None]:
        self.until_s = None if left_s is None else time.monotonic() + left_s
        try:
            yield
        finally:
            self.until_s = None

    def bound(self, timeout_s: float | None) -> float | None:
        """What is left, if that is less. Raises `httpcore2.ReadTimeout` for nothing."""
        if self.until_s is None:
            return timeout_s
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise httpcore2.ReadTimeout(DEADLINE_EXCEEDED)
        return left_s if timeout_s is None else min(timeout_s, left_s)


class _BoundStream(httpcore2.NetworkStream):
    """A connection on which no wait lasts beyond the deadline, however many bytes come before it."""

    def __init__(self, stream: httpcore2.NetworkStream, deadline: _Deadline) -> None:
        self._stream, self._deadline = stream, deadline
        self.close, self.get_extra_info = stream.close, stream.get_extra_info  # type: ignore[method-assign]

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.bound(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for at in range(0, len(buffer), _PIECE_BYTES):
            self._stream.write(buffer[at : at + _PIECE_BYTES], self._deadline.bound(timeout))

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        made = self._stream.start_tls(ssl_context, server_hostname, self._deadline.bound(timeout))
        return _BoundStream(made, self._deadline)


class _BoundBackend(httpcore2.SyncBackend):
    def __init__(self, deadline: _Deadline) -> None:
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.NetworkStream:
        made = super().connect_tcp(host, port, self._deadline.bound(timeout), local_address, socket_options)
        return _BoundStream(made, self._deadline)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore2.NetworkStream:
        made = super().connect_unix_socket(path, self._deadline.bound(timeout), socket_options)
        return _BoundStream(made, self._deadline)


class HttpTransport:
    """Blocking; may be used from several threads."""

    def __init__(self, url: str, path: str, connections: int, headers: Mapping[str, str], tls: Tls | None) -> None:
        options = _options(url, path, connections, headers, tls)
        self._deadline = _Deadline()
        transport = httpx2.HTTPTransport(
            verify=options["verify"], limits=options["limits"], trust_env=False, uds=path or None
        )
        transport._pool._network_backend = _BoundBackend(self._deadline)  # httpx2 has no option for it
        self._client = httpx2.Client(**options, transport=transport)

    def exchange(self, call: HttpCall, timeout_s: float | None, headers: Mapping[str, str]) -> HttpAnswer:
        try:
            with self._deadline.set(timeout_s):
                answer = self._client.request(
                    call.method, call.path, content=call.body or None, headers={**call.headers, **headers},
                    timeout=_times(timeout_s),
                )  # fmt: skip
        except _FAILURES as error:
            raise _failure(error) from error
        return HttpAnswer(answer.status_code, answer.headers, answer.content)

    def stream(
        self, call: HttpCall, timeout_s: float | None, left_s: float | None, headers: Mapping[str, str]
    ) -> Iterator[Any]:
        events = self._events(call, timeout_s, headers)
        until_s = None if left_s is None else time.monotonic() + left_s
        with contextlib.closing(events):
            while True:
                # between two elements the thread may do other exchanges
                with self._deadline.set(None if until_s is None else until_s - time.monotonic()):
                    try:
                        element = next(events)
                    except StopIteration:
                        return
                yield element

    def _events(self, call: HttpCall, timeout_s: float | None, headers: Mapping[str, str]) -> Generator[Any]:
        try:
            with self._client.stream(
                call.method, call.path, headers={**call.headers, **headers}, timeout=_times(timeout_s)
            ) as answer:
                if answer.status_code == 200:
                    yield from httpx2.EventSource(answer, max_event_size=None)
                else:
                    yield HttpAnswer(answer.status_code, answer.headers, answer.read())
        except _FAILURES as error:
            raise _failure(error) from error

    def close(self) -> None:
        self._client.close()


class AsyncHttpTransport:
    """For one event loop."""

    def __init__(self, url: str, path: str, connections: int, headers: Mapping[str, str], tls: Tls | None) -> None:
        options = _options(url, path, connections, headers, tls)
        transport = httpx2.AsyncHTTPTransport(
            verify=options["verify"], limits=options["limits"], trust_env=False, uds=path or None
        )
        self._client = httpx2.AsyncClient(**options, transport=transport)

    async def exchange(self, call: HttpCall, timeout_s: float | None, headers: Mapping[str, str]) -> HttpAnswer:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._client.request(
                    call.method, call.path, content=call.body or None, headers={**call.headers, **headers},
                    timeout=_times(timeout_s),
                )  # fmt: skip
        except TimeoutError:
            raise DeadlineExceeded(DEADLINE_EXCEEDED) from None
        except _FAILURES as error:
            raise _failure(error) from error
        return HttpAnswer(answer.status_code, answer.headers, answer.content)

    async def stream(
        self, call: HttpCall, timeout_s: float | None, left_s: float | None, headers: Mapping[str, str]
    ) -> AsyncIterator[Any]:
        until_s = None if left_s is None else asyncio.get_running_loop().time() + left_s
        async with contextlib.aclosing(self._events(call, timeout_s, headers)) as events:
            while True:
                try:
                    async with asyncio.timeout_at(until_s):
                        element = await anext(events)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise DeadlineExceeded(DEADLINE_EXCEEDED) from None
                yield element

    async def _events(self, call: HttpCall, timeout_s: float | None, headers: Mapping[str, str]) -> AsyncGenerator[Any]:
        try:
            async with self._client.stream(
                call.method, call.path, headers={**call.headers, **headers}, timeout=_times(timeout_s)
            ) as answer:
                if answer.status_code == 200:
                    async for event in httpx2.EventSource(answer, max_event_size=None):
                        yield event
                else:
                    yield HttpAnswer(answer.status_code, answer.headers, await answer.aread())
        except _FAILURES as error:
            raise _failure(error) from error

    async def close(self) -> None:
        await self._client.aclose()
