"""Request bodies off the wire: bounded reading and bounded decompression, and compressing replies (H18, H24).

What the bytes mean is `request_codec`'s; chunk counts and slow senders are `protocol`'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from charonia.catalog.served import ServedVersion
from charonia.inference import InferenceResponse
from charonia.offload.pool import OFF_LOOP_BYTES, Offload

from .codec.compression import IDENTITY, compress, content_encoding, decompress
from .codec.conversions import read_reply, reply_task
from .codec.error_replies import Headers, HttpRefusal
from .codec.request_codec import json_too_large, parse_header_length, raw_too_large
from .codec.response_codec import HEADER_LENGTH, LargeReply, ReplyForm, ResponseEncoder

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_INFLATED_IN_LOOP_BYTES = 2 * 1024
"""A body may become a thousand times this size: larger ones are for a thread, as zlib lets go of the interpreter."""

_DEFLATED_IN_LOOP_BYTES = 64 * 1024
"""Compressing so much takes a millisecond."""

CLASSED_BYTES = 16 * 1024
"""Outputs of which classes are wanted: so many values of a byte are sorted and written in 15 ms."""

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


async def inflate(offload: Offload, declared: bytes, body: bytes, limit_bytes: int) -> bytes:
    """The body without its Content-Encoding `declared`. Raises as `content_encoding`, `decompress` and `Offload`."""
    encoding = content_encoding(declared)
    if encoding == IDENTITY:
        return body
    if len(body) <= _INFLATED_IN_LOOP_BYTES:
        return decompress(encoding, body, limit_bytes)
    return await offload.in_thread(limit_bytes, decompress, encoding, body, limit_bytes)


async def deflate(offload: Offload, encoding: str, body: bytes | LargeReply) -> bytes:
    """The reply body in `encoding`."""
    if len(body) <= _DEFLATED_IN_LOOP_BYTES:
        return compress(encoding, _joined(body))
    return await offload.in_thread(len(body), lambda: compress(encoding, _joined(body)), may_refuse=False)


async def written(
    offload: Offload, encoder: ResponseEncoder, response: InferenceResponse, form: ReplyForm, served: ServedVersion
) -> tuple[Headers, bytes | LargeReply]:
    """A reply's headers and body, a large one written elsewhere. Raises as `ResponseEncoder.encode`."""
    if form.all_binary or sum(len(t.data) for t in response.outputs) <= (
        CLASSED_BYTES if form.classes else OFF_LOOP_BYTES
    ):
        return encoder.reply(response, form, served)
    return read_reply(await offload.run(reply_task(response, form, served), may_refuse=False))


def _joined(body: bytes | LargeReply) -> bytes:
    return body.joined() if isinstance(body, LargeReply) else body


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
