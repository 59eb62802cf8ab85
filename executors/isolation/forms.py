"""What an executor and the process of an isolated model say to each other, beside the python backend's frames.

    LOAD           {source}                            DONE  nil
    AUTO_COMPLETE  nil                                 DONE  ["graph", inputs, outputs], ["config", bytes] or nil
    PREFERS_GPU    nil                                 DONE  whether its backend does
    CREATE         {source, name, kind, device, cores}; the instance's socket and memory come over the other socket
                                                       DONE  {shape, ...}, see `Made`
                   {beside}: the number of an instance over arrays that runs several batches at once; another socket and
                   memory for it                       DONE  {shape, ...}
    MEMORY         nil                                 DONE  [[kind, device, bytes], ...] that the model holds
    TEXT_ASSETS    nil                                 DONE  the assets of a `TextModel`, empty without
    HEALTH         number of an instance over arrays   DONE  whether it is ready
    FINALIZE       nil                                 DONE  nil
    EXECUTE        of a `BatchInstance`, over its own socket: [outputs, tensors, slot, output slot], and for
                   `EncodedStrings` the rows at which requests begin and end
                                                       DONE  [tensors, whether they lie in the output slot, times in
                                                       ns or nil, [[row, code, message], ...] of rows that failed],
                                                       and for `EncodedStrings` {output: the bytes at those rows}
    EXECUTE_STREAM an EXECUTE of the python backend for a `StreamingInstance`
                                                       DONE  nil, and RESPONSEs
    SLOT           [slot, generation] that the process may fill once        no reply
    STORED         where the data of the next frame lies: [slot, generation, sizes] of an EXECUTE, else [slot, size]

`tensors` is [[name, type number, shape, size in bytes], ...]; their bytes lie in a slot (`shared_slots`) or in the
frame's data. Instances over requests use the python backend's EXECUTE and the frames around it (`frame_content`), with
STORED before what is large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np

from charonia.backend import (
    Array,
    GraphSignature,
    InstanceSpec,
    MemoryUse,
    ModelCalls,
    ModelSource,
    Outcome,
    TensorSignature,
    Timings,
    timings_of,
)
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument, error_of_model
from charonia.models.interface import ModelInterface
from charonia.tensors import Buffer, Tensor, check_bytes_elements
from executors.backends.python.protocol.frames import UNREADABLE, Frame, FrameError, tensor_offsets
from executors.batches.encoded_strings import EncodedStrings, encoded
from protos.model_config_pb2 import ModelConfig

MAX_FRAME_BYTES = 4 << 30
"""The most data of a frame that an executor takes from such a process."""


@dataclass(frozen=True, slots=True)
class Made:
    """What an executor needs to know of an instance that was made: which shapes it has, and its attributes."""

    batch: bool
    requests: bool
    stream: bool
    number: int = 0
    stateless: bool = False
    rows_fail_alone: bool = False
    batch_sizes: tuple[int, ...] = ()
    depth: int = 1
    checks_health: bool = False
    answers_later: bool = False
    reports_responses: bool = True
    pins: bool = False
    """Whether it pins pages of the memory that it shares with the executor."""

    def content(self) -> dict[str, Any]:
        return asdict(self)


def source_content(source: ModelSource) -> dict[str, Any]:
    """A source as content of a frame."""
    return {
        "model": source.name,
        "version": source.version,
        "directory": str(source.directory),
        "config": source.config.SerializeToString(),
        "backend_config": dict(source.backend_config),
        "native_code": source.native_code,
        "isolation": source.isolation,
    }


def source_of(content: Mapping[str, Any]) -> ModelSource:
    """The source again."""
    config = ModelConfig.FromString(content["config"])
    return ModelSource(
        *(content["model"], content["version"], Path(content["directory"]), config, content["backend_config"]),
        native_code=content["native_code"],
        isolation=content["isolation"],
    )


def spec_content(spec: InstanceSpec) -> dict[str, Any]:
    """An instance to create, as content of a CREATE."""
    return {
        "source": source_content(spec.source),
        "instance": [spec.name, spec.kind, spec.device_id, sorted(spec.cores)],
        "calls": spec.calls is not None,
    }


def spec_of(content: Mapping[str, Any], calls: ModelCalls | None) -> InstanceSpec:
    """The instance to create; its model makes its calls with `calls`, if it may make any."""
    source = source_of(content["source"])
    name, kind, device, cores = content["instance"]
    interface = ModelInterface.of(source.config)
    return InstanceSpec(name, kind, device, source, interface, frozenset(cores), calls if content["calls"] else None)


def signature_content(found: GraphSignature | ModelConfig | None) -> Any:
    """What a model says of itself, as content."""
    if found is None:
        return None
    if isinstance(found, GraphSignature):
        return ["graph", *([[t.name, t.datatype, t.dims] for t in side] for side in (found.inputs, found.outputs))]
    return ["config", found.SerializeToString()]


def signature_of(content: Any) -> GraphSignature | ModelConfig | None:
    """What it says of itself."""
    if content is None:
        return None
    kind, *words = content
    if kind == "config":
        return ModelConfig.FromString(words[0])
    inputs, outputs = ([TensorSignature(name, word, tuple(dims)) for name, word, dims in side] for side in words)
    return GraphSignature(tuple(inputs), tuple(outputs))


def memory_content(uses: Sequence[MemoryUse]) -> list[Any]:
    """What a model holds, as content."""
    return [[str(use.kind), int(use.device_id), int(use.size_bytes)] for use in uses]


def memory_of(content: Any) -> list[MemoryUse]:
    """What it holds. Raises one of `UNREADABLE` for content that is something else."""
    return [MemoryUse(kind, int(device), int(size_bytes)) for kind, device, size_bytes in content]


def described(arrays: Mapping[str, Array]) -> tuple[list[Any], list[Buffer]]:
    """Arrays as content, and their bytes."""
    tensors = [
        Tensor(name, DataType.BYTES, array.shape, array.data)
        if isinstance(array, EncodedStrings)
        else Tensor.of(name, array)
        for name, array in arrays.items()
    ]
    return [[t.name, t.datatype.number, t.shape, len(t.data)] for t in tensors], [t.data for t in tensors]


def encoded_outputs(arrays: Mapping[str, Array], rows: Sequence[int]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Outputs with their strings encoded for requests that begin and end at these rows, and the bytes at those rows."""
    found = {
        name: encoded(array, rows) if DataType.of_numpy(array.dtype) is DataType.BYTES else array
        for name, array in arrays.items()
    }
    ends = {name: list(array.ends) for name, array in found.items() if isinstance(array, EncodedStrings)}
    return cast("dict[str, Array]", found), ends


