"""`batch_input` tensors of ragged batches, and outputs that are split by shapes (C20-C22). Pure.

A ragged batch holds requests of different shapes one after the other; the batch inputs tell the model where each
begins. `executors.batches.assembly` flattens the inputs, `executors.batches.answers` packs the answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod

import numpy as np

from charonia.backend import Array
from charonia.datatypes import DataType
from charonia.errors import InternalError
from charonia.models.interface import BatchInput, ModelInterface, TensorSpec
from charonia.tensors import Tensor, join_bytes_elements, shape_text

from .assembly import RequestPlan, Shape


def batch_inputs(interface: ModelInterface, plans: Sequence[RequestPlan]) -> dict[str, Array]:
    """Make the batch inputs for these requests, in order (C20).

    Element counts cover the whole request, batch dimension included: one number per request. Item shapes are shapes of
    one row: one per row.
    """
    made: dict[str, Array] = {}
    for item in interface.batch_inputs:
        array = _made(item, [_shape(plan, item.source) for plan in plans])
        for target in item.targets:
            made[target] = array
    return made


def _made(item: BatchInput, shapes: Sequence[Shape]) -> Array:
    counts = [prod(shape) for shape in shapes]
    dtype = item.datatype.numpy
    match item.kind:
        case "BATCH_ELEMENT_COUNT":
            return np.array(counts, dtype)
        case "BATCH_ACCUMULATED_ELEMENT_COUNT":
            return np.array(list(accumulate(counts)), dtype)
        case "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
            return np.array(list(accumulate(counts, initial=0)), dtype)
        case "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
            return np.zeros(max(counts), dtype)
        case "BATCH_ITEM_SHAPE":
            return np.array([shape[1:] for shape in shapes for _ in range(shape[0])], dtype)
        case "BATCH_ITEM_SHAPE_FLATTEN":
            return np.array([size for shape in shapes for _ in range(shape[0]) for size in shape[1:]], dtype)
    raise InternalError(f"unsupported batch input kind '{item.kind}'")


def scatter(
    interface: ModelInterface, spec: TensorSpec, source: str, plans: Iterable[RequestPlan], array: Array
) -> list[Tensor]:
    """Split a flat output into each request's tensor (C21): as many elements as its shape has, in order.

    A variable size of the output (-1, and the batch dimension) is taken from the `source` input's same dimension.
    Raises `InternalError` when the output's size is not the sum of the shapes.
    """
    shapes = [_scattered_shape(interface, spec, _shape(plan, source)) for plan in plans]
    total = sum(prod(shape) for shape in shapes)
    if array.size != total:
        raise InternalError(
            f"unexpected shape {shape_text(tuple(array.shape))} for inference output '{spec.name}' of model "
            f"'{interface.name}', expecting {total} elements by the shapes of input '{source}'"
        )
    flat = array.ravel()
    pieces: list[Tensor] = []
    start = 0
    for shape in shapes:
        end = start + prod(shape)
        if spec.datatype is DataType.BYTES:
            pieces.append(Tensor(spec.name, spec.datatype, shape, join_bytes_elements(flat[start:end])))
        else:
            pieces.append(Tensor(spec.name, spec.datatype, shape, flat[start:end].tobytes()))
        start = end
    return pieces


def _scattered_shape(interface: ModelInterface, spec: TensorSpec, source: Shape) -> Shape:
    pattern = interface.client_shape(spec)
    if len(source) < len(pattern) and -1 in pattern[len(source) :]:
        raise InternalError(
            f"output '{spec.name}' of model '{interface.name}' varies in a place its source input does not have"
        )
    return tuple(source[index] if size == -1 else size for index, size in enumerate(pattern))


def _shape(plan: RequestPlan, name: str) -> Shape:
    """The shape of an input. The planner has checked that the request has it."""
    return next(place.shape for place in plan.inputs if place.name == name)
