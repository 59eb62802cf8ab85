"""Runs arrays on an instance that takes batches of certain sizes only: rows are added, and cut off again. Pure.

For graphs and plans that were made for fixed sizes, and for libraries that refuse small batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from charonia.backend import Array, BatchInstance, Outcome, Timings, timings_of
from charonia.errors import CharoniaError


def execute_sized(
    instance: BatchInstance, sizes: Collection[int], arrays: Mapping[str, Array], outputs: Sequence[str]
) -> Mapping[str, Array] | Outcome:
    """Execute in as many calls as `sizes` asks for, and return what one call would.

    Added rows repeat the last one, so that they hold values which the model takes.
    """
    counts = {len(array) for array in arrays.values()}
    if len(counts) != 1:
        return instance.execute(arrays, outputs)  # inputs that are not rows, as those of ragged batches
    (rows,) = counts
    most = max(sizes)
    parts = [
        _execute_part(instance, min(size for size in sizes if size >= min(most, rows - start)), arrays, outputs, start)
        for start in range(0, rows, most)
    ]
    if len(parts) == 1:
        return parts[0]
    timings = [part.timings for part in parts if part.timings is not None]
    return Outcome(
        {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays},
        _sum(timings) if len(timings) == len(parts) else None,
        {
            start + row: error
            for start, part in zip(range(0, rows, most), parts, strict=True)
            for row, error in part.failures.items()
        },
    )


def _execute_part(
    instance: BatchInstance, size: int, arrays: Mapping[str, Array], outputs: Sequence[str], start: int
) -> Outcome:
    """Execute the `size` rows from `start`, of which some may not be there."""
    cut = {name: array[start : start + size] for name, array in arrays.items()}
    rows = len(next(iter(cut.values())))
    if rows < size:
        cut = {name: np.concatenate([array, np.repeat(array[-1:], size - rows, 0)]) for name, array in cut.items()}
    found = instance.execute(cut, outputs)
    outcome = found if isinstance(found, Outcome) else Outcome(found)
    kept = {name: array[:rows] if len(array) == size else array for name, array in outcome.arrays.items()}
    failures: dict[int, CharoniaError] = {row: error for row, error in outcome.failures.items() if row < rows}
    return Outcome(kept, timings_of(outcome), failures)


def _sum(timings: Sequence[Timings]) -> Timings:
    return Timings(
        sum(one.input_ns for one in timings),
        sum(one.infer_ns for one in timings),
        sum(one.output_ns for one in timings),
    )
