"""Work that takes time in proportion to a tensor's elements, as tasks of a worker process (`charonia.offload`).

Small tensors are processed in the event loop, by `charonia.calls.admission` and `classification`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from charonia.catalog.served import ServedVersion
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.inference import InferenceRequest, InferenceResponse
from charonia.offload.pool import Offload, Task
from charonia.tensors import Buffer, Tensor, check_bytes_elements

from .classification import classified

_MANY_ELEMENTS = 32_768
"""Reading this many length prefixes takes 5 ms."""

_MANY_BYTES = 16_384
"""Sorting and writing this many one-byte values as classes takes 15 ms."""

_HERE = __name__


async def check_elements(offload: Offload, request: InferenceRequest) -> None:
    """Have the elements of large BYTES inputs counted; admission uses the result (`InferenceRequest.elements`)."""
    for tensor in request.inputs:
        if tensor.datatype is not DataType.BYTES or len(tensor.data) < _MANY_ELEMENTS:
            continue
        if request.elements is not None and tensor.name in request.elements:
            continue
        expected = prod(tensor.shape)
        if not _MANY_ELEMENTS < expected <= len(tensor.data):
            continue  # few, or more than the bytes can hold: the check ends with the bytes
        task = Task(f"{_HERE}:count", [expected, tensor.name, request.model], (tensor.data,))
        if request.elements is None:
            request.elements = {}
        request.elements[tensor.name], _ = await offload.run(task)


def count(note: Any, buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    expected, name, model = note
    return complaint(buffers[0], expected, name, model), ()


def complaint(data: Buffer, expected: int, name: str, model: str) -> str:
    """The fault of BYTES elements, "" for none."""
    try:
        check_bytes_elements(data, expected, name=name, model=model)
    except InvalidArgument as error:
        return error.message
    return ""


async def classify_large(
    offload: Offload, response: InferenceResponse, classes: Mapping[str, int], served: ServedVersion
) -> tuple[InferenceResponse, Mapping[str, int]]:
    """The response with large outputs replaced by their best values, and the classes that remain to be done."""
    outputs = [tensor for tensor in response.outputs if tensor.name in classes]
    if sum(len(tensor.data) for tensor in outputs) <= _MANY_BYTES:
        return response, classes
    labels = {tensor.name: served.labels.get(tensor.name, []) for tensor in outputs}
    described = [[tensor.name, tensor.datatype.value, tensor.shape] for tensor in outputs]
    note = [described, dict(classes), served.interface.batching, labels]
    task = Task(f"{_HERE}:classify_all", note, [tensor.data for tensor in outputs])
    shapes, buffers = await offload.run(task, may_refuse=False)
    made = {
        tensor.name: Tensor(tensor.name, DataType.BYTES, tuple(shape), data)
        for tensor, shape, data in zip(outputs, shapes, buffers, strict=True)
    }
    return replace(response, outputs=[made.get(tensor.name, tensor) for tensor in response.outputs]), {}


def classify_all(note: Any, buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    described, classes, batching, labels = note
    outputs = [
        Tensor(name, DataType(datatype), tuple(shape), data)
        for (name, datatype, shape), data in zip(described, buffers, strict=True)
    ]
    made = classified(outputs, classes, batching, labels)
    return [tensor.shape for tensor in made], [tensor.data for tensor in made]
