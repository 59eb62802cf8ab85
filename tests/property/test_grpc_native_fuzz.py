"""Whatever a client sends, the native gRPC front answers in frames, ends what it must, and holds nothing afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import hpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.grpc.calling import Context, Streaming, Unary, Write
from gateway.grpc.native.codec import http2_frames as frames
from gateway.grpc.native.codec.limits import KeepAlive
from gateway.grpc.native.connection import Connection
from gateway.grpc.native.serving import Serving
from gateway.grpc.statuses import Refusal

_PATHS = [b"/s/Unary", b"/s/Stream", b"/s/Nothing"]


async def _echo(data: bytes, _context: Context) -> bytes | Refusal:
    await asyncio.sleep(0)
    return data


async def _echo_all(messages: AsyncIterator[bytes], write: Write, _context: Context) -> Refusal | None:
    async for message in messages:
        await write(message)
    return None


_METHODS = {"/s/Unary": Unary(_echo), "/s/Stream": Streaming(_echo_all)}


class Transport(asyncio.Transport):
    """Keeps what is written; closed, it says so to its protocol as a loop does."""

    def __init__(self, protocol: Connection) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def _block(path: bytes, more: list[tuple[str, str]]) -> bytes:
    fields: list[tuple[bytes | str, bytes | str]] = [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"),
        ("content-type", "application/grpc"), ("te", "trailers"), *more,
    ]  # fmt: skip
    return bytes(hpack.Encoder().encode(fields))


_ids = st.one_of(st.sampled_from([0, 1, 3, 5, 7, 2]), st.integers(0, 2**31 - 1))
_words = st.lists(
    st.sampled_from(
        [
            ("grpc-timeout", "1m"),
            ("grpc-timeout", "x"),
            ("grpc-encoding", "gzip"),
            ("grpc-encoding", "lzma"),
            ("a-bin", "?"),
        ]
    ),
    max_size=2,
)
_blocks = st.one_of(st.builds(_block, st.sampled_from(_PATHS), _words), st.binary(max_size=40))
_message = st.binary(max_size=60).map(lambda data: b"\0" + len(data).to_bytes(4, "big") + data)
_data = st.one_of(_message, st.binary(max_size=20), st.lists(_message, max_size=3).map(b"".join))
_settings = st.lists(
    st.tuples(st.integers(0, 8), st.one_of(st.integers(0, 70_000), st.integers(0, 2**32 - 1))), max_size=3
).map(lambda pairs: b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in pairs))
_numbers = st.integers(0, 2**32 - 1).map(lambda number: number.to_bytes(4, "big"))
_frame = st.one_of(
    st.builds(frames.frame, st.just(frames.HEADERS), st.sampled_from([4, 5, 4, 5, 0, 1, 0x2C]), _ids, _blocks),
    st.builds(frames.frame, st.just(frames.DATA), st.sampled_from([0, 1, 1, 8]), _ids, _data),
    st.builds(frames.frame, st.just(frames.SETTINGS), st.sampled_from([0, 0, 1]), st.just(0), _settings),
    st.builds(frames.frame, st.just(frames.WINDOW_UPDATE), st.just(0), _ids, _numbers),
    st.builds(frames.frame, st.just(frames.RST_STREAM), st.just(0), _ids, _numbers),
    st.builds(
        frames.frame, st.just(frames.PING), st.sampled_from([0, 1]), st.just(0), st.binary(min_size=8, max_size=8)
    ),
    st.builds(frames.frame, st.integers(0, 12), st.integers(0, 255), _ids, st.binary(max_size=30)),
    st.binary(max_size=20),
)


def _read_frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    found, at = [], 0
    while at < len(data):
        high, low, kind, flags, number = frames.HEAD.unpack_from(data, at)
        start, at = at + 9, at + 9 + (high << 8 | low)
        assert at <= len(data), "a frame is cut"
        found.append((kind, flags, number, bytes(data[start:at])))
    return found


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_frame, max_size=14), st.integers(1, 200), st.booleans())
def test_any_frames(parts: list[bytes], piece: int, begins_well: bool) -> None:
    records: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("gateway.grpc.native")
    logger.addHandler(listener)
    problems: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        serving = Serving(dict(_METHODS), KeepAlive(), 0, 1 << 20)
        connection = Connection(serving)
        transport = Transport(connection)
        connection.connection_made(transport)
        start = frames.PREFACE + frames.settings({})
        data = (start if begins_well else b"") + b"".join(parts)
        for at in range(0, len(data), piece):
            if transport.closing:
                break
            connection.data_received(data[at : at + piece])
            if at % 3 == 0:
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        answered = _read_frames(bytes(transport.written))
        ended = [number for kind, flags, number, _ in answered if kind == frames.HEADERS and flags & frames.END_STREAM]
        assert len(ended) == len(set(ended)), "a stream was ended twice"
        assert answered[0][0] == frames.SETTINGS
        transport.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not connection.calls.streams
        assert not serving.connections
        assert connection.out.blocked_bytes == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    try:
        asyncio.run(run())
    finally:
        logger.removeHandler(listener)
    assert [record.getMessage() for record in records if record.levelno >= logging.ERROR] == []
    assert problems == []


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"PRI * HTTP/1.0\r\n\r\n"])
async def test_what_is_not_http2_is_told_so(data: bytes) -> None:
    connection = Connection(Serving(dict(_METHODS), KeepAlive(), 0, 1 << 20))
    transport = Transport(connection)
    connection.connection_made(transport)
    connection.data_received(data)
    assert transport.closing
    assert _read_frames(bytes(transport.written))[-1][0] == frames.GOAWAY
    await asyncio.sleep(0)
