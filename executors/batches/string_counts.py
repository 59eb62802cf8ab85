"""Expects how many strings a batch and its answers have: whether it runs away from the executor (docs/adr/0063). Pure.

Those of inputs are in the requests. Those of outputs are known beforehand only where the dims are fixed; of others the
answers before say how many come for so many bytes of inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Protocol

from charonia.backend import Array
from charonia.datatypes import DataType
from charonia.models.interface import ModelInterface

from .encoded_strings import MANY_BYTES, MANY_STRINGS, EncodedStrings

_ONE_STRING_BYTES = MANY_BYTES // MANY_STRINGS
"""So many bytes of strings take as long to copy as one string more."""

_SAMPLES = 64
"""Strings of an answer whose lengths are read."""


class Place(Protocol):
    """An input of a request, as `InputPlan` and `TensorPlace` describe it."""

    @property
    def datatype(self) -> DataType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def size_bytes(self) -> int: ...


Alike = tuple[Sequence[Place], Sequence[str], int, int]
"""Requests of one form: the inputs of each, the outputs it wants (none named: all), its rows, how many there are."""


class StringCounts:
    """The strings of one version's batches. Threads of all its instances use it."""

    def __init__(self, interface: ModelInterface) -> None:
        self.taken = any(spec.datatype is DataType.BYTES for spec in interface.inputs.values())
        """Whether requests have strings."""
        given = [spec for spec in interface.outputs.values() if spec.datatype is DataType.BYTES]
        self._fixed = {spec.name: prod(spec.dims) for spec in given if all(dim >= 0 for dim in spec.dims)}
        """Strings of an output, in each row."""
        self._varying = frozenset([spec.name for spec in given if spec.name not in self._fixed])
        self.learns = bool(self._varying)
        """Whether `learn` has an effect."""
        self.occur = self.taken or bool(given)
        """Whether requests or answers have strings."""
        self._batching = interface.batching
        # the executor itself reads the elements: inputs joined flat, outputs that are cut by shapes
        self._stay = bool(interface.has_ragged_input or interface.batch_inputs or interface.scattered_outputs)
        self._per_byte = 0.0
        """Strings that outputs of varying dims are expected to have for each byte of inputs."""

    def are_many(self, requests: Iterable[Alike]) -> bool:
        """Whether no object of the executor's process should stand for each string of these requests and answers."""
        if self._stay or not self.occur:
            return False
        taken = taken_bytes = 0
        given = 0.0
        for places, outputs, rows, count in requests:
            for place in places:
                given += self._per_byte * place.size_bytes * count
                if place.datatype is DataType.BYTES:
                    taken += prod(place.shape) * count
                    taken_bytes += place.size_bytes * count
            for name, strings in self._fixed.items():
                if not outputs or name in outputs:
                    given += strings * count * (rows if self._batching else 1)
        return taken > MANY_STRINGS or taken_bytes > MANY_BYTES or given > MANY_STRINGS

    def learn(self, taken_bytes: int, results: Mapping[str, Array]) -> None:
        """Note the strings of an answer to inputs of so many bytes. After an answer with many, several with few have to
        come until few are expected.
        """
        given = sum([_weight(results[name]) for name in self._varying if name in results])
        self._per_byte = max(given / max(taken_bytes, 1), self._per_byte / 2)


def _weight(array: Array | EncodedStrings) -> float:
    """How many strings, where long ones count as several."""
    count = prod(array.shape)
    if isinstance(array, EncodedStrings):
        return count + len(array.data) / _ONE_STRING_BYTES
    if not count or array.dtype.kind != "O":
        return count
    lengths = [len(one) if isinstance(one, str | bytes) else 0 for one in array.flat[:: -(-count // _SAMPLES)]]
    return count * (1 + sum(lengths) / len(lengths) / _ONE_STRING_BYTES)
