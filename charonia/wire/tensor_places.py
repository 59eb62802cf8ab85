"""What request and response records share: where tensors lie in a record, and how much of metas is remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from charonia.datatypes import DataType
from charonia.errors import InvalidRecord
from charonia.inference import Parameters

WIRE_VERSION = 1

META_CACHE_LIMIT = 4096
"""Distinct tensor signatures a process remembers; past it the cache is emptied: hostile variety costs only time."""

MAX_CACHED_META_BYTES = 4096
"""Longer metas (large parameters) are decoded each time, so that the caches cannot be filled with megabytes."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor of a record lies: `offset` counts from the start of the record's tensor bytes."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


def places_of(tensors: Any) -> tuple[TensorPlace, ...]:
    places = []
    offset = 0
    for name, number, shape, size in tensors:
        if not (
            type(name) is str
            and type(shape) is tuple
            and all(type(dim) is int and dim >= 0 for dim in shape)
            and type(size) is int
            and size >= 0
        ):
            raise InvalidRecord("a tensor's description has a field of another type")
        places.append(TensorPlace(name, DataType.of_number(number), shape, offset, size))
        offset += size
    return tuple(places)


def total_size_bytes(places: tuple[TensorPlace, ...]) -> int:
    return places[-1].offset + places[-1].size_bytes if places else 0


def parameters_of(parameters: Any) -> Parameters:
    if parameters is None:
        return {}
    if type(parameters) is not dict or not all(
        type(key) is str and type(value) in (str, int, bool, float) for key, value in parameters.items()
    ):
        raise InvalidRecord("parameters have a key or value of another type")
    return parameters
