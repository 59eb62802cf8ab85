"""Checks requests against their model's interface, and joins their tensors into batch arrays. Pure.

`Planner` checks a request once per signature, so a batch costs little more than slice assignments. A request that does
not fit the interface fails alone (I1-I3). `executors.batches.execution` runs the arrays, `executors.batches.answers`
splits the results.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, cast

import numpy as np

from charonia.backend import Array
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from charonia.models.interface import ModelInterface, translate
from charonia.tensors import (
    Buffer,
    Tensor,
    check_bytes_elements,
    expected_size_bytes,
    joined,
    object_array,
    shape_text,
    split_bytes_elements,
)
from charonia.wire import RequestMeta, RequestRecord, TensorPlace, Wave

from .encoded_strings import EncodedStrings, row_bounds
from .string_counts import StringCounts

_PLAN_LIMIT = 4096
"""Signatures that a planner caches. The cache is cleared when it is full, so hostile variety costs only time."""

_ANSWER_BY_NAME = frozenset({"onnxruntime", "pytorch"})
"""Backends whose outputs come in the order of their names, as Triton's of the same names write them. All others write
them in the order of the configuration, and python models in their own; none in that of the request."""

_KEEP_BYTES = 64 * 1024 * 1024
"""Larger buffers are freed after their batch, so that one large batch does not hold memory for ever."""

JOINED_BYTES = 65_536
"""Up to this size, joining the records and copying the result once is cheaper than copying each record."""

_ALIGNMENT = 64
"""Bytes: the alignment that vectorised kernels want for an input's first element."""

Shape = tuple[int, ...]

_ANY_SHAPE = (-1,)
"""The shape of a ragged input in a group key. No request has it."""


