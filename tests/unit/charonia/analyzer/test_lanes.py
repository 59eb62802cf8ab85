"""What lanes make of a server's bytes: answers of HTTP/1.1, frames of HTTP/2, in pieces of any length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from example_counts import examples
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.analyzer.http1_lane import AnswerReader, Destination, Head, Http1Lane, ProtocolError
from charonia.analyzer.http2_lane import Http2Connection, Http2Lane, frame
from protos import grpc_service_pb2 as pb

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
PLACE = Destination("host", 1)
OK = [(":status", "200"), ("content-type", "application/grpc")]


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.data += data

    def abort(self) -> None:
        self.aborted = True

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of each frame behind the preface."""
        data, found = self.data.removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), []
        while data:
            size = int.from_bytes(data[:3], "big")
            found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
            data = data[9 + size :]
        return found


def fed(receive: Callable[[bytes], None], data: bytes, cuts: list[int]) -> None:
    at = 0
    for cut in sorted(cut % (len(data) + 1) for cut in cuts):
        if cut > at:
            receive(data[at:cut])
            at = cut
    if at < len(data):
        receive(data[at:])


# -- HTTP/1.1 ----------------------------------------------------------------------------------------------------------

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"
ERROR = b'HTTP/1.1 400 Bad\r\nContent-Length: 19\r\nConnection: close\r\n\r\n{"error": "no way"}'


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\ninference-header-content-length: 2", (200, 5, 2, False)),
        (b"HTTP/1.1 204 No Content\r\nconnection: Close\r\ncontent-length: 0", (204, 0, None, True)),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0", (200, 0, None, True)),
        (b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked", (400, None, None, False)),
    ],
)
def test_heads(raw: bytes, expected: tuple[int, int | None, int | None, bool]) -> None:
    head = Head(raw)
    assert (head.status, head.length, head.json_length, head.close) == expected


@given(st.sampled_from([SIZED, CHUNKED]), st.lists(st.integers(0, 200), max_size=6))
@settings(max_examples=examples(100), deadline=None)
def test_any_pieces_are_the_same_answer(answer: bytes, cuts: list[int]) -> None:
    reader = AnswerReader()
    for _ in range(2):
        found: list[Any] = []
        fed(lambda piece, found=found: found.append(reader.feed(piece)), answer, cuts)
        assert found[:-1] == [None] * (len(found) - 1)
        assert (found[-1][0].status, found[-1][1]) == (200, b"hello")


@given(st.sampled_from([SIZED, CHUNKED, ERROR]), st.lists(st.integers(0, 200), max_size=6))
@settings(max_examples=examples(100), deadline=None)
def test_answers_in_pieces(answer: bytes, cuts: list[int]) -> None:
    ends: list[str | None] = []
    lane = Http1Lane(PLACE, lambda _, error: ends.append(error))
    wire: Any = Wire()
    lane.connection_made(wire)
    for _ in range(2):
        if lane.is_open:
            lane.send(b"request")
            fed(lane.data_received, answer, cuts)
    assert ends == (["HTTP 400: no way"] if answer == ERROR else [None, None])
    assert wire.aborted == (answer == ERROR)


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n", b"ICY 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length 0\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nInference-Header-Content-Length: x\r\n\r\n",
        SIZED + b"x", CHUNKED.replace(b"3\r\n", b"z\r\n", 1), CHUNKED + b"x", b"x" * 70_000,
    ],
)  # fmt: skip
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        AnswerReader().feed(data)
    ends: list[str | None] = []
    lane = Http1Lane(PLACE, lambda _, error: ends.append(error))
    lane.connection_made(Wire())  # type: ignore[arg-type]
    lane.send(b"request")
    lane.data_received(data)
    assert len(ends) == 1
    assert ends[0]
    assert not lane.is_open


def test_a_lost_connection_fails_the_request_in_flight_only() -> None:
    ends: list[str | None] = []
    for sends in (False, True):
        lane = Http1Lane(PLACE, lambda _, error: ends.append(error))
        lane.connection_made(Wire())  # type: ignore[arg-type]
        if sends:
            lane.send(b"request")
        lane.connection_lost(None)
        assert not lane.is_open
    assert ends == ["the connection was closed by the server"]


