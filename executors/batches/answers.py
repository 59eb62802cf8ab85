"""Splits batch results into each request's response record, and checks what a model returned. Pure.

The counterpart of `executors.batches.assembly`. Every result of a batch is checked against the model's interface before
any of it is sent (I5): with a wrong number of rows, callers would get the rows of others. What a model answers to each
request by itself is sent with the type and the shape that the model gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from msgspec import Struct

from charonia.backend import Array
from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument, parameter_fault
from charonia.eventlog.payloads import BY_REFERENCE_BYTES
from charonia.models.interface import ModelInterface, TensorSpec, translate
from charonia.tensors import Buffer, Tensor, join_bytes_elements, shape_text
from charonia.wire import RequestRecord, pack_response, response_template

from .assembly import RequestPlan, Shape, fits, have_one_plan, rows_of
from .encoded_strings import EncodedStrings
from .ragged import scatter

SMALL_BYTES = 65_536
"""Results up to this size are copied once: slices of bytes cost less than slices of a view."""


_LONG_COPY_BYTES = 1 << 20
"""Copying so much takes a quarter of a millisecond, and the loop has better to do."""

Put = Callable[[RequestRecord, bytes, Sequence[Buffer]], bytes | None]
"""Stores an answer's large tensors out of band, in one copy: (request, answer record without tensors, tensors).

Returns the record to send, or None when the tensors must be in the record."""


def pack_answers(
    interface: ModelInterface,
    version: int,
    run: Sequence[tuple[RequestPlan, RequestRecord]],
    results: Mapping[str, Array],
    put: Put | None = None,
) -> list[bytes]:
    """Return the response record of each request of one execution, in order, with client shapes (I7).

    Only requested outputs are included (I6). Large outputs of requests with one plan go through `put`. Raises
    `InternalError` for a missing result, another type than configured, or a batch dimension other than the number of
    executed rows.
    """
    rows, one_plan = rows_of(run), have_one_plan(run)
    if interface.scattered_outputs:
        return _pack_scattered(interface, version, run, results, rows)
    first = run[0][0]
    parts: dict[str, OutputPart] = {}
    for plan, _ in run[:1] if one_plan else run:
        if plan.outputs is not first.outputs or not parts:
            for name in plan.outputs:
                if name not in parts:
                    parts[name] = OutputPart.of(interface, name, results, rows)
    if one_plan and len(first.outputs) == 1:
        part = parts[first.outputs[0]]
        size = first.rows * part.row_bytes
        if part.elements is None and size:  # the usual case: one signature, one output
            template = response_template(interface.name, version, (part.described(first.rows),))
            head, meta, raw = template.head, template.meta, part.raw
            places = range(0, len(raw), size)
            if put is not None and size >= BY_REFERENCE_BYTES:
                return [
                    _put(put, record, b"".join((head, record.id, meta)), raw[at : at + size])
                    for at, (_, record) in zip(places, run, strict=True)
                ]
            return [
                b"".join((head, record.id, meta, raw[at : at + size]))
                for at, (_, record) in zip(places, run, strict=True)
            ]
    answers: list[bytes] = []
    start = 0
    last: RequestPlan | None = None
    chosen: list[OutputPart] = []
    head = meta = b""
    fixed = True
    for plan, record in run:
        if plan is not last:  # requests of one signature share their plan: make all but their bytes once
            last = plan
            chosen = [parts[name] for name in plan.outputs]
            fixed = all(part.elements is None for part in chosen)
            if fixed:
                described = tuple([part.described(plan.rows) for part in chosen])
                template = response_template(interface.name, version, described)
                head, meta = template.head, template.meta
        end = start + plan.rows
        if not fixed:
            tensors = [part.tensor(start, end) for part in chosen]
            answers.append(_packed(put, record, interface.name, version, tensors))
        elif len(chosen) == 1:
            part = chosen[0]
            size = part.row_bytes
            answers.append(b"".join((head, record.id, meta, part.raw[start * size : end * size])))
        else:
            pieces = [part.raw[start * part.row_bytes : end * part.row_bytes] for part in chosen]
            answers.append(b"".join((head, record.id, meta, *pieces)))
        start = end
    return answers


def _packed(put: Put | None, record: RequestRecord, model: str, version: int, tensors: Sequence[Tensor]) -> bytes:
    """An answer; what is large of it is stored here, in the instance's thread, and not by who settles it."""
    if put is not None and sum(len(tensor.data) for tensor in tensors) >= _LONG_COPY_BYTES:
        described = tuple([(t.name, t.datatype, t.shape, len(t.data)) for t in tensors])
        template = response_template(model, version, described)
        answer = put(record, b"".join((template.head, record.id, template.meta)), [t.data for t in tensors])
        if answer is not None:
            return answer
    return pack_response(record.id, model, version, tensors, {})