@dataclass(frozen=True, slots=True)
class InputPlan:
    """One input of a signature: its offset in the record and the shape that the backend sees.

    `tail` is that shape without the batch dimension, or the whole shape for a model without batching. A `ragged` input
    (C22) is joined flat.
    """

    name: str
    datatype: DataType
    dtype: np.dtype[Any]
    offset: int
    size_bytes: int
    shape: Shape
    tail: Shape
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A checked signature. Requests with equal `group` may share a batch (S5). `outputs` are the ones to send, in the
    model's order, whatever the order of the request is (I6).
    """

    rows: int
    inputs: tuple[InputPlan, ...]
    outputs: tuple[str, ...]
    group: tuple[tuple[str, DataType, Shape], ...]


_MANY_STRINGS_BYTES = 262_144
"""So many bytes of short strings are followed in 10 ms."""


class Planner:
    """Checks requests against one model interface, once per signature."""

    def __init__(self, interface: ModelInterface) -> None:
        self.interface = interface
        self._plans: dict[bytes, RequestPlan | CharoniaError] = {}
        self._shared: dict[tuple[tuple[TensorPlace, ...], tuple[str, ...]], RequestPlan | CharoniaError] = {}
        """The same by what is checked. Tenants share a plan, so that their requests are joined as those of one are."""
        self.answers: dict[Hashable, tuple[bytes, list[tuple[int, int]]]] = {}
        """By form of the columns that a model gave: the meta of their reply, and of which ones its columns are, with
        the size for each request in bytes."""
        by_name = interface.backend in _ANSWER_BY_NAME
        self._all_outputs = tuple(sorted(interface.outputs) if by_name else interface.outputs)
        sources = [item.source for item in interface.batch_inputs]
        self._shape_sources = frozenset([*sources, *interface.scattered_outputs.values()])
        self.needs_requests = bool(sources or interface.scattered_outputs or interface.has_ragged_input)
        """Whether requests cannot be joined as columns, because the shapes of each one matter."""
        self.strings = StringCounts(interface)

    def remember(self, form: Hashable, answer: tuple[bytes, list[tuple[int, int]]]) -> None:
        """Keep how answers of a form are packed (`answers`)."""
        if len(self.answers) >= _PLAN_LIMIT:
            self.answers.clear()
        self.answers[form] = answer

    def plan(self, record: RequestRecord | Wave) -> RequestPlan:
        """Return the plan of a request, or of each request of a wave.

        Raises `InvalidArgument` when it does not fit the interface (I2, I3).
        """
        meta = record.meta
        found = self._plans.get(meta.packed)
        if found is None:
            if len(self._plans) >= _PLAN_LIMIT:
                self._plans.clear()
                self._shared.clear()
            found = self._shared.get((meta.inputs, meta.outputs))
            if found is None:
                try:
                    found = self._check(meta)
                except CharoniaError as error:
                    found = error
                self._shared[meta.inputs, meta.outputs] = found
            self._plans[meta.packed] = found
        if isinstance(found, CharoniaError):
            # a new exception each time: one that is raised again collects tracebacks
            raise CharoniaError.of(found.code, found.message)
        if record.rows != found.rows:
            raise InvalidArgument(
                f"inference request of {record.rows} rows carries {found.rows} for '{self.interface.name}'"
            )
        return found

    def _check(self, meta: RequestMeta) -> RequestPlan:
        interface = self.interface
        name = interface.name
        rows = 1
        if interface.batching:
            rows = self._rows(meta)
        plans: dict[str, InputPlan] = {}
        for place in meta.inputs:
            if place.name in plans:
                raise InvalidArgument(f"input '{place.name}' already exists in request")
            plans[place.name] = self._check_input(place)
        missing = sorted(interface.required_inputs - plans.keys())
        if missing:
            raise InvalidArgument(_missing_text(interface, sorted(plans), missing))
        for output in meta.outputs:
            if output not in interface.outputs:
                raise InvalidArgument(f"unexpected inference output '{output}' for model '{name}'")
        for needed in self._shape_sources:
            if needed not in plans:
                raise InvalidArgument(
                    f"input '{needed}' is needed to make the batch inputs or cut the batch outputs of model '{name}'"
                )
        inputs = tuple(plans[input_name] for input_name in sorted(plans))
        group = tuple((p.name, p.datatype, _ANY_SHAPE if p.ragged else p.tail) for p in inputs)
        wanted = tuple([output for output in self._all_outputs if output in meta.outputs])
        return RequestPlan(rows, inputs, wanted or self._all_outputs, group)

    def _rows(self, meta: RequestMeta) -> int:
        name, limit = self.interface.name, self.interface.max_batch_size
        rows = 1
        for index, place in enumerate(meta.inputs):
            if not place.shape:
                raise InvalidArgument(
                    f"input '{place.name}' has no shape but model requires batch dimension for '{name}'"
                )
            if index == 0:
                rows = place.shape[0]
            elif place.shape[0] != rows:
                raise InvalidArgument(f"input '{place.name}' batch size does not match other inputs for '{name}'")
        if not 1 <= rows <= limit:
            raise InvalidArgument(f"inference request batch-size must be <= {limit} for '{name}'")
        return rows

    def _check_input(self, place: TensorPlace) -> InputPlan:
        interface = self.interface
        spec = interface.inputs.get(place.name)
        if spec is None:
            raise InvalidArgument(f"unexpected inference input '{place.name}' for model '{interface.name}'")
        if place.datatype is not spec.datatype:
            raise InvalidArgument(
                f"inference input '{place.name}' data-type is '{place.datatype.value}', but model '{interface.name}' "
                f"expects '{spec.datatype.value}'"
            )
        head = place.shape[:1] if interface.batching else ()
        dims = place.shape[len(head) :]
        if not fits(dims, spec.dims):
            raise InvalidArgument(
                f"unexpected shape for input '{place.name}' for model '{interface.name}'. Expected "
                f"{shape_text(interface.client_shape(spec))}, got {shape_text(place.shape)}. "
            )
        if place.datatype is not DataType.BYTES:
            expected = expected_size_bytes(place.name, place.datatype, place.shape)
            if expected != place.size_bytes:
                raise InvalidArgument(
                    f"input byte size mismatch for input '{place.name}' for model '{interface.name}'. Expected "
                    f"{expected}, got {place.size_bytes}"
                )
        tail = dims if spec.reshape is None else translate(dims, spec.dims, spec.reshape)
        return InputPlan(
            place.name,
            place.datatype,
            place.datatype.numpy,
            place.offset,
            place.size_bytes,
            (*head, *tail),
            tail,
            spec.allow_ragged_batch,
        )


def groups(
    interface: ModelInterface, planned: Sequence[tuple[int, RequestPlan]]
) -> Iterator[list[tuple[int, RequestPlan]]]:
    """Split (index, plan) pairs into runs that fit one execution, in order.

    A batcher sends only batches that fit together, but after a reload, or in a forged entry, requests may not.
    """
    run: list[tuple[int, RequestPlan]] = []
    rows = 0
    limit = interface.max_batch_size
    first: RequestPlan | None = None
    for pair in planned:
        plan = pair[1]
        if first is None:
            first = plan
        elif limit == 0 or rows + plan.rows > limit or (plan is not first and plan.group != first.group):
            yield run
            run, rows, first = [], 0, plan
        run.append(pair)
        rows += plan.rows
    if run:
        yield run


class Workspace:
    """Input buffers of one instance, reused for each batch.

    This is safe, even when a backend returns an input as its output, because answers are packed (copied) before the
    instance takes its next batch.
    """

    def __init__(self, allocate: Callable[[int], Array | None] | None = None) -> None:
        """`allocate` gives memory that the instance wants its inputs in, or none for so many bytes."""
        self._buffers: dict[str, Array] = {}
        self._allocate = allocate

    def flat(self, name: str, size_bytes: int) -> Array:
        """Return `size_bytes` aligned, uninitialised bytes."""
        held = self._buffers.get(name)
        if held is None or held.size < size_bytes:
            wanted = max(size_bytes, 4096)
            held = self._allocate(wanted) if self._allocate is not None else None
            if held is None:
                held = _aligned(wanted)
            if size_bytes <= _KEEP_BYTES:
                self._buffers[name] = held
        return held[:size_bytes]


def have_one_plan(run: Sequence[tuple[RequestPlan, RequestRecord]]) -> bool:
    """Whether all requests of a run have one signature, the usual case."""
    first = run[0][0]
    return not any(True for plan, _ in run if plan is not first)


def rows_of(run: Sequence[tuple[RequestPlan, RequestRecord]]) -> int:
    """The number of rows of one execution."""
    return run[0][0].rows * len(run) if have_one_plan(run) else sum([plan.rows for plan, _ in run])


def join(
    interface: ModelInterface,
    run: Sequence[tuple[RequestPlan, RequestRecord]],
    workspace: Workspace,
    *,
    encoded: bool = False,
) -> dict[str, Array]:
    """Return the batch arrays of requests of one group: [rows, ...], or the exact shape without batching; ragged: flat.

    A single request's arrays are views of its record where they are aligned. Raises `InvalidArgument` when a BYTES
    tensor is malformed; then call it for each request alone. With `encoded`, BYTES are `EncodedStrings`, not checked.
    """
    first = run[0][0]
    arrays: dict[str, Array] = {}
    bounds = row_bounds([plan.rows for plan, _ in run]) if encoded else ()
    if len(run) == 1:
        data = run[0][1].data
        for place in first.inputs:
            raw = data[place.offset : place.offset + place.size_bytes]
            if encoded and place.datatype is DataType.BYTES:
                arrays[place.name] = cast("Array", EncodedStrings(place.shape, raw))
                continue
            array = _single(interface, place, raw)
            arrays[place.name] = array.reshape(-1) if place.ragged else array
        return arrays
    rows = rows_of(run)
    for index, place in enumerate(first.inputs):
        shape: Shape = (-1,) if place.ragged else (rows, *place.tail)
        if place.datatype is DataType.BYTES and encoded:
            parts = [
                record.data[own.offset : own.offset + own.size_bytes]
                for own, record in ((plan.inputs[index], record) for plan, record in run)
            ]
            ends = row_bounds([len(part) for part in parts])
            arrays[place.name] = cast("Array", EncodedStrings(shape, joined(parts), bounds, ends))
            continue
        if place.datatype is DataType.BYTES:
            elements = []
            for plan, record in run:
                own = plan.inputs[index]
                elements.append(_elements(interface, own, record.data[own.offset : own.offset + own.size_bytes]))
            count = sum(prod(plan.inputs[index].shape) for plan, _ in run)
            arrays[place.name] = object_array(chain.from_iterable(elements), count).reshape(shape)
            continue
        if place.ragged:
            total_bytes = sum(plan.inputs[index].size_bytes for plan, _ in run)
        else:
            total_bytes = rows * (place.size_bytes // first.rows)
        flat = workspace.flat(place.name, total_bytes)
        target = flat.data
        if len(first.inputs) == 1 and total_bytes <= JOINED_BYTES:
            target[:] = b"".join([record.data for _, record in run])
            arrays[place.name] = flat.view(place.dtype).reshape(shape)
            continue
        at = 0
        for plan, record in run:
            own = plan.inputs[index]
            size, data = own.size_bytes, record.data
            end = at + size
            target[at:end] = data if size == len(data) else data[own.offset : own.offset + size]
            at = end
        arrays[place.name] = flat.view(place.dtype).reshape(shape)
    return arrays


def wanted_outputs(interface: ModelInterface, run: Sequence[tuple[RequestPlan, RequestRecord]]) -> tuple[str, ...]:
    """The outputs that some request of a batch wants, in the model's order (I6)."""
    first = run[0][0].outputs
    if have_one_plan(run) or all(plan.outputs == first for plan, _ in run):
        return first
    union = {name for plan, _ in run for name in plan.outputs}
    return tuple(name for name in interface.outputs if name in union)