async def test_a_lane_whose_opening_is_cancelled_is_closed() -> None:
    wire = Wire()

    class Slow(Destination):
        async def connect(self, lane: Any) -> None:
            lane.connection_made(wire)
            await asyncio.Event().wait()

    lane = Http1Lane(Slow("host", 1), lambda _, __: None)
    opening = asyncio.ensure_future(lane.open())
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    assert (lane.is_open, wire.aborted) == (False, True)


# -- HTTP/2 ------------------------------------------------------------------------------------------------------------


class Peer:
    """A connection with one lane, and what the lane said."""

    def __init__(self, *, streaming: bool = False, decoupled: bool = False) -> None:
        self.ends: list[str | None] = []
        self.responses = 0
        self.wire = Wire()
        self.connection = Http2Connection(PLACE)
        self.lane = Http2Lane(
            self.connection, b"\x83", streaming=streaming, decoupled=decoupled,
            on_end=lambda _, error: self.ends.append(error), on_response=self._responded,
        )  # fmt: skip
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]

    def _responded(self, _lane: Any, _now_ns: int) -> None:
        self.responses += 1

    def receive(self, *frames: bytes, cuts: list[int] | None = None) -> None:
        fed(self.connection.data_received, b"".join(frames), cuts or [])


def block(*fields: tuple[str, str]) -> bytes:
    encoder = Encoder()
    encoder.header_table_size = 0
    return encoder.encode(list(fields))


@given(st.lists(st.integers(0, 400), max_size=8), st.integers(0, 40))
@settings(max_examples=examples(100), deadline=None)
def test_calls_in_pieces(cuts: list[int], split: int) -> None:
    peer = Peer()
    trailers = block(("grpc-status", "0"))
    for call in range(3):
        peer.lane.send(b"\0\0\0\0\x02ab")
        stream = 1 + 2 * call
        head = block(*OK)
        at = split % (len(head) + 1)
        peer.receive(
            frame(SETTINGS, 0, 0, b""), frame(HEADERS, 0, stream, head[:at]), frame(CONTINUATION, 4, stream, head[at:]),
            frame(DATA, 8, stream, b"\x02\0\0\0\0\x01zXX"), frame(HEADERS, 1 | 4, stream, trailers), cuts=cuts,
        )  # fmt: skip
        assert peer.ends == [None] * (call + 1)
    sent = [(kind, flags, stream) for kind, flags, stream, _ in peer.wire.frames() if kind in (DATA, HEADERS)]
    assert sent == [(HEADERS, 4, 1), (DATA, 1, 1), (HEADERS, 4, 3), (DATA, 1, 3), (HEADERS, 4, 5), (DATA, 1, 5)]


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        (
            [frame(HEADERS, 5, 1, block(*OK, ("grpc-status", "5"), ("grpc-message", "no%20model")))],
            "status 5: no model",
        ),
        ([frame(HEADERS, 5, 1, block((":status", "502")))], "HTTP 502 without"),
        ([frame(RESET, 0, 1, (8).to_bytes(4, "big"))], "reset with code 8"),
        ([frame(HEADERS, 4, 1, block(*OK)), frame(DATA, 1, 1, b"")], "without a status"),
        ([frame(GOAWAY, 0, 0, bytes(8) + b"bye")], "going away: bye"),
        ([frame(HEADERS, 5, 1, b"\xff\xff\xff\xff\xff")], "headers that cannot be read"),
    ],
)
def test_calls_that_fail(frames: list[bytes], error: str) -> None:
    peer = Peer()
    peer.lane.send(b"message")
    peer.receive(*frames)
    assert len(peer.ends) == 1
    assert error in str(peer.ends[0])


def test_pings_and_settings_are_answered() -> None:
    peer = Peer()
    peer.receive(frame(PING, 0, 0, b"12345678"), frame(PING, 1, 0, b"abcdefgh"), frame(SETTINGS, 0, 0, b""))
    assert peer.wire.frames()[2:] == [(PING, 1, 0, b"12345678"), (SETTINGS, 1, 0, b"")]


