"""A tensor as the interface carries it: name, type, shape and raw little-endian bytes (T2, T3, T6).

Pure. Tensors hold views, never copies: `data` may be a memoryview into a received frame. Checks that need a model's
configuration are in `charonia.calls.admission`; this module knows only what is true of any tensor.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from typing import cast

import numpy as np
import numpy.typing as npt

from .datatypes import DataType
from .errors import InvalidArgument

Buffer = bytes | bytearray | memoryview

MAX_ELEMENTS = 2**63 - 1
"""Element counts and byte sizes are int64 on the wire (T6)."""

_LENGTH = struct.Struct("<I")
_IS_LITTLE = sys.byteorder == "little"

_AT_ONCE = 8192
"""Elements that are handled by one call: it keeps the interpreter's lock, which other threads wait for."""

_TURN_S = 0.0005
"""How long a thread that handles many elements may keep the interpreter's lock when another asks for it."""

_USUAL_TURN_S = sys.getswitchinterval()
_taking_turns: set[object] = set()
"""One for each thread that handles many now."""

_SMALL_BYTES = 1 << 20
"""So much is copied to be cut: slices of bytes cost half of those of a view."""

_MANY_ELEMENTS = 64

_LONG_COPY_BYTES = 1 << 20


def copy_into(target: memoryview, buffer: Buffer) -> None:
    """Copy bytes; a large copy lets go of the interpreter's lock."""
    if len(buffer) < _LONG_COPY_BYTES:
        target[:] = buffer.cast("B") if isinstance(buffer, memoryview) else buffer
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(buffer, np.uint8))


def joined(buffers: Sequence[Buffer]) -> memoryview:
    """These bytes in a row, as `bytes.join`, which keeps the interpreter's lock while it copies views of any length."""
    whole = np.empty(sum(map(len, buffers)), np.uint8).data
    at = 0
    for buffer in buffers:
        copy_into(whole[at : at + len(buffer)], buffer)
        at += len(buffer)
    return whole


