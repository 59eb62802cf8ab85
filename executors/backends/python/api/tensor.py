"""`pb_utils.Tensor`: a named NumPy array in model code (P7). Host memory only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .dtypes import BYTES, Array, deserialize_bytes_tensor, number_of, serialize_byte_tensor, triton_to_numpy_type
from .errors import TritonModelException

_DLPACK_CPU = (1, 0)


class Tensor:
    """A tensor of any shape. BYTES tensors are object arrays of bytes; arrays of str are accepted too (P7)."""

    __slots__ = ("_array", "_encoded", "_name", "_number", "_shape")

    def __init__(self, name: str, numpy_array: Array) -> None:
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
                dtype = np.dtype(triton_to_numpy_type(self._number))
                self._array = np.frombuffer(encoded, dtype=dtype).reshape(self._shape)
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
        plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return plain.reshape(-1).view(np.uint8).data

    # -- DLPack --------------------------------------------------------------------------------------------------------

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule over the same memory. Raises `TritonModelException` for BYTES."""
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if self._number == BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        from . import dlpack  # only now: most models never need it

        return dlpack.export(self.as_numpy(), stream=stream, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Make a tensor from a DLPack capsule, or an object with `__dlpack__`, sharing its memory."""
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        from . import dlpack

        return Tensor(name, dlpack.array_of(name, tensor))
