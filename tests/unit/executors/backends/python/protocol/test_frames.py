from __future__ import annotations

import pytest

from executors.backends.python.protocol.frames import HEADER_BYTES, FrameError, FrameReader, Kind, pack, tensor_offsets


def feed(reader: FrameReader, data: bytes) -> list:
    frames = []
    while data:
        buffer = reader.get_buffer()
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        data = data[count:]
        frames += reader.received(count)
    return frames


def test_a_small_frame_is_one_buffer_and_a_large_one_is_not_copied() -> None:
    assert len(pack(Kind.EXECUTE, 1, None, [b"x" * 16, b"y" * 16])) == 1
    large = bytes(1 << 20)
    assert any(buffer is large for buffer in pack(Kind.EXECUTE, 1, None, [large]))


def test_a_meta_larger_than_the_readers_scratch_space() -> None:
    content = ["x" * 300_000, 7]
    (frame,) = feed(FrameReader(), b"".join(pack(Kind.DONE, 9, content, [b"abc"])))
    assert frame.content() == content
    assert frame.data[:3] == b"abc"


def test_an_incomplete_frame_is_not_idle() -> None:
    reader = FrameReader()
    assert reader.idle
    feed(reader, b"".join(pack(Kind.DONE, 9, None))[:-1])
    assert not reader.idle


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"x" * HEADER_BYTES, "are no frame"),
        (b"".join(pack(Kind.DONE, 1, None)).replace(bytes([Kind.DONE]), b"\x63", 1), "unknown kind 99"),
        (b"".join(pack(Kind.DONE, 1, None))[: HEADER_BYTES - 8] + b"\xff" * 8, "are no frame"),
    ],
)
def test_other_bytes_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(FrameError, match=text):
        feed(FrameReader(), data)


def test_unreadable_meta_is_refused() -> None:
    (frame,) = feed(FrameReader(), b"".join(pack(Kind.DONE, 1, 5)).replace(b"\x05", b"\xc1"))
    with pytest.raises(FrameError, match="cannot be read"):
        frame.content()


def test_places_are_aligned() -> None:
    assert tensor_offsets([1, 16, 0, 17, 3]) == [0, 16, 32, 32, 64]
