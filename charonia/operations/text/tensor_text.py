"""Tensors as text: a line of first values, v2 JSON, or a file (.npy, BYTES as .json)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from charonia.datatypes import DataType
from charonia.tensors import Tensor

_PREVIEW_ELEMENTS = 8
_PREVIEW_BYTES = 60


def described(tensor: Tensor, *, whole: bool = False) -> dict[str, Any]:
    """Name, datatype, shape and the first values, or with `whole` all of them."""
    elements = tensor.array().reshape(-1)
    count = elements.size if whole else min(elements.size, _PREVIEW_ELEMENTS)
    values = [_plain(value, whole) for value in elements[:count].tolist()]
    text = {"name": tensor.name, "datatype": tensor.datatype.value, "shape": list(tensor.shape), "data": values}
    return text if whole else {**text, "elements": int(elements.size), "bytes": len(tensor.data)}


def saved_all(tensors: Sequence[Tensor], directory: Path) -> list[str]:
    """Write each tensor into `directory`, made when it is not there; the files."""
    directory.mkdir(parents=True, exist_ok=True)
    return [str(_saved(tensor, directory)) for tensor in tensors]


def _saved(tensor: Tensor, directory: Path) -> Path:
    """Write a tensor's file. BYTES become JSON: text if it is UTF-8, otherwise hex in an object."""
    stem = quote(tensor.name, safe="-_. ").lstrip(".") or "tensor"
    array = tensor.array()
    if tensor.datatype is DataType.BYTES:
        path = directory / f"{stem}.json"
        values = [_text(value) for value in array.reshape(-1).tolist()]
        path.write_text(json.dumps({"shape": list(tensor.shape), "data": values}) + "\n")
        return path
    path = directory / f"{stem}.npy"
    if tensor.datatype is DataType.BF16:  # .npy has no name for it
        array = array.astype(np.float32)
    np.save(path, array, allow_pickle=False)
    return path


def _plain(value: Any, whole: bool) -> Any:
    if isinstance(value, bytes):
        return _text(value if whole or len(value) <= _PREVIEW_BYTES else value[:_PREVIEW_BYTES])
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)  # JSON has no word for them
    return value


def _text(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"hex": value.hex()}
