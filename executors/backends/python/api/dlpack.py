"""Converts DLPack capsules to NumPy arrays and back (P7), BF16 included. Host memory only.

NumPy does the work. It has no BF16, so such tensors pass it as uint16, of the same size: the type field in the
capsule's structure is exchanged. Layout: dlpack.h of the DLPack project, ABI version 0.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import TritonModelException

CPU = (1, 0)
_UNSIGNED = (1, 16)
_BFLOAT = (4, 16)
Array = npt.NDArray[Any]

_NAME = b"dltensor"
_DTYPE_OFFSET = 20
"""The offset of type code and bits (a byte each) in a DLTensor: after data pointer, device (2 x i32) and ndim (i32)."""


def export(array: Array, **options: Any) -> Any:
    """Return a capsule over an array's memory. Read-only memory, and layouts other than C order, are copied first."""
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = np.array(array, order="C")
    if array.dtype.name != "bfloat16":
        return array.__dlpack__(**options)
    capsule = array.view(np.uint16).__dlpack__()
    _set_type(capsule, _BFLOAT)
    return capsule


def array_of(name: str, tensor: Any) -> Array:
    """Return an array over the memory of a capsule, or of an object with `__dlpack__`; device memory is copied.

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
    """Wraps a capsule for `numpy.from_dlpack`, which checks the capsule's device."""

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
    """Type code and bits; None for another kind of capsule, or a used one: NumPy raises the error for these."""
    try:
        at = _pointer_of(capsule, _NAME)
    except ValueError:
        return None
    code, bits = (ctypes.c_uint8 * 2).from_address(at + _DTYPE_OFFSET)
    return code, bits


def _set_type(capsule: Any, to: tuple[int, int]) -> None:
    (ctypes.c_uint8 * 2).from_address(_pointer_of(capsule, _NAME) + _DTYPE_OFFSET)[:] = list(to)
