"""Reads and decompresses request bodies within bounds, and writes and compresses replies (H18, H24). ASGI's types.

`request_codec` parses bodies; `protocol` bounds chunks and refuses slow senders.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from charonia.catalog.served import ServedVersion
from charonia.errors import CharoniaError, InvalidArgument
from charonia.inference import InferenceResponse
from charonia.offload.pool import OFF_LOOP_BYTES, Offload
from charonia.offload.reclaimed import ReclaimedBytes
from charonia.tensors import Buffer
from gateway.requests.decompression import GZIP, DecompressionFault, inflate

from .codec.compression import IDENTITY, compress, content_encoding, refusal_of
from .codec.conversions import read_reply, reply_task
from .codec.error_replies import Headers, HttpRefusal, error_body
from .codec.job_json import response_json
from .codec.request_codec import json_too_large, parse_header_length, raw_too_large
from .codec.response_codec import HEADER_LENGTH, LargeReply, ReplyForm, ResponseEncoder

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
LimitText = Callable[[dict[bytes, bytes], int, int], str]
"""Makes the text that refuses a body: headers, size, limit."""

_DEFLATED_IN_LOOP_BYTES = 64 * 1024
"""Compressing this much takes a millisecond."""

_CLASSIFIED_IN_LOOP_BYTES = 16 * 1024
"""Sorting and writing this many one-byte values as classes takes 15 ms."""

_DISCARD_LIMIT_FACTOR = 16
"""A refused body of at most this many times the limit is read and dropped, so that the client sees the refusal;
for a larger one the connection is closed."""


RAW_HEADERS = "charonia.raw_headers"
"""Key in the scope's state: the headers with names as sent, only set when headers are forwarded."""

CLIENT_LEFT = "charonia.client_left"
"""Key in the scope's state: True when the request was cancelled because its client left."""

EXCHANGE = "charonia.exchange"
"""Key in the scope's state: the request's `exchanges.Exchange`, only set on connections of `protocol`."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def response_text(
    offload: Offload, encoder: ResponseEncoder, response: InferenceResponse, form: ReplyForm, served: ServedVersion
) -> tuple[Buffer, ...]:
    """As `job_json.response_json`, in parts; a large one is written by a worker process."""
    if sum(len(tensor.data) for tensor in response.outputs) <= _CLASSIFIED_IN_LOOP_BYTES:
        return (response_json(response, form, served),)
    try:
        _, reply = await written(offload, encoder, response, form, served)
    except CharoniaError as refused:  # JSON cannot carry the output
        return (error_body(refused.message),)
    return reply.parts if isinstance(reply, LargeReply) else (reply,)


def too_large(headers: dict[bytes, bytes], size_bytes: int, limit_bytes: int) -> str:
    """H24's text for the kind of body that the headers announce."""
    declared = headers.get(HEADER_LENGTH)
    if declared is not None and parse_header_length(declared) == 0:
        return raw_too_large(size_bytes, limit_bytes)
    return json_too_large(size_bytes, limit_bytes)


def too_large_for_control(_headers: dict[bytes, bytes], size_bytes: int, limit_bytes: int) -> str:
    """The text for a request without tensors."""
    return f"request body of {size_bytes} bytes exceeds the maximum of {limit_bytes} bytes at this endpoint"


def check_declared(headers: dict[bytes, bytes], limit_bytes: int, text: LimitText = too_large) -> None:
    """Raises a 400 `HttpRefusal` with this text if Content-Length exceeds the limit."""
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared[:20]) > limit_bytes:
        size = int(declared[:20])
        raise HttpRefusal(400, text(headers, size, limit_bytes), close=size > limit_bytes * _DISCARD_LIMIT_FACTOR)


async def read_body(
    message: Message, headers: dict[bytes, bytes], receive: Receive, limit_bytes: int, text: LimitText = too_large
) -> bytes | memoryview:
    """The whole body. `message` is its first ASGI message; call `check_declared` before awaiting that.

    Raises a 400 `HttpRefusal` with this text past the limit, `ClientGone` if the client leaves first.
    """
    whole: ReclaimedBytes | None = None
    come_bytes = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        come_bytes += len(part)
        if come_bytes > limit_bytes:
            raise HttpRefusal(400, text(headers, come_bytes, limit_bytes), close=True)
        if not message.get("more_body", False) and come_bytes == len(part):
            return part
        if whole is None:
            declared = headers.get(b"content-length", b"")
            size = int(declared[:20]) if declared.isdigit() else 0
            whole = ReclaimedBytes(min(size, limit_bytes))
        whole.append(part)  # grows in place: joining all parts at the end would stall the loop
        if not message.get("more_body", False):
            return whole.view() if come_bytes > OFF_LOOP_BYTES else bytes(whole.view())
        message = await receive()


async def without_encoding(
    offload: Offload, declared: bytes, body: bytes | memoryview, limit_bytes: int
) -> bytes | memoryview:
    """The body without its Content-Encoding `declared`.

    Raises as `content_encoding`, `Offload`, and `refusal_of`, and `InvalidArgument` for an encoded body without a byte.
    """
    encoding = content_encoding(declared)
    if encoding == IDENTITY:
        return body
    if not body:
        raise InvalidArgument("nothing to be decompressed")
    try:
        return await inflate(offload, encoding, body, limit_bytes, several=encoding == GZIP)
    except DecompressionFault as error:
        raise refusal_of(error, limit_bytes) from None


async def deflate(offload: Offload, encoding: str, body: bytes | LargeReply) -> bytes:
    """The reply body in `encoding`."""
    parts = body.parts if isinstance(body, LargeReply) else (body,)
    if len(body) <= _DEFLATED_IN_LOOP_BYTES:
        return compress(encoding, parts)
    return await offload.in_thread(len(body), compress, encoding, parts, may_refuse=False)


def is_quick_to_write(response: InferenceResponse, form: ReplyForm) -> bool:
    """Whether the event loop may write this reply, which is not binary throughout."""
    limit_bytes = _CLASSIFIED_IN_LOOP_BYTES if form.classes else OFF_LOOP_BYTES
    return sum([len(tensor.data) for tensor in response.outputs]) <= limit_bytes


async def written(
    offload: Offload, encoder: ResponseEncoder, response: InferenceResponse, form: ReplyForm, served: ServedVersion
) -> tuple[Headers, bytes | LargeReply]:
    """A reply's headers and body, a large one written by a worker process. Raises as `ResponseEncoder.encode`."""
    if form.all_binary or is_quick_to_write(response, form):
        return encoder.reply(response, form, served)
    return read_reply(await offload.run(reply_task(response, form, served), may_refuse=False))


async def reply_whole(send: Send, status: int, headers: Headers, body: bytes | LargeReply) -> None:
    """Send a complete response."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", b"%d" % len(body))],
        }
    )
    if isinstance(body, LargeReply):
        for part in body.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        body = b""
    await send({"type": "http.response.body", "body": body})
