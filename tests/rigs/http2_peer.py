"""A client of HTTP/2 that says what it is told to, frame by frame: what no library would send."""

from __future__ import annotations

import asyncio
import contextlib
from struct import pack
from types import TracebackType

from hpack import Decoder, Encoder

from gateway.grpc.native.codec.http2_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    settings,
)

LIMIT_S = 30
SERVICE = "/inference.GRPCInferenceService/"

Frame = tuple[int, int, int, bytes]
"""Kind, flags, stream, payload."""


class Peer:
    """A connection; `settings_` are said with the preface."""

    def __init__(self, port: int, settings_: dict[int, int] | None = None) -> None:
        self._port = port
        self._settings = settings_ or {}
        self.encoder = Encoder()
        self.decoder = Decoder()

    async def __aenter__(self) -> Peer:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.send(PREFACE, settings(self._settings))
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.writer.close()

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    def call(
        self,
        stream: int,
        method: str = "ServerLive",
        message: bytes | None = b"",
        extra: tuple[tuple[str, str], ...] = (),
    ) -> bytes:
        """The frames of a call; without a message, those of one that is not ended."""
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", SERVICE + method), (":authority", "here"),
            ("te", "trailers"), ("content-type", "application/grpc"), *extra,
        ]  # fmt: skip
        opening = frame(HEADERS, END_HEADERS, stream, self.encoder.encode(fields))
        if message is None:
            return opening
        return opening + frame(DATA, END_STREAM, stream, pack(">BL", 0, len(message)) + message)

    async def read(self) -> Frame:
        """The next frame. Raises `asyncio.IncompleteReadError` at the end."""
        async with asyncio.timeout(LIMIT_S):
            high, low, kind, flags, stream = HEAD.unpack(await self.reader.readexactly(HEAD_BYTES))
            return kind, flags, stream, await self.reader.readexactly(high << 8 | low)

    async def until(self, kind: int, *, stream: int | None = None, flags: int = 0) -> Frame:
        """The next frame of the kind, with all of the flags."""
        while True:
            found = await self.read()
            if found[0] == kind and found[1] & flags == flags and stream in (None, found[2]):
                return found

    async def rest(self) -> list[Frame]:
        """All frames until the server closes the connection."""
        found: list[Frame] = []
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                found.append(await self.read())
        return found

    async def gone(self) -> tuple[int, bytes]:
        """Why the server gave up: the code and the text of its GOAWAY."""
        payload = (await self.until(GOAWAY))[3]
        return int.from_bytes(payload[4:8]), payload[8:]


def ping(word: bytes = b"12345678") -> bytes:
    return frame(PING, 0, 0, word)


def widen(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, pack(">L", size))


__all__ = ["SETTINGS", "Frame", "Peer", "ping", "widen"]
