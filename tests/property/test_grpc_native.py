"""The pure parts of the native gRPC front against what they stand for, and its send side under any client."""

from __future__ import annotations

import base64
import gzip
import re
import zlib
from collections.abc import Callable
from itertools import pairwise
from urllib.parse import unquote_to_bytes

from example_counts import examples
from grpc_frames import Written, frames_of
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from gateway.grpc.native.codec.call_headers import (
    CallHeaders,
    HeaderReader,
    literal,
    percent_encoded,
    status_block,
    timeout_of,
    uses_no_table,
)
from gateway.grpc.native.codec.grpc_messages import PREFIX, Assembler, Packed
from gateway.grpc.native.codec.http2_frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    ConnectionFault,
    frame,
)
from gateway.grpc.native.codec.limits import KeepAlive, Patience, PingStrikes
from gateway.grpc.native.outbox import Outbox, Stream
from gateway.grpc.statuses import Status
from gateway.grpc.statuses import details as cut

# -- messages ---------------------------------------------------------------------------------------------------------

PACK = {"gzip": gzip.compress, "deflate": zlib.compress}


@given(
    st.sampled_from(["identity", "gzip", "deflate"]),
    st.lists(st.tuples(st.binary(max_size=40) | st.integers(0, 9000).map(bytes), st.booleans()), max_size=6),
    st.integers(0, 40),
    st.data(),
)
def test_messages_are_the_same_wherever_they_are_cut(
    encoding: str, messages: list[tuple[bytes, bool]], left_out: int, data: st.DataObject
) -> None:
    wire = b""
    whole = []
    for message, packed in messages:
        packed = packed and encoding in PACK
        body = PACK[encoding](message) if packed else message
        whole.append((len(wire) + 5 + len(body), message))
        wire += PREFIX.pack(packed, len(body)) + body
    wire = wire[: max(0, len(wire) - left_out)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    assembler = Assembler(encoding, 10_000)
    got = []
    for start, end in pairwise([0, *cuts, len(wire)]):
        part = memoryview(wire)[start:end] if data.draw(st.booleans()) else wire[start:end]
        got += [each.unpacked() if isinstance(each, Packed) else each for each in assembler.feed(part)]
        ends = [at for at, _ in whole if at <= end]
        assert got == [message for at, message in whole if at <= end]
        assert assembler.is_between == (end == (ends[-1] if ends else 0))
    assert all(type(message) is bytes for message in got)


# -- headers ----------------------------------------------------------------------------------------------------------

names = st.from_regex(r"[a-z0-9_.\-]{1,12}", fullmatch=True).filter(
    lambda name: not name.endswith("-bin") and name not in ("te", "connection", "keep-alive", "upgrade")
)
texts = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=30)
pairs = st.tuples(names, texts) | st.tuples(names.map("{}-bin".format), st.binary(max_size=20))
metadatas = st.lists(pairs, max_size=5)
calls = st.tuples(
    st.integers(0, 2),  # the connection
    st.sampled_from(["/s/One", "/s/Other"]),
    metadatas,
    st.sampled_from([None, 0, 100, 4096]),  # the size of the table from now on
    st.booleans(),
)


def wire_fields(path: str, metadata: list[tuple[str, str | bytes]]) -> list[tuple[str, str]]:
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", path), ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]  # fmt: skip
    for name, value in metadata:
        fields.append((name, value if isinstance(value, str) else base64.b64encode(value).decode().rstrip("=")))
    return fields


