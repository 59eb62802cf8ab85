"""Tensors in model code (P7): named NumPy arrays in host memory, and their element types and encoding (P8).

Types are separate from `charonia.datatypes`, which imports ml_dtypes: a model process imports that only when a model
uses BF16.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import TritonModelException

_DLPACK_CPU = (1, 0)

Array = npt.NDArray[Any]

BYTES = 13
BF16 = 14

_NUMPY_BY_NUMBER: dict[int, Any] = {
    1: np.bool_,
    2: np.uint8,
    3: np.uint16,
    4: np.uint32,
    5: np.uint64,
    6: np.int8,
    7: np.int16,
    8: np.int32,
    9: np.int64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
    BYTES: np.object_,
}
_NUMBER_BY_WORD = {
    "TYPE_BOOL": 1,
    "TYPE_UINT8": 2,
    "TYPE_UINT16": 3,
    "TYPE_UINT32": 4,
    "TYPE_UINT64": 5,
    "TYPE_INT8": 6,
    "TYPE_INT16": 7,
    "TYPE_INT32": 8,
    "TYPE_INT64": 9,
    "TYPE_FP16": 10,
    "TYPE_FP32": 11,
    "TYPE_FP64": 12,
    "TYPE_STRING": BYTES,
    "TYPE_BF16": BF16,
}
TRITON_STRING_TO_NUMPY = {
    word: bool if word == "TYPE_BOOL" else _NUMPY_BY_NUMBER[number]
    for word, number in _NUMBER_BY_WORD.items()
    if number != BF16
}
"""NumPy's types by the words of configurations; BF16 has none."""

_NUMBER_BY_DTYPE = {np.dtype(kind): number for number, kind in _NUMPY_BY_NUMBER.items()}
_DTYPES = {number: np.dtype(kind) for number, kind in _NUMPY_BY_NUMBER.items()}
_LENGTH = struct.Struct("<I")
_SMALL_BYTES = 4096
"""Copying so much costs less than a view of it."""


def triton_to_numpy_type(data_type: int) -> Any:
    """The NumPy type of a type number; None for an unknown number (P8). BF16 needs ml_dtypes."""
    if data_type == BF16:
        import ml_dtypes

        return ml_dtypes.bfloat16
    return _NUMPY_BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The type number of a NumPy type or dtype; None when there is none (P8). bytes and str are BYTES."""
    dtype = np.dtype(data_type)
    number = _NUMBER_BY_DTYPE.get(dtype)
    if number is not None:
        return number
    if dtype.kind in "SU":
        return BYTES
    if dtype.name == "bfloat16":
        return BF16
    return _NUMBER_BY_DTYPE.get(dtype.newbyteorder("<"))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The NumPy type of a configuration's type such as `TYPE_FP32` (P8). Raises `KeyError` for an unknown one."""
    return triton_to_numpy_type(_NUMBER_BY_WORD[triton_type_string])


def number_of(dtype: np.dtype[Any]) -> int:
    """The type number of an array's dtype. Raises `TritonModelException` for a dtype that has none."""
    number = _NUMBER_BY_DTYPE.get(dtype) or numpy_to_triton_type(dtype)
    if number is None:
        raise TritonModelException("NumPy dtype is not supported.")
    return number


def serialize_byte_tensor(input_tensor: Array) -> bytes | None:
    """The raw encoding of an array of bytes or str objects, row-major; None for an array of numbers (P8)."""
    if input_tensor.dtype.kind not in "OSU":
        return b"" if input_tensor.size == 0 else None
    parts = []
    for element in input_tensor.ravel().tolist():
        if isinstance(element, (bytes, bytearray, memoryview)):
            body = bytes(element)
        else:
            body = str(element).encode()
        parts.append(_LENGTH.pack(len(body)))
        parts.append(body)
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: Any) -> Array:
    """The elements of a raw BYTES encoding as a one-dimensional object array (P8). Takes bytes or a uint8 array."""
    view = memoryview(encoded_tensor).cast("B") if len(encoded_tensor) else memoryview(b"")
    elements: list[bytes] = []
    at, end = 0, len(view)
    while at < end:
        (length,) = _LENGTH.unpack_from(view, at)
        at += _LENGTH.size
        if length > end - at:
            raise ValueError(f"element {len(elements)} has {length} bytes, only {end - at} are left")
        elements.append(bytes(view[at : at + length]))
        at += length
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


