"""What goes to a client, frame by frame, against the windows it gives (RFC 9113, 5.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from grpc_frames import Frame, Written, frames_of
from hpack import Decoder

from gateway.grpc.native.codec.call_headers import CallHeaders
from gateway.grpc.native.codec.grpc_messages import PREFIX_BYTES
from gateway.grpc.native.codec.http2_frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    LARGEST_WINDOW,
    ConnectionFault,
    ErrorCode,
    StreamFault,
    frame,
)
from gateway.grpc.native.outbox import Outbox, Stream

TAIL = frame(HEADERS, END_STREAM | END_HEADERS, 0, b"tail")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Client:
    """An outbox and what came of it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.out = Outbox(loop)
        self.written = Written()
        self.closed: list[int] = []
        self.out.on_closed = lambda stream: self.closed.append(stream.id)
        self.out.connect(self.written)

    def stream(self, number: int, window: int | None = None) -> Stream:
        calls: object = None
        window = self.out.initial_window if window is None else window
        return Stream(calls, number, CallHeaders(), 0, window)  # type: ignore[arg-type]

    def tick(self) -> None:
        """What the loop has been told to call, once."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def frames(self) -> list[Frame]:
        """Those written since the last time."""
        self.tick()
        return frames_of(self.written.taken())

    def sizes(self) -> list[tuple[int, int]]:
        """(stream, bytes) of the data written since the last time."""
        return [(each.stream, len(each.payload)) for each in self.frames() if each.kind == DATA]


@pytest.fixture
def client(loop: asyncio.AbstractEventLoop) -> Client:
    return Client(loop)


def test_frames_of_a_tick_leave_in_one_write(client: Client) -> None:
    for number in range(3):
        client.out.put(frame(HEADERS, 0, number))
    assert client.written.count == 0
    client.tick()
    assert client.written.count == 1
    assert [each.stream for each in frames_of(client.written.taken())] == [0, 1, 2]


def test_a_client_that_takes_very_long_frames_gets_a_long_answer(client: Client) -> None:
    """Clients of gRPC's C core take frames of 4 MiB once they have measured a quick connection."""
    out = client.out
    out.frame_bytes = 1 << 22
    out.widen(LARGEST_WINDOW - DEFAULT_WINDOW)
    stream = client.stream(1, LARGEST_WINDOW)
    answer = bytes(range(251)) * 100_000
    out.data(stream, [answer])
    out.end(stream, TAIL)
    *data, _ = client.frames()
    assert max(len(each.payload) for each in data) <= out.frame_bytes
    assert b"".join(each.payload for each in data) == answer


class TestWholeAnswers:
    def test_headers_data_and_end(self, client: Client) -> None:
        stream = client.stream(3)
        assert client.out.answer(stream, b"reply")
        assert client.closed == [3]
        first, data, last = client.frames()
        assert (first.kind, first.flags, data, last.kind, last.flags) == (
            HEADERS, END_HEADERS, Frame(DATA, 0, 3, b"\0\0\0\0\5reply"), HEADERS, END_STREAM | END_HEADERS,
        )  # fmt: skip
        decoder = Decoder()
        assert dict(decoder.decode(first.payload))[":status"] == "200"
        assert dict(decoder.decode(last.payload)) == {"grpc-status": "0"}

    def test_only_at_once(self, client: Client) -> None:
        fits = b"x" * (DEFAULT_FRAME_BYTES - PREFIX_BYTES)
        assert not client.out.answer(client.stream(1), fits + b"x")
        assert client.out.answer(client.stream(1), fits)
        client.out.frame_bytes *= 8
        assert not client.out.answer(client.stream(3, 9), b"12345")
        assert client.out.answer(client.stream(3, 9), b"1234")
        assert not client.out.answer(client.stream(5, LARGEST_WINDOW), b"x" * (DEFAULT_WINDOW - len(fits) - 9 - 9))
        assert client.out.answer(client.stream(5, LARGEST_WINDOW), b"x" * (DEFAULT_WINDOW - len(fits) - 9 - 10))
        assert not client.out.answer(client.stream(7), b"")
        client.out.widen(10)
        client.out.pause()
        assert not client.out.answer(client.stream(7), b"")
        client.out.resume()
        assert client.out.answer(client.stream(7), b"")
        assert client.closed == [1, 3, 5, 7]


