"""BYTES: the check and the split agree on every encoding there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from charonia.errors import InvalidArgument
from charonia.tensors import check_bytes_elements, join_bytes_elements, split_bytes_elements


def oracle(data: bytes) -> list[bytes] | None:
    """The elements by plain slicing, None when the bytes are no encoding."""
    elements = []
    while data:
        if len(data) < 4:
            return None
        length = int.from_bytes(data[:4], "little")
        if len(data) < 4 + length:
            return None
        elements.append(data[4 : 4 + length])
        data = data[4 + length :]
    return elements


ELEMENTS = st.lists(st.binary(max_size=6), max_size=5)


@given(ELEMENTS)
def test_what_is_joined_is_split(elements: list[bytes]) -> None:
    data = join_bytes_elements(elements)
    check_bytes_elements(data, len(elements), name="i", model="m")
    assert list(split_bytes_elements(memoryview(data))) == elements


@given(ELEMENTS.map(join_bytes_elements) | st.lists(st.sampled_from([0, 1, 2, 255])).map(bytes), st.integers(0, 6))
def test_the_check_accepts_exactly_the_encodings(data: bytes, expected: int) -> None:
    elements = oracle(data)
    valid = elements is not None and len(elements) == expected
    try:
        check_bytes_elements(data, expected, name="i", model="m")
    except InvalidArgument:
        assert not valid
    else:
        assert valid
        assert list(split_bytes_elements(data)) == elements
