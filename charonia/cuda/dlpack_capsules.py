"""Reads and makes DLPack capsules, of arrays on the host and on devices.

Layout: `dlpack.h` of the DLPack project, the structures of ABI version 0 (capsules named "dltensor"), which producers
of later versions still give. Imports no library of arrays but NumPy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from charonia.datatypes import DataType

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""Kinds of devices (DLDeviceType)."""

_NAME = b"dltensor"
_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_CODES: dict[DataType, tuple[int, int]] = {
    DataType.BOOL: (_BOOL, 8),
    DataType.BF16: (_BFLOAT, 16),
    **{DataType[f"INT{bits}"]: (_INT, bits) for bits in (8, 16, 32, 64)},
    **{DataType[f"UINT{bits}"]: (_UINT, bits) for bits in (8, 16, 32, 64)},
    **{DataType[f"FP{bits}"]: (_FLOAT, bits) for bits in (16, 32, 64)},
}
_DATATYPES = {code: datatype for datatype, code in _CODES.items()}


class DLTensor(ctypes.Structure):
    """What a capsule describes. Strides are in elements; none means C order."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """A DLManagedTensor."""

    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class Described:
    """An array of another library. It lives as long as `capsule`, which is not consumed: its end releases the array."""

    capsule: Any
    device: tuple[int, int]
    """The kind and the number."""
    address: int
    datatype: DataType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""

    @property
    def span_bytes(self) -> int:
        """From the first byte to the last one of its elements; more than its size where elements have gaps."""
        if 0 in self.shape:
            return 0
        steps = sum((count - 1) * stride for count, stride in zip(self.shape, self.strides, strict=True))
        return steps + self.datatype.size_bytes

    def over(self, at: int, owner: object) -> npt.NDArray[Any]:
        """The array in memory of this process that begins `at` an address, as NumPy's. It keeps `owner`."""
        if 0 in self.shape:
            return np.empty(self.shape, self.datatype.numpy)
        is_brain = self.datatype is DataType.BF16  # NumPy has no such type: its bytes pass as another
        kind = np.dtype(np.uint16) if is_brain else self.datatype.numpy
        array: npt.NDArray[Any] = np.asarray(_Block(at, kind.str, self.shape, self.strides, owner))
        return array.view(self.datatype.numpy) if is_brain else array


class _Block:
    """Memory as NumPy takes it: what is made of it keeps this object."""

    def __init__(self, at: int, kind: str, shape: tuple[int, ...], strides: tuple[int, ...], owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (at, False),
            "typestr": kind,
            "shape": shape,
            "strides": strides,
            "version": 3,
        }


def head_of(capsule: Any) -> DLTensor:
    """What a capsule describes. Raises `ValueError` for another object, and for a capsule that was consumed."""
    return DLTensor.from_address(_pointer_of(capsule, _NAME))


def described(array: Any, stream: int | None = None) -> Described:
    """Ask an object with `__dlpack__` for its array; `stream` of a GPU then waits until the array is there.

    Raises `ValueError` for a type that has no tensor datatype and for strides below 0, and whatever the object raises.
    """
    capsule = array.__dlpack__() if stream is None else array.__dlpack__(stream=stream)
    head = head_of(capsule)
    datatype = _DATATYPES.get((head.type_code, head.bits)) if head.lanes == 1 else None
    if datatype is None:
        raise ValueError(
            f"DLPack type {head.type_code} of {head.bits} bits and {head.lanes} lanes is no tensor datatype"
        )
    shape = tuple(head.shape[: head.ndim])
    steps = tuple(head.strides[: head.ndim]) if head.strides else _c_order(shape)
    if min(steps, default=0) < 0:
        raise ValueError("strides below 0 are not supported")
    strides = tuple(step * datatype.size_bytes for step in steps)
    device = (head.device_type, head.device_id)
    return Described(capsule, device, (head.data or 0) + head.byte_offset, datatype, shape, strides)


def capsule_of(owner: object, device: tuple[int, int], address: int, datatype: DataType, shape: Sequence[int]) -> Any:
    """A capsule over memory in C order, which `owner` keeps until the consumer releases it."""
    managed = _Managed()
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.device_id, tensor.ndim = address, *device, len(shape)
    (tensor.type_code, tensor.bits), tensor.lanes = _CODES[datatype], 1
    dims, steps = ((ctypes.c_int64 * len(shape))(*numbers) for numbers in (shape, _c_order(shape)))
    tensor.shape = ctypes.cast(dims, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(_release, ctypes.c_void_p).value
    at = ctypes.addressof(managed)
    _exported[at] = (managed, dims, steps, owner)
    return _new_capsule(at, _NAME, _destructor)


def _c_order(shape: Sequence[int]) -> tuple[int, ...]:
    steps, step = [], 1
    for count in reversed(shape):
        steps.append(step)
        step *= count
    return tuple(reversed(steps))


_exported: dict[int, tuple[object, ...]] = {}
"""By the address of its structure: what a capsule, or its consumer, still uses."""

_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
# a capsule that is being destroyed must not get another reference: it goes by its address
_dying_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_dying = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def _drop(at: int) -> None:
    """The deleter: the consumer, in any thread of any library, no longer uses the array."""
    _exported.pop(at, None)


def _forget(capsule: int) -> None:
    """The end of a capsule: one that no consumer took releases its array."""
    if _is_dying(capsule, _NAME):
        _exported.pop(_dying_pointer_of(capsule, _NAME), None)


_release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_drop)
_destructor = _Destructor(_forget)
