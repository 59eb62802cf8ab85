"""Writes traces as the text of a Triton trace file (N3-N5), for its readers and `charonia trace summary`. Pure.

Each request has an object with its name, one with its times and, at level TENSORS, one for each tensor; the file is one
JSON array of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import orjson

from charonia.datatypes import DataType
from charonia.tensors import Tensor, split_bytes_elements

from .reports import Report, ReportedTensor

_LENGTH_BYTES = 4


def objects(report: Report, next_id: Callable[[], int], parent_id: int = 0, *, timestamps: bool = True) -> list[bytes]:
    """The objects of one request and of all that were made for it; parents before children.

    At level TENSORS alone there are no `timestamps`.
    """
    number = next_id()
    named: dict[str, object] = {
        "id": number,
        "model_name": report.model,
        "model_version": report.version,
        "request_id": report.request_id,
    }
    if parent_id:
        named["parent_id"] = parent_id
    if report.about and timestamps:
        named["attributes"] = dict(report.about)  # ours; readers of Triton's files pass over it
    stamps = sorted(report.stamps, key=lambda stamp: stamp[1])
    found = [orjson.dumps(named)]
    if timestamps:
        found.append(orjson.dumps({"id": number, "timestamps": [{"name": name, "ns": ns} for name, ns in stamps]}))
    found += [_tensor(number, tensor) for tensor in report.tensors]
    for child in report.children:
        found += objects(child, next_id, number, timestamps=timestamps)
    return found


def _tensor(number: int, tensor: ReportedTensor) -> bytes:
    described: dict[str, object] = {
        "name": tensor.name,
        "data": _text(tensor),
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.datatype.value,
    }
    if len(tensor.data) < tensor.size_bytes:
        described["size_bytes"] = tensor.size_bytes  # the data is only its beginning
    return orjson.dumps({"id": number, "activity": tensor.activity, "tensor": described})


def _text(tensor: ReportedTensor) -> str:
    """The elements in order, joined by commas."""
    if tensor.datatype is DataType.BYTES:
        whole = tensor.data[: _whole_elements(tensor.data)]
        return ",".join(element.decode(errors="replace") for element in split_bytes_elements(whole))
    count = len(tensor.data) // tensor.datatype.size_bytes
    data = tensor.data[: count * tensor.datatype.size_bytes]
    array = Tensor(tensor.name, tensor.datatype, (count,), data).array()
    if tensor.datatype is DataType.BF16:
        array = array.astype(np.float32)
    elif tensor.datatype is DataType.BOOL:
        array = array.view(np.uint8)
    if array.dtype.kind == "f" and not np.isfinite(array).all():  # JSON has neither nan nor inf
        return ",".join(map(str, array.tolist()))
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].decode()


def _whole_elements(data: bytes) -> int:
    """The end of the last complete element of cut data."""
    at = 0
    while at + _LENGTH_BYTES <= len(data):
        end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        if end > len(data):
            break
        at = end
    return at
