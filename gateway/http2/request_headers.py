"""The headers of a request over HTTP/2 and of its response (RFC 9113, section 8). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.grpc.native.codec.call_headers import CallHeaders, Fields, http_block, literal
from gateway.grpc.native.codec.http2_frames import CONTINUATION, END_HEADERS, HEADERS, frame

_FRAME_BYTES = 16_384
_OF_CONNECTIONS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})


@dataclass(frozen=True, slots=True)
class RequestHeaders(CallHeaders):
    """`fields` are the headers of an ASGI scope; `length` is the body's, if declared."""

    method: str = ""
    target: bytes = b""
    fields: tuple[tuple[bytes, bytes], ...] = ()
    length: int | None = None


def request_headers(pseudo: dict[str, str], _words: list[tuple[str, str]], fields: Fields) -> CallHeaders:
    """The meaning of headers that are valid in HTTP/2."""
    method, target, authority = pseudo[":method"], b"", b""
    lengths: set[bytes] = set()
    for name, value in fields:
        if name == b":path":
            target = value
        elif name == b":authority":
            authority = value
        elif name == b"content-length":
            lengths.add(value)
    length = next(iter(lengths), None)
    if len(lengths) > 1 or (length is not None and (not length.isdigit() or len(length) > 18)):
        return RequestHeaders(malformed="'content-length' is no number, or several")
    rest = [field for field in fields if not field[0].startswith(b":")]
    if authority:  # it overrides Host (RFC 9113, section 8.3.1)
        rest = [(b"host", authority), *(field for field in rest if field[0] != b"host")]
    return RequestHeaders(
        method=method, target=target, fields=tuple(rest), length=None if length is None else int(length)
    )


def response_frames(stream_id: int, status: int, headers: Iterable[tuple[bytes, bytes]], flags: int = 0) -> bytes:
    """The header frames of a response, without headers that concern HTTP/1.1 connections."""
    block = http_block(status) + b"".join(
        [literal(name, value) for name, value in headers if name not in _OF_CONNECTIONS]
    )
    if len(block) <= _FRAME_BYTES:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    pieces = [block[at : at + _FRAME_BYTES] for at in range(0, len(block), _FRAME_BYTES)]
    frames = [frame(HEADERS, flags, stream_id, pieces[0])]
    frames += [frame(CONTINUATION, 0, stream_id, piece) for piece in pieces[1:-1]]
    return b"".join([*frames, frame(CONTINUATION, END_HEADERS, stream_id, pieces[-1])])
