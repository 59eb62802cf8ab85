"""Request bodies off the wire: bounded reading and bounded decompression, and compressing replies (H18, H24).

What the bytes mean is `request_codec`'s; chunk counts and slow senders are `protocol`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .codec.compression import IDENTITY, compress, content_encoding, decompress
from .codec.error_replies import Headers, HttpRefusal
from .codec.request_codec import json_too_large, parse_header_length, raw_too_large
from .codec.response_codec import HEADER_LENGTH

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_OFF_LOOP_BYTES = 256 * 1024
"""Above this a body is (de)compressed in a thread: zlib lets go of the interpreter, the loop keeps answering."""

_DISCARD_LIMIT_FACTOR = 16
"""A refused body of at most this many times the limit is read and dropped, so that the client sees the refusal;
a larger one has its connection closed."""


RAW_HEADERS = "charonia.raw_headers"
"""Key in the scope's state of the headers with their names as sent; there only when headers are forwarded."""

CLIENT_LEFT = "charonia.client_left"
"""Key in the scope's state that says why the request was cancelled."""

EXCHANGE = "charonia.exchange"
"""Key in the scope's state of the request's `asgi.Exchange`; there only on this package's own connections."""


class ClientGone(Exception):
    """The client closed the connection; there is no one to answer."""


def check_declared(headers: dict[bytes, bytes], limit_bytes: int) -> None:
    """Raise a 400 `HttpRefusal` with H24's text when Content-Length announces more than the limit."""
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared[:20]) > limit_bytes:
        size = int(declared[:20])
        raise HttpRefusal(400, _too_large(headers, size, limit_bytes), close=size > limit_bytes * _DISCARD_LIMIT_FACTOR)


async def read_body(message: Message, headers: dict[bytes, bytes], receive: Receive, limit_bytes: int) -> bytes:
    """The whole body, `message` being its first ASGI message; call `check_declared` before awaiting that.

    Raises a 400 `HttpRefusal` with H24's text past the limit, `ClientGone` when the client leaves first.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise HttpRefusal(400, _too_large(headers, size, limit_bytes), close=True)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
        message = await receive()


async def inflate(declared: bytes, body: bytes, limit_bytes: int) -> bytes:
    """The body without its Content-Encoding `declared`. Raises as `content_encoding` and `decompress`."""
    encoding = content_encoding(declared)
    if encoding == IDENTITY:
        return body
    return await _off_loop(len(body), decompress, encoding, body, limit_bytes)


async def deflate(encoding: str, body: bytes) -> bytes:
    """The reply body in `encoding`."""
    return await _off_loop(len(body), compress, encoding, body)


async def _off_loop(size_bytes: int, work: Callable[..., bytes], *arguments: object) -> bytes:
    if size_bytes <= _OFF_LOOP_BYTES:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


def _too_large(headers: dict[bytes, bytes], size_bytes: int, limit_bytes: int) -> str:
    """H24's text for the kind of body the headers announce."""
    declared = headers.get(HEADER_LENGTH)
    if declared is not None and parse_header_length(declared) == 0:
        return raw_too_large(size_bytes, limit_bytes)
    return json_too_large(size_bytes, limit_bytes)


async def reply_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a response that is there as a whole."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})
