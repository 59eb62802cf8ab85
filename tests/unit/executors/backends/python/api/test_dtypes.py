from __future__ import annotations

import numpy as np
import pytest

from charonia.datatypes import DataType
from executors.backends.python import api


@pytest.mark.parametrize("datatype", DataType)
def test_types_agree_with_the_kernel(datatype: DataType) -> None:
    assert np.dtype(api.triton_to_numpy_type(datatype.number)) == datatype.numpy
    assert np.dtype(api.triton_string_to_numpy(datatype.config_name)) == datatype.numpy
    assert api.numpy_to_triton_type(datatype.numpy) == datatype.number


def test_scalar_types_and_strings_have_numbers_and_others_have_none() -> None:
    assert api.numpy_to_triton_type(np.float32) == 11
    assert [api.numpy_to_triton_type(kind) for kind in (np.bytes_, np.str_, "S3", "U3")] == [13] * 4
    assert api.numpy_to_triton_type(">f4") == 11
    assert api.numpy_to_triton_type(np.complex64) is None
    assert api.triton_to_numpy_type(0) is None
    with pytest.raises(KeyError):
        api.triton_string_to_numpy("TYPE_FP8")


def test_bytes_are_serialised_and_read_back() -> None:
    array = np.array([[b"a", "ü"], [b"", 5]], dtype=np.object_)
    encoded = api.serialize_byte_tensor(array)
    assert encoded == b"\1\0\0\0a\2\0\0\0\xc3\xbc\0\0\0\0\1\0\0\0005"
    for form in (encoded, np.frombuffer(encoded, np.uint8)):
        assert api.deserialize_bytes_tensor(form).tolist() == [b"a", "ü".encode(), b"", b"5"]
    assert api.serialize_byte_tensor(np.array([1, 2])) is None
    assert api.deserialize_bytes_tensor(b"").shape == (0,)


def test_a_cut_encoding_is_refused() -> None:
    with pytest.raises(ValueError, match="element 0 has 9 bytes, only 1 are left"):
        api.deserialize_bytes_tensor(b"\x09\0\0\0x")
