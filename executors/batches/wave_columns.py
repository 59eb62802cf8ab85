"""Joins waves to the columns that a `ColumnInstance` runs. The counterpart of `executors.batches.assembly`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol, TypeGuard, runtime_checkable

from charonia.backend import ColumnInput, ColumnInstance, ColumnOutput, ModelResponse, RequestColumns
from charonia.datatypes import DataType
from charonia.inference import RECEIPT
from charonia.tensors import check_bytes_elements
from charonia.wire import RequestRecord, Wave

from .assembly import InputPlan, RequestPlan, parts_of

Run = Sequence[tuple[int, RequestPlan]]
"""Waves that run together: the index of each in its batch, and the plan of its requests."""


class ColumnCall(Protocol):
    """Columns that were sent to a model process."""

    def columns(self) -> list[ColumnOutput] | None:
        """The outputs, if the reply has come and has them as columns, which ends the call; else see `answers`."""

    def look(self) -> None:
        """Wait for the reply for a moment, in the event loop."""

    async def answers(self) -> list[ColumnOutput] | Sequence[ModelResponse]:
        """Wait for the reply, and return or raise what `ColumnInstance.execute_columns` does."""


@runtime_checkable
class PromptInstance(ColumnInstance, Protocol):
    """A `ColumnInstance` whose calls need no task, which costs turns of the event loop."""

    def begin_columns(self, columns: RequestColumns, replied: Callable[[], None] | None = None) -> ColumnCall:
        """Send columns to be executed. `replied` is called in the event loop, once: there is a reply, or none will
        come. Raises `InstanceDied`.
        """


_HAS_COLUMNS: dict[type, bool] = {}
_IS_PROMPT: dict[type, bool] = {}
"""By class: checking a protocol with `isinstance` costs more than the rest of a small run."""


def has_columns(instance: object) -> TypeGuard[ColumnInstance]:
    known = _HAS_COLUMNS.get(type(instance))
    if known is None:
        known = _HAS_COLUMNS[type(instance)] = isinstance(instance, ColumnInstance)
    return known


def is_prompt(instance: object) -> TypeGuard[PromptInstance]:
    known = _IS_PROMPT.get(type(instance))
    if known is None:
        known = _IS_PROMPT[type(instance)] = isinstance(instance, PromptInstance)
    return known


def may_be_columns(waves: Sequence[Wave]) -> bool:
    """Whether these waves may run as one set of columns: the model sees one shape, one set of parameters and one
    time-out for all."""
    first = waves[0]
    for wave in waves[1:]:
        if wave.rows != first.rows or wave.timeout_us != first.timeout_us:
            return False
        if wave.meta.parameters != first.meta.parameters:
            return False
    return True


def columns_of(run: Run, waves: Sequence[Wave], model: str) -> RequestColumns:
    """Join waves for a model. Raises `InvalidArgument` for malformed BYTES."""
    plan, first = run[0][1], waves[0]
    if len(waves) == 1 and not (first.client_ids or first.references or first.sizes or first.meta.parameters):
        inputs = _plain(plan, first)
        if inputs:
            return RequestColumns(
                *(first.count, inputs, plan.outputs, {}, None, first.timeout_us, _Origins(waves)),
                (first.meta.packed, first.count, first.timeout_us),
            )
    inputs = [_column_of(position, place, run, waves, model) for position, place in enumerate(plan.inputs)]
    client_ids: list[str] = []
    if len(waves) == 1:
        client_ids += first.client_ids
    elif any(wave.client_ids for wave in waves):
        for wave in waves:
            client_ids += wave.client_ids or [""] * wave.count
    parameters = first.meta.parameters
    if parameters and RECEIPT in parameters:  # models that know all their parameters refuse this one
        parameters = {name: value for name, value in parameters.items() if name != RECEIPT}
    return RequestColumns(
        *(sum([wave.count for wave in waves]), inputs, plan.outputs, parameters, client_ids or None),
        *(first.timeout_us, _Origins(waves)),
    )


def _plain(plan: RequestPlan, wave: Wave) -> list[ColumnInput]:
    """The inputs of a wave whose tensors lie in its record; none when one of them is of BYTES."""
    places = wave.meta.inputs
    inputs = []
    for planned in plan.inputs:
        if planned.datatype is DataType.BYTES:
            return []
        number = 0
        while places[number].name != planned.name:
            number += 1
        inputs.append(ColumnInput(planned.name, planned.datatype, planned.shape, wave.columns[number]))
    return inputs


def _column_of(position: int, place: InputPlan, run: Run, waves: Sequence[Wave], model: str) -> ColumnInput:
    """Join one input of all requests. Raises `InvalidArgument` for malformed BYTES."""
    columns = parts_of(run, waves, position)
    sizes: list[int] | None = None
    if place.datatype is DataType.BYTES:
        sizes = []
        for column, wave in zip(columns, waves, strict=True):
            expected = prod(place.shape) * wave.count
            check_bytes_elements(column, expected, name=place.name, model=model)
            sizes += _sizes(wave, place.name)
    data = columns[0] if len(columns) == 1 else b"".join(columns)
    return ColumnInput(place.name, place.datatype, place.shape, data, sizes)


def _sizes(wave: Wave, name: str) -> Sequence[int]:
    """The size of an input in each request of a wave, in bytes."""
    for number, place in enumerate(wave.meta.inputs):
        if place.name == name:
            return wave.sizes[number] if wave.sizes else [place.size_bytes] * wave.count
    return []


class _Origins(Sequence[object]):
    """The records of the waves' requests, made when one is first needed: few models call others."""

    def __init__(self, waves: Sequence[Wave]) -> None:
        self._waves = waves
        self._records: list[RequestRecord] | None = None

    def __len__(self) -> int:
        return sum(wave.count for wave in self._waves)

    def __getitem__(self, index: Any) -> Any:
        if self._records is None:
            self._records = [record for wave in self._waves for record in wave.requests()]
        return self._records[index]