@settings(max_examples=examples(50))
@given(st.lists(calls, max_size=20), st.booleans())
def test_headers_read_back_whatever_is_remembered(
    asked: list[tuple[int, str, list[tuple[str, str | bytes]], int | None, bool]], without_tables: bool
) -> None:
    known: dict[bytes, CallHeaders] = {}
    encoders = [Encoder() for _ in range(3)]
    readers = [HeaderReader(known) for _ in range(3)]
    if without_tables:  # as clients that were told so
        for encoder in encoders:
            encoder.header_table_size = 0
    for number, path, metadata, table_size, huffman in asked:
        if table_size is not None and not without_tables:
            encoders[number].header_table_size = table_size
        block = encoders[number].encode(wire_fields(path, metadata), huffman=huffman)
        assert readers[number].read(block) == CallHeaders(path, tuple(metadata))
    for block, headers in known.items():  # what is remembered is what a connection without a table reads
        reader = HeaderReader({})
        reader.skip(b"\x20")
        assert reader.read(block) == headers


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_no_block_fails_otherwise_than_as_a_fault_of_the_connection(blocks: list[bytes]) -> None:
    known: dict[bytes, CallHeaders] = {}
    for number in range(2):
        reader = HeaderReader(known)
        try:
            for block in blocks[number:]:
                reader.read(block)
        except ConnectionFault:
            pass


@given(st.binary(max_size=60), st.lists(st.sampled_from([b"\x82", b"\x04\x01/", b"\x00\x01a\x01b", b"\x40\x01a\x01b"])))
def test_a_block_that_uses_no_table_leaves_it_empty(block: bytes, fields: list[bytes]) -> None:
    for data in (block, b"".join(fields) + block):
        decoder = Decoder()
        try:
            decoder.decode(data, raw=True)
        except HPACKError:
            continue
        is_as_before = not decoder.header_table.dynamic_entries and decoder.header_table_size == 4096
        if uses_no_table(data):
            assert is_as_before
        elif is_as_before:  # its fields were added and removed again, or the table's size was set to what it was
            assert any(byte & 0x60 and not byte & 0x80 for byte in data)


values = st.binary(max_size=300)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=200), values), max_size=8))
def test_literals_decode(fields: list[tuple[bytes, bytes]]) -> None:
    block = b"".join(literal(name, value) for name, value in fields)
    assert Decoder().decode(block, raw=True) == fields


@given(st.sampled_from(Status), st.text(max_size=60), st.lists(st.tuples(names, texts), max_size=4), st.booleans())
def test_ends_of_calls_decode(status: Status, details: str, metadata: list[tuple[str, str]], alone: bool) -> None:
    fields = list(Decoder().decode(status_block(status, details, metadata, alone=alone)))
    if alone:
        assert fields[:2] == [(":status", "200"), ("content-type", "application/grpc")]
        del fields[:2]
    assert fields[0] == ("grpc-status", str(int(status)))
    del fields[0]
    if details:
        name, value = fields.pop(0)
        assert (name, unquote_to_bytes(value)) == ("grpc-message", details.encode())
    assert fields == metadata


@given(st.text())
def test_messages_are_printable_and_decode(text: str) -> None:
    wire = percent_encoded(text)
    assert re.fullmatch(rb"(?:[ -$&-~]|%[0-9A-F]{2})*", wire)
    assert unquote_to_bytes(wire) == text.encode()


@settings(max_examples=examples(30))
@given(st.text(min_size=1, max_size=5), st.integers(1, 4000))
def test_the_end_of_a_call_is_one_frame_that_any_client_takes(unit: str, count: int) -> None:
    block = status_block(Status.RESOURCE_EXHAUSTED, cut(unit * count), (("retry-after-ms", "9" * 20),), alone=True)
    assert len(block) <= DEFAULT_FRAME_BYTES


UNITS_NS = {"H": 3600 * 10**9, "M": 60 * 10**9, "S": 10**9, "m": 10**6, "u": 10**3, "n": 1}


@given(st.integers(0, 99_999_999), st.integers(0, 8), st.sampled_from(sorted(UNITS_NS)))
def test_timeouts(number: int, digits: int, unit: str) -> None:
    assert timeout_of(f"{number:0{digits}}{unit}") == number * UNITS_NS[unit]


@given(st.text(max_size=10) | st.text("0123456789HMSmun+-. _", max_size=12))
def test_nothing_else_is_a_timeout(word: str) -> None:
    assert (timeout_of(word) is not None) == bool(re.fullmatch("[0-9]{1,8}[HMSmun]", word))


# -- limits -----------------------------------------------------------------------------------------------------------

