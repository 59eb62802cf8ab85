"""Whatever a client sends, the native gRPC front answers in frames, ends what it must, and holds nothing afterwards."""

from __future__ import annotations

import asyncio
import logging

import hpack
import pytest
from example_counts import examples
from http2_wire import METHODS, Transport, answers, read_frames
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.grpc.native.codec import http2_frames as frames
from gateway.grpc.native.codec.limits import KeepAlive
from gateway.grpc.native.connection import Connection
from gateway.grpc.native.serving import Serving

_PATHS = [b"/s/Unary", b"/s/Stream", b"/s/Nothing"]


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


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_frame, max_size=14), st.integers(1, 200), st.booleans())
def test_any_frames(parts: list[bytes], piece: int, begins_well: bool) -> None:
    records: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("gateway.grpc.native")
    logger.addHandler(listener)
    sent = b"".join(parts)
    pieces = [sent[at : at + piece] for at in range(0, len(sent), piece)]
    try:
        asyncio.run(answers(pieces, slowly=True, begins_well=begins_well))
    finally:
        logger.removeHandler(listener)
    assert [record.getMessage() for record in records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"PRI * HTTP/1.0\r\n\r\n"])
async def test_what_is_not_http2_is_told_so(data: bytes) -> None:
    connection = Connection(Serving(dict(METHODS), KeepAlive(), 0, 1 << 20))
    transport = Transport(connection)
    connection.connection_made(transport)
    connection.data_received(data)
    assert transport.closing
    assert read_frames(bytes(transport.written))[-1][0] == frames.GOAWAY
    await asyncio.sleep(0)
