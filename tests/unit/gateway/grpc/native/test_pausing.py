"""A client that does not read is not read from, however what is to be sent reaches its transport."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_frames import Written, frames_of
from hpack import Encoder

from gateway.grpc.calling import Streaming
from gateway.grpc.native.codec.http2_frames import DATA, END_HEADERS, HEADERS, PREFACE, frame, settings, window_update
from gateway.grpc.native.codec.limits import KeepAlive
from gateway.grpc.native.connection import Connection
from gateway.grpc.native.serving import Serving

ANSWER = bytes(5 << 20)
CALL = (
    (":method", "POST"), (":scheme", "http"), (":path", "/s/m"), ("te", "trailers"),
    ("content-type", "application/grpc"),
)  # fmt: skip


class Socket(Written):
    """Says that it has enough within every write, as transports do, and that it has room when it is told to."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self.is_read = True
        self.is_full = False
        self.fills = False
        self.pauses = self._fill

    def _fill(self) -> None:
        if self.fills and not self.is_full:
            self.is_full = True
            self._connection.pause_writing()

    def drain(self) -> None:
        self.is_full = False
        self._connection.resume_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def is_closing(self) -> bool:
        return False


async def test_reading_goes_on_when_all_is_written() -> None:
    done = asyncio.Event()

    async def answer(_messages: Any, write: Any, _context: Any) -> None:
        await write(ANSWER)
        done.set()

    connection = Connection(Serving({"/s/m": Streaming(answer)}, KeepAlive(), 0, 1000))
    socket = Socket(connection)
    connection.connection_made(socket)
    window = len(ANSWER) + 100
    connection.data_received(PREFACE + settings({4: window}) + window_update(0, window))
    socket.fills = True
    connection.data_received(frame(HEADERS, END_HEADERS, 1, Encoder().encode(CALL)))
    drains = 0
    while not done.is_set():
        await asyncio.sleep(0)
        if socket.is_full:
            assert not socket.is_read
            socket.drain()
            assert socket.is_read is not socket.is_full
            drains += 1
    assert drains >= 5
    sent = [each for each in frames_of(socket.taken()) if each.kind == DATA]
    assert sum(len(each.payload) for each in sent) == len(ANSWER) + 5
    connection.connection_lost(None)
