"""DLPack capsules to and from NumPy arrays (P7), BF16 included, which NumPy has no word for. Host memory only.

NumPy does the work; a BF16 tensor passes it under the name of uint16, whose elements have the same size: the one field
of the capsule's structure that says so is exchanged. Layout: dlpack.h of the DLPack project, ABI version 0.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .dtypes import Array
from .errors import TritonModelException

CPU = (1, 0)
_UNSIGNED = (1, 16)
_BFLOAT = (4, 16)
_NAME = b"dltensor"
_DTYPE_OFFSET = 20
"""Of code and bits (a byte each) in a DLTensor: after the data pointer, the device (2 x i32) and ndim (i32)."""


def export(array: Array, **options: Any) -> Any:
    """A capsule over an array's memory; another layout than C order, or read-only memory, is copied first."""
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = np.array(array, order="C")
    if array.dtype.name != "bfloat16":
        return array.__dlpack__(**options)
    capsule = array.view(np.uint16).__dlpack__()
    _set_type(capsule, _BFLOAT)
    return capsule


def taken(name: str, tensor: Any) -> Array:
    """The array of a capsule, or of an object with `__dlpack__`, over the same memory; from a device it is copied.

    Raises `TritonModelException`.
    """
    capsule = tensor if type(tensor).__name__ == "PyCapsule" else _capsule_of(tensor)
    bfloat = _type(capsule) == _BFLOAT
    if bfloat:
        _set_type(capsule, _UNSIGNED)
    try:
        array = np.from_dlpack(_OnHost(capsule))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TritonModelException(
            f"DLPack tensor '{name}' cannot be taken: {error}. Only tensors in host memory are supported."
        ) from error
    if not array.flags.c_contiguous:
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    if bfloat:
        import ml_dtypes

        array = array.view(ml_dtypes.bfloat16)
    return array


def _capsule_of(tensor: Any) -> Any:
    if not hasattr(tensor, "__dlpack__"):
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule or have a `__dlpack__` attribute"
        )
    if hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] != CPU[0] and hasattr(tensor, "cpu"):
        tensor = tensor.cpu()
    try:
        return tensor.__dlpack__()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TritonModelException(f"the tensor gives no DLPack capsule: {error}") from error


class _OnHost:
    """What `numpy.from_dlpack` wants around a bare capsule. The capsule tells its device as well; NumPy checks it."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _type(capsule: Any) -> tuple[int, int] | None:
    """Code and bits; `None` for a capsule of another kind, or one that was used before: NumPy says so."""
    try:
        at = _pointer_of(capsule, _NAME)
    except ValueError:
        return None
    code, bits = (ctypes.c_uint8 * 2).from_address(at + _DTYPE_OFFSET)
    return code, bits


def _set_type(capsule: Any, to: tuple[int, int]) -> None:
    (ctypes.c_uint8 * 2).from_address(_pointer_of(capsule, _NAME) + _DTYPE_OFFSET)[:] = list(to)