def are_many_strings(records: Iterable[RequestRecord]) -> bool:
    """Whether to follow the strings of these requests, whose model takes some, away from the event loop."""
    return sum([record.meta.size_bytes for record in records]) > _MANY_STRINGS_BYTES


def request_inputs(interface: ModelInterface, plan: RequestPlan, record: RequestRecord) -> list[Tensor]:
    """Return the inputs of one request as a backend sees them: views of the record, with `reshape` applied (I7).

    Raises `InvalidArgument` for a malformed BYTES tensor.
    """
    tensors = []
    for place in plan.inputs:
        raw = record.data[place.offset : place.offset + place.size_bytes]
        if place.datatype is DataType.BYTES:
            check_bytes_elements(raw, prod(place.shape), name=place.name, model=interface.name)
        tensors.append(Tensor(place.name, place.datatype, place.shape, raw))
    return tensors


def fits(dims: Shape, pattern: Shape) -> bool:
    """Whether a shape matches a configuration's dims, where -1 allows any size."""
    if len(dims) != len(pattern):
        return False
    return all(want in (-1, got) for got, want in zip(dims, pattern, strict=True))


def _single(interface: ModelInterface, place: InputPlan, raw: Buffer) -> Array:
    if place.datatype is DataType.BYTES:
        return object_array(_elements(interface, place, raw), prod(place.shape)).reshape(place.shape)
    return array_of(raw, place.dtype, place.shape)


