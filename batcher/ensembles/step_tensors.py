"""The values of an ensemble's planner: tensors, each with the payload file it came in, so that a file can be reused.

Pure. Models with and without batching may be steps of one ensemble: their tensors differ by a batch dimension, which is
added or removed between them (`charonia.models.ensemble.fitted`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from charonia.models.ensemble import EnsembleGraph, Step, fitted, matches
from charonia.models.interface import translate
from charonia.tensors import Tensor
from charonia.wire import Reference, SequenceMark


@dataclass(frozen=True, slots=True)
class Origin:
    """A payload out of band with exactly the tensors `names`, in this order."""

    reference: Reference
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a running request. `origin` is set when its bytes lie in a file. `rows` is the batch size of the
    request it was made for, 0 for a model that does not batch. `mark` is the sequence it belongs to, None for a tensor
    of the ensemble's own request (`step_sequences`).
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
    """Their total bytes."""
    return sum(len(value.tensor.data) for value in values.values())


def _passed(name: str, value: Value, dims: Mapping[str, tuple[int, ...]], *, batching: bool) -> Tensor:
    tensor = value.tensor
    wanted = dims.get(name)
    shape = tensor.shape if wanted is None else fitted(tensor.shape, value.rows, wanted, batching=batching)
    return Tensor(name, tensor.datatype, shape, tensor.data)


def inputs_of(graph: EnsembleGraph, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inputs of an ensemble's request as its steps get them: with the `reshape` of its configuration."""
    return [_reshaped(graph, tensor, of_answer=False) for tensor in tensors] if graph.reshaped else tensors


def answer_of(graph: EnsembleGraph, values: Mapping[str, Value]) -> list[Tensor]:
    """The outputs of an ensemble as its callers get them."""
    made = [_passed(name, value, graph.dims, batching=graph.batching) for name, value in values.items()]
    return [_reshaped(graph, tensor, of_answer=True) for tensor in made] if graph.reshaped else made


def _reshaped(graph: EnsembleGraph, tensor: Tensor, *, of_answer: bool) -> Tensor:
    """A tensor with its `reshape`, or in an answer without it. One of another shape, which no model checks, stays."""
    spec = graph.reshaped.get(tensor.name)
    if spec is None:
        return tensor
    source, target = (spec.backend_dims, spec.dims) if of_answer else (spec.dims, spec.backend_dims)
    head, tail = (tensor.shape[:1], tensor.shape[1:]) if graph.batching else ((), tensor.shape)
    if not matches(tail, source):
        return tensor
    return Tensor(tensor.name, tensor.datatype, (*head, *translate(tail, source, target)), tensor.data)


def rows_of(step: Step, values: Mapping[str, Value]) -> int:
    """The batch size of a step with these inputs, 0 if its model does not batch."""
    if not step.batching or not values:
        return 0
    name, value = next(iter(values.items()))
    return next(iter(_passed(name, value, step.dims, batching=True).shape), 0)


def renamed(step: Step, values: Mapping[str, Value]) -> tuple[list[Tensor], Reference | None]:
    """The inputs of a step, by its model's names, and the file that holds exactly these in this order."""
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
