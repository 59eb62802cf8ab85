"""Frames, against the bytes that RFC 9113 draws and the library `h2`'s reading of ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import Frame

from gateway.grpc.native.codec.http2_frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    ENABLE_PUSH,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_FRAME_BYTES,
    LARGEST_WINDOW,
    MAX_FRAME_SIZE,
    PADDED,
    WITH_PRIORITY,
    ConnectionFault,
    ErrorCode,
    frame,
    goaway,
    read_settings,
    read_word,
    rst_stream,
    settings,
    window_update,
    without_padding,
)


@pytest.mark.parametrize(
    ("made", "drawn"),
    [
        (frame(DATA, 1, 3, b"abc"), "000003 00 01 00000003 616263"),
        (frame(HEADERS, 5, 0x7FFFFFFF), "000000 01 05 7fffffff"),
        (settings({1: 0, 4: 65_535}), "00000c 04 00 00000000 0001 00000000 0004 0000ffff"),
        (settings({}), "000000 04 00 00000000"),
        (window_update(7, 0x7FFFFFFF), "000004 08 00 00000007 7fffffff"),
        (rst_stream(9, ErrorCode.CANCEL), "000004 03 00 00000009 00000008"),
        (goaway(5, ErrorCode.ENHANCE_YOUR_CALM, "hm"), "00000a 07 00 00000000 00000005 0000000b 686d"),
        (goaway(0, ErrorCode.NO_ERROR), "000008 07 00 00000000 00000000 00000000"),
    ],
)
def test_frames_on_the_wire(made: bytes, drawn: str) -> None:
    assert made == bytes.fromhex(drawn)


@pytest.mark.parametrize("size", [0, 255, 256, 65_535, 65_536, LARGEST_FRAME_BYTES])
def test_lengths_of_three_bytes(size: int) -> None:
    made = frame(DATA, 0, 1, bytes(size))
    assert int.from_bytes(made[:3], "big") == size == len(made) - 9


class TestSettings:
    def test_they_read_back(self) -> None:
        values = {1: 0, 2: 1, 3: 0xFFFFFFFF, 4: LARGEST_WINDOW, 5: DEFAULT_FRAME_BYTES, 0xF000: 7}
        assert dict(read_settings(settings(values)[9:])) == values
        assert read_settings(b"") == []
        twice = settings({4: 1})[9:] + settings({4: 2})[9:]
        assert read_settings(twice) == [(4, 1), (4, 2)]

    @pytest.mark.parametrize(
        ("name", "value", "code"),
        [
            (ENABLE_PUSH, 2, ErrorCode.PROTOCOL_ERROR),
            (INITIAL_WINDOW_SIZE, LARGEST_WINDOW + 1, ErrorCode.FLOW_CONTROL_ERROR),
            (MAX_FRAME_SIZE, DEFAULT_FRAME_BYTES - 1, ErrorCode.PROTOCOL_ERROR),
            (MAX_FRAME_SIZE, LARGEST_FRAME_BYTES + 1, ErrorCode.PROTOCOL_ERROR),
        ],
    )
    def test_values_out_of_bounds(self, name: int, value: int, code: ErrorCode) -> None:
        with pytest.raises(ConnectionFault) as caught:
            read_settings(settings({name: value})[9:])
        assert caught.value.code is code

    @pytest.mark.parametrize("size", [1, 5, 7, 11])
    def test_sizes_that_hold_no_whole_setting(self, size: int) -> None:
        with pytest.raises(ConnectionFault) as caught:
            read_settings(bytes(size))
        assert caught.value.code is ErrorCode.FRAME_SIZE_ERROR


def test_a_word() -> None:
    assert read_word(b"\xff\0\0\1", "it") == 0xFF000001
    for wrong in (b"", b"\0\0\0", b"\0\0\0\0\0"):
        with pytest.raises(ConnectionFault, match=r"^it of . bytes, expected 4$") as caught:
            read_word(wrong, "it")
        assert caught.value.code is ErrorCode.FRAME_SIZE_ERROR


class TestPadding:
    @pytest.mark.parametrize(
        ("flags", "payload", "rest"),
        [
            (0, b"abc", b"abc"),
            (PADDED, b"\0abc", b"abc"),
            (PADDED, b"\2abc\0\0", b"abc"),
            (PADDED, b"\2\0\0", b""),
            (PADDED, b"\0", b""),
            (WITH_PRIORITY, b"\0\0\0\1\x10abc", b"abc"),
            (WITH_PRIORITY, b"\0\0\0\1\x10", b""),
            (PADDED | WITH_PRIORITY, b"\1\0\0\0\1\x10abc\0", b"abc"),
            (PADDED | WITH_PRIORITY, b"\1\0\0\0\1\x10\0", b""),
        ],
    )
    def test_what_it_surrounds(self, flags: int, payload: bytes, rest: bytes) -> None:
        assert without_padding(flags, payload, "HEADERS") == rest

    @pytest.mark.parametrize(
        ("flags", "payload", "code"),
        [
            (PADDED, b"", ErrorCode.FRAME_SIZE_ERROR),
            (PADDED, b"\1", ErrorCode.PROTOCOL_ERROR),
            (PADDED, b"\4abc", ErrorCode.PROTOCOL_ERROR),
            (WITH_PRIORITY, b"\0\0\0\1", ErrorCode.FRAME_SIZE_ERROR),
            (PADDED | WITH_PRIORITY, b"\0\0\0\0\1", ErrorCode.FRAME_SIZE_ERROR),
            (PADDED | WITH_PRIORITY, b"\1\0\0\0\1\x10", ErrorCode.PROTOCOL_ERROR),
        ],
    )
    def test_more_than_there_is(self, flags: int, payload: bytes, code: ErrorCode) -> None:
        with pytest.raises(ConnectionFault) as caught:
            without_padding(flags, payload, "HEADERS")
        assert caught.value.code is code


def test_the_codes_are_those_of_the_library() -> None:
    assert {code.name: int(code) for code in ErrorCode} == {code.name: int(code) for code in ErrorCodes}


MAKERS: list[tuple[str, Callable[[], bytes]]] = [
    ("SettingsFrame", lambda: settings({4: 70_000})),
    ("WindowUpdateFrame", lambda: window_update(0, 5)),
    ("RstStreamFrame", lambda: rst_stream(1, ErrorCode.REFUSED_STREAM)),
    ("GoAwayFrame", lambda: goaway(1, ErrorCode.NO_ERROR, "bye")),
    ("DataFrame", lambda: frame(DATA, 1, 1, b"data")),
]


@pytest.mark.parametrize(("kind", "make"), MAKERS, ids=[kind for kind, _ in MAKERS])
def test_the_library_writes_them_alike(kind: str, make: Callable[[], bytes]) -> None:
    made = make()
    read, size = Frame.parse_frame_header(memoryview(made[:9]))
    read.parse_body(memoryview(made[9:]))
    assert (type(read).__name__, size) == (kind, len(made) - 9)
    assert read.serialize() == made