def _put(put: Put, record: RequestRecord, answer: bytes, data: Buffer) -> bytes:
    return put(record, answer, (data,)) or b"".join((answer, data))


def _pack_scattered(
    interface: ModelInterface,
    version: int,
    run: Sequence[tuple[RequestPlan, RequestRecord]],
    results: Mapping[str, Array],
    rows: int,
) -> list[bytes]:
    """`pack_answers` for a model with outputs that are split by the shapes of an input (C21)."""
    plans = [plan for plan, _ in run]
    parts: dict[str, OutputPart] = {}
    scattered: dict[str, list[Tensor]] = {}
    for name in dict.fromkeys(name for plan in plans for name in plan.outputs):
        source = interface.scattered_outputs.get(name)
        if source is None:
            parts[name] = OutputPart.of(interface, name, results, rows)
        else:
            spec = interface.outputs[name]
            array = _result(interface, name, results)
            _check_datatype(interface, spec, _datatype(array))
            scattered[name] = scatter(interface, spec, source, plans, array)
    answers: list[bytes] = []
    start = 0
    for index, (plan, record) in enumerate(run):
        end = start + plan.rows
        tensors = [
            scattered[name][index] if name in scattered else parts[name].tensor(start, end) for name in plan.outputs
        ]
        answers.append(pack_response(record.id, interface.name, version, tensors, {}))
        start = end
    return answers


