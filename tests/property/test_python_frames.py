"""Frames between executor and model process survive any way the stream is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from executors.backends.python.protocol.frames import ALIGNMENT, FrameReader, Kind, pack, tensor_offsets

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=20)
CONTENT = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4), max_leaves=10)
# sizes around the reader's 64 KiB and the writer's 128 KiB borders, and small ones
SIZES = st.integers(0, 100) | st.integers(65_500, 65_560) | st.integers(131_050, 131_090)
FRAMES = st.lists(
    st.tuples(st.sampled_from(Kind), st.integers(0, 2**32 - 1), CONTENT, st.lists(SIZES, max_size=4)), max_size=4
)


@settings(deadline=None)
@given(FRAMES, st.lists(st.integers(1, 70_000) | st.integers(1, 40), min_size=1, max_size=20))
def test_frames_come_out_as_they_went_in(frames: list, cuts: list[int]) -> None:
    stream = b""
    for kind, call, content, sizes in frames:
        data = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
        stream += b"".join(pack(kind, call, content, data))
    reader = FrameReader()
    smallest = len(stream) // 300  # single bytes only where there are few
    received = []
    at = turn = 0
    while at < len(stream):
        buffer = reader.get_buffer()
        count = min(len(buffer), max(smallest, cuts[turn % len(cuts)]), len(stream) - at)
        buffer[:count] = stream[at : at + count]
        received += reader.received(count)
        at += count
        turn += 1
    assert reader.idle
    assert len(received) == len(frames)
    for frame, (kind, call, content, sizes) in zip(received, frames, strict=True):
        assert (frame.kind, frame.call, frame.content()) == (kind, call, content)
        assert not frame.data.readonly
        for index, (size, offset) in enumerate(zip(sizes, tensor_offsets(sizes), strict=True)):
            assert offset % ALIGNMENT == 0
            assert frame.data[offset : offset + size] == bytes([index + 1]) * size