def outcome_content(found: Mapping[str, Array] | Outcome) -> tuple[Mapping[str, Array], list[Any]]:
    """The arrays of what `BatchInstance.execute` returned, and the rest of it as content.

    Raises `InternalError` for what are no arrays by name, as the executor does where a model runs in it.
    """
    arrays = found.arrays if isinstance(found, Outcome) else found
    if not hasattr(arrays, "items"):
        raise InternalError(f"the model gave a {type(arrays).__name__}, not arrays by output name")
    for name, array in arrays.items():
        if not hasattr(array, "dtype"):
            raise InternalError(f"the model gave a {type(array).__name__} as output '{name}', not an array")
    if not isinstance(found, Outcome):
        return found, [None, []]
    times = timings_of(found)
    spent = None if times is None else [times.input_ns, times.infer_ns, times.output_ns]
    failures = [(int(row), error_of_model(error)) for row, error in found.failures.items()]
    return found.arrays, [spent, [[row, int(error.code), error.message] for row, error in failures]]


def outcome_of(
    frame: Frame, in_slot: Callable[[Sequence[int]], Sequence[memoryview]], rows: Sequence[int] | None = None
) -> Mapping[str, Array] | Outcome:
    """What the DONE of an EXECUTE says; arrays are views of the frame or of `in_slot(sizes)`. Raises `FrameError`.

    With `rows`, strings are `EncodedStrings` for requests that begin and end there. Their lengths are not followed: it
    is for processes of models that could as well run in this one.
    """
    try:
        tensors, shared, spent, failures, *ends = frame.content()
        sizes = [size for *_, size in tensors]
        parts = in_slot(sizes) if shared else in_frame(frame, sizes)
        strings = {} if rows is None or not ends else _encoded_of(tensors, parts, rows, ends[0])
        others = [(tensor, part) for tensor, part in zip(tensors, parts, strict=True) if tensor[0] not in strings]
        arrays = arrays_of([tensor for tensor, _ in others], [part for _, part in others]) | strings
        if spent is None and not failures:
            return arrays
        failed = {int(row): CharoniaError.of(code, message) for row, code, message in failures}
        return Outcome(arrays, None if spent is None else Timings(*map(int, spent)), failed)
    except (*UNREADABLE, CharoniaError) as error:
        raise FrameError(f"the answer to a batch cannot be read: {error}") from None


def _encoded_of(
    tensors: Sequence[Any], parts: Sequence[memoryview], rows: Sequence[int], ends: Mapping[str, Sequence[int]]
) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for (name, _, shape, size), data in zip(tensors, parts, strict=True):
        if name not in ends:
            continue
        at = tuple(map(int, ends[name]))
        if min(shape, default=0) < 0 or len(data) != size or (at and (at[0], at[-1]) != (0, size)):
            raise FrameError(f"tensor '{name}' is not of the size that it is described with")
        if sorted(at) != list(at) or (at and len(at) != len(rows)):
            raise FrameError(f"tensor '{name}' is not cut as it was asked for")
        found[name] = cast("Array", EncodedStrings(tuple(shape), data, tuple(rows) if at else (), at))
    return found


def in_frame(frame: Frame, sizes: Sequence[int]) -> list[memoryview]:
    """The tensors in a frame's data."""
    return [frame.data[at : at + size] for at, size in zip(tensor_offsets(sizes), sizes, strict=True)]


def arrays_of(tensors: Sequence[Any], parts: Sequence[memoryview]) -> dict[str, Array]:
    """The arrays again, as views. Raises `FrameError` where bytes and description do not fit: the process may lie."""
    arrays: dict[str, Array] = {}
    for (name, number, shape, size), data in zip(tensors, parts, strict=True):
        datatype = DataType.of_number(number)
        count = prod(shape)
        if min(shape, default=0) < 0 or len(data) != size:
            raise FrameError(f"tensor '{name}' is not of the size that it is described with")
        if datatype is DataType.BYTES:
            raw = bytes(data)  # it must not change between the check and the use
            try:
                check_bytes_elements(raw, count, name=name, model="")
            except InvalidArgument as error:
                raise FrameError(error.message) from None
            arrays[str(name)] = Tensor(name, datatype, tuple(shape), raw).array()
        elif size != count * datatype.size_bytes:
            raise FrameError(f"tensor '{name}' has {size} bytes, which is not shape {list(shape)} of {datatype.value}")
        else:
            arrays[str(name)] = np.frombuffer(data, datatype.numpy).reshape(shape)
    return arrays
