"""Makes the requests of a model's warm-up (C17) as ordinary request records, so that they run like any other.

`executors.configuration.validation` checks the configuration; instance pools run the requests.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np

from charonia.backend import Array
from charonia.clock import wall_ns
from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument
from charonia.models.interface import ModelInterface, Warmup, WarmupInput
from charonia.tensors import Tensor, check_bytes_elements, join_bytes_elements
from charonia.wire import RequestRecord, pack_request, request_meta, unpack_request
from executors.repository.files import contained, read_file

DIRECTORY = "warmup"
_RANDOM_INTEGERS = 128
"""The upper bound of random integers: they are often indices or tokens, and arbitrary values would fail the model."""


def warmup_records(interface: ModelInterface, version: int, directory: Path, warmup: Warmup) -> list[RequestRecord]:
    """Return `batch_size` requests of one item each. Raises `InvalidArgument` for unsuitable data or files outside."""
    inputs = [_tensor(interface, directory, warmup, name, data) for name, data in warmup.inputs.items()]
    meta = request_meta(version, "", inputs, (), {})
    packed = pack_request(
        bytes(16),
        b"",
        b"",
        meta,
        [tensor.data for tensor in inputs],
        rows=1,
        signature=0,
        level=0,
        accepted_ns=wall_ns(),
    )
    record = unpack_request(packed)
    return [record] * (warmup.batch_size if interface.batching else 1)


def _tensor(interface: ModelInterface, directory: Path, warmup: Warmup, name: str, data: WarmupInput) -> Tensor:
    shape = (1, *data.dims) if interface.batching else data.dims
    count = prod(shape)
    if data.source == "file":
        raw = _file(interface, directory, warmup, name, data)
        if data.datatype is DataType.BYTES:
            check_bytes_elements(raw, count, name=name, model=interface.name)
            return Tensor(name, data.datatype, shape, raw)
        size_bytes = count * data.datatype.size_bytes
        if len(raw) < size_bytes:
            raise InvalidArgument(
                f"warmup setting '{warmup.name}' of model '{interface.name}' expects {size_bytes} bytes for input "
                f"'{name}', but the data provided from file has {len(raw)} bytes"
            )
        return Tensor(name, data.datatype, shape, raw[:size_bytes])
    if data.datatype is DataType.BYTES:
        word = b"" if data.source == "zero" else b"charonia"
        return Tensor(name, data.datatype, shape, join_bytes_elements([word] * count))
    if data.source == "zero":
        return Tensor(name, data.datatype, shape, bytes(count * data.datatype.size_bytes))
    generator = np.random.default_rng()
    values: Array
    if data.datatype is DataType.BOOL:
        values = generator.integers(0, 2, count)
    elif data.datatype.value.startswith(("FP", "BF")):
        values = generator.random(count)
    else:
        values = generator.integers(0, _RANDOM_INTEGERS, count)
    return Tensor(name, data.datatype, shape, values.astype(data.datatype.numpy).tobytes())


def _file(interface: ModelInterface, directory: Path, warmup: Warmup, name: str, data: WarmupInput) -> bytes:
    path = contained(directory / DIRECTORY, data.filename)
    if path is None:
        raise InvalidArgument(
            f"warmup data file '{data.filename}' of input '{name}' of model '{interface.name}' is outside the model's "
            f"'{DIRECTORY}' directory"
        )
    try:
        return read_file(path)
    except OSError as error:
        raise InternalError(f"failed to open text file for read {path}: {error.strerror}") from None
