"""A client of HTTP/2 that sends what it is told to, right or wrong, and reads the answers frame by frame.

It shares no code with the gateway: frames are made here, header blocks are read by `hpack`, and `polite_call` is the
library `h2`, which checks all that a server says.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import h2.config
import h2.connection
import h2.events
import hpack
from grpc_calls import LIMIT_S, SERVICE
from hpack.hpack import encode_integer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, WITH_PRIORITY, ACK = 0x1, 0x4, 0x8, 0x20, 0x1
MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME = 3, 4, 5
(
    NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT, STREAM_CLOSED, FRAME_SIZE_ERROR,
    REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, CONNECT_ERROR, ENHANCE_YOUR_CALM,
) = range(12)  # fmt: skip

Fields = list[tuple[str, str]]


def raw(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">L", len(payload))[1:] + struct.pack(">BBL", kind, flags, stream) + payload


def settings(*values: tuple[int, int]) -> bytes:
    return raw(SETTINGS, 0, 0, b"".join(struct.pack(">HL", *value) for value in values))


def window_update(stream: int, size: int) -> bytes:
    return raw(WINDOW_UPDATE, 0, stream, struct.pack(">L", size))


def rst_stream(stream: int, code: int = CANCEL) -> bytes:
    return raw(RST_STREAM, 0, stream, struct.pack(">L", code))


def message(data: bytes = b"", flag: int = 0) -> bytes:
    return struct.pack(">BL", flag, len(data)) + data


def call_fields(method: str = "ServerLive", /, *more: tuple[str, str], **changed: str | None) -> Fields:
    """The headers of a call; `changed` by their names without colons and with `_` for `-`, None to leave one out."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method if method.startswith("/") else SERVICE + method,
        ":authority": "charonia",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    for name, value in changed.items():
        key = name.replace("_", "-")
        fields[":" + key if ":" + key in fields else key] = value  # type: ignore[assignment]
    return [*((name, value) for name, value in fields.items() if value is not None), *more]


def literal(name: bytes, value: bytes, first: int = 0) -> bytes:
    """`first` 0x40 for one that enters the dynamic table."""
    return b"".join(
        (bytes((first,)), bytes(encode_integer(len(name), 7)), name, bytes(encode_integer(len(value), 7)), value)
    )


def block(fields: Iterable[tuple[str, str]], first: int = 0) -> bytes:
    """A header block without Huffman codes and, unless `first` says so, without the dynamic table."""
    return b"".join(literal(name.encode("latin-1"), value.encode("latin-1"), first) for name, value in fields)


def open_call(stream: int, method: str = "ServerLive", /, *more: tuple[str, str], **changed: str | None) -> bytes:
    """The headers of a call that goes on."""
    return raw(HEADERS, END_HEADERS, stream, block(call_fields(method, *more, **changed)))


def data_frames(stream: int, data: bytes) -> bytes:
    """All that a stream says, in frames that any server takes."""
    parts = [data[at : at + 16_384] for at in range(0, len(data), 16_384)]
    return b"".join(raw(DATA, END_STREAM if part is parts[-1] else 0, stream, part) for part in parts)


def whole_call(stream: int, method: str = "ServerLive", body: bytes = b"", **changed: str | None) -> bytes:
    """A call of one message."""
    return open_call(stream, method, **changed) + data_frames(stream, message(body))


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def word(self) -> int:
        return int(struct.unpack(">L", self.payload[:4])[0])