@dataclass(slots=True)
class Tensor:
    """`data` is the raw encoding of `shape` elements of `datatype`: row-major, little-endian, no padding (T2, T3)."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    data: Buffer

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def array(self) -> npt.NDArray[np.generic]:
        """The tensor as a NumPy array of `shape`: a read-only view of `data`, but for BYTES an array of objects."""
        if self.datatype is DataType.BYTES:
            return object_array(split_bytes_elements(self.data), prod(self.shape)).reshape(self.shape)
        return np.frombuffer(self.data, dtype=self.datatype.numpy).reshape(self.shape)

    @staticmethod
    def of(name: str, array: npt.NDArray[np.generic]) -> Tensor:
        """The tensor of an array (made contiguous if it is not). str and object arrays become BYTES, str as UTF-8."""
        given = array.dtype
        # `newbyteorder` makes a new object, whose hash takes longer than the rest here
        datatype = DataType.of_numpy(given if _IS_LITTLE and given.isnative else given.newbyteorder("<"))
        if datatype is DataType.BYTES:
            return Tensor(name, datatype, tuple(array.shape), join_bytes_elements(array))
        contiguous = np.ascontiguousarray(array)
        if contiguous.dtype != datatype.numpy:
            contiguous = contiguous.astype(datatype.numpy)
        flat = contiguous.reshape(-1)
        if datatype is DataType.BF16:  # ml_dtypes has no buffer protocol
            flat = flat.view(np.uint16)
        return Tensor(name, datatype, tuple(array.shape), flat.data.cast("B") if flat.size else b"")


def element_count(name: str, shape: Sequence[int]) -> int:
    """The product of `shape`. Raises `InvalidArgument` for a negative dimension or an int64 overflow (T6)."""
    count = 1
    for dim in shape:
        if dim < 0:
            raise InvalidArgument(
                f"invalid shape for input '{name}': shape {shape_text(shape)} contains one or more invalid dimensions"
            )
        count *= dim
    # checked after the loop so that a zero dimension is legal whatever stands beside it
    if count > MAX_ELEMENTS:
        raise InvalidArgument(
            f"invalid shape for input '{name}': shape {shape_text(shape)} causes total element count to exceed maximum "
            f"size of {MAX_ELEMENTS}"
        )
    return count


def expected_size_bytes(name: str, datatype: DataType, shape: Sequence[int]) -> int:
    """Bytes of a fixed-size tensor of `shape`. Raises `InvalidArgument` on overflow (T6). Not for BYTES."""
    count = element_count(name, shape)
    size = count * datatype.size_bytes
    if size > MAX_ELEMENTS:
        raise InvalidArgument(
            f"byte size overflow for input '{name}': element count ({count}) * data type size "
            f"({datatype.size_bytes}) exceeds maximum allowed size ({MAX_ELEMENTS})"
        )
    return size


def shape_text(shape: Iterable[int]) -> str:
    """`[-1,16]`, as messages print shapes."""
    return "[" + ",".join(str(dim) for dim in shape) + "]"


@contextmanager
def _short_turns() -> Iterator[None]:
    """Handle more than `_AT_ONCE` elements one by one: other threads wait for half a millisecond at a time."""
    turn = object()
    _taking_turns.add(turn)
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        _taking_turns.discard(turn)
        if not _taking_turns:
            sys.setswitchinterval(_USUAL_TURN_S)


def object_array(elements: Iterable[object], count: int) -> npt.NDArray[np.object_]:
    """The first `count` elements as an array; there must be as many."""
    array = np.empty(count, dtype=np.object_)
    if count <= _AT_ONCE:
        array[:] = list(islice(elements, count))
        return array
    rest = iter(elements)
    with _short_turns():
        for at in range(0, count, _AT_ONCE):
            array[at : at + _AT_ONCE] = list(islice(rest, min(_AT_ONCE, count - at)))
    return array


def join_bytes_elements(elements: Iterable[object]) -> bytes:
    """The raw encoding of BYTES elements (T3). bytes-like as they are, str as UTF-8, anything else as `str(x)`."""
    if isinstance(elements, np.ndarray):
        flat = elements.reshape(-1)
        if flat.size <= _AT_ONCE:
            return _one_run(flat.tolist())
        with _short_turns():
            return _joined([_one_run(flat[at : at + _AT_ONCE].tolist()) for at in range(0, flat.size, _AT_ONCE)])
    parts: list[bytes] = []
    rest = iter(elements)
    while some := list(islice(rest, _AT_ONCE)):
        parts.append(_one_run(some))
    return _joined(parts)


def _one_run(elements: list[object]) -> bytes:
    if set(map(type, elements)) == {str}:
        bodies = list(map(str.encode, cast("list[str]", elements)))
    else:
        bodies = [element if type(element) is bytes else _body(element) for element in elements]
    return b"".join(chain.from_iterable(zip(map(_LENGTH.pack, map(len, bodies)), bodies, strict=True)))


def _joined(parts: list[bytes]) -> bytes:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _body(element: object) -> bytes:
    return bytes(element) if isinstance(element, (bytes, bytearray, memoryview)) else str(element).encode()


def split_bytes_elements(data: Buffer) -> Iterable[bytes]:
    """The elements of a valid raw BYTES encoding. Check hostile data with `check_bytes_elements` first."""
    end = len(data)
    at = 0
    unpack = _LENGTH.unpack_from
    whole = data if isinstance(data, bytes) else None if end > _SMALL_BYTES else bytes(data)
    if whole is None:
        view = memoryview(data)
        while at < end:
            (length,) = unpack(view, at)
            at += 4
            yield bytes(view[at : at + length])
            at += length
        return
    while at < end:
        (length,) = unpack(whole, at)
        at += 4
        yield whole[at : at + length]
        at += length


def _have_one_length(data: Buffer, count: int) -> bool:
    """Whether these bytes are so many elements of one length, which many tensors are: one pass of NumPy tells."""
    stride, rest = divmod(len(data), count)
    if rest or stride < 4:
        return False
    lengths = np.ndarray((count,), "<u4", buffer=data, strides=(stride,))
    return bool((lengths == stride - 4).all())


def check_bytes_elements(data: Buffer, expected: int, *, name: str, model: str) -> None:
    """Raise T3's `InvalidArgument` unless `data` is the raw encoding of exactly `expected` BYTES elements."""
    if expected > _MANY_ELEMENTS and _have_one_length(data, expected):
        return
    where = f"for inference input '{name}' for model '{model}'"
    if len(data) <= _SMALL_BYTES:
        _follow_lengths(data, expected, name, model, where)
        return
    with _short_turns():
        _follow_lengths(data, expected, name, model, where)


def _follow_lengths(data: Buffer, expected: int, name: str, model: str, where: str) -> None:
    view = memoryview(data)
    at, end, count = 0, len(view), 0
    while at < end:
        if end - at < 4:
            raise InvalidArgument(
                f"incomplete string length indicator {where}, expecting 4 bytes but only {end - at} bytes available. "
                "Please make sure the string length indicator is in one buffer."
            )
        if count >= expected:
            # counting on would let a hostile body keep us busy; one more than expected is enough to refuse
            raise InvalidArgument(f"unexpected number of string elements {count + 1} {where}, expecting {expected}")
        (length,) = _LENGTH.unpack_from(view, at)
        at += 4
        if length > end - at:
            raise InvalidArgument(
                f"incomplete string data {where}, expecting string of length {length} but only {end - at} bytes "
                "available. Please make sure the string length is in one buffer."
            )
        at += length
        count += 1
    if count != expected:
        raise InvalidArgument(
            f"expected {expected} string elements for inference input '{name}' for model '{model}', got {count}"
        )