class TestWindows:
    def test_of_a_stream(self, client: Client) -> None:
        stream = client.stream(1, 10)
        client.out.data(stream, [b"12345", b"", b"6789abc"])
        client.out.end(stream, TAIL)
        assert client.frames() == [Frame(DATA, 0, 1, b"123456789a")]
        assert (client.out.blocked_bytes, client.closed) == (2, [])
        client.out.widen(1000)
        assert client.frames() == []
        client.out.widen_stream(stream, 1)
        assert client.frames() == [Frame(DATA, 0, 1, b"b")]
        client.out.widen_stream(stream, 1)
        data, tail = client.frames()
        assert (data.payload, tail.payload) == (b"c", b"tail")
        assert (client.out.blocked_bytes, client.closed) == (0, [1])

    def test_of_the_connection(self, client: Client) -> None:
        first, second, third = (client.stream(number, LARGEST_WINDOW) for number in (1, 3, 5))
        client.out.data(first, [bytes(DEFAULT_WINDOW - 1)])
        assert sum(size for _, size in client.sizes()) == DEFAULT_WINDOW - 1
        client.out.data(second, [b"22"])
        client.out.data(third, [b"33"])
        client.out.data(second, [b"2"])
        assert client.sizes() == [(3, 1)]
        client.out.widen(3)
        assert client.sizes() == [(3, 2), (5, 1)]
        client.out.widen(9)
        assert client.sizes() == [(5, 1)]
        client.out.data(first, [b"1" * 8])
        assert client.sizes() == [(1, 8)]
        client.out.data(first, [b"1"])
        assert client.sizes() == []

    def test_frames_are_as_long_as_the_client_takes_them(self, client: Client) -> None:
        stream = client.stream(1)
        client.out.data(stream, [bytes(DEFAULT_FRAME_BYTES), b"1", bytes(20_000)])
        assert client.sizes() == [(1, DEFAULT_FRAME_BYTES), (1, DEFAULT_FRAME_BYTES), (1, 3617)]
        client.out.frame_bytes = 20_000
        client.out.data(stream, [bytes(20_001)])
        assert client.sizes() == [(1, 20_000), (1, 1)]

    def test_that_become_smaller_and_larger(self, client: Client) -> None:
        first, second = client.stream(1), client.stream(3)
        client.out.data(first, [bytes(1000)])
        client.out.resize([first, second], 500)
        assert (first.send_window, second.send_window, client.out.initial_window) == (-500, 500, 500)
        client.out.data(first, [b"1"])
        client.out.data(second, [bytes(600)])
        assert client.sizes() == [(1, 1000), (3, 500)]
        client.out.widen_stream(first, 500)
        assert client.sizes() == []
        client.out.resize([first, second], 501)
        assert client.sizes() == [(1, 1), (3, 1)]
        client.out.resize([first, second], 700)
        assert client.sizes() == [(3, 99)]
        assert client.out.blocked_bytes == 0

    def test_a_smaller_window_for_a_stream_that_waits_for_the_connection(self, client: Client) -> None:
        full, stream = client.stream(1), client.stream(3)
        client.out.data(full, [bytes(DEFAULT_WINDOW)])
        client.out.data(stream, [b"123"])
        client.out.resize([full, stream], 0)
        client.sizes()
        client.out.widen(100)
        assert client.sizes() == []
        client.out.resize([full, stream], 2)
        assert client.sizes() == [(3, 2)]

    def test_both_at_once(self, client: Client) -> None:
        full, stream = client.stream(1), client.stream(3, 2)
        client.out.data(full, [bytes(DEFAULT_WINDOW)])
        client.out.data(stream, [b"123"])
        client.sizes()
        client.out.widen(1)
        assert client.sizes() == [(3, 1)]
        client.out.widen(5)
        assert client.sizes() == [(3, 1)]
        client.out.widen_stream(stream, 1)
        assert client.sizes() == [(3, 1)]

    def test_that_are_too_large(self, client: Client) -> None:
        client.out.widen(LARGEST_WINDOW - DEFAULT_WINDOW)
        with pytest.raises(ConnectionFault) as connection_fault:
            client.out.widen(1)
        stream = client.stream(1)
        client.out.widen_stream(stream, LARGEST_WINDOW - DEFAULT_WINDOW)
        with pytest.raises(StreamFault) as stream_fault:
            client.out.widen_stream(stream, 1)
        assert stream_fault.value.stream_id == 1
        with pytest.raises(ConnectionFault) as resize_fault:
            client.out.resize([client.stream(3), stream], DEFAULT_WINDOW + 1)
        for fault in (connection_fault, stream_fault, resize_fault):
            assert fault.value.code is ErrorCode.FLOW_CONTROL_ERROR  # type: ignore[attr-defined]


