"""The values of an ensemble's planner: tensors, and the payload file they are all of, so that it can be handed on.

A model that batches and one that does not may be steps of one ensemble: their tensors differ by a batch dimension,
which is added or taken off where a tensor passes from one to the other (`charonia.models.ensemble.fitted`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from charonia.models.ensemble import EnsembleGraph, Step, fitted
from charonia.tensors import Tensor
from charonia.wire import Reference, SequenceMark


@dataclass(frozen=True, slots=True)
class Origin:
    """A payload beside the log with exactly the tensors `names`, in this order."""

    reference: Reference
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a request under way. `origin` is set when its bytes lie in a file.

    `rows` is the batch size of the request that it was made for, 0 of a model that does not batch; `mark` the sequence
    that it belongs to, None of a tensor that the ensemble's request brought (`step_sequences`).
    """

    tensor: Tensor
    origin: Origin | None = None
    rows: int = 0
    mark: SequenceMark | None = None


def is_true(value: Value) -> bool:
    """Whether any element of a BOOL tensor is true."""
    return any(value.tensor.data)


def values_of(
    tensors: Sequence[Tensor], reference: Reference | None, rows: int = 0, mark: SequenceMark | None = None
) -> dict[str, Value]:
    """The tensors of one record by name."""
    origin = Origin(reference, tuple(tensor.name for tensor in tensors)) if reference is not None else None
    return {tensor.name: Value(tensor, origin, rows, mark) for tensor in tensors}


def size_of(values: Mapping[str, Value]) -> int:
    """Their bytes together."""
    return sum(len(value.tensor.data) for value in values.values())


def _passed(name: str, value: Value, dims: Mapping[str, tuple[int, ...]], *, batching: bool) -> Tensor:
    tensor = value.tensor
    wanted = dims.get(name)
    shape = tensor.shape if wanted is None else fitted(tensor.shape, value.rows, wanted, batching=batching)
    return Tensor(name, tensor.datatype, shape, tensor.data)


def answer_of(graph: EnsembleGraph, values: Mapping[str, Value]) -> list[Tensor]:
    """The outputs of an ensemble."""
    return [_passed(name, value, graph.dims, batching=graph.batching) for name, value in values.items()]


def rows_of(step: Step, values: Mapping[str, Value]) -> int:
    """The batch size of a step with these inputs, 0 of a model that does not batch."""
    if not step.batching or not values:
        return 0
    name, value = next(iter(values.items()))
    return next(iter(_passed(name, value, step.dims, batching=True).shape), 0)


def renamed(step: Step, values: Mapping[str, Value]) -> tuple[list[Tensor], Reference | None]:
    """The inputs of a step, named as its model names them, and the file that holds just these in this order."""
    chosen = list(values.items())
    origin = chosen[0][1].origin if chosen else None
    if origin is not None and all(value.origin is origin for _, value in chosen):
        places = {name: place for place, name in enumerate(origin.names)}
        chosen.sort(key=lambda item: places[item[1].tensor.name])
        if tuple(value.tensor.name for _, value in chosen) != origin.names:
            origin = None
    else:
        origin = None
    tensors = [_passed(name, value, step.dims, batching=step.batching) for name, value in chosen]
    return tensors, origin.reference if origin is not None else None
