"""What the headers of a request over HTTP/2 say, and how those of a response are written."""

from __future__ import annotations

from typing import cast

import hpack
import pytest

from gateway.grpc.native.codec.call_headers import HeaderReader, call_headers
from gateway.grpc.native.codec.http2_frames import CONTINUATION, END_HEADERS, END_STREAM, HEADERS
from gateway.http2.request_headers import RequestHeaders, request_headers, response_frames

Fields = list[tuple[bytes, bytes]]
FIRST: Fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/v2/a%20b?c=d"), (b":authority", b"here:1")]


def read(fields: Fields) -> RequestHeaders:
    return cast(RequestHeaders, call_headers(fields, request_headers))


def test_a_request() -> None:
    found = read([*FIRST, (b"content-length", b"12"), (b"x", b"\xff\xfe"), (b"x", b"2")])
    assert (found.method, found.target, found.length, found.malformed) == ("POST", b"/v2/a%20b?c=d", 12, "")
    assert found.fields == (
        (b"host", b"here:1"), (b"content-length", b"12"), (b"x", b"\xff\xfe"), (b"x", b"2"),
    )  # fmt: skip


def test_the_authority_goes_before_a_host() -> None:
    assert read([*FIRST, (b"host", b"elsewhere")]).fields == ((b"host", b"here:1"),)
    assert read([*FIRST[:3], (b"host", b"elsewhere")]).fields == ((b"host", b"elsewhere"),)


@pytest.mark.parametrize("lengths", [[b"1", b"2"], [b""], [b"-1"], [b"+1"], [b"1,1"], [b"9" * 19], [b"\xb2"]])
def test_lengths_that_are_none(lengths: list[bytes]) -> None:
    assert read([*FIRST, *((b"content-length", length) for length in lengths)]).malformed


def test_a_length_that_is_said_twice() -> None:
    assert read([*FIRST, (b"content-length", b"3"), (b"content-length", b"3")]).length == 3


def test_the_rules_of_http2_hold() -> None:
    assert read(FIRST[:2]).malformed
    assert read([*FIRST, (b"connection", b"close")]).malformed
    assert read([*FIRST, (b"a", b"b\nc")]).malformed


def test_blocks_are_remembered_as_requests() -> None:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    known: dict[bytes, object] = {}
    reader = HeaderReader(known, request_headers)  # type: ignore[arg-type]
    reader.read(encoder.encode(FIRST))  # the client gives up its table
    block = encoder.encode(FIRST)
    assert reader.read(block) is reader.read(block)
    assert isinstance(known[block], RequestHeaders)


class TestResponses:
    @pytest.mark.parametrize("size", [0, 10, 16_000, 16_384, 20_000, 60_000])
    def test_of_any_length(self, size: int) -> None:
        data = response_frames(5, 404, [(b"a", b"x" * size), (b"connection", b"close")], END_STREAM)
        frames, at = [], 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 3])
            assert int.from_bytes(data[at + 5 : at + 9]) == 5
            frames.append((data[at + 3], data[at + 4], data[at + 9 : at + 9 + length]))
            assert length <= 16_384
            at += 9 + length
        assert [kind for kind, _, _ in frames] == [HEADERS] + [CONTINUATION] * (len(frames) - 1)
        assert [flags & END_HEADERS for _, flags, _ in frames] == [0] * (len(frames) - 1) + [END_HEADERS]
        assert frames[0][1] & END_STREAM
        block = b"".join(payload for _, _, payload in frames)
        assert hpack.Decoder(100_000).decode(block, raw=True) == [(b":status", b"404"), (b"a", b"x" * size)]