class OutputPart(Struct):
    """One output of a batch, ready to be sliced by rows. `elements` is set for BYTES."""

    name: str
    datatype: DataType
    batching: bool
    tail: Shape
    raw: Buffer
    row_bytes: int
    elements: Array | EncodedStrings | None

    @staticmethod
    def of(interface: ModelInterface, name: str, results: Mapping[str, Array], rows: int) -> OutputPart:
        spec = interface.outputs[name]
        array = _result(interface, name, results)
        datatype = spec.datatype if array.dtype is spec.datatype.numpy else _datatype(array)
        tail = _output_tail(interface, spec, datatype, array.shape, rows)
        if datatype is DataType.BYTES:
            return OutputPart(name, datatype, interface.batching, tail, b"", 0, array)
        raw: Buffer
        if array.nbytes <= SMALL_BYTES and array.dtype is datatype.numpy:
            raw = array.tobytes()
        else:
            raw = Tensor.of(name, array).data
        return OutputPart(name, spec.datatype, interface.batching, tail, raw, len(raw) // rows, None)

    def described(self, rows: int) -> tuple[str, DataType, Shape, int]:
        shape = (rows, *self.tail) if self.batching else self.tail
        return (self.name, self.datatype, shape, rows * self.row_bytes)

    def tensor(self, start: int, end: int) -> Tensor:
        shape = (end - start, *self.tail) if self.batching else self.tail
        if isinstance(self.elements, EncodedStrings):
            data = self.elements.between(start, end) if self.batching else self.elements.data
            return Tensor(self.name, self.datatype, shape, data)
        if self.elements is not None:
            chosen = self.elements[start:end] if self.batching else self.elements
            return Tensor(self.name, self.datatype, shape, join_bytes_elements(chosen))
        return Tensor(self.name, self.datatype, shape, self.raw[start * self.row_bytes : end * self.row_bytes])


def check_parameters(model: str, parameters: Any) -> None:
    """Raise `InternalError` for response parameters that no reader of the answer would take."""
    if not isinstance(parameters, dict):
        raise InternalError(f"model '{model}' gave a {type(parameters).__name__} as response parameters, not a dict")
    for key, value in parameters.items():
        if fault := parameter_fault(key, value):
            raise InternalError(f"response parameter {key!r} of model '{model}' is {fault}")


def request_outputs(interface: ModelInterface, plan: RequestPlan, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the requested ones of a model's outputs for one request, in the order it gave them, with client shapes.

    A requested output that the model did not return is left out, and types and dims are the model's affair, as in
    Triton's python backend (I5). Raises `InternalError` for a size that does not match the shape, and for a shape that
    the configured `reshape` cannot be undone for.
    """
    if len(outputs) == 1 and outputs[0].name in plan.outputs and _is_given(interface, outputs[0]):
        return [outputs[0]]
    returned = {tensor.name: tensor for tensor in outputs}
    chosen = []
    for name, tensor in returned.items():
        if name not in plan.outputs:
            continue
        fixed = tensor.datatype is not DataType.BYTES
        if fixed and len(tensor.data) != prod(tensor.shape) * tensor.datatype.size_bytes:
            raise InternalError(
                f"output '{name}' of model '{interface.name}' holds {len(tensor.data)} bytes, which is not shape "
                f"{shape_text(tensor.shape)} of {tensor.datatype.value}"
            )
        chosen.append(Tensor(name, tensor.datatype, _client_shape(interface, name, tensor.shape), tensor.data))
    return chosen


def _is_given(interface: ModelInterface, tensor: Tensor) -> bool:
    """Whether an output reaches the client as it is, which nearly all texts of streams do."""
    return tensor.datatype is DataType.BYTES and interface.outputs[tensor.name].reshape is None


def _client_shape(interface: ModelInterface, name: str, shape: Shape) -> Shape:
    """The shape of a whole output as clients see it (I7)."""
    spec = interface.outputs[name]
    if spec.reshape is None:
        return shape
    if not interface.batching:
        return _reshaped(interface, spec, shape, shape)
    return (*shape[:1], *_reshaped(interface, spec, shape, shape[1:]))


def _output_tail(interface: ModelInterface, spec: TensorSpec, datatype: DataType, shape: Shape, rows: int) -> Shape:
    """Check a result and return its client shape without the batch dimension. Raises `InternalError`."""
    _check_datatype(interface, spec, datatype)
    tail = shape
    if interface.batching:
        if not shape or shape[0] != rows:
            raise InternalError(
                f"unexpected shape {shape_text(shape)} for inference output '{spec.name}' of model "
                f"'{interface.name}', expecting a batch dimension of {rows}"
            )
        tail = shape[1:]
    return tail if spec.reshape is None else _reshaped(interface, spec, shape, tail)


def _reshaped(interface: ModelInterface, spec: TensorSpec, shape: Shape, tail: Shape) -> Shape:
    """`tail`, of the backend's `shape`, as clients see it. Raises `InternalError`."""
    assert spec.reshape is not None
    if not fits(tail, spec.reshape):
        raise InternalError(
            f"unexpected shape {shape_text(shape)} for inference output '{spec.name}' of model '{interface.name}', "
            f"expecting {shape_text(interface.backend_shape(spec))}"
        )
    return translate(tail, spec.reshape, spec.dims)


def _result(interface: ModelInterface, name: str, results: Mapping[str, Array]) -> Array:
    if not hasattr(results, "get"):
        raise InternalError(f"model '{interface.name}' gave a {type(results).__name__}, not arrays by output name")
    array = results.get(name)
    if array is None:
        raise InternalError(f"model '{interface.name}' did not produce output '{name}'")
    if not hasattr(array, "dtype"):
        raise InternalError(f"model '{interface.name}' gave a {type(array).__name__} as output '{name}', not an array")
    return array


def _check_datatype(interface: ModelInterface, spec: TensorSpec, datatype: DataType) -> None:
    if datatype is not spec.datatype:
        raise InternalError(
            f"unexpected datatype {datatype.config_name} for inference output '{spec.name}' of model "
            f"'{interface.name}', expecting {spec.datatype.config_name}"
        )


def _datatype(array: Array) -> DataType:
    try:
        return DataType.of_numpy(array.dtype)
    except InvalidArgument as error:
        raise InternalError(error.message) from None