class TestTheTransport:
    def test_nothing_flows_while_it_has_enough(self, client: Client) -> None:
        client.out.pause()
        first, second = client.stream(1), client.stream(3)
        client.out.data(first, [b"1"])
        client.out.data(second, [b"2"])
        client.out.put(frame(HEADERS, 0, 7))
        assert [each.kind for each in client.frames()] == [HEADERS]
        client.out.resume()
        assert client.sizes() == [(1, 1), (3, 1)]

    def test_it_may_have_enough_in_the_middle(self, client: Client) -> None:
        size = 5 << 20
        client.out.widen(size)
        client.written.pauses = client.out.pause
        stream = client.stream(1, size)
        client.out.data(stream, [bytes(size)])
        for left in (4 << 20, 3 << 20, 2 << 20, 1 << 20, 0):
            assert client.out.blocked_bytes == left
            assert client.out.is_paused
            client.out.resume()
        assert not client.out.is_paused
        assert sum(size for _, size in client.sizes()) == size

    async def test_who_sends_waits_until_it_is_taken(self) -> None:
        client = Client(loop := asyncio.get_running_loop())
        stream = client.stream(1, 1)

        def send(data: bytes) -> asyncio.Future[None]:
            stream.sent = sent = loop.create_future()
            client.out.data(stream, [data])
            return sent

        assert send(b"1").done()
        blocked = send(b"2")
        assert not blocked.done()
        client.out.widen_stream(stream, 1)
        assert blocked.done()
        client.out.widen_stream(stream, 10)
        for data in (b"3", b""):
            client.out.pause()
            paused = send(data)
            assert not paused.done()
            client.out.resume()
            assert paused.done()
        client.out.pause()
        told = send(b"4")
        client.out.drop(stream)
        assert told.done()
        cancelled = send(b"5")
        cancelled.cancel()
        client.out.resume()
        assert stream.sent is None

    def test_the_end_does_not_wait_for_it(self, client: Client) -> None:
        client.out.pause()
        stream = client.stream(1)
        client.out.data(stream, [])
        client.out.end(stream, TAIL)
        assert [each.payload for each in client.frames()] == [b"tail"]
        assert client.closed == [1]
        client.out.resume()
        assert client.closed == [1]

    def test_without_one_all_is_forgotten(self, client: Client) -> None:
        stream = client.stream(1)
        client.out.data(stream, [b"1"])
        client.out.disconnect()
        client.out.data(stream, [b"2"])
        client.out.end(stream, TAIL)
        assert client.frames() == []
        assert (client.out.blocked_bytes, client.closed) == (0, [1])


def test_a_stream_that_is_dropped_sends_nothing_more(client: Client) -> None:
    stream, other = client.stream(1, 5), client.stream(3, 0)
    client.out.data(stream, [b"1234567", b"89"])
    client.out.data(other, [b"other"])
    client.out.drop(stream)
    assert client.out.blocked_bytes == 5
    client.out.widen_stream(stream, 100)
    client.out.widen(100)
    assert client.sizes() == [(1, 5)]
    assert client.closed == []


def test_a_word_about_the_connection_costs_no_look_at_streams_that_wait_for_their_own_windows(client: Client) -> None:
    """Thousands of streams, and updates of one byte. Counted by reads of the windows."""

    class Counting(Stream):
        looks = 0

        @property
        def send_window(self) -> int:  # type: ignore[override]
            Counting.looks += 1
            return 0

        @send_window.setter
        def send_window(self, _: int) -> None: ...

    calls: object = None
    for number in range(1, 2001, 2):
        client.out.data(Counting(calls, number, CallHeaders(), 0, 0), [b"waits"])  # type: ignore[arg-type]
    Counting.looks = 0
    for _ in range(100):
        client.out.widen(1)
    assert Counting.looks == 0
