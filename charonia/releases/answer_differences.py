"""How the answers of two versions to one request differ: which outputs, in what, and by how much. Pure.

`answer_comparison` says only which outputs differ, for the copies of a shadow. Here a tolerance has two parts, and a
request may have several responses, or an error in their place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from charonia.datatypes import DataType
from charonia.errors import CharoniaError, ErrorCode
from charonia.tensors import Tensor, shape_text, split_bytes_elements

from .answer_comparison import FLOATS, PIECE, numbers_of

MISSING = "missing"
EXTRA = "extra"
DATATYPE = "datatype"
SHAPE = "shape"
VALUES = "values"
ERROR = "error"
RESPONSES = "responses"
"""Kinds of differences. The last two are of a whole answer, the others of one output of it."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A recorded number a and another one b are alike when |a - b| <= absolute + relative * |a|."""

    absolute: float = 0.0
    relative: float = 0.0


EXACT = Tolerance()

_ALL_400 = frozenset({ErrorCode.UNKNOWN, ErrorCode.ALREADY_EXISTS, ErrorCode.CANCELLED})
"""HTTP answers these with the status of `INVALID_ARG`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One response: its outputs, or the error in their place."""

    outputs: Sequence[Tensor] = ()
    error: CharoniaError | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output of one response, or with `output` "" the whole answer.

    `kind` is "" where both are alike; then the figures say how far they differ within the tolerance. `worst_absolute`
    is the largest |a - b|, infinite where one of two is NaN or an infinity; `worst_relative` the largest of
    |a - b| / |a| over numbers a that are not 0. `differing` of `elements` elements are beyond the tolerance.
    """

    output: str
    kind: str = ""
    detail: str = ""
    elements: int = 0
    differing: int = 0
    worst_absolute: float = 0.0
    worst_relative: float = 0.0


def compared(
    recorded: Sequence[Answer], given: Sequence[Answer], tolerances: Mapping[str, Tolerance]
) -> list[Comparison]:
    """Compare the responses to one request in their order, those that both have.

    `tolerances` are by output, that of "" for outputs that are not named. Errors are alike when HTTP has one status for
    them, of whatever text: texts name versions and ids.
    """
    found: list[Comparison] = []
    for position, (one, other) in enumerate(zip(recorded, given, strict=False)):
        where = f"response {position}: " if len(recorded) > 1 else ""
        if one.error is None and other.error is None:
            found += _outputs(one.outputs, other.outputs, tolerances, where)
        elif one.error is None or other.error is None or _sort(one.error) is not _sort(other.error):
            found.append(Comparison("", ERROR, f"{where}recorded was {_ending(one)}, now it is {_ending(other)}"))
    if len(recorded) != len(given):
        found.append(Comparison("", RESPONSES, f"recorded were {len(recorded)} responses, now there are {len(given)}"))
    return found


def _sort(error: CharoniaError) -> ErrorCode:
    return ErrorCode.INVALID_ARG if error.code in _ALL_400 else error.code


def _ending(answer: Answer) -> str:
    return "an answer" if answer.error is None else f"{answer.error.code.name}: {answer.error.message}"


def _outputs(
    recorded: Sequence[Tensor], given: Sequence[Tensor], tolerances: Mapping[str, Tolerance], where: str
) -> list[Comparison]:
    others = {tensor.name: tensor for tensor in given}
    default = tolerances.get("", EXACT)
    found = []
    for tensor in recorded:
        other = others.pop(tensor.name, None)
        if other is None:
            found.append(Comparison(tensor.name, MISSING, f"{where}the output is missing"))
        else:
            found.append(_compared(tensor, other, tolerances.get(tensor.name, default), where))
    found += [Comparison(name, EXTRA, f"{where}the output was not recorded") for name in others]
    return found


def _compared(a: Tensor, b: Tensor, tolerance: Tolerance, where: str) -> Comparison:
    if a.datatype is not b.datatype:
        return Comparison(a.name, DATATYPE, f"{where}{a.datatype.value} recorded, {b.datatype.value} now")
    if a.shape != b.shape:
        return Comparison(a.name, SHAPE, f"{where}{shape_text(a.shape)} recorded, {shape_text(b.shape)} now")
    elements = math.prod(a.shape)
    if a.data == b.data:
        return Comparison(a.name, elements=elements)
    if a.datatype is DataType.BYTES:
        pairs = zip(split_bytes_elements(a.data), split_bytes_elements(b.data), strict=False)
        figures = _Figures(sum(one != other for one, other in pairs))
    else:
        figures = _figures(a, b, tolerance)
    if not figures.differing:
        return Comparison(a.name, "", "", elements, 0, figures.absolute, figures.relative)
    detail = f"{where}{figures.differing} of {elements} elements differ"
    if figures.absolute:
        detail += f", by up to {figures.absolute:.6g} (relative {figures.relative:.3g})"
    return Comparison(a.name, VALUES, detail, elements, figures.differing, figures.absolute, figures.relative)


@dataclass(frozen=True, slots=True)
class _Figures:
    differing: int
    absolute: float = 0.0
    relative: float = 0.0


def _figures(a: Tensor, b: Tensor, tolerance: Tolerance) -> _Figures:
    """Of two tensors of numbers or BOOL with one shape."""
    all_a, all_b = numbers_of(a), numbers_of(b)
    if a.datatype is DataType.BOOL:
        return _Figures(int(np.count_nonzero(all_a != all_b)))
    # large integers that differ may be one float64
    is_exact = a.datatype not in FLOATS and not (tolerance.absolute or tolerance.relative)
    differing, absolute, relative = 0, 0.0, 0.0
    for at in range(0, all_a.size, PIECE):
        part_a, part_b = all_a[at : at + PIECE], all_b[at : at + PIECE]
        apart, bounds, worst = _piece(part_a.astype(np.float64), part_b.astype(np.float64), tolerance)
        differing += int(np.count_nonzero(part_a != part_b if is_exact else apart > bounds))
        absolute, relative = max(absolute, float(apart.max(initial=0.0))), max(relative, worst)
    return _Figures(differing, absolute, relative)


def _piece(
    a: npt.NDArray[Any], b: npt.NDArray[Any], tolerance: Tolerance
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], float]:
    """How far numbers are apart, how far they may be, and the largest relative difference."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        apart = np.abs(a - b)
        alike = (a == b) | (np.isnan(a) & np.isnan(b))
        comparable = np.isfinite(a) & np.isfinite(b)
        apart = np.where(alike, 0.0, np.where(comparable, apart, np.inf))
        bounds = tolerance.absolute + tolerance.relative * np.where(comparable, np.abs(a), 0.0)
        relative = np.where((a != 0) & (apart > 0), apart / np.abs(a), 0.0)
    # where a is NaN or an infinity the quotient says nothing, the absolute difference is infinite
    return apart, bounds, float(np.nan_to_num(relative, nan=0.0, posinf=np.inf).max(initial=0.0))
