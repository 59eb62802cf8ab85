"""The report of a traced request, which returns with its answer: times, tensors, and reports of its calls. Pure.

Times are wall clock (CLOCK_REALTIME) in ns, taken by different processes, perhaps on different machines: they are
comparable as far as the clocks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from charonia.datatypes import DataType
from charonia.errors import InvalidRecord
from charonia.tensors import Buffer, Tensor

REQUEST_START, REQUEST_END = "REQUEST_START", "REQUEST_END"
QUEUE_START = "QUEUE_START"
COMPUTE_START, COMPUTE_INPUT_END = "COMPUTE_START", "COMPUTE_INPUT_END"
COMPUTE_OUTPUT_START, COMPUTE_END = "COMPUTE_OUTPUT_START", "COMPUTE_END"
RESPONSE_COMPLETE = "INFER_RESPONSE_COMPLETE"
COMPUTE = (COMPUTE_START, COMPUTE_INPUT_END, COMPUTE_OUTPUT_START, COMPUTE_END)

QUEUE_INPUT = "TENSOR_QUEUE_INPUT"
BACKEND_INPUT, BACKEND_OUTPUT = "TENSOR_BACKEND_INPUT", "TENSOR_BACKEND_OUTPUT"

MOST_TENSOR_BYTES = 256 * 1024
"""Max bytes kept of one tensor: reports travel with answers, and are written as text."""
_MOST_DEPTH = 64

Stamp = tuple[str, int]
"""A name of N4, and wall clock ns."""


@dataclass(frozen=True, slots=True)
class ReportedTensor:
    """One tensor at one point (N3); `data` is cut at `MOST_TENSOR_BYTES`, `size_bytes` is the full size."""

    activity: str
    name: str
    datatype: DataType
    shape: tuple[int, ...]
    data: bytes
    size_bytes: int

    @staticmethod
    def of(activity: str, tensor: Tensor) -> ReportedTensor:
        size = len(tensor.data)
        return ReportedTensor(
            activity,
            tensor.name,
            tensor.datatype,
            tuple(tensor.shape),
            bytes(memoryview(tensor.data)[:MOST_TENSOR_BYTES]),
            size,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one request. `error` is "" if it succeeded; `about` are further attributes for spans.

    `children` are the requests made for it: steps of an ensemble, calls of a model.
    """

    span_id: bytes
    model: str
    version: int
    request_id: str
    stamps: tuple[Stamp, ...]
    error: str = ""
    about: tuple[tuple[str, str | int], ...] = ()
    tensors: tuple[ReportedTensor, ...] = ()
    children: tuple[Report, ...] = ()

    def pack(self) -> bytes:
        return bytes(msgpack.packb(_plain(self)))

    @staticmethod
    def unpack(data: Buffer) -> Report:
        """Decode a report. Raises `InvalidRecord`."""
        try:
            return _report(msgpack.unpackb(data, use_list=False), _MOST_DEPTH)
        except InvalidRecord:
            raise
        except Exception as error:
            raise InvalidRecord(f"the trace report of a response cannot be read: {error}") from None


def tensors_of(activity: str, tensors: Sequence[Tensor]) -> tuple[ReportedTensor, ...]:
    return tuple(ReportedTensor.of(activity, tensor) for tensor in tensors)


def _plain(report: Report) -> list[Any]:
    return [
        report.span_id,
        report.model,
        report.version,
        report.request_id,
        report.stamps,
        report.error,
        report.about,
        [[t.activity, t.name, t.datatype.number, t.shape, t.data, t.size_bytes] for t in report.tensors],
        [_plain(child) for child in report.children],
    ]


def _report(plain: Any, depth: int) -> Report:
    span_id, model, version, request_id, stamps, error, about, tensors, children, *_ = plain
    valid = (
        type(span_id) is bytes
        and len(span_id) == 8
        and type(model) is type(request_id) is type(error) is str
        and type(version) is int
        and all(type(name) is str and type(ns) is int for name, ns in stamps)
        and all(type(name) is str and type(value) in (str, int) for name, value in about)
        and depth > 0
    )
    if not valid:
        raise InvalidRecord("the trace report of a response has a field of another type")
    found = tuple(
        ReportedTensor(activity, name, DataType.of_number(number), shape, data, size)
        for activity, name, number, shape, data, size in tensors
    )
    return Report(
        span_id,
        model,
        version,
        request_id,
        stamps,
        error,
        about,
        found,
        tuple(_report(child, depth - 1) for child in children),
    )
