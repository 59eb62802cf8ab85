from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from charonia.tensors import Tensor as KernelTensor
from executors.backends.python.api import Tensor, TritonModelException


def test_facts_of_a_tensor() -> None:
    array = np.zeros((2, 3), np.float32)
    tensor = Tensor("T", array)
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("T", [2, 3], 11, True)
    assert tensor.as_numpy() is array


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.arange(12, dtype=np.int32)[::2],
        np.array(5, np.uint8),
        np.zeros((0, 3), np.float64),
        np.array([1, 2], ml_dtypes.bfloat16),
        np.array([["a", "käse"]]),
        np.array([b"a", b"bc"]),
        np.array([b"\0", "text", 5], dtype=np.object_),
        np.array([], dtype=np.object_),
        np.array([True, False]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_are_encoded_as_the_kernel_encodes_them(array: np.ndarray) -> None:
    kernel = KernelTensor.of("T", array)
    tensor = Tensor("T", array)
    assert bytes(tensor.encoded()) == bytes(kernel.data)
    assert tensor.triton_dtype() == kernel.datatype.number


@pytest.mark.parametrize(
    "array",
    [np.array([[1.5, 2]], np.float16), np.array([3], ml_dtypes.bfloat16), np.array([[b"a", b""]], dtype=np.object_)],
    ids=lambda array: str(array.dtype),
)
def test_received_tensors_are_read_lazily_and_equal(array: np.ndarray) -> None:
    kernel = KernelTensor.of("T", array)
    data = bytearray(kernel.data)
    tensor = Tensor.received("T", kernel.datatype.number, kernel.shape, memoryview(data))
    assert bytes(tensor.encoded()) == bytes(kernel.data)
    assert tensor.as_numpy().tolist() == array.tolist()
    assert tensor.as_numpy().flags.writeable
    assert bytes(tensor.encoded()) == bytes(kernel.data)


def test_other_byte_orders_are_converted() -> None:
    tensor = Tensor("T", np.array([1, 2], dtype=">i4"))
    assert tensor.triton_dtype() == 8
    assert bytes(tensor.encoded()) == b"\1\0\0\0\2\0\0\0"


def test_names_and_arrays_are_needed() -> None:
    with pytest.raises(TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        Tensor("", np.zeros(1))
    with pytest.raises(TypeError, match="name must be of type str"):
        Tensor(None, np.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"needs a numpy\.ndarray"):
        Tensor("T", [1, 2])  # type: ignore[arg-type]
    with pytest.raises(TritonModelException, match=r"^NumPy dtype is not supported\.$"):
        Tensor("T", np.zeros(1, np.complex128))


def test_dlpack_shares_memory_both_ways() -> None:
    array = np.arange(4, dtype=np.float32)
    tensor = Tensor("T", array)
    assert tensor.__dlpack_device__() == (1, 0)
    for view in (np.from_dlpack(tensor), Tensor.from_dlpack("U", tensor).as_numpy()):
        assert np.shares_memory(view, array)
    through_capsule = Tensor.from_dlpack("U", tensor.to_dlpack())
    array[0] = 9
    assert through_capsule.as_numpy().tolist() == [9, 1, 2, 3]
    assert through_capsule.name() == "U"


def test_dlpack_outlives_its_tensor() -> None:
    capsule = Tensor("T", np.full(1000, 7, np.int64)).to_dlpack()
    assert Tensor.from_dlpack("U", capsule).as_numpy().sum() == 7000


def test_received_tensors_can_be_given_to_dlpack() -> None:
    tensor = Tensor.received("T", 8, (2,), memoryview(bytearray(b"\1\0\0\0\2\0\0\0")))
    assert np.from_dlpack(tensor).tolist() == [1, 2]


def test_a_transposed_array_is_made_contiguous_for_dlpack() -> None:
    array = np.arange(6).reshape(2, 3).T
    assert Tensor.from_dlpack("U", Tensor("T", array)).as_numpy().tolist() == array.tolist()


def test_what_dlpack_cannot_carry_is_refused() -> None:
    with pytest.raises(TritonModelException, match=r"^DLPack does not have support for string tensors\.$"):
        Tensor("T", np.array([b"x"], dtype=np.object_)).to_dlpack()
    with pytest.raises(TritonModelException, match="Tensor must be a DLPack capsule or have a `__dlpack__` attribute"):
        Tensor.from_dlpack("T", [1])
    with pytest.raises(TritonModelException, match=r"^DLPack tensor is not contiguous\."):
        Tensor.from_dlpack("T", np.arange(6).reshape(2, 3).T)
    with pytest.raises(TritonModelException, match="empty string"):
        Tensor.from_dlpack("", np.zeros(1))


def test_bf16_goes_through_dlpack() -> None:
    array = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    taken = Tensor.from_dlpack("U", Tensor("T", array))
    assert (taken.triton_dtype(), taken.shape()) == (14, [1, 2])
    array[0, 0] = 3
    assert taken.as_numpy().tolist() == [[3.0, -2.0]]
    assert taken.encoded() == array.tobytes()


def test_a_capsule_is_used_once() -> None:
    for array in (np.zeros(2, np.float32), np.zeros(2, ml_dtypes.bfloat16)):
        capsule = Tensor("T", array).to_dlpack()
        Tensor.from_dlpack("U", capsule)
        with pytest.raises(TritonModelException, match="DLPack tensor 'U' cannot be taken"):
            Tensor.from_dlpack("U", capsule)


def test_read_only_arrays_are_copied_for_dlpack() -> None:
    array = np.frombuffer(b"\1\0\0\0", np.int32)
    assert np.from_dlpack(Tensor("T", array)).tolist() == [1]


def test_a_tensor_on_a_device_is_copied_to_the_host() -> None:
    class OnDevice:
        def __dlpack__(self) -> object:
            raise AssertionError("its memory cannot be read here")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def cpu(self) -> object:
            return np.array([4, 5])

    assert Tensor.from_dlpack("T", OnDevice()).as_numpy().tolist() == [4, 5]


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for given in (torch.arange(6).reshape(2, 3), torch.tensor([1.5, 2.0], dtype=torch.bfloat16)):
        tensor = Tensor.from_dlpack("T", given)
        assert torch.equal(torch.from_dlpack(tensor), given)
        assert torch.equal(torch.utils.dlpack.from_dlpack(tensor.to_dlpack()), given)
