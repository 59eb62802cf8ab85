"""Tensors of the in-process API: memory of this process with a type and a shape, exchanged by DLPack without a copy.

Only host memory is known: what lies on a device, or is wanted there, is refused in Triton's words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from charonia import tensors as kernel
from charonia.cuda.dlpack_capsules import head_of
from charonia.datatypes import DataType as KernelType
from charonia.errors import InvalidArgument

from .kinds import DataType, DLDeviceType, InvalidArgumentError, MemoryType, UnsupportedError

DeviceOrMemoryType = tuple[MemoryType, int] | MemoryType | tuple[DLDeviceType, int] | str

_CPU = (MemoryType.CPU, 0)

# -- DLPack ------------------------------------------------------------------------------------------------------------

_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_TYPES = {
    (_BOOL, 8): DataType.BOOL,
    **{(_INT, bits): DataType[f"INT{bits}"] for bits in (8, 16, 32, 64)},
    **{(_UINT, bits): DataType[f"UINT{bits}"] for bits in (8, 16, 32, 64)},
    **{(_FLOAT, bits): DataType[f"FP{bits}"] for bits in (16, 32, 64)},
    (_BFLOAT, 16): DataType.BF16,
}


def _described(obj: Any) -> tuple[DataType, list[int], MemoryBuffer]:
    """What an object with `__dlpack__` holds. Raises `InvalidArgumentError`."""
    try:
        device = tuple(map(int, obj.__dlpack_device__()))
        if device[0] == DLDeviceType.kDLCUDA:
            raise UnsupportedError(f"DLPack synchronization on device {device} not supported")
        capsule = obj.__dlpack__()
        head = head_of(capsule)
    except Exception as error:
        raise InvalidArgumentError(f"Object does not support DLPack protocol: {error}") from None
    if head.device_type != DLDeviceType.kDLCPU:
        raise InvalidArgumentError(
            f"Unsupported DLPack device type. Can't convert {head.device_type} to Triton server memory type"
        )
    known = _TYPES.get((head.type_code, head.bits)) if head.lanes == 1 else None
    if known is None:
        raise InvalidArgumentError(
            f"Unsupported DLPack data type. Can't convert {(head.type_code, head.bits)} to Triton server data type"
        )
    shape = head.shape[: head.ndim]
    size = prod(shape) * head.bits // 8
    if not _is_contiguous(shape, head.strides[: head.ndim] if head.strides else None):
        raise InvalidArgumentError("Only contiguous memory is supported")
    return known, shape, MemoryBuffer((head.data or 0) + head.byte_offset, MemoryType.CPU, 0, size, obj)


def _is_contiguous(shape: list[int], strides: list[int] | None) -> bool:
    """Whether elements lie in row-major order without gaps; the stride of a dimension of one says nothing."""
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides or []), strict=False):
        if length != 1 and stride != expected and 0 not in shape:
            return False
        expected *= length
    return True


# -- tensors -----------------------------------------------------------------------------------------------------------


class _Block:
    """Memory as NumPy takes it; whatever is made of it keeps the owner."""

    def __init__(self, buffer: MemoryBuffer) -> None:
        self.owner = buffer.owner
        fixed = isinstance(buffer.owner, np.ndarray) and not buffer.owner.flags.writeable
        where = (buffer.data_ptr, fixed)
        self.__array_interface__ = {"data": where, "shape": (buffer.size,), "typestr": "|u1", "version": 3}


@dataclass
class MemoryBuffer:
    """Memory that `owner` keeps alive."""

    data_ptr: int
    memory_type: MemoryType
    memory_type_id: int
    size: int
    owner: Any

    @staticmethod
    def from_dlpack(owner: Any) -> MemoryBuffer:
        """The memory of an object with `__dlpack__`. Raises `InvalidArgumentError`."""
        if not hasattr(owner, "__dlpack__"):
            raise InvalidArgumentError("Object does not support DLpack protocol")
        return _described(owner)[2]

    @staticmethod
    def _of(data: kernel.Buffer, alignment: int) -> MemoryBuffer:
        array = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        if array.ctypes.data % alignment:  # a small one, in the middle of a message
            array = array.copy()
        return MemoryBuffer(array.ctypes.data, MemoryType.CPU, 0, array.nbytes, array)

    def _bytes(self) -> npt.NDArray[np.uint8]:
        """The memory itself. Raises `UnsupportedError` for a device's."""
        if self.memory_type is MemoryType.GPU:
            raise UnsupportedError(f"Conversion from {self.memory_type} to numpy array not supported.")
        return np.asarray(_Block(self)) if self.size else np.empty(0, np.uint8)