# parts of a second that floats hold exactly
steps_s = st.integers(0, 20_000).map(lambda number: number / 1024)


@given(st.lists(st.tuples(steps_s, st.integers(0, Patience.MOST)), max_size=30))
def test_patience_ends_when_more_is_spent_than_grew(spending: list[tuple[float, int]]) -> None:
    patience = Patience(0.0)
    now_s = 0.0
    spent: list[tuple[float, int]] = []
    for step_s, cost in spending:
        now_s += step_s
        spent.append((now_s, cost))
        since = [
            sum(each for _, each in spent[first:]) <= Patience.MOST + Patience.A_SECOND * (now_s - spent[first][0])
            for first in range(len(spent))
        ]
        assert patience.spend(cost, now_s) == all(since)
        if not all(since):
            return


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 299.0, 300.0, 7199.0, 7200.0]), st.booleans(), st.booleans())),
    st.booleans(),
    st.integers(0, 3),
)
def test_pings_are_counted_from_the_last_data(pings: list[tuple[float, bool, bool]], permits: bool, most: int) -> None:
    strikes = PingStrikes(KeepAlive(permit_without_calls=permits, max_ping_strikes=most))
    since: list[tuple[float, bool]] = []
    now_s = 0.0
    for gap_s, has_calls, data_before in pings:
        now_s += gap_s
        if data_before:
            since.clear()
        since.append((now_s, has_calls))
        early = sum(
            later - earlier < (300.0 if calls or permits else 7200.0)
            for (earlier, _), (later, calls) in pairwise(since)
        )
        assert strikes.is_enough(now_s, has_calls=has_calls, sent_data=data_before) == (0 < most < early)


# -- the send side ----------------------------------------------------------------------------------------------------


