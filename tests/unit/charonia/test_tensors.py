"""Raw encodings (T2, T3), and what is said of those that are none (T3, T6)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.tensors import (
    Buffer,
    Tensor,
    check_bytes_elements,
    element_count,
    expected_size_bytes,
    join_bytes_elements,
    joined,
    object_array,
    shape_text,
    split_bytes_elements,
)


@pytest.mark.parametrize("datatype", [t for t in DataType if t is not DataType.BYTES])
def test_an_array_comes_back(datatype: DataType) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(datatype.numpy)
    tensor = Tensor.of("x", array)
    assert (tensor.datatype, tensor.shape, tensor.size_bytes) == (datatype, (2, 3), 6 * datatype.size_bytes)
    assert bytes(tensor.data) == array.tobytes()
    np.testing.assert_array_equal(tensor.array(), array)


def test_layouts_and_byte_orders_are_made_the_wires() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    tensor = Tensor.of("x", array)
    assert (tensor.datatype, tensor.shape) == (DataType.INT32, (3, 2))
    assert bytes(tensor.data) == np.array([0, 3, 1, 4, 2, 5], "<i4").tobytes()


def test_empty_and_scalar_tensors() -> None:
    assert bytes(Tensor.of("x", np.zeros((0, 3), np.float32)).data) == b""
    assert bytes(Tensor.of("x", np.zeros((0,), ml_dtypes.bfloat16)).data) == b""
    scalar = Tensor.of("x", np.array(7, np.uint8))
    assert (scalar.shape, bytes(scalar.data)) == ((), b"\7")
    assert scalar.array() == 7


def test_strings() -> None:
    tensor = Tensor.of("x", np.array([["a", b"\0\xff\0"], ["", 7]], dtype=object))
    assert bytes(tensor.data) == b"\1\0\0\0a\3\0\0\0\0\xff\0\0\0\0\0\1\0\0\0" + b"7"
    assert tensor.array().tolist() == [[b"a", b"\0\xff\0"], [b"", b"7"]]
    assert Tensor.of("x", np.array(["é", "b"])).array().tolist() == ["é".encode(), b"b"]


def check(data: bytes, expected: int) -> None:
    check_bytes_elements(data, expected, name="i", model="m")


def test_valid_strings_pass() -> None:
    check(b"", 0)
    check(join_bytes_elements([b"a", b"", b"ccc"]), 3)


@pytest.mark.parametrize(
    ("data", "expected", "message"),
    [
        (
            b"\1\0\0\0a\1\0",
            2,
            "incomplete string length indicator for inference input 'i' for model 'm', expecting 4 bytes but only 2 "
            "bytes available. Please make sure the string length indicator is in one buffer.",
        ),
        (
            b"\5\0\0\0abc",
            1,
            "incomplete string data for inference input 'i' for model 'm', expecting string of length 5 but only 3 "
            "bytes available. Please make sure the string length is in one buffer.",
        ),
        (
            b"\xff\xff\xff\xffa",
            1,
            "incomplete string data for inference input 'i' for model 'm', expecting string of length 4294967295 "
            "but only 1 bytes available. Please make sure the string length is in one buffer.",
        ),
        (
            b"\0\0\0\0" * 3,
            2,
            "unexpected number of string elements 3 for inference input 'i' for model 'm', expecting 2",
        ),
        (
            b"\0\0\0\0" * 2 + b"\0",
            2,
            "incomplete string length indicator for inference input 'i' for model 'm', expecting 4 bytes but only 1 "
            "bytes available. Please make sure the string length indicator is in one buffer.",
        ),
        (b"\0\0\0\0" * 1, 2, "expected 2 string elements for inference input 'i' for model 'm', got 1"),
        (b"", 1, "expected 1 string elements for inference input 'i' for model 'm', got 0"),
    ],
)
def test_broken_strings(data: bytes, expected: int, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(data, expected)
    assert caught.value.message == message


def test_counts() -> None:
    assert element_count("i", []) == 1
    assert element_count("i", [2**62, 0, 2**62]) == 0
    assert expected_size_bytes("i", DataType.FP64, [2, 3]) == 48
    assert shape_text((-1, 16)) == "[-1,16]"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, -1), "invalid shape for input 'i': shape [2,-1] contains one or more invalid dimensions"),
        ((0, -1), "invalid shape for input 'i': shape [0,-1] contains one or more invalid dimensions"),
        (
            (2**62, 2),
            "invalid shape for input 'i': shape [4611686018427387904,2] causes total element count to exceed maximum "
            "size of 9223372036854775807",
        ),
        (
            (2**61, 1),
            "byte size overflow for input 'i': element count (2305843009213693952) * data type size (8) exceeds "
            "maximum allowed size (9223372036854775807)",
        ),
    ],
)
def test_impossible_shapes(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        expected_size_bytes("i", DataType.INT64, shape)
    assert caught.value.message == message


class TestManyElements:
    """More elements than one call handles are joined and made an array in parts, by threads that take short turns."""

    def test_arrays_and_lists_are_joined_alike(self) -> None:
        elements = [b"%d" % number for number in range(20_001)]
        array = object_array(iter(elements), len(elements))
        assert array.tolist() == elements
        joined = join_bytes_elements(array.reshape(3, -1))
        assert joined == join_bytes_elements(elements)
        assert list(split_bytes_elements(joined)) == elements

    def test_too_few_elements_are_refused(self) -> None:
        with pytest.raises(ValueError, match="broadcast"):
            object_array([b"a"] * 10_000, 20_000)

    def test_turns_are_short_meanwhile(self) -> None:
        usual_s = sys.getswitchinterval()
        turns: set[float] = set()

        def elements() -> Iterator[bytes]:
            for _ in range(20_000):
                turns.add(sys.getswitchinterval())
                yield b"a"

        object_array(elements(), 20_000)
        assert max(turns) < usual_s
        assert sys.getswitchinterval() == usual_s
        turns.clear()
        object_array(elements(), 10)
        assert turns == {usual_s}


@pytest.mark.parametrize("sizes", [(), (0,), (3, 0, 5), (1 << 20, 7, (1 << 20) + 1)])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_buffers_are_joined(sizes: tuple[int, ...], kind: Callable[[bytes], Buffer]) -> None:
    pieces = [bytes([at + 1]) * size for at, size in enumerate(sizes)]
    assert joined([kind(piece) for piece in pieces]) == b"".join(pieces)
