"""What is packed is read again; other bytes are refused in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.errors import InvalidArgument
from executors.generation.progress_codec import ResponseProgress, pack_progress, unpack_progress

progress = st.builds(
    ResponseProgress,
    st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.floats(allow_nan=False),
    st.none() | st.binary(min_size=1, max_size=40),
    st.none() | st.binary(max_size=40),
)


@given(progress)
def test_what_is_packed_is_read_again(one: ResponseProgress) -> None:
    assert unpack_progress(pack_progress(one)) == one


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_or_mean_something(data: bytes) -> None:
    try:
        found = unpack_progress(data)
    except InvalidArgument:
        return
    assert len(found.tokens) * 4 < len(data)


def test_its_bytes_are_these_in_every_release() -> None:
    packed = pack_progress(ResponseProgress((1, 258), -2, 0.5, b"[]"))
    assert packed.hex() == "0702000000feffffffffffffff000000000000e03f01000000020100005b5d"
    packed = pack_progress(ResponseProgress((1,), None, None, b"[]", b"null"))
    assert packed.hex() == "0c0100000001000000040000006e756c6c5b5d"
    with pytest.raises(InvalidArgument, match="another length"):
        unpack_progress(pack_progress(ResponseProgress((1,), prompt_candidates=b"null"))[:-1])
    with pytest.raises(InvalidArgument, match="another length"):
        unpack_progress(packed[:-2])
