"""Makes request bodies ahead of time, so that sending one costs a concatenation; transports add their framing.

A pool of different bodies is built once and cycled. For `--verify identity` each body further gets its own serial
number in the first element, so that an answer that belongs to any other request, earlier ones included, is caught.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .model import ELEMENT_SIZES, LoadTestError, Model, TensorSpec

POOL_BYTES = 64 << 20
POOL_BODIES = 4096
STRING_BYTES = 16

# First elements that can carry a serial number: struct format and the count of distinct values it holds exactly.
_SERIALS = {
    "FP32": ("<f", 1 << 24), "FP64": ("<d", 1 << 53), "INT32": ("<i", 1 << 31), "UINT32": ("<I", 1 << 32),
    "INT64": ("<q", 1 << 62), "UINT64": ("<Q", 1 << 62),
}  # fmt: skip

_NUMPY = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class Serial:
    """How a serial number overwrites the first element: struct format, element size, count of distinct values."""

    format: struct.Struct
    size_bytes: int
    modulus: int


@dataclass(frozen=True)
class Bodies:
    """`pool[i][k]` is the raw content of input k of body i; all bodies have inputs of the same sizes."""

    pool: list[tuple[bytes, ...]]
    serial: Serial | None


def encode_strings(strings: list[bytes]) -> bytes:
    """BYTES elements in the protocol's raw form: a little-endian 4-byte length, then the bytes."""
    return b"".join(struct.pack("<I", len(s)) + s for s in strings)


def _bfloat16(values: np.ndarray[Any, Any]) -> bytes:
    """FP32 values cut to their upper halves, which is what BF16 holds."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def _generated(spec: TensorSpec, generator: np.random.Generator | None) -> bytes:
    """Content of one input: zeros without a generator; else floats in [0, 1), integers in [0, 128), letters."""
    count = math.prod(spec.shape)
    if spec.datatype == "BYTES":
        if generator is None:
            return encode_strings([b""] * count)
        letters = generator.integers(97, 123, (count, STRING_BYTES), dtype=np.uint8)
        return encode_strings([row.tobytes() for row in letters])
    if generator is None:
        return bytes(count * ELEMENT_SIZES[spec.datatype])
    if spec.datatype == "BF16":
        return _bfloat16(generator.random(count, dtype=np.float32))
    if spec.datatype.startswith("FP"):
        return generator.random(count).astype(_NUMPY[spec.datatype]).tobytes()
    high = 2 if spec.datatype == "BOOL" else 128
    return generator.integers(0, high, count, dtype=np.uint8).astype(_NUMPY[spec.datatype]).tobytes()


def _from_array(spec: TensorSpec, array: np.ndarray[Any, Any], origin: str) -> bytes:
    """Raw bytes of an array for an input. Raises LoadTestError when the count or the kind does not fit."""
    if array.size != math.prod(spec.shape):
        raise LoadTestError(f"{origin}: {array.size} elements for input '{spec.name}' of shape {list(spec.shape)}")
    try:
        if spec.datatype == "BYTES":
            return encode_strings([s if isinstance(s, bytes) else str(s).encode() for s in array.reshape(-1).tolist()])
        if spec.datatype == "BF16":
            return _bfloat16(array)
        return array.astype(_NUMPY[spec.datatype], casting="unsafe").tobytes()
    except (TypeError, ValueError) as error:
        raise LoadTestError(f"{origin}: input '{spec.name}' ({spec.datatype}): {error}") from None


def _from_file(path: Path, inputs: tuple[TensorSpec, ...]) -> list[tuple[bytes, ...]]:
    """Bodies of a file: .npy for a sole input; .json: {"NAME": values}, a list of such, or {"data": that list}."""
    try:
        if path.suffix == ".npy":
            if len(inputs) != 1:
                raise LoadTestError(f"{path}: a .npy file serves models of one input, this one has {len(inputs)}")
            return [(_from_array(inputs[0], np.load(path, allow_pickle=False), str(path)),)]
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LoadTestError(f"cannot read --input-data {path}: {error}") from None
    if isinstance(document, dict) and isinstance(document.get("data"), list) and "data" not in {i.name for i in inputs}:
        document = document["data"]
    steps = document if isinstance(document, list) else [document]
    bodies = []
    for index, step in enumerate(steps):
        origin = f"{path} step {index}"
        if not isinstance(step, dict) or any(spec.name not in step for spec in inputs):
            raise LoadTestError(f"{origin}: needs values for {', '.join(spec.name for spec in inputs)}")
        bodies.append(tuple(_from_array(spec, np.asarray(step[spec.name]), origin) for spec in inputs))
    if not bodies:
        raise LoadTestError(f"{path}: holds no request")
    if len({tuple(map(len, body)) for body in bodies}) > 1:
        raise LoadTestError(f"{path}: all requests of a file must have the same sizes in bytes")
    return bodies


def make_bodies(model: Model, input_data: str, concurrency: int, serials: bool, seed: int = 0) -> Bodies:
    """Bodies for a model of fixed shapes; `input_data` is "zero", "random" or a path ending in .npy or .json.

    With `serials` the first element of the first input gets a serial number, where its datatype has room for one.
    Random pools hold more bodies than requests in flight, so that two in flight never carry the same.
    """
    for spec in model.inputs:
        if spec.datatype != "BYTES" and spec.datatype not in ELEMENT_SIZES:
            raise LoadTestError(f"input '{spec.name}' has the unknown datatype {spec.datatype}")
    if not model.inputs:
        raise LoadTestError(f"model '{model.name}' has no inputs")
    if input_data == "zero":
        pool = [tuple(_generated(spec, None) for spec in model.inputs)]
    elif input_data == "random":
        generator = np.random.default_rng(seed)
        first = tuple(_generated(spec, generator) for spec in model.inputs)
        count = max(concurrency + 1, min(POOL_BODIES, POOL_BYTES // max(1, sum(map(len, first)))))
        pool = [first]
        pool += [tuple(_generated(spec, generator) for spec in model.inputs) for _ in range(count - 1)]
    elif input_data.endswith((".npy", ".json")):
        pool = _from_file(Path(input_data), model.inputs)
    else:
        raise LoadTestError(f"--input-data must be zero, random or a .npy or .json file, got {input_data!r}")
    serial = None
    kind = _SERIALS.get(model.inputs[0].datatype)
    if serials and input_data == "random" and kind and pool[0][0]:
        layout = struct.Struct(kind[0])
        serial = Serial(layout, layout.size, kind[1])
    return Bodies(pool, serial)