@dataclass
class Tensor:
    """A tensor in memory, BYTES as Triton writes them: the length of each element in 4 bytes, then the element."""

    data_type: DataType
    shape: Sequence[int]
    memory_buffer: MemoryBuffer

    @property
    def data_ptr(self) -> int:
        return self.memory_buffer.data_ptr

    @property
    def memory_type(self) -> MemoryType:
        return self.memory_buffer.memory_type

    @property
    def memory_type_id(self) -> int:
        return self.memory_buffer.memory_type_id

    @property
    def size(self) -> int:
        """In bytes."""
        return self.memory_buffer.size

    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None, **more: Any) -> Any:
        """A capsule over this memory. Who cannot be told that memory is read-only gets a copy of such."""
        if stream not in (None, 0):
            raise UnsupportedError(
                f"DLPack stream synchronization on memory type {self.memory_type} and stream {stream} not supported"
            )
        if self.data_type not in _TYPES.values():
            raise InvalidArgumentError(
                f"Unsupported Triton server data type. Can't convert {self.data_type} to DLPack data type"
            )
        is_brain = self.data_type is DataType.BF16  # NumPy has no such type: its bytes go as another
        dtype = np.dtype(np.uint16) if is_brain else KernelType[self.data_type.name].numpy
        array = self.memory_buffer._bytes().view(dtype).reshape(tuple(self.shape))
        if is_brain or max_version is None:
            capsule = (array if array.flags.writeable else array.copy()).__dlpack__()
            if is_brain:
                head_of(capsule).type_code = _BFLOAT
            return capsule
        return array.__dlpack__(max_version=max_version, **more)

    def __dlpack_device__(self) -> tuple[DLDeviceType, int]:
        return DLDeviceType.kDLCUDA if self.memory_type is MemoryType.GPU else DLDeviceType.kDLCPU, self.memory_type_id

    def to_string_array(self) -> npt.NDArray[np.str_]:
        """The elements of a BYTES tensor as text (UTF-8). Raises `InvalidArgumentError` for another type."""
        elements = self.to_bytes_array()
        return np.array([element.decode() for element in elements.flat], dtype=np.str_).reshape(elements.shape)

    def to_bytes_array(self) -> npt.NDArray[Any]:
        """The elements of a BYTES tensor as an array of bytes objects. Raises `InvalidArgumentError`."""
        if self.data_type is not DataType.BYTES:
            raise InvalidArgumentError(f"Tensor has data type {self.data_type} not {DataType.BYTES}")
        data = self.memory_buffer._bytes().data
        try:
            kernel.check_bytes_elements(data, prod(self.shape), name="", model="")
        except InvalidArgument as error:
            raise InvalidArgumentError(error.message) from None
        return kernel.object_array(kernel.split_bytes_elements(data), prod(self.shape)).reshape(tuple(self.shape))

    @staticmethod
    def from_string_array(string_array: list[str] | npt.NDArray[Any]) -> Tensor:
        """As `from_bytes_array`."""
        return Tensor.from_bytes_array(string_array)

    @staticmethod
    def from_bytes_array(bytes_array: list[str] | list[bytes] | npt.NDArray[Any]) -> Tensor:
        """A BYTES tensor of strings or bytes. Raises `InvalidArgumentError` for what is neither."""
        made = Tensor._from_object(bytes_array)
        if made.data_type is not DataType.BYTES:
            raise InvalidArgumentError(
                f"Unsupported conversion from {bytes_array} to Triton BYTES Tensor. Got {made.data_type}"
            )
        return made

    @staticmethod
    def from_dlpack(obj: Any) -> Tensor:
        """A tensor over the memory of an object with `__dlpack__`. Raises `InvalidArgumentError`."""
        return Tensor(*_described(obj))

    def to_host(self) -> Tensor:
        """This tensor, which is on the host."""
        return self.to_device("cpu")

    def to_device(self, device: DeviceOrMemoryType) -> Tensor:
        """This tensor where it is on that device. Raises `UnsupportedError` where it is not."""
        here, wanted = (self.memory_type, self.memory_type_id), parse_device(device)
        if here == wanted or (self.memory_type is MemoryType.CPU_PINNED and wanted[0] is MemoryType.CPU):
            return self
        raise UnsupportedError(f"Conversion from {here} to {wanted} not supported.")

    @staticmethod
    def _from_object(obj: Any) -> Tensor:
        """A tensor of a list, an array, or what has `__dlpack__`. Raises `InvalidArgumentError`."""
        if isinstance(obj, list):
            try:
                array = np.array(obj)
                if array.dtype.kind in "SU":  # which drop zero bytes at the end of an element
                    array = np.array(obj, dtype=np.object_)
                return Tensor._from_numpy(array)
            except Exception as error:
                raise InvalidArgumentError(f"Conversion from {obj} to tensor not supported.") from error
        if isinstance(obj, np.ndarray | np.generic):
            return Tensor._from_numpy(np.asarray(obj))
        if hasattr(obj, "__dlpack__"):
            return Tensor.from_dlpack(obj)
        raise InvalidArgumentError(
            f"Input type {type(obj)} not supported. Must be one of {[np.ndarray, np.generic, list]} or the type must "
            "support __dlpack__"
        )

    @staticmethod
    def _from_numpy(array: npt.NDArray[Any]) -> Tensor:
        try:
            made = kernel.Tensor.of("", array)
        except InvalidArgument:
            raise InvalidArgumentError(
                f"Unsupported Numpy data type. Can't convert {array.dtype.type} to Triton server data type"
            ) from None
        return Tensor._of(made)

    @staticmethod
    def _of(tensor: kernel.Tensor) -> Tensor:
        buffer = MemoryBuffer._of(tensor.data, tensor.datatype.size_bytes or 1)
        return Tensor(DataType(tensor.datatype.number), list(tensor.shape), buffer)

    def _named(self, name: str) -> kernel.Tensor:
        """As an input of a request, over the same memory."""
        if self.data_type is DataType.INVALID:
            raise InvalidArgumentError(f"input '{name}' has no data type")
        if self.memory_type is MemoryType.GPU:
            raise UnsupportedError(
                f"Conversion from {(self.memory_type, self.memory_type_id)} to {_CPU} not supported."
            )
        shape = tuple(map(int, self.shape))
        return kernel.Tensor(name, KernelType[self.data_type.name], shape, self.memory_buffer._bytes().data)


def parse_device(device: DeviceOrMemoryType) -> tuple[MemoryType, int]:
    """A memory type and its number, of a word ("gpu:0"), a type or a pair. Raises `InvalidArgumentError`."""
    match device:
        case MemoryType():
            return device, 0
        case (MemoryType() as kind, int(number)):
            return kind, number
        case (DLDeviceType() as kind, int(number)):
            known = {DLDeviceType.kDLCPU: MemoryType.CPU, DLDeviceType.kDLCUDA: MemoryType.GPU}
            if kind not in known:
                raise InvalidArgumentError(
                    f"Unsupported DLPack device type. Can't convert {kind} to Triton server memory type"
                )
            return known[kind], number
        case str():
            word, colon, digits = device.partition(":")
            if colon and not digits.isdecimal():
                raise InvalidArgumentError(f"Invalid memory type string {device}")
            if word.upper() not in MemoryType.__members__:
                raise InvalidArgumentError(
                    f"Unsupported Memory Type String. Can't convert {word.upper()} to Triton server memory type"
                )
            return MemoryType[word.upper()], int(digits or 0)
    raise InvalidArgumentError(f"Invalid memory type {device}")