class Tensor:
    """A tensor of any shape. BYTES tensors are object arrays of bytes; arrays of str are accepted too (P7)."""

    __slots__ = ("_array", "_encoded", "_name", "_number", "_shape")

    def __init__(self, name: str, numpy_array: Array) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a tensor's name must be of type str, found type '{type(name)}'.")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor '{name}' needs a numpy.ndarray, found type '{type(numpy_array)}'.")
        self._name = name
        self._number = number_of(numpy_array.dtype)
        self._shape: tuple[int, ...] = numpy_array.shape
        self._array: Array | None = numpy_array
        self._encoded: memoryview | None = None

    @classmethod
    def received(cls, name: str, number: int, shape: tuple[int, ...], data: memoryview) -> Tensor:
        """Make a tensor from raw bytes. The array is made when it is first read."""
        tensor = cls.__new__(cls)
        tensor._name, tensor._number, tensor._shape = name, number, shape
        tensor._array, tensor._encoded = None, data
        return tensor

    @classmethod
    def rows(cls, name: str, number: int, shape: tuple[int, ...], arrays: Iterable[Array]) -> list[Tensor]:
        """Make tensors with this name, type and shape, one for each array."""
        tensors = []
        for array in arrays:
            tensor = cls.__new__(cls)
            tensor._name, tensor._number, tensor._shape = name, number, shape
            tensor._array, tensor._encoded = array, None
            tensors.append(tensor)
        return tensors

    @property
    def form(self) -> tuple[str, int, tuple[int, ...]]:
        """Name, type and shape. Internal."""
        return self._name, self._number, self._shape

    @staticmethod
    def plain_arrays(tensors: Sequence[Tensor]) -> list[Array] | None:
        """The arrays of tensors of one form, if all are plain NumPy arrays of numbers; else None."""
        arrays = [tensor._array for tensor in tensors]
        if tensors[0]._number == BYTES or {*map(type, arrays)} != {np.ndarray}:
            return None
        return arrays  # type: ignore[return-value]

    def name(self) -> str:
        return self._name

    def shape(self) -> list[int]:
        return list(self._shape)

    def triton_dtype(self) -> int:
        """The number of the element type, as in a model configuration."""
        return self._number

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> Array:
        """Return the array, writable and not copied."""
        if self._array is None:
            encoded = self._encoded if self._encoded is not None else memoryview(b"")
            if self._number == BYTES:
                self._array = deserialize_bytes_tensor(encoded).reshape(self._shape)
            else:
                dtype = _DTYPES.get(self._number) or np.dtype(triton_to_numpy_type(self._number))
                self._array = np.frombuffer(encoded, dtype).reshape(self._shape)
            self._encoded = None
        return self._array

    def encoded(self) -> memoryview | bytes:
        """Return the raw encoding. An array in another layout or byte order is converted first."""
        if self._array is None:
            return self._encoded if self._encoded is not None else b""
        array = self._array
        if self._number == BYTES:
            return serialize_byte_tensor(array) or b""
        if array.size == 0:
            return b""
        if type(array) is np.ndarray and array.nbytes <= _SMALL_BYTES and array.dtype in _NUMBER_BY_DTYPE:
            return array.tobytes()
        plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return plain.reshape(-1).view(np.uint8).data

    # -- DLPack --------------------------------------------------------------------------------------------------------

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule over the same memory. Raises `TritonModelException` for BYTES."""
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if self._number == BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        from executors.backends.python.api import dlpack  # only now: most models never need it

        return dlpack.export(self.as_numpy(), stream=stream, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Make a tensor from a DLPack capsule, or an object with `__dlpack__`, sharing its memory."""
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        from executors.backends.python.api import dlpack

        return Tensor(name, dlpack.array_of(name, tensor))