class Sent:
    """A stream, what was given to it, and what its client has of it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.given = b""
        self.got = b""
        self.ended = self.dropped = self.has_end = False
        self.granted = stream.send_window


class Ticks:
    """The part of a loop that is needed: what is to be called in its next tick."""

    def __init__(self) -> None:
        self._soon: list[Callable[[], None]] = []

    def call_soon(self, do: Callable[[], None]) -> None:
        self._soon.append(do)

    def tick(self) -> None:
        soon, self._soon = self._soon, []
        for do in soon:
            do()


class Sending(RuleBasedStateMachine):
    """A client that widens and narrows its windows and frames as it likes, and a transport that is full at times."""

    streams = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.loop = Ticks()
        self.out = Outbox(self.loop)  # type: ignore[arg-type]
        self.written = Written()
        self.written.pauses = self._written
        self.full_in = 1000
        self.closed: list[int] = []
        self.out.on_closed = lambda stream: self.closed.append(stream.id)
        self.out.connect(self.written)
        self.all: dict[int, Sent] = {}
        self.granted = DEFAULT_WINDOW
        self.count = 0

    def _written(self) -> None:
        self.full_in -= 1
        if self.full_in == 0:
            self.out.pause()

    @initialize(room=st.integers(0, 60), window=st.integers(0, 60))
    def a_narrow_connection(self, room: int, window: int) -> None:
        """Others have used its window up."""
        sent = self._new()
        self._give(sent, [bytes(DEFAULT_WINDOW - room)])
        self._end(sent)
        self.resize(window)

    @rule(target=streams)
    def stream(self) -> Sent:
        return self._new()

    def _new(self) -> Sent:
        calls: object = None
        number = 2 * len(self.all) + 1
        stream = Stream(calls, number, CallHeaders(), 0, self.out.initial_window)  # type: ignore[arg-type]
        self.all[number] = Sent(stream)
        return self.all[number]

    def _give(self, sent: Sent, parts: list[bytes]) -> None:
        if sent.stream.tail is None and not sent.dropped:
            sent.given += b"".join(parts)
            self.out.data(sent.stream, parts)

    @rule(sent=streams, sizes=st.lists(st.integers(0, 40), max_size=4))
    def data(self, sent: Sent, sizes: list[int]) -> None:
        parts = []
        for size in sizes:
            self.count += 1
            parts.append(bytes((self.count + at) % 251 for at in range(size)))
        self._give(sent, parts)

    @rule(sent=streams, size=st.integers(0, 40))
    def answer(self, sent: Sent, size: int) -> None:
        if (
            sent.stream.tail is None
            and not sent.dropped
            and not sent.given
            and self.out.answer(sent.stream, bytes(size))
        ):
            sent.given = PREFIX.pack(0, size) + bytes(size)
            sent.ended = True
            sent.stream.tail = b"sent"

    @rule(sent=consumes(streams))
    def end(self, sent: Sent) -> None:
        self._end(sent)

    def _end(self, sent: Sent) -> None:
        if sent.stream.tail is None and not sent.dropped:
            sent.ended = True
            self.out.end(sent.stream, frame(HEADERS, END_STREAM | END_HEADERS, sent.stream.id, b"end"))

    @rule(sent=consumes(streams))
    def drop(self, sent: Sent) -> None:
        if not sent.ended:
            sent.dropped = True
            self.out.drop(sent.stream)

    @rule(size=st.integers(1, 80))
    def widen(self, size: int) -> None:
        self.granted += size
        self.out.widen(size)

    @rule(sent=streams, size=st.integers(1, 80))
    def widen_stream(self, sent: Sent, size: int) -> None:
        sent.granted += size
        if not sent.dropped:
            self.out.widen_stream(sent.stream, size)

    def _open(self) -> list[Sent]:
        return [each for each in self.all.values() if not each.dropped and each.stream.id not in self.closed]

    @rule(window=st.integers(0, 100))
    def resize(self, window: int) -> None:
        self.tick()  # what is on its way was under the old one
        change = window - self.out.initial_window
        for each in self._open():
            each.granted += change
        self.out.resize([each.stream for each in self._open()], window)

    @rule(size=st.integers(1, 50))
    def frames_of_another_size(self, size: int) -> None:
        self.tick()
        self.out.frame_bytes = size

    @rule(writes=st.integers(1, 3))
    def the_transport_will_be_full(self, writes: int) -> None:
        self.full_in = writes

    @precondition(lambda self: self.out.is_paused)
    @rule()
    def the_transport_has_room(self) -> None:
        self.out.resume()

    @rule()
    def tick(self) -> None:
        self.loop.tick()
        for each in frames_of(self.written.taken()):
            sent = self.all[each.stream]
            assert not sent.has_end
            if each.kind == DATA:
                assert 0 < len(each.payload) <= self.out.frame_bytes
                sent.got += each.payload
                assert len(sent.got) <= sent.granted
            elif each.flags & END_STREAM:
                sent.has_end = True
                assert sent.got == sent.given
            assert sent.given.startswith(sent.got)
        assert sum(len(each.got) for each in self.all.values()) <= self.granted

    @invariant()
    def what_is_blocked_is_counted(self) -> None:
        assert self.out.blocked_bytes == sum(sum(map(len, each.stream.pending)) for each in self.all.values())
        assert len(self.closed) == len(set(self.closed))

    @rule()
    def nothing_waits_for_nothing(self) -> None:
        """What both windows and the transport allow is sent."""
        self.tick()
        used = sum(len(each.got) for each in self.all.values())
        if used < self.granted and not self.out.is_paused:
            for each in self._open():
                assert len(each.got) == len(each.given) or len(each.got) >= each.granted

    def teardown(self) -> None:
        """At last all is sent."""
        self.full_in = 10**9
        self.granted += 10**6
        self.out.widen(10**6)
        for each in self._open():
            each.granted += 10**5
            self.out.widen_stream(each.stream, 10**5)
        self.out.resume()
        self.tick()
        assert self.out.blocked_bytes == 0
        for each in self.all.values():
            if not each.dropped:
                assert (each.got, each.has_end) == (each.given, each.ended)
        assert sorted(self.closed) == [number for number, each in self.all.items() if each.ended]


TestSending = Sending.TestCase
TestSending.settings = settings(max_examples=examples(60), stateful_step_count=40)
