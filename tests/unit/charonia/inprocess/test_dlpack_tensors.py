"""Tensors of the in-process API: what becomes one, what it shares, and what is refused in Triton's words."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from charonia import tensors as kernel
from charonia.datatypes import DataType as KernelType
from charonia.inprocess import (
    DataType,
    DLDeviceType,
    InvalidArgumentError,
    MemoryBuffer,
    MemoryType,
    Tensor,
    UnsupportedError,
)
from charonia.inprocess.dlpack_tensors import parse_device

NUMBERS = [np.bool_, *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "f2", "f4", "f8"]


@pytest.mark.parametrize("dtype", NUMBERS)
def test_arrays_go_both_ways_without_a_copy(dtype: Any) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    for tensor in (Tensor.from_dlpack(array), Tensor._from_object(array)):
        assert tensor.data_ptr == array.ctypes.data
        assert (list(tensor.shape), tensor.size, tensor.memory_type) == ([2, 3], array.nbytes, MemoryType.CPU)
        assert tensor.data_type.name == KernelType.of_numpy(array.dtype).name
        back = np.from_dlpack(tensor)
        assert back.ctypes.data == array.ctypes.data
        assert back.dtype == array.dtype
        assert (back == array).all()


def test_a_capsule_keeps_the_memory_and_lets_it_go() -> None:
    class Owner(np.ndarray):
        """An array that can be watched."""

    owner = np.zeros(1000).view(Owner)
    gone = weakref.ref(owner)
    tensor = Tensor.from_dlpack(owner)
    back = np.from_dlpack(tensor)
    del owner, tensor
    gc.collect()
    assert gone() is not None
    assert back.sum() == 0
    del back
    gc.collect()
    assert gone() is None


def test_making_a_tensor_leaves_no_reference() -> None:
    array = np.zeros(4)
    before = sys.getrefcount(array)
    for _ in range(10):
        np.from_dlpack(Tensor.from_dlpack(array))
    assert sys.getrefcount(array) == before


def test_a_tensor_may_be_seen_in_another_shape() -> None:
    tensor = Tensor.from_dlpack(np.arange(6))
    tensor.shape = [3, 2]
    assert np.from_dlpack(tensor).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_what_is_not_contiguous_is_refused_by_dlpack_and_copied_from_numpy() -> None:
    array = np.arange(6).reshape(2, 3).T
    for make in (Tensor.from_dlpack, MemoryBuffer.from_dlpack):
        with pytest.raises(InvalidArgumentError, match=r"^Only contiguous memory is supported$"):
            make(array)
    assert np.from_dlpack(Tensor._from_object(array)).tolist() == array.tolist()
    assert Tensor.from_dlpack(np.zeros((1, 4))[:, :]).size == 32, "the stride of a dimension of one says nothing"


def test_big_endian_numbers_are_turned() -> None:
    assert np.from_dlpack(Tensor._from_object(np.array([1, 2], ">i4"))).tolist() == [1, 2]


def test_memory_that_cannot_be_written_is_shared_with_who_understands_that() -> None:
    tensor = Tensor._of(kernel.Tensor("", KernelType.INT32, (2,), np.array([7, 8], np.int32).tobytes()))
    shared = np.from_dlpack(tensor)
    assert (shared.tolist(), shared.flags.writeable) == ([7, 8], False)
    assert tensor.__dlpack__() is not None, "who knows only the first version of DLPack gets a copy"


def test_memory_in_the_middle_of_a_message_is_aligned() -> None:
    message = memoryview(bytes(9))
    offset = 1 if np.frombuffer(message, np.uint8).ctypes.data % 8 == 0 else 0
    tensor = Tensor._of(kernel.Tensor("", KernelType.FP64, (1,), message[offset : offset + 8]))
    assert tensor.data_ptr % 8 == 0
    assert np.from_dlpack(tensor).tolist() == [0.0]


def test_bfloat16() -> None:
    array = np.array([1.5, -2], ml_dtypes.bfloat16)
    tensor = Tensor._from_object(array)
    assert tensor.data_type is DataType.BF16
    again = Tensor.from_dlpack(tensor)
    assert (again.data_type, again.data_ptr, again.shape) == (DataType.BF16, tensor.data_ptr, [2])
    assert again._named("X").array().tolist() == [1.5, -2]


@pytest.mark.parametrize(
    "given",
    [["a", "bé", ""], [b"a", "bé".encode(), b""], np.array(["a", "bé", ""]), np.array([b"a", "bé", b""], np.object_)],
)
def test_strings(given: Any) -> None:
    tensor = Tensor.from_bytes_array(given)
    assert (tensor.data_type, tuple(tensor.shape)) == (DataType.BYTES, (3,))
    assert tensor.to_bytes_array().tolist() == [b"a", "bé".encode(), b""]
    assert tensor.to_string_array().tolist() == ["a", "bé", ""]
    assert Tensor.from_string_array(given).to_string_array().dtype.kind == "U"


def test_strings_keep_zero_bytes_and_shape() -> None:
    tensor = Tensor.from_bytes_array([[b"a\0", b"\0"]])
    assert tensor.to_bytes_array().tolist() == [[b"a\0", b"\0"]]
    empty = Tensor.from_bytes_array(np.empty((0, 2), np.object_))
    assert empty.to_bytes_array().shape == empty.to_string_array().shape == (0, 2)


def test_strings_that_are_none() -> None:
    raw = np.frombuffer(b"\xff\0\0\0ab", np.uint8)
    broken = Tensor(DataType.BYTES, [1], MemoryBuffer.from_dlpack(raw.copy()))
    with pytest.raises(InvalidArgumentError, match="incomplete string data"):
        broken.to_bytes_array()
    with pytest.raises(
        InvalidArgumentError,
        match=r"^Tensor has data type TRITONSERVER_DataType\.INT64 not TRITONSERVER_DataType\.BYTES$",
    ):
        Tensor._from_object([1]).to_string_array()
    with pytest.raises(
        InvalidArgumentError, match=r"Unsupported conversion from \[1\] to Triton BYTES Tensor. Got TRITON.*INT64"
    ):
        Tensor.from_string_array([1])  # type: ignore[list-item]
    with pytest.raises(
        InvalidArgumentError,
        match=r"Unsupported Triton server data type. Can't convert TRITON.*BYTES to DLPack data type",
    ):
        np.from_dlpack(Tensor.from_bytes_array(["a"]))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (object(), r"Input type <class 'object'> not supported. Must be one of \[.*\] or the type must support __dlp"),
        ((1, 2), "Input type <class 'tuple'> not supported"),
        ([1, [2]], r"Conversion from \[1, \[2\]\] to tensor not supported\."),
        ([1j], r"Conversion from \[1j\] to tensor not supported\."),
        (np.array([1j]), "Unsupported Numpy data type. Can't convert <class 'numpy.complex128'> to Triton server data"),
        (np.array(["2026-01-01"], "M8[D]"), "Unsupported Numpy data type"),
    ],
)
def test_what_becomes_no_tensor(given: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        Tensor._from_object(given)


def test_scalars_of_numpy() -> None:
    tensor = Tensor._from_object(np.float32(2))
    assert (tensor.data_type, tuple(tensor.shape)) == (DataType.FP32, ())


class OnDevice:
    """A tensor of another library on another device."""

    def __init__(self, device: int) -> None:
        self._device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **_more: Any) -> Any:
        raise BufferError("nothing is exported")


def test_a_gpu_is_refused_in_tritons_words() -> None:
    with pytest.raises(
        InvalidArgumentError,
        match=r"^Object does not support DLPack protocol: DLPack synchronization on device \(2, 0\) not supported$",
    ):
        Tensor.from_dlpack(OnDevice(DLDeviceType.kDLCUDA))
    with pytest.raises(InvalidArgumentError, match="does not support DLPack protocol: nothing is exported"):
        Tensor.from_dlpack(OnDevice(DLDeviceType.kDLCPU))
    with pytest.raises(InvalidArgumentError, match="Object does not support DLpack protocol"):
        MemoryBuffer.from_dlpack(object())
    tensor = Tensor._from_object([1])
    with pytest.raises(
        UnsupportedError,
        match=r"^Conversion from \(<TRITONSERVER_MemoryType.CPU: 0>, 0\) to \(<TRITONSERVER_MemoryType.GPU: 2>, 1\)",
    ):
        tensor.to_device("gpu:1")
    assert tensor.to_device("cpu") is tensor.to_device((DLDeviceType.kDLCPU, 0)) is tensor.to_host() is tensor
    elsewhere = Tensor(DataType.UINT8, [1], MemoryBuffer(1 << 40, MemoryType.GPU, 0, 1, None))
    assert elsewhere.__dlpack_device__() == (DLDeviceType.kDLCUDA, 0)
    for use in (elsewhere.to_host, elsewhere.__dlpack__, lambda: elsewhere._named("X")):
        with pytest.raises(UnsupportedError, match=r"Conversion from .*GPU.* not supported"):
            use()
    with pytest.raises(UnsupportedError, match=r"DLPack stream synchronization on memory type .*CPU and stream 7 not"):
        tensor.__dlpack__(stream=7)


@pytest.mark.parametrize(
    ("device", "parsed"),
    [
        ("cpu", (MemoryType.CPU, 0)),
        ("GPU:3", (MemoryType.GPU, 3)),
        ("cpu_pinned", (MemoryType.CPU_PINNED, 0)),
        (MemoryType.GPU, (MemoryType.GPU, 0)),
        ((MemoryType.CPU, 0), (MemoryType.CPU, 0)),
        ((DLDeviceType.kDLCUDA, 2), (MemoryType.GPU, 2)),
    ],
)
def test_devices(device: Any, parsed: tuple[MemoryType, int]) -> None:
    assert parse_device(device) == parsed


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("unsupported", "Unsupported Memory Type String. Can't convert UNSUPPORTED to Triton server memory type"),
        ("gpu:x", "Invalid memory type string gpu:x"),
        ("gpu:1:2", "Invalid memory type string gpu:1:2"),
        ((DLDeviceType.kDLROCM, 0), "Unsupported DLPack device type"),
        ((1, 0), r"Invalid memory type \(1, 0\)"),
        (None, "Invalid memory type None"),
    ],
)
def test_devices_that_are_none(device: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        parse_device(device)


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    given = torch.arange(4, dtype=torch.bfloat16)
    tensor = Tensor.from_dlpack(given)
    assert (tensor.data_type, tensor.data_ptr) == (DataType.BF16, given.data_ptr())
    assert torch.from_dlpack(tensor).data_ptr() == given.data_ptr()
