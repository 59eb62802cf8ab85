"""The headers of calls and answers, against the library `hpack` and the words of gRPC's protocol document."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from hpack import Decoder, Encoder

from gateway.grpc.native.codec.call_headers import (
    MAX_HEADER_BYTES,
    CallHeaders,
    HeaderReader,
    answer_block,
    call_headers,
    http_block,
    literal,
    percent_encoded,
    status_block,
    timeout_of,
    uses_no_table,
)
from gateway.grpc.native.codec.http2_frames import ConnectionFault, ErrorCode
from gateway.grpc.statuses import Status

CALL = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/s/m"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)


def headers(*fields: tuple[bytes, bytes], without: str = "") -> CallHeaders:
    """Of a call with further fields, and without those of a name."""
    return call_headers([*(field for field in CALL if field[0].decode() != without), *fields])


def block(*fields: tuple[bytes, bytes], table_bytes: int | None = 0) -> bytes:
    encoder = Encoder()
    if table_bytes is not None:
        encoder.header_table_size = table_bytes
    return encoder.encode([*CALL, *fields])


def decoded(data: bytes) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in Decoder().decode(data)]


class TestACall:
    def test_its_words_and_the_callers(self) -> None:
        told = headers(
            (b"grpc-timeout", b"3S"), (b"grpc-encoding", b"gzip"), (b"grpc-accept-encoding", b"deflate, gzip"),
            (b"user-agent", b"some/1"), (b"x", b"1"), (b"x", b"2"), (b"k-bin", b"AAE"),
        )  # fmt: skip
        assert told == CallHeaders(
            "/s/m", (("user-agent", "some/1"), ("x", "1"), ("x", "2"), ("k-bin", b"\0\1")), 3 * 10**9, "gzip", True,
        )  # fmt: skip
        assert headers() == CallHeaders("/s/m")

    @pytest.mark.parametrize("kind", [b"application/grpc+proto", b"application/grpc;charset=utf-8"])
    def test_kinds_of_grpc(self, kind: bytes) -> None:
        assert headers((b"content-type", kind), without="content-type").http_status == 200

    @pytest.mark.parametrize("kind", [b"", b"text/plain", b"application/grpc-web", b"application/json"])
    def test_other_kinds(self, kind: bytes) -> None:
        assert headers((b"content-type", kind), without="content-type").http_status == 415
        assert headers(without="content-type").http_status == 415

    def test_another_method(self) -> None:
        told = call_headers([(b":method", b"GET"), *CALL[1:]])
        assert (told.http_status, told.malformed) == (405, "")

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ([(b":method", b"POST"), *CALL], "pseudo-header ':method' is unknown, repeated or late"),
            ([(b":status", b"200"), *CALL], "pseudo-header ':status' is unknown, repeated or late"),
            ([*CALL, (b":authority", b"a")], "pseudo-header ':authority' is unknown, repeated or late"),
            ([*CALL, (b"connection", b"close")], "header 'connection' is not one of HTTP/2"),
            ([*CALL, (b"transfer-encoding", b"x")], "header 'transfer-encoding' is not one of HTTP/2"),
            ([*CALL, (b"Name", b"x")], "header 'Name' is not one of HTTP/2"),
            ([*CALL, (b"", b"x")], "header '' is not one of HTTP/2"),
            ([*CALL, (b"a", b"x\ny")], "header 'a' has a value of more than one line"),
            ([*CALL, (b"a", b"x\ry")], "header 'a' has a value of more than one line"),
            ([*CALL, (b"a", b"x\0y")], "header 'a' has a value of more than one line"),
            (CALL[1:], "':method', ':scheme' or ':path' is missing"),
            ([CALL[0], *CALL[2:]], "':method', ':scheme' or ':path' is missing"),
            ([*CALL[:2], *CALL[3:]], "':method', ':scheme' or ':path' is missing"),
            ([*CALL[:2], (b":path", b""), *CALL[3:]], "':method', ':scheme' or ':path' is missing"),
        ],
    )
    def test_what_breaks_the_rules_of_http(self, fields: Any, reason: str) -> None:
        assert call_headers(fields).malformed == reason

    @pytest.mark.parametrize(
        ("name", "value", "refusal"),
        [
            (b"grpc-encoding", b"br", (Status.UNIMPLEMENTED, "Compression algorithm 'br' is not supported.")),
            (b"grpc-timeout", b"soon", (Status.INTERNAL, "malformed grpc-timeout 'soon'")),
            (b"k-bin", b"A", (Status.INTERNAL, "metadata 'k-bin' is not in base64")),
            (b"k-bin", b"\xff", (Status.INTERNAL, "metadata 'k-bin' is not in base64")),
        ],
    )
    def test_what_cannot_be_served(self, name: bytes, value: bytes, refusal: tuple[Status, str]) -> None:
        assert headers((name, value)).refusal == refusal

    @pytest.mark.parametrize(
        ("word", "values"),
        [(b"", [b""]), (b"AA==", [b"\0"]), (b"AA", [b"\0"]), (b"AAE,AQ", [b"\0\1", b"\1"]), (b"+/8=", [b"\xfb\xff"])],
    )
    def test_binary_metadata(self, word: bytes, values: list[bytes]) -> None:
        assert headers((b"k-bin", word)).metadata == tuple(("k-bin", value) for value in values)


@pytest.mark.parametrize(
    ("word", "timeout_ns"),
    [
        ("0n", 0), ("1n", 1), ("1u", 10**3), ("5m", 5 * 10**6), ("1S", 10**9), ("2M", 120 * 10**9),
        ("3H", 10800 * 10**9), ("99999999H", 99_999_999 * 3600 * 10**9), ("00000001S", 10**9),
        ("100000000n", None), ("", None), ("1", None), ("S", None), ("-1S", None), ("+1S", None), ("1s", None),
        (" 1S", None), ("1 S", None), ("1.5S", None), ("\u0661S", None), ("\xb2S", None), ("1_0S", None),
    ],
)  # fmt: skip
def test_timeouts(word: str, timeout_ns: int | None) -> None:
    assert timeout_of(word) == timeout_ns


class TestReading:
    def test_a_block_that_was_read_is_remembered_for_every_connection(self) -> None:
        known: dict[bytes, CallHeaders] = {}
        first, second = HeaderReader(known), HeaderReader(known)
        free = block(table_bytes=None)
        for reader in (first, second):
            reader.skip(b"\x20")  # what clients begin with that were told to keep no table
        told = first.read(free)
        assert known == {free: told}
        assert second.read(free) is told

    def test_nothing_is_remembered_while_there_is_a_table(self) -> None:
        known: dict[bytes, CallHeaders] = {}
        reader = HeaderReader(known)
        reader.read(block((b"x", b"1"), table_bytes=None))
        assert known == {}
        reader.read(block((b"x", b"1")))  # begins with the new size, 0: what it means depends on what was before
        assert known == {}

    def test_a_known_block_means_nothing_to_a_connection_with_a_table(self) -> None:
        """The same bytes name what the table of that connection holds."""
        encoder = Encoder()
        encoder.encode([(b"x", b"of the table")])
        known = {(indexed := encoder.encode([(b"x", b"of the table")])): CallHeaders("/wrong")}
        reader = HeaderReader(known)
        reader.skip(Encoder().encode([*CALL, (b"x", b"of the table")]))
        assert reader.read(indexed).malformed

    def test_a_client_that_says_nothing_of_its_table_is_remembered_until_it_uses_it(self) -> None:
        known: dict[bytes, CallHeaders] = {}
        reader, whole = HeaderReader(known), b"".join(literal(name, value) for name, value in CALL)
        told = reader.read(whole)
        assert known == {whole: told}
        assert reader.is_free
        assert reader.has_table
        assert HeaderReader(known).read(whole) is told
        reader.skip(block((b"x", b"1"), table_bytes=None))
        assert not reader.is_free
        assert reader.read(whole) is not told

    def test_a_known_block_that_is_added_to_a_table_is_read_where_there_is_one(self) -> None:
        encoder = Encoder()
        whole = encoder.encode([*CALL, (b"x", b"1")])
        reader = HeaderReader({whole: CallHeaders("/wrong")})
        assert reader.read(whole).metadata == (("x", "1"),)
        assert reader.read(encoder.encode([*CALL, (b"x", b"1")])).metadata == (("x", "1"),)

    def test_a_block_that_brings_a_table_is_not_remembered(self) -> None:
        known: dict[bytes, CallHeaders] = {}
        reader = HeaderReader(known)
        reader.skip(b"\x20")
        reader.read(b"\x3f\xe1\x1f" + block(table_bytes=None))
        assert known == {}

    def test_so_many_are_remembered_and_none_that_is_long(self) -> None:
        known: dict[bytes, CallHeaders] = {}
        reader = HeaderReader(known)
        reader.skip(b"\x20")
        for number in range(2000):
            reader.read(block((b"x", b"%d" % number), table_bytes=None))
            assert len(known) <= 512
        before = len(known)
        reader.read(block((b"x", b"%" * 2000), table_bytes=None))
        reader.read(block(table_bytes=None) + b"\x90" * 500)  # each is "accept-encoding: gzip, deflate"
        assert len(known) == before

    @pytest.mark.parametrize(
        "data",
        [
            b"\x80", b"\xff", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x00\x05abc", b"\xc0", b"\x82\x20",
            b"\x3f\xff\xff\x03", b"\x20\x20\x20", b"\x3f\xe1\x1f\x3f\xe1\x1f\x3f\xe1\x1f", b"\x00\x81\x00\x00",
        ],
    )  # fmt: skip
    def test_what_cannot_be_decoded_ends_the_connection(self, data: bytes) -> None:
        for read in (HeaderReader({}).read, HeaderReader({}).skip):
            with pytest.raises(ConnectionFault) as caught:
                read(data)
            assert caught.value.code is ErrorCode.COMPRESSION_ERROR

    def test_two_sizes_at_the_start_are_allowed(self) -> None:
        reader = HeaderReader({})
        assert reader.read(b"\x20\x3f\xe1\x1f" + block(table_bytes=None)).path == "/s/m"
        assert reader.read(b"\x3f\xe1\x1f" + block(table_bytes=None)).path == "/s/m"

    def test_too_much(self) -> None:
        with pytest.raises(ConnectionFault):
            HeaderReader({}).read(block((b"x", b"%" * MAX_HEADER_BYTES)))
        with pytest.raises(ConnectionFault) as caught:
            HeaderReader({}).read(b"\x20" * (MAX_HEADER_BYTES + 1))
        assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM
        with pytest.raises(ConnectionFault):  # indices are short, what they name is not
            HeaderReader({}).read(b"\x90" * 2000)


@pytest.mark.parametrize(
    ("data", "uses_none"),
    [
        (b"", True), (b"\x83\x86", True), (b"\x04\x01/\x01\x01a", True), (b"\x00\x02te\x08trailers", True),
        (b"\x10\x01a\x01b", True), (b"\x1f\x2e\x01a", True), (b"\xbd", True), (literal(b"a", b"b" * 300), True),
        (b"\xbe", False), (b"\x1f\x2f\x01a", False), (b"\x40\x01a\x01b", False), (b"\x44\x01/", False),
        (b"\x20\x83", False), (b"\x83\x20", False), (b"\x3f\xe1\x1f", False), (b"\x00\x01a", False),
        (b"\x00\x01a\x02b", False), (b"\xff", False), (b"\xff\x80", False), (b"\x00\x7f", False),
    ],
)  # fmt: skip
def test_what_uses_no_table(data: bytes, uses_none: bool) -> None:
    assert uses_no_table(data) is uses_none


class TestAnswers:
    def test_the_headers(self) -> None:
        plain = [
            (":status", "200"), ("content-type", "application/grpc"),
            ("grpc-accept-encoding", "identity, deflate, gzip"),
        ]  # fmt: skip
        assert decoded(answer_block()) == plain
        assert decoded(answer_block("gzip")) == [*plain, ("grpc-encoding", "gzip")]

    def test_the_end(self) -> None:
        assert decoded(status_block(Status.OK, "", alone=False)) == [("grpc-status", "0")]
        metadata = (("retry-after-ms", "7000"), ("a", "b"))
        assert decoded(status_block(Status.UNAVAILABLE, "not ü", metadata, alone=True)) == [
            (":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "14"),
            ("grpc-message", "not %C3%BC"), ("retry-after-ms", "7000"), ("a", "b"),
        ]  # fmt: skip

    def test_what_is_no_call(self) -> None:
        assert decoded(http_block(415)) == [(":status", "415")]

    @pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 254, 255, 256, 16_510, 16_511, 16_512, 70_000, 2_100_000])
    def test_literals_of_any_length(self, size: int) -> None:
        decoder = Decoder(max_header_list_size=5_000_000)
        value = b"v" * size
        for name in (b"n", b"n" * 127):
            assert decoder.decode(literal(name, value), raw=True) == [(name, value)]
        assert decoder.header_table.dynamic_entries == type(decoder.header_table.dynamic_entries)()

    @pytest.mark.parametrize("text", ["", "plain words", "100%", "ü", "a\nb\x7f\x00", "\U0001f41a", "\ud800", "~ !"])
    def test_messages_are_percent_encoded(self, text: str) -> None:
        wire = percent_encoded(text)
        assert all(0x20 <= byte <= 0x7E for byte in wire)
        assert unquote_to_bytes(wire) == text.encode("utf-8", "replace")


def test_values_are_read_as_utf8_as_by_grpcio() -> None:
    told = headers((b"key", "schlüssel".encode()), (b"odd", b"\xff"))
    assert told.metadata == (("key", "schlüssel"), ("odd", "\ufffd"))


def test_headers_that_no_other_call_has_are_not_remembered() -> None:
    known: dict[bytes, CallHeaders] = {}
    reader = HeaderReader(known)
    reader.read(block())  # it says that there is no table
    whole = b"".join(literal(name, value) for name, value in CALL)
    for name, remembered in ((b"traceparent", 0), (b"user-agent", 1)):
        reader.read(whole + literal(name, b"00-1-2-01"))
        assert len(known) == remembered


@pytest.mark.parametrize("start", [b"\xff", b"\x0f\xff", b"\x04\x7f\xff"])
def test_long_blocks_and_numbers_are_not_followed(start: bytes) -> None:
    """A number of many bytes costs time by its square, a long block its decoding: neither is remembered."""
    assert not uses_no_table(start + start[-1:] * 900)
    assert not uses_no_table(start + start[-1:] * 60_000)
    assert uses_no_table(b"\x82" * 900)
    assert not uses_no_table(b"\x82" * 60_000)
