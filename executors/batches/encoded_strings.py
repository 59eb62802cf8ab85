"""Strings of a batch in their raw encoding: they stand for an array of objects where no code reads them one by one.

A million objects keep the interpreter's lock for a tenth of a second, to be made and to be freed; the bytes that they
come in keep nothing. `executors.batches.assembly` makes them of requests, `executors.isolation` has them run in a
process of the model's own, and `executors.batches.answers` cuts what comes back. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from charonia.backend import Array, BatchInstance, Outcome
from charonia.tensors import Buffer, join_bytes_elements, joined

MANY_STRINGS = 16_384
"""A batch with more of them runs apart: onnxruntime keeps the interpreter's lock for 1 to 2 ms for so many."""
MANY_BYTES = 1 << 20
"""Or with longer ones: so much takes as long to copy as so many."""

_OBJECTS = np.dtype(np.object_)


@dataclass(frozen=True, slots=True)
class EncodedStrings:
    """BYTES elements of `shape` in `data`, their raw encoding (T3).

    `rows` are the rows at which the requests of the batch begin, and the end of the last one; `ends` the bytes of
    `data` there. Both are empty where the whole belongs to one request.
    """

    shape: tuple[int, ...]
    data: Buffer
    rows: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def dtype(self) -> np.dtype[np.object_]:
        """That of the array for which it stands."""
        return _OBJECTS

    def between(self, start: int, end: int) -> Buffer:
        """The encoding of the rows of one request, or of several in a row. Raises ValueError for other rows."""
        if not self.rows:
            return self.data
        return self.data[self.ends[self.rows.index(start)] : self.ends[self.rows.index(end)]]

    def only(self, requests: Sequence[tuple[int, int]]) -> EncodedStrings:
        """Those of some requests of the batch, each given by its first row and the row after its last."""
        parts = [self.between(start, end) for start, end in requests]
        counts = [end - start for start, end in requests]
        rows, ends = row_bounds(counts), row_bounds([len(part) for part in parts])
        return EncodedStrings((sum(counts), *self.shape[1:]), joined(parts), rows, ends)


class EncodedInstance(BatchInstance, Protocol):
    """An instance in another process that takes and gives `EncodedStrings`."""

    takes_encoded_strings: bool

    def execute_encoded(
        self, inputs: Mapping[str, Array], outputs: Sequence[str], rows: Sequence[int]
    ) -> Mapping[str, Array] | Outcome:
        """As `execute`; strings among inputs and results are `EncodedStrings`, those of results cut at `rows`."""


def takes_encoded(instance: BatchInstance) -> TypeGuard[EncodedInstance]:
    """Whether `execute_encoded` of this instance may be called."""
    return getattr(instance, "takes_encoded_strings", False)


def row_bounds(rows: Sequence[int]) -> tuple[int, ...]:
    """The rows at which requests of so many rows each begin, and the end of the last one; () for a single request."""
    if len(rows) == 1:
        return ()
    bounds = [0]
    for count in rows:
        bounds.append(bounds[-1] + count)
    return tuple(bounds)


def encoded(array: npt.NDArray[np.object_], rows: Sequence[int]) -> EncodedStrings:
    """Encode an array of strings for requests that begin and end at these rows.

    An array with other rows than the batch is encoded whole: its reader says what is wrong with it.
    """
    shape = tuple(array.shape)
    if not rows or not shape or rows[-1] != shape[0]:
        return EncodedStrings(shape, join_bytes_elements(array))
    parts = [join_bytes_elements(part) for part in _parts(array, rows)]
    return EncodedStrings(shape, joined(parts), tuple(rows), row_bounds([len(part) for part in parts]))


def _parts(array: npt.NDArray[np.object_], rows: Sequence[int]) -> Iterator[npt.NDArray[np.object_]]:
    for start, end in pairwise(rows):
        yield array[start:end]
