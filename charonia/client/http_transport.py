"""HTTP over httpx2, blocking and for asyncio: pools of connections, times, streams of events."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx2

from charonia.errors import DEADLINE_EXCEEDED, CharoniaError, DeadlineExceeded, InvalidArgument

from .http_form import HttpAnswer, HttpCall
from .results import ConnectionLost, Incomprehensible, NotConnected, Tls

CONNECT_WITHIN_S = 5.0


def _options(url: str, connections: int, headers: Mapping[str, str], tls: Tls | None) -> dict[str, Any]:
    return {
        "base_url": url,
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
    return ConnectionLost(f"the connection was lost: {words}")


_FAILURES = (httpx2.HTTPError, httpx2.InvalidURL)


class HttpTransport:
    """Blocking; may be used from several threads."""

    def __init__(self, url: str, connections: int, headers: Mapping[str, str], tls: Tls | None) -> None:
        self._client = httpx2.Client(**_options(url, connections, headers, tls))

    def exchange(self, call: HttpCall, timeout_s: float | None, headers: Mapping[str, str]) -> HttpAnswer:
        """Each wait for the network is bounded by the timeout, so a body that comes in drops is given up after it."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        parts: list[bytes] = []
        try:
            with self._client.stream(
                call.method, call.path, content=call.body or None, headers={**call.headers, **headers},
                timeout=_times(timeout_s),
            ) as answer:  # fmt: skip
                for part in answer.iter_bytes():
                    parts.append(part)
                    if until is not None and time.monotonic() > until:
                        raise DeadlineExceeded(DEADLINE_EXCEEDED)
        except _FAILURES as error:
            raise _failure(error) from error
        return HttpAnswer(answer.status_code, answer.headers, b"".join(parts))

    def stream(self, call: HttpCall, timeout_s: float | None, headers: Mapping[str, str]) -> Iterator[Any]:
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

    def __init__(self, url: str, connections: int, headers: Mapping[str, str], tls: Tls | None) -> None:
        self._client = httpx2.AsyncClient(**_options(url, connections, headers, tls))

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

    async def stream(self, call: HttpCall, timeout_s: float | None, headers: Mapping[str, str]) -> AsyncIterator[Any]:
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