def array_of(raw: Buffer, dtype: np.dtype[Any], shape: Shape) -> Array:
    """A view of raw bytes if they are aligned, else a copy."""
    array: Array = np.frombuffer(raw, dtype=dtype)
    if not array.flags.aligned:
        array = array.copy()
    return array.reshape(shape)


def _elements(interface: ModelInterface, place: InputPlan, raw: Buffer) -> Iterable[bytes]:
    check_bytes_elements(raw, prod(place.shape), name=place.name, model=interface.name)
    return split_bytes_elements(raw)


def _aligned(size_bytes: int) -> Array:
    raw = np.empty(size_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size_bytes]


def _missing_text(interface: ModelInterface, got: list[str], missing: list[str]) -> str:
    """Triton's error text for missing inputs (I4)."""
    total, required = len(interface.inputs), len(interface.required_inputs)
    quoted = ",".join(f"'{name}'" for name in got)
    lacking = ",".join(f"'{name}'" for name in missing)
    tail = (
        f"got {len(got)} inputs for model '{interface.name}'. Got input(s) [{quoted}], but missing required input(s) "
        f"[{lacking}]. Please provide all required input(s)."
    )
    if required == total:
        return f"expected {total} inputs but {tail}"
    return f"expected number of inputs between {required} and {total} but {tail}"


def parts_of(run: Sequence[tuple[int, RequestPlan]], waves: Sequence[Wave], position: int) -> list[Buffer]:
    """The bytes of an input of all waves, in order; one part for each wave with its tensors in the record.

    Plans have inputs sorted by name, waves in the order in which they were sent.
    """
    parts: list[Buffer] = []
    for (_, plan), wave in zip(run, waves, strict=True):
        name = plan.inputs[position].name
        for number, place in enumerate(wave.meta.inputs):
            if place.name == name:
                if wave.references:
                    parts += wave.parts(number)
                else:
                    parts.append(wave.columns[number])
                break
        else:
            raise InternalError(f"a wave without input '{name}'")
    return parts
