"""What a model takes, and the tensors that are sent to it: zeros, random ones, those of JSON files or a directory."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from charonia.client.results import packed
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.tensors import Tensor

from .bench_options import BenchOptions

Step = dict[str, Tensor]
"""The inputs of a request of batch 1 by their names, without the batch dimension."""

_CHARACTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of the model. `dims` are without the batch dimension, -1 for free ones."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ModelView:
    """The model as its server describes it. `steps` are the models of an ensemble."""

    name: str
    version: str
    batches: bool
    max_batch: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    sequences: bool
    decoupled: bool
    caches: bool
    steps: tuple[str, ...]


def model_view(
    name: str, version: str, metadata: Mapping[str, Any], config: Mapping[str, Any] | None, shapes: Mapping[str, Any]
) -> ModelView:
    """The view of a model's metadata and configuration. Of servers without configurations, the inputs batch when the
    first dimension of all of them is free and none has a shape of the command line."""
    described = config or {}
    inputs = metadata.get("inputs") or []
    if config is None:
        batches = bool(inputs) and all(_dims(item)[:1] == (-1,) and item["name"] not in shapes for item in inputs)
        max_batch = 2**31 - 1 if batches else 0
    else:
        max_batch = int(described.get("max_batch_size", 0))
        batches = max_batch > 0
    optional = {item["name"] for item in described.get("input", ()) if item.get("optional")}

    def ports(items: Sequence[Mapping[str, Any]]) -> tuple[Port, ...]:
        return tuple(
            Port(
                item["name"],
                DataType.of(item["datatype"]),
                _dims(item)[1:] if batches else _dims(item),
                item["name"] in optional,
            )
            for item in items
        )

    steps = described.get("ensemble_scheduling", {}).get("step", ())
    return ModelView(
        name, version, batches, max_batch, ports(inputs), ports(metadata.get("outputs") or []),
        "sequence_batching" in described, bool(described.get("model_transaction_policy", {}).get("decoupled")),
        bool(described.get("response_cache", {}).get("enable")),
        tuple(dict.fromkeys(str(step["model_name"]) for step in steps)),
    )  # fmt: skip


def _dims(item: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(dim) for dim in item["shape"])


def streams_of(options: BenchOptions, view: ModelView) -> list[list[Step]]:
    """The streams of steps that requests are made of. Raises `InvalidArgument` for data that the model cannot take."""
    for name in options.shapes:
        if name not in {port.name for port in view.inputs}:
            raise InvalidArgument(f"--shape names the input '{name}', which model '{view.name}' has not")
    given = options.words.input_data or ["random"]
    if len(given) == 1 and given[0] in ("zero", "random"):
        return [[_made(options, view, zeros=given[0] == "zero")]]
    if len(given) == 1 and Path(given[0]).is_dir():
        return [[_of_directory(Path(given[0]), options, view)]]
    streams = [stream for path in given for stream in _of_file(path, options, view)]
    if not view.sequences:
        streams = [[step for stream in streams for step in stream]]
    if not all(streams):
        raise InvalidArgument(f"--input-data '{given[0]}' has no data")
    return streams


def batch_of(steps: Sequence[Step], at: int, batch: int, view: ModelView) -> list[Tensor]:
    """The tensors of the request that begins with step `at`: its batch is of that step and those behind it, in turn.

    Raises `InvalidArgument` for steps that cannot be one batch.
    """
    if not view.batches:
        if batch > 1:
            raise InvalidArgument(f"model '{view.name}' does not batch: leave -b {batch} out")
        return list(steps[at].values())
    if batch > view.max_batch:
        raise InvalidArgument(f"model '{view.name}' takes batches of at most {view.max_batch}, and -b is {batch}")
    chosen = [steps[(at + number) % len(steps)] for number in range(batch)]
    tensors = []
    for name, first in chosen[0].items():
        parts = [step.get(name) for step in chosen]
        if any(part is None or part.shape != first.shape for part in parts):
            raise InvalidArgument(f"input '{name}' has not the same shape in all steps, which a batch needs")
        data = b"".join(bytes(part.data) for part in parts if part is not None)
        tensors.append(Tensor(name, first.datatype, (batch, *first.shape), data))
    return tensors


# -- made --------------------------------------------------------------------------------------------------------------


def _shape(port: Port, options: BenchOptions) -> tuple[int, ...]:
    given = options.shapes.get(port.name)
    if given is None:
        if min(port.dims, default=1) < 0:
            raise InvalidArgument(
                f"input '{port.name}' has the free shape {list(port.dims)}: say which with --shape {port.name}:D,D"
            )
        return port.dims
    if len(given) != len(port.dims) or any(dim not in (-1, asked) for dim, asked in zip(port.dims, given, strict=True)):
        raise InvalidArgument(f"--shape of input '{port.name}' is {list(given)}, and the model's {list(port.dims)}")
    return given


def _made(options: BenchOptions, view: ModelView, *, zeros: bool) -> Step:
    random = np.random.default_rng(options.words.seed)
    step: Step = {}
    for port in view.inputs:
        if port.optional and port.name not in options.shapes:
            continue
        shape = _shape(port, options)
        step[port.name] = Tensor(
            port.name, port.datatype, shape, _content(port.datatype, prod(shape), random, options, zeros)
        )
    return step


def _content(datatype: DataType, count: int, random: np.random.Generator, options: BenchOptions, zeros: bool) -> bytes:
    if datatype is DataType.BYTES:
        text = options.words.string_data
        if text is not None:
            return _strings([text.encode()] * count)
        if zeros:
            return _strings([b""] * count)
        letters = np.frombuffer(_CHARACTERS, np.uint8)
        length = options.words.string_length
        return _strings(bytes(random.choice(letters, length)) for _ in range(count))
    if zeros:
        return bytes(count * datatype.size_bytes)
    kind = datatype.numpy
    if kind.kind == "b":
        return random.integers(0, 2, count).astype(kind).tobytes()
    if kind.kind in "iu":
        return random.bytes(count * kind.itemsize)
    return random.random(count).astype(kind).tobytes()


def _strings(elements: Any) -> bytes:
    return b"".join(len(element).to_bytes(4, "little") + element for element in elements)


# -- files -------------------------------------------------------------------------------------------------------------


def _of_directory(folder: Path, options: BenchOptions, view: ModelView) -> Step:
    step: Step = {}
    for port in view.inputs:
        path = folder / port.name
        if port.optional and not path.exists():
            continue
        content = _read(path)
        shape = _shape(port, options)
        if port.datatype is DataType.BYTES:
            content = _strings(content.splitlines())
        step[port.name] = _tensor(port, shape, content)
    return step


def _of_file(path: str, options: BenchOptions, view: ModelView) -> Iterator[list[Step]]:
    try:
        document = json.loads(_read(Path(path)))
    except ValueError as error:
        raise InvalidArgument(f"--input-data '{path}' is no JSON: {error}") from None
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list) or not data:
        raise InvalidArgument(f"--input-data '{path}' has no list 'data'")
    if "validation_data" in document:
        raise InvalidArgument(f"--input-data '{path}' has 'validation_data': answers are not compared, take it out")
    flat = [item for item in data if not isinstance(item, list)]
    if flat:
        yield [_step(path, item, options, view) for item in flat]
    for stream in data:
        if isinstance(stream, list):
            yield [_step(path, item, options, view) for item in stream]


def _step(path: str, item: Any, options: BenchOptions, view: ModelView) -> Step:
    if not isinstance(item, dict):
        raise InvalidArgument(f"--input-data '{path}': a step is an object with the inputs by name")
    ports = {port.name: port for port in view.inputs}
    for name in item:
        if name not in ports:
            raise InvalidArgument(f"--input-data '{path}' has the input '{name}', which model '{view.name}' has not")
    step: Step = {}
    for port in view.inputs:
        if port.name in item:
            step[port.name] = _value(path, port, item[port.name], options)
        elif not port.optional:
            raise InvalidArgument(f"--input-data '{path}' has a step without the input '{port.name}'")
    return step


def _value(path: str, port: Port, value: Any, options: BenchOptions) -> Tensor:
    shape: tuple[int, ...] | None = None
    if isinstance(value, dict):
        if "shape" in value:
            shape = tuple(int(dim) for dim in value["shape"])
        value = value if "b64" in value else value.get("content", value)
    try:
        if isinstance(value, dict):
            content = base64.b64decode(value["b64"], validate=True)
            count = None
        else:
            elements = np.array(value, dtype=np.object_).ravel().tolist()
            content, count = bytes(packed(port.name, port.datatype, elements)), len(elements)
    except (KeyError, ValueError, TypeError, OverflowError, binascii.Error) as error:
        raise InvalidArgument(f"--input-data '{path}': input '{port.name}' cannot be read: {error}") from None
    if shape is None:
        shape = _inferred(port, count) if port.name not in options.shapes else _shape(port, options)
    return _tensor(port, shape, content)


def _inferred(port: Port, count: int | None) -> tuple[int, ...]:
    """The shape of `count` elements, where one dimension at most is free."""
    fixed = prod(dim for dim in port.dims if dim > 0)
    if port.dims.count(-1) == 1 and count is not None and fixed and count % fixed == 0:
        return tuple(count // fixed if dim < 0 else dim for dim in port.dims)
    if -1 in port.dims:
        raise InvalidArgument(f"input '{port.name}' has the free shape {list(port.dims)}: write its 'shape'")
    return port.dims


def _tensor(port: Port, shape: tuple[int, ...], content: bytes) -> Tensor:
    wanted = prod(shape) * port.datatype.size_bytes
    if port.datatype is not DataType.BYTES and len(content) != wanted:
        raise InvalidArgument(
            f"input '{port.name}' of shape {list(shape)} has {wanted} bytes of {port.datatype.value}, "
            f"not {len(content)}"
        )
    return Tensor(port.name, port.datatype, shape, content)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"--input-data '{path}' cannot be read: {error.strerror}") from None


def intervals_of(path: str) -> tuple[int, ...]:
    """The microseconds of a file of intervals. Raises `InvalidArgument`."""
    try:
        found = tuple(int(line) for line in _read_intervals(path).split())
    except ValueError:
        found = ()
    if not found or min(found) < 0 or not sum(found):
        raise InvalidArgument(f"--request-intervals '{path}' is no list of microseconds, one a line")
    return found


def _read_intervals(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--request-intervals '{path}' cannot be read: {error}") from None