@pytest.mark.parametrize(
    ("table_bytes", "first"), [(None, b"\x83"), (0, b"\x20\x83"), (4096, b"\x83"), (100, b"\x20\x83")]
)
def test_a_server_that_wants_a_smaller_table_is_answered_in_the_next_headers(
    table_bytes: int | None, first: bytes
) -> None:
    peer = Peer()
    wanted = b"" if table_bytes is None else b"\0\1" + table_bytes.to_bytes(4, "big")
    peer.receive(frame(SETTINGS, 0, 0, wanted))
    for stream in (1, 3):
        peer.lane.send(b"message")
        peer.receive(frame(HEADERS, 5, stream, block(*OK, ("grpc-status", "0"))))
    assert [payload for kind, _, _, payload in peer.wire.frames() if kind == HEADERS] == [first, b"\x83"]


@pytest.mark.parametrize("size", [10_000, 65_535, 65_536, 300_000])
def test_no_more_is_sent_than_the_server_has_room_for(size: int) -> None:
    peer = Peer()
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    peer.lane.send(message)

    def sent() -> bytes:
        return b"".join(payload for kind, _, _, payload in peer.wire.frames() if kind == DATA)

    assert sent() == message[:65_535]
    for _ in range(6):
        more = (50_000).to_bytes(4, "big")
        peer.receive(frame(WINDOW, 0, 1, more), frame(WINDOW, 0, 0, more))
    assert sent() == message
    data = [(flags, len(payload)) for kind, flags, _, payload in peer.wire.frames() if kind == DATA]
    assert [flags for flags, _ in data] == [0] * (len(data) - 1) + [1]
    assert max(length for _, length in data) <= 16_384


def answer(*, outputs: int = 0, final: bool | None = None, error: str = "") -> bytes:
    message = pb.ModelStreamInferResponse(error_message=error)
    for number in range(outputs):
        message.infer_response.outputs.add(name=f"Y{number}")
    if final is not None:
        message.infer_response.parameters["triton_final_response"].bool_param = final
    data = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


@given(st.lists(st.integers(0, 300), max_size=8))
@settings(max_examples=examples(50), deadline=None)
def test_streams_of_a_decoupled_model(cuts: list[int]) -> None:
    peer = Peer(streaming=True, decoupled=True)
    for call in range(1, 3):
        peer.lane.send(b"message")
        said = answer(outputs=1, final=False) + answer(outputs=1, final=False) + answer(final=True)
        peer.receive(*([frame(HEADERS, 4, 1, block(*OK))] if call == 1 else []), frame(DATA, 0, 1, said), cuts=cuts)
        assert peer.ends == [None] * call
        assert peer.responses == 2 * call
    assert sum(kind == HEADERS for kind, *_ in peer.wire.frames()) == 1


def test_streams_of_other_models_have_one_response_each() -> None:
    peer = Peer(streaming=True)
    peer.lane.send(b"message")
    peer.receive(frame(HEADERS, 4, 1, block(*OK)), frame(DATA, 0, 1, answer(outputs=1)))
    peer.lane.send(b"message")
    peer.receive(frame(DATA, 0, 1, answer(error="broken")))
    peer.lane.send(b"message")
    peer.receive(frame(HEADERS, 5, 1, block(("grpc-status", "0"))))
    assert peer.ends == [None, "broken", "the stream ended before the request's last response"]
    assert peer.responses == 1


async def test_streams_end_with_their_connection() -> None:
    second = Wire()

    class Again(Destination):
        async def connect(self, lane: Any) -> None:
            lane.connection_made(second)

    peer = Peer(streaming=True)
    peer.connection._destination = Again("host", 1)
    other = Http2Lane(
        peer.connection, b"\x83", streaming=True, decoupled=False, on_end=lambda *_: None, on_response=lambda *_: None
    )
    peer.lane.send(b"message")
    other.send(b"message")
    other.close()  # its answer never came, and the connection is both lanes'
    await peer.lane.open()
    peer.lane.send(b"message")
    # a new stream, not the one of the connection before
    assert [(kind, stream) for kind, _, stream, _ in second.frames()[2:]] == [(HEADERS, 1), (DATA, 1)]
