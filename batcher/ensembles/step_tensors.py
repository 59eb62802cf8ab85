"""The values of an ensemble's planner: tensors, and the payload file they are all of, so that it can be handed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from charonia.tensors import Tensor
from charonia.wire import Reference


@dataclass(frozen=True, slots=True)
class Origin:
    """A payload beside the log with exactly the tensors `names`, in this order."""

    reference: Reference
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a request under way. `origin` is set when its bytes lie in a file."""

    tensor: Tensor
    origin: Origin | None = None


def is_true(value: Value) -> bool:
    """Whether any element of a BOOL tensor is true."""
    return any(value.tensor.data)


def values_of(tensors: Sequence[Tensor], reference: Reference | None) -> dict[str, Value]:
    """The tensors of one record by name."""
    origin = Origin(reference, tuple(tensor.name for tensor in tensors)) if reference is not None else None
    return {tensor.name: Value(tensor, origin) for tensor in tensors}


def size_of(values: Mapping[str, Value]) -> int:
    """Their bytes together."""
    return sum(len(value.tensor.data) for value in values.values())


def renamed(values: Mapping[str, Value]) -> tuple[list[Tensor], Reference | None]:
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
    tensors = [Tensor(name, value.tensor.datatype, value.tensor.shape, value.tensor.data) for name, value in chosen]
    return tensors, origin.reference if origin is not None else None