@dataclass
class Answer:
    """What came on a stream: `headers` of its first block, `trailers` of the one that ended it (perhaps the same)."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    blocks: int = 0
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        assert self.ended, f"no end: {self}"
        return int(self.trailers["grpc-status"])

    @property
    def details(self) -> str:
        return self.trailers.get("grpc-message", "")


class Wire:
    """One connection. What was read of each stream is in `answers`, every frame in `frames`."""

    def __init__(self, sock: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._sock = sock
        self._reader = reader
        self.writer = writer
        self._decoder = hpack.Decoder()
        self._block = b""
        self.answers: dict[int, Answer] = {}
        self.frames: list[Frame] = []

    @classmethod
    async def connect(cls, port: int, first: bytes = PREFACE + settings(), *, held_bytes: int = 1 << 26) -> Wire:
        """`held_bytes` is how much is read ahead of who asks; with little of it, a client that does not read."""
        sock = socket.socket()
        sock.setblocking(False)
        if held_bytes < 1 << 16:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, held_bytes)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        wire = cls(sock, *await asyncio.open_connection(sock=sock, limit=held_bytes))
        wire.write(first)
        return wire

    def write(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def flood(self, frames: bytes) -> None:
        """As much as the server takes. What it says before it hangs up can still be read: writing fails apart."""
        with self._sock.dup() as sock:
            try:
                await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(sock, frames), LIMIT_S)
            except ConnectionError:
                pass

    def close(self) -> None:
        self.writer.transport.abort()

    async def frame(self) -> Frame | None:
        """The next one; None at the end of the connection."""
        try:
            async with asyncio.timeout(LIMIT_S):
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        frame = Frame(head[3], head[4], int.from_bytes(head[5:]) & 0x7FFFFFFF, payload)
        self.frames.append(frame)
        self._note(frame)
        return frame

    def _note(self, frame: Frame) -> None:
        if frame.kind not in (DATA, HEADERS, CONTINUATION, RST_STREAM):
            return
        answer = self.answers.setdefault(frame.stream, Answer())
        if frame.kind == RST_STREAM:
            answer.reset = frame.word
            return
        assert not answer.ended
        if frame.kind == DATA:
            answer.data += frame.payload
        else:
            self._block += frame.payload
            if frame.flags & END_HEADERS:
                fields = {str(name): str(value) for name, value in self._decoder.decode(self._block)}
                self._block = b""
                answer.blocks += 1
                answer.headers = answer.headers or fields
                answer.trailers = fields
        if frame.kind != CONTINUATION:
            self._ends = bool(frame.flags & END_STREAM)
        if frame.kind == DATA or frame.flags & END_HEADERS:
            answer.ended = self._ends

    async def until(self, kind: int, stream: int = 0, flags: int = 0) -> Frame:
        """The next frame of a kind, with all that comes before it."""
        while (frame := await self.frame()) is not None:
            if (frame.kind, frame.stream) == (kind, stream) and frame.flags & flags == flags:
                return frame
        raise AssertionError(f"the connection ended without frame {kind} of stream {stream}: {self.frames[-3:]}")

    async def answer(self, stream: int) -> Answer:
        """The whole answer of a stream, or that it was reset."""
        while not (found := self.answers.get(stream, Answer())).ended and found.reset is None:
            assert await self.frame() is not None, f"the connection ended before stream {stream}: {self.frames[-3:]}"
        return found

    async def call(self, stream: int, method: str = "ServerLive", body: bytes = b"", **changed: str | None) -> Answer:
        self.write(whole_call(stream, method, body, **changed))
        return await self.answer(stream)

    async def data(self, size: int) -> None:
        """Read until so much data came, of all streams together."""
        while sum(len(answer.data) for answer in self.answers.values()) < size:
            assert await self.frame() is not None, f"the connection ended: {self.frames[-3:]}"

    async def settle(self) -> list[Frame]:
        """What the server sends until it has read all that was written."""
        at = len(self.frames)
        self.write(raw(PING, 0, 0, b"settled?"))
        await self.until(PING, 0, ACK)
        return self.frames[at:-1]

    async def end(self) -> tuple[int, str]:
        """The connection ends with GOAWAY: its code and text."""
        said = await self.until(GOAWAY)
        while (more := await self.frame()) is not None:
            assert more.kind != GOAWAY
        return struct.unpack(">L", said.payload[4:8])[0], said.payload[8:].decode()


Dial = Callable[..., Awaitable[Wire]]
"""`Wire.connect` of one port."""


@contextlib.asynccontextmanager
async def dialling(port: int) -> AsyncIterator[Dial]:
    """Connections that are all closed in the end."""
    wires = []

    async def dial(first: bytes = PREFACE + settings(), *, held_bytes: int = 1 << 26) -> Wire:
        wires.append(await Wire.connect(port, first, held_bytes=held_bytes))
        return wires[-1]

    try:
        yield dial
    finally:
        for wire in wires:
            wire.close()


async def polite_call(port: int, method: str = "ServerLive", body: bytes = b"") -> bytes:
    """The reply to a call by `h2` on a connection of its own. Raises when the server breaks a rule or fails."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    client.initiate_connection()
    client.send_headers(1, call_fields(method))
    left = memoryview(message(body))
    reply, status = b"", ""
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                while left and (room := min(client.local_flow_control_window(1), client.max_outbound_frame_size)) > 0:
                    client.send_data(1, bytes(left[:room]), end_stream=room >= len(left))
                    left = left[room:]
                writer.write(client.data_to_send())
                data = await reader.read(1 << 16)
                assert data, "the server left"
                for event in client.receive_data(data):
                    if isinstance(event, h2.events.DataReceived):
                        reply += event.data
                        client.acknowledge_received_data(event.flow_controlled_length, 1)
                    elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                        status = dict(event.headers or ()).get("grpc-status", "")
                    elif isinstance(event, h2.events.StreamEnded):
                        assert status == "0", status
                        assert reply[:5] == struct.pack(">BL", 0, len(reply) - 5)
                        return reply[5:]
                    assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated), event
    finally:
        writer.transport.abort()
